"""Asking brokers how far the logs of their replicas reach (GetReplicaLogInfo), for elections that depend on it.

All are asked at once and for a bounded time; who does not answer is left out. An answer counts for the incarnation that
gave it and for no other. Not here: who is elected by it (`elections`, `recovery`).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from millrace.clock import Clock
from millrace.cluster.channel import within
from millrace.cluster.elections import LogEnd, LogEnds, PartitionKey
from millrace.cluster.image import ClusterImage
from millrace.cluster.peers import Peers
from millrace.errors import ApiError, ErrorCode
from millrace.wire.messages.brokers import GetReplicaLogInfoRequest, GetReplicaLogInfoResponse

logger = logging.getLogger(__name__)

VERSION: Final = 0
TIMEOUT_S: Final = 2.0
MAX_AT_A_TIME: Final = 1000
"""How many partitions are in one request, as in Kafka."""


@dataclass(slots=True)
class Survey:
    """What the replicas have, as far as they answered."""

    ends: dict[PartitionKey, dict[int, LogEnd | None]] = field(default_factory=dict)
    """By broker; None where its log is of no use."""
    epochs: dict[int, int] = field(default_factory=dict)
    """The incarnations that answered."""

    def ends_in(self, image: ClusterImage) -> LogEnds:
        """The answers of brokers that are still who they were."""
        same = {each.broker_id for each in image.live_brokers if self.epochs.get(each.broker_id) == each.broker_epoch}
        return {
            key: {broker_id: end for broker_id, end in ends.items() if broker_id in same}
            for key, ends in self.ends.items()
        }


Questions = Mapping[PartitionKey, Iterable[int]]
"""Which brokers are asked for which partitions."""
AskLogEnds = Callable[[Questions], Awaitable[Survey]]


async def nobody_to_ask(_questions: Questions) -> Survey:
    """For a controller whose broker holds no replicas yet."""
    return Survey()


class Surveyor:
    """Asks the other brokers, and this one. Called with the questions."""

    def __init__(
        self,
        *,
        broker_id: int,
        broker_epoch: Callable[[], int],
        own: Callable[[uuid.UUID, int], tuple[int, int, int]],
        peers: Peers,
        clock: Clock,
    ) -> None:
        """`own` tells of this broker's replicas: epoch, end, and what is not of interest here; or raises ApiError."""
        self._broker_id = broker_id
        self._broker_epoch = broker_epoch
        self._own = own
        self._peers = peers
        self._clock = clock

    async def __call__(self, questions: Questions) -> Survey:
        asked: dict[int, list[PartitionKey]] = defaultdict(list)
        for key, brokers in questions.items():
            for broker_id in brokers:
                asked[broker_id].append(key)
        survey = Survey()
        others = [
            self._ask(survey, broker_id, keys[start : start + MAX_AT_A_TIME])
            for broker_id, keys in asked.items()
            if broker_id != self._broker_id
            for start in range(0, len(keys), MAX_AT_A_TIME)
        ]
        await asyncio.gather(*others, self._look(survey, asked.get(self._broker_id, ())))
        return survey

    async def _look(self, survey: Survey, keys: Sequence[PartitionKey]) -> None:
        if keys:
            survey.epochs[self._broker_id] = self._broker_epoch()
        for topic_id, index in keys:
            try:
                epoch, end, _ = self._own(topic_id, index)
                _note(survey, (topic_id, index), self._broker_id, ErrorCode.NONE, LogEnd(epoch, end))
            except ApiError as error:
                _note(survey, (topic_id, index), self._broker_id, error.code)
            await asyncio.sleep(0)  # a log that was not open yet took a moment

    async def _ask(self, survey: Survey, broker_id: int, keys: Sequence[PartitionKey]) -> None:
        topics: dict[uuid.UUID, list[int]] = defaultdict(list)
        for topic_id, index in keys:
            topics[topic_id].append(index)
        request = GetReplicaLogInfoRequest(
            topic_partitions=[
                GetReplicaLogInfoRequest.TopicPartitions(topic_id=topic_id, partitions=indexes)
                for topic_id, indexes in topics.items()
            ]
        )
        try:
            asked = self._peers.request(broker_id, request, VERSION, round(TIMEOUT_S * 1000))
            answer: GetReplicaLogInfoResponse = await within(self._clock, asked, TIMEOUT_S)
        except ApiError as error:
            logger.info("broker %d does not say how far its logs reach: %s", broker_id, error)
            return
        if survey.epochs.setdefault(broker_id, answer.broker_epoch) != answer.broker_epoch:
            return  # it was started again between two answers
        for topic in answer.topic_partition_log_info_list:
            for each in topic.partition_log_info:
                end = LogEnd(each.last_written_leader_epoch, each.log_end_offset)
                _note(survey, (topic.topic_id, each.partition), broker_id, each.error_code, end)


def _note(survey: Survey, key: PartitionKey, broker_id: int, code: int, end: LogEnd | None = None) -> None:
    """An answer; a broker that has not heard of the replica yet has given none."""
    if code == ErrorCode.NONE:
        survey.ends.setdefault(key, {})[broker_id] = end
    elif code == ErrorCode.KAFKA_STORAGE_ERROR:
        survey.ends.setdefault(key, {})[broker_id] = None
