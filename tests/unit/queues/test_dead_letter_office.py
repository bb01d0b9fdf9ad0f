"""Writing dead letters: from which records, to which leader, and what happens when that is not possible."""

from __future__ import annotations

import uuid
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import PartitionState
from millrace.queues.acquisition import DeadLetter, DeadLetterReason
from millrace.queues.dead_letter_office import DeadLetterOffice
from millrace.queues.records import ShareKey
from millrace.queues.settings import DeadLetterSettings, QueueSettings
from millrace.records.batch import split
from millrace.records.decode import Record, decode_records
from millrace.replication.partition import Partition
from millrace.storage.files import Files
from millrace.storage.log import Log
from millrace.storage.recovery import LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch, with_header

HERE, ELSEWHERE = 1, 2
KEY = ShareKey("g", uuid.UUID(int=7), 5)
LEADS = PartitionState((HERE,), (HERE,), HERE, 4)
WANTED = QueueSettings(dead_letter_topic="dlq.t", copies_dead_letters=True)


def letter(first: int, last: int) -> DeadLetter:
    return DeadLetter(first, last, 3, DeadLetterReason.REJECTED)


class Desk:
    """An office with a source, a dead-letter topic of three partitions, and a cluster that is made up."""

    def __init__(self, home: Path) -> None:
        self.clock = ManualClock(wall_ms=NOW_MS)
        self.source = self._partition(home, "t", KEY.topic_id, KEY.partition)
        self.target = self._partition(home, "dlq.t", uuid.UUID(int=9), 2)
        self.leader = HERE
        self.topics: dict[str, Any] = {}
        self.settings: dict[str, Any] = {"max.message.bytes": 1 << 20, "errors.deadletterqueue.group.enable": True}
        self.sent: list[tuple[int, Any]] = []
        self.answer = ErrorCode.NONE
        self.add_topic()

    def _partition(self, home: Path, topic: str, topic_id: uuid.UUID, index: int) -> Partition:
        directory = home / f"{topic}-{index}"
        directory.mkdir()
        log = Log.open(
            directory, LogConfig(flush_mode=FlushMode.OS), clock=self.clock, files=Files(), state=LogState(clean=True)
        )
        partition = Partition(topic, index, topic_id, open_log=lambda: log, clock=self.clock, broker_id=HERE)
        partition.lead(LEADS)
        return partition

    def add_topic(self) -> None:
        partitions = [SimpleNamespace(leader=self.leader)] * 3
        self.topics["dlq.t"] = SimpleNamespace(name="dlq.t", topic_id=self.target.topic_id, partitions=partitions)

    async def request(self, broker_id: int, message: Any, _version: int, _timeout_ms: int) -> Any:
        self.sent.append((broker_id, message))
        result = SimpleNamespace(error_code=self.answer, error_message=None)
        return SimpleNamespace(responses=[SimpleNamespace(partition_responses=[result])])

    async def make_topic(self, _name: str) -> None:
        self.add_topic()

    def office(self, settings: DeadLetterSettings | None = None) -> DeadLetterOffice:
        image: Any = SimpleNamespace(topic=self.topics.get)
        peers: Any = self
        return DeadLetterOffice(
            broker_id=HERE,
            settings=settings or DeadLetterSettings(),
            image=lambda: image,
            topic_setting=lambda _topic, name: self.settings[name],
            find=lambda _topic_id, _index: self.target,
            make_topic=self.make_topic,
            peers=peers,
            clock=self.clock,
        )

    def written(self) -> list[Record]:
        data = self.target.log.read(0, 1 << 20, limit=self.target.committed, at_least_one=True).data
        return [each for found in split(data) for each in decode_records(found.data)]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def offsets(records: list[Record]) -> list[int]:
    return [int(each.headers[-4].value or b"") for each in records]


async def test_letters_go_to_the_partition_of_the_same_number(desk: Desk) -> None:
    desk.source.append(batch(3))
    desk.source.append(batch(3))
    assert await desk.office().deliver(KEY, desk.source, letter(1, 4), WANTED) == 4
    assert offsets(desk.written()) == [1, 2, 3, 4]
    assert [each.key for each in desk.written()] == [b"k1", b"k2", b"k0", b"k1"]


async def test_letters_go_to_the_leader_wherever_it_is(desk: Desk) -> None:
    desk.leader = ELSEWHERE
    desk.add_topic()
    desk.source.append(batch(2))
    await desk.office().deliver(KEY, desk.source, letter(0, 1), WANTED)
    ((broker_id, request),) = desk.sent
    (topic,) = request.topic_data
    (item,) = topic.partition_data
    assert (broker_id, request.acks, topic.topic_id, item.index) == (ELSEWHERE, -1, desk.target.topic_id, 2)
    assert offsets([each for found in split(item.records) for each in decode_records(found.data)]) == [0, 1]
    desk.answer = ErrorCode.NOT_LEADER_OR_FOLLOWER
    with pytest.raises(ApiError):
        await desk.office().deliver(KEY, desk.source, letter(0, 1), WANTED)


async def test_a_group_without_a_topic_wants_no_letters(desk: Desk) -> None:
    assert await desk.office().deliver(KEY, desk.source, letter(0, 9), QueueSettings()) == 9
    assert not desk.written()


async def test_a_topic_that_is_missing_is_made_where_that_is_allowed(desk: Desk) -> None:
    desk.source.append(batch(1))
    desk.topics.clear()
    with pytest.raises(ApiError) as refused:
        await desk.office().deliver(KEY, desk.source, letter(0, 0), WANTED)
    assert refused.value.code is ErrorCode.INVALID_CONFIG
    await desk.office(DeadLetterSettings(creates_topics=True)).deliver(KEY, desk.source, letter(0, 0), WANTED)
    assert offsets(desk.written()) == [0]
    desk.settings["errors.deadletterqueue.group.enable"] = False
    with pytest.raises(ApiError, match=r"cannot take dead letters"):
        await desk.office().deliver(KEY, desk.source, letter(0, 0), WANTED)


async def test_what_the_log_has_lost_gets_no_letter(desk: Desk) -> None:
    desk.source.append(batch(4))
    desk.source.delete_records_before(2)
    assert await desk.office().deliver(KEY, desk.source, letter(0, 3), WANTED) == 3
    assert offsets(desk.written()) == [2, 3]
    desk.source.delete_records_before(4)
    assert await desk.office().deliver(KEY, desk.source, letter(0, 3), WANTED) == 3
    assert len(desk.written()) == 2


async def test_a_long_range_takes_several_turns(desk: Desk) -> None:
    for _ in range(4):
        desk.source.append(batch(10, size=10_000))
    done = await desk.office().deliver(KEY, desk.source, letter(0, 39), WANTED)
    assert 0 < done < 39
    assert offsets(desk.written()) == list(range(done + 1))
    assert await desk.office().deliver(KEY, desk.source, letter(done + 1, 39), WANTED) == 39


async def test_records_that_nobody_can_read_still_get_letters(desk: Desk) -> None:
    desk.source.append(with_header(batch(3)[:-20] + bytes(20), count=3))
    assert await desk.office().deliver(KEY, desk.source, letter(0, 2), WANTED) == 2
    assert offsets(desk.written()) == [0, 1, 2]
    assert [each.value for each in desk.written()] == [None] * 3
