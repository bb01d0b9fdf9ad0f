"""The settings a group coordinator obeys: those of the broker, read once, and those a group can have of its own.

Not here: parsing and validation of settings (`config`). Defaults are Kafka's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from millrace.config import BrokerConfig, group_value
from millrace.config.setting import whole_number
from millrace.groups.assignors import ASSIGNORS

_MAX_INT32 = 2**31 - 1
_MS_PER_MINUTE = 60_000


class SettingsSource(Protocol):
    """The part of `BrokerConfig` that is needed here."""

    def get(self, name: str, /) -> Any:
        """The typed value of a setting."""


@dataclass(frozen=True, slots=True)
class GroupTimes:
    """What a KIP-848 or a share group can be given as settings of its own."""

    session_timeout_ms: int = 45_000
    heartbeat_interval_ms: int = 5_000
    assignment_interval_ms: int = 1_000

    @classmethod
    def of_consumers(cls, own: Mapping[str, str], broker: BrokerConfig) -> GroupTimes:
        """The own settings of a KIP-848 group, or else the broker's."""
        return cls(
            session_timeout_ms=whole_number(group_value("consumer.session.timeout.ms", own, broker)),
            heartbeat_interval_ms=whole_number(group_value("consumer.heartbeat.interval.ms", own, broker)),
            assignment_interval_ms=whole_number(group_value("consumer.assignment.interval.ms", own, broker)),
        )

    @classmethod
    def of_share_group(cls, own: Mapping[str, str], broker: BrokerConfig) -> GroupTimes:
        """The own settings of a share group, or else the broker's."""
        return cls(
            session_timeout_ms=whole_number(group_value("share.session.timeout.ms", own, broker)),
            heartbeat_interval_ms=whole_number(group_value("share.heartbeat.interval.ms", own, broker)),
            assignment_interval_ms=whole_number(group_value("share.assignment.interval.ms", own, broker)),
        )


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits and delays of groups and of committed offsets."""

    min_session_timeout_ms: int = 6_000
    max_session_timeout_ms: int = 1_800_000
    initial_rebalance_delay_ms: int = 3_000
    max_size: int = _MAX_INT32
    # A parked JoinGroup of a member that was never told its id cannot be kept alive by heartbeats, and its client may
    # be long gone: Kafka gives it five minutes.
    new_member_join_timeout_ms: int = 300_000
    # Ids handed out with MEMBER_ID_REQUIRED are not counted by group.max.size, so they get a bound of their own.
    max_pending_members: int = 10_000
    offset_metadata_max_bytes: int = 4_096
    offsets_retention_ms: int = 7 * 24 * 60 * _MS_PER_MINUTE
    offsets_retention_check_interval_ms: int = 600_000
    offsets_commit_timeout_ms: int = 5_000
    consumer_max_size: int = _MAX_INT32
    consumer_assignors: tuple[str, ...] = ("uniform", "range")
    """Of KIP-848 groups; the first is the default."""
    migration_policy: str = "bidirectional"
    share_max_size: int = 200
    protocols: tuple[str, ...] = ("classic", "consumer", "streams")
    """By which members may come; classic ones and those of share groups always may."""

    @property
    def offers_consumer_groups(self) -> bool:
        """Whether KIP-848 groups are served."""
        return "consumer" in self.protocols

    @property
    def may_upgrade(self) -> bool:
        """Whether a classic group with members may become a KIP-848 group."""
        return self.migration_policy in {"bidirectional", "upgrade"}

    @property
    def may_downgrade(self) -> bool:
        """Whether a KIP-848 group with classic members only may become a classic group."""
        return self.migration_policy in {"bidirectional", "downgrade"}

    @property
    def may_mix(self) -> bool:
        """Whether classic members may be in a KIP-848 group at all."""
        return self.migration_policy != "disabled"

    @classmethod
    def from_config(cls, config: SettingsSource) -> GroupSettings:
        """The settings under their Kafka names."""
        return cls(
            min_session_timeout_ms=int(config.get("group.min.session.timeout.ms")),
            max_session_timeout_ms=int(config.get("group.max.session.timeout.ms")),
            initial_rebalance_delay_ms=int(config.get("group.initial.rebalance.delay.ms")),
            max_size=int(config.get("group.max.size")),
            offset_metadata_max_bytes=int(config.get("offset.metadata.max.bytes")),
            offsets_retention_ms=int(config.get("offsets.retention.minutes")) * _MS_PER_MINUTE,
            offsets_retention_check_interval_ms=int(config.get("offsets.retention.check.interval.ms")),
            offsets_commit_timeout_ms=int(config.get("offsets.commit.timeout.ms")),
            consumer_max_size=int(config.get("group.consumer.max.size")),
            consumer_assignors=_known_assignors(config.get("group.consumer.assignors")),
            migration_policy=str(config.get("group.consumer.migration.policy")).lower(),
            share_max_size=int(config.get("group.share.max.size")),
            protocols=tuple(config.get("group.coordinator.rebalance.protocols")),
        )


def _known_assignors(names: Iterable[str]) -> tuple[str, ...]:
    """Those that there are here; a class of Java, which Kafka would load, is none of them."""
    return tuple(name for name in names if name in ASSIGNORS) or tuple(ASSIGNORS)
