"""Records on their way to a topic: a librdkafka producer, what became of each record, and why one was refused.

The library says no more of a refusal than the protocol's name for it, so the reason is put together from what the topic
takes (`TopicRules`) and what the record is. Where the rules can be seen before (a key on a compacted topic), a record
that breaks one is not sent: the broker would refuse the whole batch that it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from millrace.cli.jsonrecords import OutgoingRecord
from millrace.cli.output import CommandError

if TYPE_CHECKING:
    from confluent_kafka import KafkaError, Message, Producer

PARTITION_UA: Final = -1
"""The library's name for: whichever the partitioner chooses."""
LARGEST_RECORD_BYTES: Final = 100_000_000
"""Brokers take no request above 100 MiB by default; what a topic takes is for the broker to say."""
LARGEST_BATCH_BYTES: Final = 1_000_000
_BATCH_OVERHEAD_BYTES: Final = 100
"""More than what a batch adds to one record without headers."""
_FAILURES_KEPT: Final = 1000
_ERRORS_SHOWN: Final = 5


@dataclass(frozen=True, slots=True)
class TopicRules:
    """What a topic takes, as far as the cluster tells."""

    max_message_bytes: int | None = None
    is_compacted: bool = False

    def client_settings(self) -> dict[str, Any]:
        """A batch that is too large for the topic would be refused although its records are not."""
        if self.max_message_bytes is None:
            return {}
        return {
            "message.max.bytes": LARGEST_RECORD_BYTES,
            "batch.size": max(1, min(LARGEST_BATCH_BYTES, self.max_message_bytes)),
        }


class Failure(NamedTuple):
    """A record that was refused: the line it came from, why, and what matters of it."""

    place: str
    error: KafkaError
    has_key: bool
    size_bytes: int


def read_rules(bootstrap: str, overrides: Mapping[str, str], topic: str) -> TopicRules:
    """What the topic takes. Nothing is known of one that is not there yet, or whose settings one may not see."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import RESOURCE_TOPIC, ConfigResource

    from millrace.cli.connection import REQUEST_TIMEOUT_S, open_admin, result

    admin = open_admin(bootstrap, overrides)
    try:
        (future,) = admin.describe_configs(
            [ConfigResource(RESOURCE_TOPIC, topic)], request_timeout=REQUEST_TIMEOUT_S
        ).values()
        found = {name: entry.value for name, entry in result(future).items()}
    except (KafkaException, TimeoutError):
        return TopicRules()
    limit = found.get("max.message.bytes") or ""
    return TopicRules(int(limit) if limit.isdigit() else None, "compact" in (found.get("cleanup.policy") or ""))


class Delivery:
    """One librdkafka producer and the count of what became of the records given to it.

    Only failures are reported back by the library, one by one; what is neither failed nor still queued was delivered.
    """

    def __init__(
        self,
        topic: str,
        open_with: Callable[[dict[str, Any]], Producer],
        settings: dict[str, Any],
        rules: TopicRules | None = None,
    ) -> None:
        self.topic = topic
        self.sent = 0
        self.sent_bytes = 0
        self.failed = 0
        self.failures: list[Failure] = []
        self._needs_keys = rules is not None and rules.is_compacted
        self._client_limit = int(settings.get("message.max.bytes", LARGEST_BATCH_BYTES))
        self._producer = open_with({**settings, "delivery.report.only.error": True})
        self._produce = self._producer.produce

    def __repr__(self) -> str:
        return f"Delivery(topic={self.topic!r}, sent={self.sent}, failed={self.failed}, queued={len(self._producer)})"

    @property
    def delivered(self) -> int:
        return self.sent - self.failed - len(self._producer)

    @property
    def undelivered(self) -> int:
        return len(self._producer)

    def send(self, record: OutgoingRecord, place: str) -> None:
        """Hand over a record that was read at `place`; `CommandError` says why it cannot be sent at all."""
        key, value = record.key, record.value
        if key is None and self._needs_keys:
            raise CommandError(needs_a_key(self.topic))
        partition = PARTITION_UA if record.partition is None else record.partition
        optional: dict[str, Any] = {}
        if record.timestamp_ms is not None:
            optional["timestamp"] = record.timestamp_ms
        if record.headers:
            optional["headers"] = list(record.headers)
        size_bytes = len(value or b"") + len(key or b"")
        while True:
            try:
                # By position, because this is done for every line, and names cost as much again.
                self._produce(self.topic, value, key, partition, partial(self._on_report, place), **optional)
            except BufferError:  # the client's queue is full: back-pressure on the reader
                self._producer.poll(0.1)
            except Exception as error:
                if not _is_too_large(error):
                    raise
                raise CommandError(
                    f"a record of {size_bytes:,} bytes; the client sends at most "
                    f"{self._client_limit:,} (-X message.max.bytes=N)"
                ) from None
            else:
                break
        self.sent += 1
        self.sent_bytes += size_bytes

    def poll(self) -> None:
        self._producer.poll(0)

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything is acknowledged or has failed; False when the time was not enough."""
        return self._producer.flush(timeout_s) == 0

    def abandon(self) -> None:
        """Give up what is still queued, so that closing does not wait for it."""
        self._producer.purge(blocking=False)

    def _on_report(self, place: str, error: KafkaError | None, message: Message) -> None:
        if error is None:
            return
        self.failed += 1
        if len(self.failures) < _FAILURES_KEPT:
            key = message.key()
            size_bytes = len(message.value() or b"") + len(key or b"")
            self.failures.append(Failure(place, error, key is not None, size_bytes))


def failure_texts(failures: list[Failure], topic: str, read: Callable[[], TopicRules]) -> list[str]:
    """The first failures, a line each: those that are to blame before those that were only in their batch.

    `read` asks for the topic's rules, which is worth it only for refusals that they explain.
    """
    from confluent_kafka import KafkaError

    explained = {KafkaError.INVALID_RECORD, KafkaError.MSG_SIZE_TOO_LARGE}
    rules = read() if any(failure.error.code() in explained for failure in failures) else TopicRules()
    to_blame_first = sorted(failures, key=lambda failure: rules.is_compacted and failure.has_key)
    return [f"{failure.place}: {_reason(failure, topic, rules)}" for failure in to_blame_first[:_ERRORS_SHOWN]]


def needs_a_key(topic: str) -> str:
    return f"the record has no key, and topic '{topic}' is compacted (cleanup.policy=compact): there each needs one"


def _reason(failure: Failure, topic: str, rules: TopicRules) -> str:
    from confluent_kafka import KafkaError

    from millrace.cli.connection import explain

    code, limit = failure.error.code(), rules.max_message_bytes
    if code == KafkaError.INVALID_RECORD and rules.is_compacted:
        return needs_a_key(topic) if not failure.has_key else "it was in one batch with a record that has no key"
    if code == KafkaError.MSG_SIZE_TOO_LARGE and limit is not None:
        alone = failure.size_bytes + _BATCH_OVERHEAD_BYTES > limit
        what = f"{'a' if alone else 'in too large a batch, a'} record of {failure.size_bytes:,} bytes"
        return (
            f"{what}; topic '{topic}' takes batches of at most {limit:,} bytes "
            f"(millrace topics alter {topic} --set max.message.bytes=N)"
        )
    return explain(failure.error)


def _is_too_large(error: Exception) -> bool:
    from confluent_kafka import KafkaError

    from millrace.cli.connection import error_of

    kafka_error = error_of(error)
    return kafka_error is not None and kafka_error.code() == KafkaError.MSG_SIZE_TOO_LARGE
