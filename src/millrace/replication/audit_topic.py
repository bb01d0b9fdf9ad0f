"""The audit log as an internal topic: records of the broker's own, JSON each, that clients may read and not write.

Every broker writes its events in their order, one batch at a time: to a partition that it leads, or where it leads none
through the leader of one. The topic is made when there is the first event. A batch counts when it is committed; what
fails is tried again, so that an event may be there twice and has the same `metadata.uid` then. Meanwhile events wait in
their queue, and beyond its bounds are lost (`security.audit`).

The topic has no part in the reserve of a full disk: what groups and transactions have to write comes first.
Owner: the task that runs `run`.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from millrace.clock import Clock
from millrace.cluster.channel import within
from millrace.cluster.image import TopicImage
from millrace.cluster.peers import Peers
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.model import AUDIT_LOG_TOPIC, NO_BROKER
from millrace.records.encode import Record, encode_batch
from millrace.replication.partition import Partition
from millrace.security.audit import Line, Outbox
from millrace.wire.messages.produce import ProduceRequest

logger = logging.getLogger(__name__)

RETRY_S: Final = 1.0
TIMEOUT_S: Final = 10.0
LAST_S: Final = 2.0
"""How long the last events may take when the broker stops."""
_LINES: Final = 500
"""Encoding a batch must not hold the loop for long."""
_BYTES: Final = 256 * 1024
_PRODUCE_VERSION: Final = 13
_ACKS_ALL: Final = -1


class Led(Protocol):
    """The partition of a topic, if this broker leads it."""

    def __call__(self, topic: str, index: int, /) -> Partition | None: ...


class AuditTopic:
    """Writes an outbox to the internal topic."""

    def __init__(
        self,
        outbox: Outbox,
        *,
        broker_id: int,
        ensure_topic: Callable[[str], Awaitable[TopicImage]],
        led: Led,
        peers: Peers,
        clock: Clock,
    ) -> None:
        self._outbox = outbox
        self._broker_id = broker_id
        self._ensure_topic = ensure_topic
        self._led = led
        self._peers = peers
        self._clock = clock
        self._lines: list[Line] = []
        """On their way."""
        self._failing = False

    def __repr__(self) -> str:
        return f"AuditTopic({AUDIT_LOG_TOPIC}, {'failing' if self._failing else 'writing'}, {self._outbox!r})"

    async def run(self) -> None:
        """Write what comes, for ever."""
        while True:
            if not self._lines:
                await self._outbox.filled()
            if not await self._write_some():
                await self._clock.sleep(RETRY_S)

    async def stop(self) -> None:
        """Write what there is, once `run` has ended, as far as that is quickly done."""

        async def write_all() -> None:
            while (self._lines or self._outbox) and await self._write_some():
                pass

        try:
            await within(self._clock, write_all(), LAST_S)
        except ApiError as error:
            logger.warning("the last audit events are not in %s: %s", AUDIT_LOG_TOPIC, error)

    async def _write_some(self) -> bool:
        self._lines = self._lines or self._outbox.take(_LINES, _BYTES)
        if self._lines:
            try:
                await self._append(self._lines)
            except MillraceError as error:
                if not self._failing:
                    logger.warning("audit events cannot be written to %s: %s", AUDIT_LOG_TOPIC, error)
                self._failing = True
                return False
            self._lines = []
        if self._failing:
            logger.info("audit events are written to %s again", AUDIT_LOG_TOPIC)
            self._failing = False
        return True

    async def _append(self, lines: Sequence[Line]) -> None:
        topic = await self._ensure_topic(AUDIT_LOG_TOPIC)
        key = str(self._broker_id).encode()
        batch = encode_batch([Record(delta, line.time_ms, key, line.data) for delta, line in enumerate(lines)])
        count = len(topic.partitions)
        # Brokers begin at different partitions, so that one that leads several does not write to the same as another.
        order = [(self._broker_id + step) % count for step in range(count)]
        for index in order:
            partition = self._led(AUDIT_LOG_TOPIC, index)
            if partition is not None:
                partition.check_in_sync()
                appended = partition.append(batch, from_client=False)
                await within(self._clock, partition.wait_committed(appended.last_offset), TIMEOUT_S)
                return
        for index in order:
            leader = topic.partitions[index].leader
            if leader not in (NO_BROKER, self._broker_id):
                await self._send(leader, topic, index, batch)
                return
        raise ApiError(ErrorCode.LEADER_NOT_AVAILABLE, "no partition of it has a leader")

    async def _send(self, leader: int, topic: TopicImage, index: int, batch: bytes) -> None:
        item = ProduceRequest.PartitionProduceData(index=index, records=batch)
        data = ProduceRequest.TopicProduceData(name=topic.name, topic_id=topic.topic_id, partition_data=[item])
        timeout_ms = round(TIMEOUT_S * 1000)
        request = ProduceRequest(acks=_ACKS_ALL, timeout_ms=timeout_ms, topic_data=[data])
        response = await self._peers.request(leader, request, _PRODUCE_VERSION, timeout_ms)
        (answered,) = response.responses
        (result,) = answered.partition_responses
        if result.error_code:
            raise ApiError(ErrorCode(result.error_code), result.error_message or "")
