"""The users of a cluster of which no broker runs, in the metadata store that a broker's properties file names.

For users that brokers log in to each other as, before their first start. Whoever can read the file, and what it names,
may do this; a cluster that runs is refused (`cluster.offline`), and asked by `millrace users` without `--offline`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from millrace.broker import store_for
from millrace.cli.output import CommandError
from millrace.clock import SystemClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.migration import is_single
from millrace.cluster.offline import change_offline
from millrace.cluster.users import MAX_NAME_BYTES
from millrace.config import BrokerConfig
from millrace.errors import ConfigError, StorageError
from millrace.metadata.deltas import Change, ScramChanged
from millrace.security.scram import ScramMechanism, new_credential


class OfflineUsers:
    """See the module's text."""

    def __init__(self, config_path: Path) -> None:
        self._path = config_path
        self._config = BrokerConfig.load(config_path)
        self._clock = SystemClock()
        self._in_zookeeper = bool(self._config.get("zookeeper.connect"))
        has_directory = self._config.is_set("log.dirs") or self._config.is_set("log.dir")
        if not self._in_zookeeper and not has_directory:
            raise CommandError(f"{config_path} does not say where the metadata is: set zookeeper.connect or log.dirs")
        self._has_file = has_directory and is_single(Path(self._config.log_dirs[0]))
        if self._in_zookeeper and self._has_file:
            raise CommandError(
                f"the metadata in {self._config.log_dirs[0]} has not moved to ZooKeeper yet: start the broker once "
                "with millrace broker --migrate, or leave out zookeeper.connect until then"
            )

    def __repr__(self) -> str:
        return f"OfflineUsers({self._path})"

    def mechanisms(self, name: str) -> dict[str, int]:
        return self.everybody().get(name, {})

    def everybody(self) -> dict[str, dict[str, int]]:
        if not self._in_zookeeper and not self._has_file:
            return {}  # and no file is made by asking
        users: dict[str, dict[str, int]] = {}
        for (name, mechanism), credential in sorted(self._change(lambda _: ()).users.items()):
            users.setdefault(name, {})[mechanism.label] = credential.iterations
        return users

    def set_password(self, name: str, credentials: Mapping[str, int], password: str) -> None:
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES:
            raise CommandError(f"a user name has between 1 and {MAX_NAME_BYTES} bytes", exit_code=2)
        wanted = {ScramMechanism.labelled(label): iterations for label, iterations in credentials.items()}
        changes = [ScramChanged(name, each, new_credential(each, password, wanted[each])) for each in wanted]
        self._change(lambda _: changes)

    def remove(self, name: str, labels: Iterable[str]) -> None:
        changes = [ScramChanged(name, ScramMechanism.labelled(label), None) for label in labels]
        self._change(lambda _: changes)

    def _change(self, decide: Callable[[ClusterImage], Iterable[Change]]) -> ClusterImage:
        async def change() -> ClusterImage:
            return await change_offline(store_for(self._config, self._clock), decide, self._clock)

        try:
            return asyncio.run(change())
        except ConfigError as error:
            raise CommandError(f"{error} (a broker is asked without --offline)") from None
        except StorageError as error:
            hint = "" if self._in_zookeeper else " (a broker that runs is asked without --offline)"
            raise CommandError(f"{error}{hint}") from None
