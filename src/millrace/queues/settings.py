"""The settings that share groups and their coordinator obey, under their Kafka names.

Not here: parsing and validation (`config`). What a group says for itself is asked for at every use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from millrace.queues.acquisition import Limits

_DURATION: Final = re.compile(r"P(?:(\d+)D)?(?:T(?:(\d+)H)?(?:(\d+)M)?(?:(\d+)(?:\.(\d{1,9}))?S)?)?")
"""An ISO-8601 duration as Java reads it, without signs."""

Value = Callable[[str], Any]
"""A setting of one group by its name."""


class SettingsSource(Protocol):
    """The part of `BrokerConfig` that is needed here."""

    def get(self, name: str, /) -> Any:
        """The typed value of a setting."""


@dataclass(frozen=True, slots=True)
class CoordinatorSettings:
    """How the share coordinator keeps its log."""

    updates_per_snapshot: int = 500
    write_timeout_ms: int = 5_000
    snapshot_interval_ms: int = 300_000
    """After how long a share-partition that is hardly written to gets a snapshot anyway."""
    prune_interval_ms: int = 300_000

    @classmethod
    def from_config(cls, config: SettingsSource) -> CoordinatorSettings:
        """The settings of the broker."""
        return cls(
            updates_per_snapshot=int(config.get("share.coordinator.snapshot.update.records.per.snapshot")),
            write_timeout_ms=int(config.get("share.coordinator.write.timeout.ms")),
            snapshot_interval_ms=int(config.get("share.coordinator.cold.partition.snapshot.interval.ms")),
            prune_interval_ms=int(config.get("share.coordinator.state.topic.prune.interval.ms")),
        )


@dataclass(frozen=True, slots=True)
class DeadLetterSettings:
    """What this cluster allows of dead-letter topics."""

    name_prefix: str = "dlq."
    creates_topics: bool = False

    @classmethod
    def from_config(cls, config: SettingsSource) -> DeadLetterSettings:
        """The settings of the broker."""
        return cls(
            name_prefix=str(config.get("errors.deadletterqueue.topic.name.prefix") or ""),
            creates_topics=bool(config.get("errors.deadletterqueue.auto.create.topics.enable")),
        )


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """What one share group wants of its share-partitions."""

    limits: Limits = field(default_factory=Limits)
    offset_reset: str = "latest"
    reads_committed: bool = False
    """Whether records of open and aborted transactions stay away from members."""
    dead_letter_topic: str = ""
    """Where records go that the group gives up; empty: nowhere."""
    copies_dead_letters: bool = False
    """Whether a dead letter has what its record had, or says only which one it was."""

    @classmethod
    def of_group(cls, value: Value) -> QueueSettings:
        """The settings of a group."""
        dead_letter_topic = str(value("errors.deadletterqueue.topic.name"))
        return cls(
            limits=Limits(
                max_locks=int(value("share.partition.max.record.locks")),
                max_deliveries=int(value("share.delivery.count.limit")),
                lock_ms=int(value("share.record.lock.duration.ms")),
                renews=bool(value("share.renew.acknowledge.enable")),
                backoff_ms=int(value("share.redelivery.backoff.ms")),
                backoff_max_ms=int(value("share.redelivery.backoff.max.ms")),
                dead_letters=bool(dead_letter_topic),
            ),
            offset_reset=str(value("share.auto.offset.reset")),
            reads_committed=value("share.isolation.level") == "read_committed",
            dead_letter_topic=dead_letter_topic,
            copies_dead_letters=bool(value("errors.deadletterqueue.copy.record.enable")),
        )

    @property
    def reset_before_ms(self) -> int | None:
        """How far back a share-partition begins that nobody has read; None for `earliest` and `latest`."""
        kind, _, text = self.offset_reset.partition(":")
        found = _DURATION.fullmatch(text) if kind == "by_duration" else None
        if found is None:
            return None
        days, hours, minutes, seconds, fraction = found.groups("0")
        whole_s = ((int(days) * 24 + int(hours)) * 60 + int(minutes)) * 60 + int(seconds)
        return whole_s * 1000 + int(fraction.ljust(3, "0")[:3])


class KnownSettings:
    """The settings of groups, looked up once per image: every fetch and every acknowledgement asks for them."""

    def __init__(self, version: Callable[[], object], look_up: Callable[[str], QueueSettings]) -> None:
        """`version` is another object whenever a setting may have changed."""
        self._version = version
        self._look_up = look_up
        self._seen: object = None
        self._found: dict[str, QueueSettings] = {}

    def __call__(self, group_id: str) -> QueueSettings:
        """The settings of one group."""
        version = self._version()
        if version is not self._seen:
            self._seen = version
            self._found.clear()
        found = self._found.get(group_id)
        if found is None:
            found = self._found[group_id] = self._look_up(group_id)
        return found
