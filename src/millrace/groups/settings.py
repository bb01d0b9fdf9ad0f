"""The settings a group coordinator obeys, read once from the broker's configuration.

Not here: parsing and validation of settings (`config`). Defaults are Kafka's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

_MAX_INT32 = 2**31 - 1
_MS_PER_MINUTE = 60_000


class SettingsSource(Protocol):
    """The part of `BrokerConfig` that is needed here."""

    def get(self, name: str, /) -> Any:
        """The typed value of a setting."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """Limits and delays of classic groups and of committed offsets."""

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
    offsets_partitions: int = 50

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
            offsets_partitions=int(config.get("offsets.topic.num.partitions")),
        )
