"""Led partitions on real logs, as handlers see them: what is appended is committed when a test flushes it."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from millrace.clock import ManualClock
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.handlers import registry
from millrace.handlers.context import RequestContext, Services
from millrace.handlers.counting import RequestCounts
from millrace.handlers.fetch_sessions import FetchSessions
from millrace.metadata.deltas import PartitionState
from millrace.replication.partition import Partition
from millrace.replication.watermark import Watermark
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.settings import FlushMode, LogConfig
from millrace.wire.frame import RequestHeader
from millrace.wire.keys import ApiKey
from support.batches import NOW_MS

CONFIG = LogConfig(flush_mode=FlushMode.GROUP)


class Connection:
    """The far end of a request."""

    def __init__(self) -> None:
        self.on_lost: dict[object, Callable[[], None]] = {}

    def answer_room(self, _context: RequestContext) -> int:
        return 1 << 30


class LedPartitions:
    """Partition 0 of some topics, and services around them."""

    def __init__(self, home: Path, *topics: str, config: LogConfig = CONFIG, settings: dict[str, str] | None = None):
        self.clock = ManualClock(NOW_MS)
        self.files = Files(sync=False)
        self.partitions: dict[str, Partition] = {}
        for topic in topics:
            directory = home / f"{topic}-0"
            directory.mkdir()
            log = Log.open(directory, config, clock=self.clock, files=self.files)
            partition = Partition(topic, 0, uuid.uuid4(), open_log=partial(_same, log), clock=self.clock, broker_id=1)
            partition.lead(PartitionState((1,), (1,), 1, leader_epoch=0))
            self.partitions[topic] = partition
        self.replicas = SimpleNamespace(
            find=self._find,
            find_readable=self._find,
            led=lambda key, _index: self.partitions.get(key),
            watermarks=self._watermarks,
            closing=False,
        )
        self.services: Any = SimpleNamespace(
            config=BrokerConfig(settings or {}),
            clock=self.clock,
            replicas=self.replicas,
            fetch_sessions=FetchSessions(10),
            counts=RequestCounts(),
            fetch_max_bytes=1 << 20,
            is_rack_aware=False,
            transaction_gate=None,
            produce_lines={},
            groups=None,
            image=SimpleNamespace(brokers={}),
            authorizer=NO_AUTHORIZER,
        )

    def _find(self, key: str, index: int) -> Partition:
        if key not in self.partitions or index:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
        return self.partitions[key]

    def _watermarks(self, places: Iterable[tuple[str, int]]) -> list[Watermark]:
        return [self.partitions[key].high_watermark for key, _ in places]

    def context(self, key: ApiKey, version: int, peer: Connection | None = None) -> RequestContext:
        header = RequestHeader(key, version, 1, "test")
        services, needs = cast(Services, self.services), registry.load()[key].needs
        return RequestContext(services, header, version, "127.0.0.1", "PLAINTEXT", cast(Any, peer), needs=needs)

    def flush(self) -> None:
        for partition in self.partitions.values():
            partition.log.flush()

    def close(self) -> None:
        self.files.close_all()


def _same(log: Log) -> Log:
    return log
