from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, Self, cast

import pytest

from millrace.clock import SystemClock
from millrace.cluster.image import TopicImage
from millrace.cluster.peers import Peers
from millrace.errors import ApiError, ErrorCode
from millrace.model import AUDIT_LOG_TOPIC, new_topic_id
from millrace.records.decode import decode_records
from millrace.replication import audit_topic
from millrace.replication.audit_topic import AuditTopic
from millrace.replication.partition import Partition
from millrace.security.audit import Line, Outbox
from millrace.tasks import Tasks
from millrace.wire.messages.produce import ProduceResponse

ME, OTHER = 2, 3


class FakePartition:
    """A led partition that commits at once."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.failures = 0

    def check_in_sync(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ApiError(ErrorCode.NOT_ENOUGH_REPLICAS)

    def append(self, records: bytes, *, from_client: bool) -> Any:
        assert not from_client
        self.values += [record.value for record in decode_records(records)]
        return SimpleNamespace(last_offset=len(self.values) - 1)

    async def wait_committed(self, last_offset: int) -> None:
        assert last_offset < len(self.values)


class FakePeers:
    """The leader of another partition."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.asked: list[tuple[int, int]] = []

    async def request(self, broker_id: int, message: Any, version: int, timeout_ms: int) -> Any:
        assert (message.acks, version, timeout_ms) == (-1, 13, 10_000)
        ((topic,),) = (message.topic_data,)
        ((item,),) = (topic.partition_data,)
        self.asked.append((broker_id, item.index))
        self.values += [record.value for record in decode_records(item.records)]
        result = ProduceResponse.PartitionProduceResponse(index=item.index)
        return ProduceResponse(responses=[ProduceResponse.TopicProduceResponse(partition_responses=[result])])


class Writing:
    """A topic of three partitions with these leaders."""

    def __init__(self, *leaders: int) -> None:
        self.partition = FakePartition()
        self.peers = FakePeers()
        self.leaders = list(leaders)
        self.outbox = Outbox("a test", lambda count: Line(0, b"lost %d" % count))
        self.topic = AuditTopic(
            self.outbox,
            broker_id=ME,
            ensure_topic=self._ensure,
            led=self._led,
            peers=cast("Peers", self.peers),
            clock=SystemClock(),
        )
        self._id = new_topic_id()
        self._tasks = Tasks(SystemClock())

    async def _ensure(self, name: str) -> TopicImage:
        assert name == AUDIT_LOG_TOPIC
        states = tuple(SimpleNamespace(leader=leader) for leader in self.leaders)
        return cast("TopicImage", SimpleNamespace(name=name, topic_id=self._id, partitions=states))

    def _led(self, topic: str, index: int) -> Partition | None:
        assert topic == AUDIT_LOG_TOPIC
        return cast("Partition", self.partition) if self.leaders[index] == ME else None

    async def __aenter__(self) -> Self:
        self._tasks.keep("audit topic", self.topic.run)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.stop()
        await self.topic.stop()

    def write(self, *values: bytes) -> None:
        for value in values:
            self.outbox.offer(Line(1_700_000_000_000, value))


async def test_events_go_to_a_partition_that_is_led_here() -> None:
    async with Writing(OTHER, ME, OTHER) as writing:
        writing.write(b"1", b"2")
    assert writing.partition.values == [b"1", b"2"]
    assert writing.peers.asked == []


async def test_a_broker_that_leads_none_writes_through_a_leader() -> None:
    async with Writing(OTHER, OTHER, -1) as writing:
        writing.write(b"1", b"2")
    assert writing.peers.values == [b"1", b"2"]
    assert writing.peers.asked == [(OTHER, 0)], "partition 2 would be this broker's first choice, but has no leader"


async def test_what_fails_is_tried_again_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit_topic, "RETRY_S", 0.01)
    async with Writing(ME, OTHER, OTHER) as writing:
        writing.partition.failures = 3
        writing.write(b"1")
        writing.write(b"2")
        async with asyncio.timeout(10):
            while writing.partition.values != [b"1", b"2"]:
                await asyncio.sleep(0.005)


async def test_a_stop_does_not_wait_for_a_topic_without_a_leader() -> None:
    async with asyncio.timeout(audit_topic.LAST_S + 1):
        async with Writing(-1, -1, -1) as writing:
            writing.write(b"1")
    assert writing.partition.values == []
