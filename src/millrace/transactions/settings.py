"""The settings that the transaction coordinator obeys, under their Kafka names.

Not here: parsing and validation (`config`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from millrace.transactions.state import LAST_EPOCH


class SettingsSource(Protocol):
    """The part of `BrokerConfig` that is needed here."""

    def get(self, name: str, /) -> Any:
        """The typed value of a setting."""


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """How long transactions and their ids live, and how often that is looked at."""

    max_timeout_ms: int = 900_000
    id_expiration_ms: int = 7 * 86_400_000
    abort_interval_ms: int = 10_000
    expiration_interval_ms: int = 3_600_000
    write_timeout_ms: int = 5_000
    """How long an answer waits for the log. What is not durable by then may become so later."""
    last_epoch: int = LAST_EPOCH
    """For tests, which cannot wait for the real one."""

    @classmethod
    def from_config(cls, config: SettingsSource) -> TransactionSettings:
        """The settings of the broker."""
        return cls(
            max_timeout_ms=int(config.get("transaction.max.timeout.ms")),
            id_expiration_ms=int(config.get("transactional.id.expiration.ms")),
            abort_interval_ms=int(config.get("transaction.abort.timed.out.transaction.cleanup.interval.ms")),
            expiration_interval_ms=int(config.get("transaction.remove.expired.transaction.cleanup.interval.ms")),
        )


@dataclass(frozen=True, slots=True)
class GateSettings:
    """How long a write waits for the transaction before it to be completed."""

    retry_backoff_ms: int = 20
    retry_max_ms: int = 100

    @classmethod
    def from_config(cls, config: SettingsSource) -> GateSettings:
        """The settings of the broker."""
        return cls(
            retry_backoff_ms=int(config.get("add.partitions.to.txn.retry.backoff.ms")),
            retry_max_ms=int(config.get("add.partitions.to.txn.retry.backoff.max.ms")),
        )
