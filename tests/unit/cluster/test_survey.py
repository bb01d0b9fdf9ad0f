"""Asking replicas how far their logs reach: all at once, a thousand partitions at a time, whoever answers in time."""

from __future__ import annotations

import asyncio
import uuid
from typing import Any, cast

import pytest

from millrace.clock import ManualClock
from millrace.cluster.elections import LogEnd
from millrace.cluster.peers import Peers
from millrace.cluster.survey import MAX_AT_A_TIME, TIMEOUT_S, Surveyor
from millrace.errors import ApiError, ErrorCode
from millrace.wire.messages.brokers import GetReplicaLogInfoRequest, GetReplicaLogInfoResponse

TOPIC_ID = uuid.UUID(int=7)
_Info = GetReplicaLogInfoResponse.PartitionLogInfo


class Others:
    """Brokers in place of `Peers`; each answers with its codes, and with its id as the end of every log."""

    def __init__(self, **codes: ErrorCode | None) -> None:
        self.codes = {int(name[1:]): code for name, code in codes.items()}
        self.sizes: list[tuple[int, int]] = []

    async def request(self, broker_id: int, message: Any, _version: int, _timeout_ms: int) -> Any:
        assert isinstance(message, GetReplicaLogInfoRequest)
        code = self.codes[broker_id]
        if code is None:
            await asyncio.Event().wait()
        if code is ErrorCode.NETWORK_EXCEPTION:
            raise ApiError(code, "refused")
        (topic,) = message.topic_partitions or ()
        self.sizes.append((broker_id, len(topic.partitions)))
        infos = [
            _Info(partition=index, last_written_leader_epoch=3, log_end_offset=broker_id, error_code=code or 0)
            for index in topic.partitions
        ]
        found = GetReplicaLogInfoResponse.TopicPartitionLogInfo(topic_id=topic.topic_id, partition_log_info=infos)
        return GetReplicaLogInfoResponse(broker_epoch=100 + broker_id, topic_partition_log_info_list=[found])


def own_end(_topic_id: uuid.UUID, index: int) -> tuple[int, int, int]:
    if index == 1:
        raise ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "damaged")
    return 3, 1, 3


def surveyor(others: Others, clock: ManualClock | None = None) -> Surveyor:
    return Surveyor(
        broker_id=1,
        broker_epoch=lambda: 101,
        own=own_end,
        peers=cast("Peers", others),
        clock=clock or ManualClock(),
    )


async def test_this_broker_and_others() -> None:
    survey = await surveyor(Others(b2=ErrorCode.NONE))({(TOPIC_ID, 0): (1, 2), (TOPIC_ID, 1): (1,)})
    assert survey.ends == {(TOPIC_ID, 0): {1: LogEnd(3, 1), 2: LogEnd(3, 2)}, (TOPIC_ID, 1): {1: None}}
    assert survey.epochs == {1: 101, 2: 102}


@pytest.mark.parametrize(
    ("code", "answers"),
    [
        (ErrorCode.KAFKA_STORAGE_ERROR, {3: LogEnd(3, 3), 2: None}),
        (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, {3: LogEnd(3, 3)}),
        (ErrorCode.NETWORK_EXCEPTION, {3: LogEnd(3, 3)}),
    ],
)
async def test_one_that_has_nothing_to_say(code: ErrorCode, answers: dict[int, LogEnd | None]) -> None:
    survey = await surveyor(Others(b2=code, b3=ErrorCode.NONE))({(TOPIC_ID, 0): (2, 3)})
    assert survey.ends == {(TOPIC_ID, 0): answers}


async def test_one_that_does_not_answer_in_time_is_left_out() -> None:
    clock = ManualClock()
    asking = asyncio.create_task(_ask(surveyor(Others(b2=None, b3=ErrorCode.NONE), clock)))
    for _turn in range(10):
        await asyncio.sleep(0)
    assert not asking.done()
    clock.advance(TIMEOUT_S)
    assert await asking == {3: LogEnd(3, 3)}


async def _ask(survey: Surveyor) -> dict[int, LogEnd | None]:
    return (await survey({(TOPIC_ID, 0): (2, 3)})).ends[TOPIC_ID, 0]


async def test_many_partitions_are_several_requests() -> None:
    others = Others(b2=ErrorCode.NONE)
    survey = await surveyor(others)({(TOPIC_ID, index): (2,) for index in range(MAX_AT_A_TIME + 5)})
    assert len(survey.ends) == MAX_AT_A_TIME + 5
    assert others.sizes == [(2, MAX_AT_A_TIME), (2, 5)]
