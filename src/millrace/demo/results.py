"""What came out of the pipelines: records of result topics as they arrive, rows of the table and of the warehouse."""

from __future__ import annotations

import sqlite3
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

from millrace.demo.pipelines import ENRICHED


class ResultReader(threading.Thread):
    """Reads every result topic from its beginning: counts records, keeps the latest of each topic."""

    def __init__(self, topics: dict[str, int], settings: dict[str, Any]) -> None:
        """`topics` are names with their numbers of partitions."""
        super().__init__(name="results", daemon=True)
        self.error: str | None = None
        self.counts: Counter[str] = Counter()
        self.joined = 0
        """Results of the stream-to-stream join that have both sides."""
        self.latest: dict[str, str] = {}
        self._read_to: dict[tuple[str, int], int] = {}
        self._leaving = threading.Event()
        self._wanted = [
            TopicPartition(topic, number, OFFSET_BEGINNING)
            for topic, count in topics.items()
            for number in range(count)
        ]
        self._consumer = Consumer(
            {**settings, "group.id": "results", "enable.auto.commit": False, "enable.partition.eof": True}
        )

    def has_read(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Whether everything below these offsets was read. Not by counting: ends of transactions have offsets, too."""
        return all(self._read_to.get(place, 0) >= end for place, end in ends.items())

    def leave(self) -> None:
        self._leaving.set()

    def run(self) -> None:
        try:
            self._consumer.assign(self._wanted)
            while not self._leaving.is_set():
                for message in self._consumer.consume(1000, 0.1):
                    self._take(message)
        except Exception as error:  # noqa: BLE001  # a thread's root: the summary tells it
            self.error = str(error)
        finally:
            self._consumer.close()

    def _take(self, message: Message) -> None:
        problem, topic, offset = message.error(), message.topic(), message.offset()
        if problem is None:
            assert topic is not None
            self._enter(topic, message.value() or b"")
        elif problem.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 (the library's name for it)
            if not problem.retriable():
                self.error = problem.str()
            return
        place = (topic or "", message.partition() or 0)
        self._read_to[place] = max(self._read_to.get(place, 0), (offset or 0) + (problem is None))

    def _enter(self, topic: str, value: bytes) -> None:
        self.counts[topic] += 1
        self.latest[topic] = value.decode(errors="replace")
        if topic.startswith(ENRICHED) and not value.endswith(b'"other":null}'):
            self.joined += 1


def events_in_table(database: Path, table: str) -> int:
    """How many events the windows of the metrics table count together."""
    if not database.exists():
        return 0
    with closing(sqlite3.connect(database)) as connection:
        known = connection.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        if known is None:
            return 0
        return int(connection.execute(f'SELECT coalesce(sum("count"), 0) FROM "{table}"').fetchone()[0])  # noqa: S608


def rows_in_warehouse(folder: Path) -> int:
    """How many rows the Delta table has, by what its log says of its files."""
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(str(folder)):
        return 0
    return int(DeltaTable(str(folder)).count())
