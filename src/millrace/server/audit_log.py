"""A broker's audit log with the places it goes to: made from the settings, and run until the last client is gone.

Not here: what is written down (`security.audit`), and how (`storage.audit_file`, `replication.audit_topic`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from millrace.model import AUDIT_LOG_TOPIC
from millrace.replication.audit_topic import AuditTopic
from millrace.security.audit import Allowed, Audit
from millrace.storage.audit_file import AuditFile
from millrace.tasks import Tasks

if TYPE_CHECKING:
    from millrace.handlers.context import Services


class AuditLog:
    """The audit log of a broker, and the tasks that write it. `audit` is None where the settings name no place."""

    def __init__(self, services: Services) -> None:
        """ConfigError where the file cannot be written."""
        config, clock = services.config, services.clock
        self.audit: Audit | None = None
        self._writers: list[AuditFile | AuditTopic] = []
        self._tasks = Tasks(clock)
        path, has_topic = config.get("audit.log.path"), config.get_bool("audit.log.topic.enable")
        if not path and not has_topic:
            return
        self.audit = Audit(
            broker_id=services.broker_id,
            cluster_id=lambda: services.cluster_id,
            allowed=Allowed(config.get_str("audit.log.allowed")),
            explain=services.authorizer.explain,
            clock=clock,
        )
        if path:
            self._writers.append(AuditFile(Path(path), self.audit.outbox(f"the file {path}"), clock=clock))
        if has_topic:
            self._writers.append(
                AuditTopic(
                    self.audit.outbox(f"the topic {AUDIT_LOG_TOPIC}"),
                    broker_id=services.broker_id,
                    ensure_topic=services.controller.ensure_internal_topic,
                    led=services.replicas.led,
                    peers=services.peers,
                    clock=clock,
                )
            )

    def __repr__(self) -> str:
        return f"AuditLog({self.audit!r}, {self._writers})"

    def start(self) -> None:
        if self.audit is not None:
            self._tasks.keep("audit counts", self.audit.run)
            for writer in self._writers:
                self._tasks.keep(f"audit to {writer!r}", writer.run)

    async def stop(self) -> None:
        """Write what there is; nothing is added any more."""
        await self._tasks.stop()
        if self.audit is not None:
            self.audit.tell_counted()
        for writer in self._writers:
            await writer.stop()
