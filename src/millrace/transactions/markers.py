"""Bringing the outcome of transactions to their partitions: WriteTxnMarkers to whoever leads them.

`send` returns when every partition has its marker or is no more, however long that takes and wherever leaders go: a
marker that comes twice is harmless, one that does not come is a partition whose readers wait for ever. To each broker
one request is under way at a time; what is decided meanwhile goes with the next. Partitions that are led here are
written without a socket.

Owner of one task per broker that has something to be told. Not here: which transactions have an outcome (`shard`), what
a marker does to a partition (the `MarkerWriter`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Final, Protocol

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.model import NO_BROKER, TopicPartition
from millrace.tasks import Tasks
from millrace.wire.messages.transactions import WriteTxnMarkersRequest, WriteTxnMarkersResponse
from millrace.wire.schema import Request

logger = logging.getLogger(__name__)

MARKERS_VERSION: Final = 2
"""Of WriteTxnMarkers; every broker has it."""
_TIMEOUT_MS: Final = 5_000
"""A broker that does not answer may not lead any more: then somebody else is to be asked."""
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0
_WARN_AFTER: Final = 8
"""Attempts, about three seconds: a leader that moved is found by then."""

# Only a later epoch of the producer is there, which begins after every partition of this one was marked.
_IS_OVER: Final = frozenset({ErrorCode.NONE, ErrorCode.INVALID_PRODUCER_EPOCH})


@dataclass(frozen=True, slots=True)
class TransactionMarker:
    """The end of one transaction, as a partition is told it."""

    producer_id: int
    producer_epoch: int
    coordinator_epoch: int
    commits: bool
    transaction_version: int
    """Of version 2, the epoch is later than that of the records (KIP-1228)."""


Outcome = dict[TopicPartition, ErrorCode]


class MarkerWriter(Protocol):
    """Writes a marker to partitions that are led here; what the handler of WriteTxnMarkers does, too."""

    async def write(self, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> Outcome:
        """What became of each partition; NONE when the marker is durable there."""


class PeerRequests(Protocol):
    """The part of `cluster.peers.Peers` that is needed here."""

    async def request(self, broker_id: int, message: Request, version: int, timeout_ms: int) -> Any: ...


class MarkerSender:
    """The way of markers to partitions."""

    def __init__(
        self,
        *,
        broker_id: int,
        local: MarkerWriter,
        peers: PeerRequests,
        image: Callable[[], ClusterImage],
        clock: Clock,
    ) -> None:
        self._broker_id = broker_id
        self._local = local
        self._peers = peers
        self._image = image
        self._clock = clock
        self._tasks = Tasks(clock)
        self._outboxes: dict[int, _Outbox] = {}

    def __repr__(self) -> str:
        return f"MarkerSender(broker {self._broker_id}, {self._outboxes!r})"

    async def stop(self) -> None:
        """Send nothing any more. Whoever waits in `send` is to be cancelled by its owner."""
        await self._tasks.stop()

    async def send(self, marker: TransactionMarker, partitions: Collection[TopicPartition]) -> None:
        """Return when the transaction is over in every partition. Cancellation ends the trying."""
        left = set(partitions)
        attempts = 0
        while by_leader := self._by_leader(left):
            if len(by_leader) > 1:
                # Partitions that went different ways do not wait for each other.
                await asyncio.gather(*(self.send(marker, group) for group in by_leader.values()))
                return
            ((leader, group),) = by_leader.items()
            outcome = await self._write(leader, marker, group)
            left = {each for each in group if outcome.get(each) not in _IS_OVER}
            if left:
                attempts += 1
                if attempts >= _WARN_AFTER and attempts & (attempts - 1) == 0:
                    logger.warning("after %d attempts %s does not reach %s", attempts, marker, sorted(left)[:5])
                await self._clock.sleep(min(_FIRST_PAUSE_S * 2 ** min(attempts - 1, 10), _LONGEST_PAUSE_S))

    def _by_leader(self, partitions: Collection[TopicPartition]) -> dict[int, set[TopicPartition]]:
        """Without those that are no more.

        A partition is added to a transaction by a coordinator that knows it, and the next coordinator's image is later
        than that: what it does not know is deleted.
        """
        image = self._image()
        found: dict[int, set[TopicPartition]] = {}
        for each in partitions:
            topic = image.topic(each.topic)
            if topic is not None and each.partition < len(topic.partitions):
                found.setdefault(topic.partitions[each.partition].leader, set()).add(each)
        return found

    async def _write(self, leader: int, marker: TransactionMarker, partitions: set[TopicPartition]) -> Outcome:
        if leader == NO_BROKER:
            return {}
        try:
            if leader == self._broker_id:
                return await self._local.write(marker, partitions)
            outbox = self._outboxes.get(leader)
            if outbox is None:
                outbox = self._outboxes[leader] = _Outbox(leader, self._peers, self._tasks)
            return await outbox.put(marker, partitions)
        except MillraceError as error:
            logger.debug("broker %d did not take %s: %s", leader, marker, error)
        except Exception:  # of one attempt: giving up would leave the partitions' readers waiting
            logger.exception("broker %d did not take %s", leader, marker)
        return {}


class _Outbox:
    """What one broker is to be told: one request at a time, and with it everything that has come together."""

    def __init__(self, broker_id: int, peers: PeerRequests, tasks: Tasks) -> None:
        self._broker_id = broker_id
        self._peers = peers
        self._tasks = tasks
        self._waiting: list[tuple[TransactionMarker, set[TopicPartition], asyncio.Future[Outcome]]] = []
        self._is_sending = False

    def __repr__(self) -> str:
        return f"_Outbox({len(self._waiting)} markers waiting)"

    async def put(self, marker: TransactionMarker, partitions: set[TopicPartition]) -> Outcome:
        """What the broker answered; ApiError where it did not."""
        done: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._waiting.append((marker, partitions, done))
        if not self._is_sending:
            self._is_sending = True
            self._tasks.start(f"markers for broker {self._broker_id}", self._send_all())
        return await done

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                # Who was cancelled coordinates no more; somebody else tells these partitions.
                batch = [each for each in self._waiting if not each[2].done()]
                self._waiting = []
                if batch:
                    await self._send(batch)
        finally:
            self._is_sending = False

    async def _send(self, batch: list[tuple[TransactionMarker, set[TopicPartition], asyncio.Future[Outcome]]]) -> None:
        message = markers_request([(marker, partitions) for marker, partitions, _ in batch])
        try:
            response = await self._peers.request(self._broker_id, message, MARKERS_VERSION, _TIMEOUT_MS)
            outcomes = marker_outcomes(response)
        except Exception as error:  # noqa: BLE001 - whoever waits says it, and tries again
            for _, _, done in batch:
                if not done.done():
                    done.set_exception(error)
            return
        except asyncio.CancelledError:
            left, self._waiting = self._waiting, []
            for _, _, done in (*batch, *left):
                done.cancel()
            raise
        for marker, _, done in batch:
            if not done.done():
                done.set_result(outcomes.get(marker.producer_id, {}))


def markers_request(
    markers: Collection[tuple[TransactionMarker, Collection[TopicPartition]]],
) -> WriteTxnMarkersRequest:
    """What the leader of the partitions is asked."""
    return WriteTxnMarkersRequest(markers=[_encoded(marker, partitions) for marker, partitions in markers])


def _encoded(
    marker: TransactionMarker, partitions: Collection[TopicPartition]
) -> WriteTxnMarkersRequest.WritableTxnMarker:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(partitions):
        by_topic.setdefault(topic, []).append(partition)
    return WriteTxnMarkersRequest.WritableTxnMarker(
        producer_id=marker.producer_id,
        producer_epoch=marker.producer_epoch,
        transaction_result=marker.commits,
        topics=[
            WriteTxnMarkersRequest.WritableTxnMarkerTopic(name=topic, partition_indexes=indexes)
            for topic, indexes in by_topic.items()
        ],
        coordinator_epoch=marker.coordinator_epoch,
        transaction_version=marker.transaction_version,
    )


def marker_outcomes(response: WriteTxnMarkersResponse) -> dict[int, Outcome]:
    """What the leader answered, by producer id, of which each has one transaction at a time."""
    outcomes: dict[int, Outcome] = {}
    for each in response.markers:
        outcome = outcomes.setdefault(each.producer_id, {})
        for topic in each.topics:
            for partition in topic.partitions:
                try:
                    code = ErrorCode(partition.error_code)
                except ValueError:
                    raise ApiError(ErrorCode.UNKNOWN_SERVER_ERROR, f"error {partition.error_code}") from None
                outcome[TopicPartition(topic.name, partition.partition_index)] = code
    return outcomes
