"""Topics and records on any broker, through librdkafka: what the tests of Spark's source start from."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

QUIET = {"log_level": 0}
TIMEOUT_S = 30


@dataclass(frozen=True)
class Sent:
    """A record to produce; a partition of -1 leaves the choice to the key."""

    value: bytes | None
    key: bytes | None = None
    partition: int = -1
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp_ms: int = 0


class Topics:
    """Makes and changes topics of one broker; names are new on every call, so that tests do not meet."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})

    def create(
        self, prefix: str = "t", partitions: int = 1, config: Mapping[str, str] | None = None, *, exact: bool = False
    ) -> str:
        name = prefix if exact else f"{prefix}-{uuid.uuid4().hex[:8]}"
        _done(self._admin.create_topics([NewTopic(name, partitions, 1, config=dict(config or {}))]))
        self._seen(name, partitions)
        return name

    def delete(self, name: str) -> None:
        _done(self._admin.delete_topics([name]))
        self._seen(name, 0)

    def add_partitions(self, name: str, total: int) -> None:
        _done(self._admin.create_partitions([NewPartitions(name, total)]))
        self._seen(name, total)

    def delete_records(self, name: str, partition: int, before: int) -> None:
        """What retention does, at once."""
        _done(self._admin.delete_records([TopicPartition(name, partition, before)]))

    def send(self, topic: str, records: Iterable[Sent], **settings: Any) -> int:
        """Produce and wait for all of them; `settings` are librdkafka's, with `_` for a dot."""
        failures: list[KafkaError] = []
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                **QUIET,
                **{name.replace("_", "."): value for name, value in settings.items()},
            }
        )

        def told(error: KafkaError | None, _: object) -> None:
            if error is not None:
                failures.append(error)

        count = 0
        for record in records:
            producer.poll(0)
            while len(producer) > 50_000:
                producer.poll(0.1)
            producer.produce(
                topic,
                value=record.value,
                key=record.key,
                partition=record.partition,
                headers=list(record.headers),
                timestamp=record.timestamp_ms,
                on_delivery=told,
            )
            count += 1
        assert producer.flush(TIMEOUT_S) == 0
        assert not failures, failures[0]
        return count

    def _seen(self, name: str, partitions: int) -> None:
        """Wait until the broker itself knows: with Apache Kafka that is a moment after the controller has answered."""
        deadline = time.monotonic() + TIMEOUT_S
        while True:
            found = self._admin.list_topics(timeout=TIMEOUT_S).topics.get(name)
            if (0 if found is None else len(found.partitions)) == partitions:
                return
            assert time.monotonic() < deadline, f"{name} has not got {partitions} partitions"
            time.sleep(0.05)


def numbered(count: int, partitions: int = 1, start: int = 0) -> list[Sent]:
    """Records with the texts of `start`, `start + 1`... dealt out over the partitions in turn."""
    return [
        Sent(str(number).encode(), key=f"k{number}".encode(), partition=number % partitions)
        for number in range(start, start + count)
    ]


def _done(futures: Mapping[Any, Any]) -> None:
    for future in futures.values():
        future.result(TIMEOUT_S)
