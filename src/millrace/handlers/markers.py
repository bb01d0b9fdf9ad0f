"""WriteTxnMarkers: the ends of transactions, as their coordinator has them written into partitions."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final

from millrace.errors import ErrorCode, MillraceError, code_of
from millrace.handlers.context import RequestContext, Services
from millrace.handlers.needs import ALTER_CLUSTER, CLUSTER_ACTION, judged
from millrace.handlers.registry import api
from millrace.model import CONSUMER_OFFSETS_TOPIC
from millrace.wire.keys import ApiKey
from millrace.wire.messages.transactions import WriteTxnMarkersRequest, WriteTxnMarkersResponse

if TYPE_CHECKING:
    from millrace.replication.partition import Partition

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_SETTING: Final = "request.timeout.ms"

_FAILED: Final = ErrorCode.UNKNOWN_SERVER_ERROR

_Marker = WriteTxnMarkersRequest.WritableTxnMarker
_Results = dict[int, dict[str, dict[int, ErrorCode]]]
"""Producer id, topic and partition -> how it went."""


@api(
    ApiKey.WRITE_TXN_MARKERS, WriteTxnMarkersRequest, "1-2", needs=judged(ALTER_CLUSTER, CLUSTER_ACTION), overlaps=True
)
async def write_txn_markers(context: RequestContext, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    """Write the marker of each transaction into its partitions; answered when all are committed, as with acks=all.

    A partition that cannot take it says why by itself: one that is not here or led elsewhere, NOT_ENOUGH_REPLICAS,
    INVALID_PRODUCER_EPOCH, TRANSACTION_COORDINATOR_FENCED, or REQUEST_TIMED_OUT if a marker is not committed within
    `request.timeout.ms`. A marker that is written again does no harm. Group offsets of a transaction become visible
    when its marker in `__consumer_offsets` is committed, in the order of the markers.

    For brokers, and for administrators: CLUSTER_AUTHORIZATION_FAILED in every partition for anybody else.

    Versions: v2 has the transaction version; from 2 on a marker needs a higher producer epoch than the records it ends.
    """
    if not (context.may(*ALTER_CLUSTER) or context.may(*CLUSTER_ACTION)):
        return _refused(request)
    return await write_markers(context.broker, request)


async def write_markers(broker: Services, request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    """The same for a coordinator of this very broker."""
    writing = _Writing(broker)
    for marker in request.markers:
        for topic in marker.topics:
            for index in topic.partition_indexes:
                writing.begin(marker, topic.name, index)
    await writing.within(broker.config.get_int(REQUEST_TIMEOUT_SETTING) / 1000)
    return _response(writing.results)


class _Writing:
    """The markers of one request. What follows from a commit happens also when the answer has not waited for it."""

    def __init__(self, broker: Services) -> None:
        self.results: _Results = {}
        self._broker = broker
        self._waiting = 0
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, marker: _Marker, topic: str, index: int) -> None:
        """Append one marker, and take note of how it goes on."""
        codes = self.results.setdefault(marker.producer_id, {}).setdefault(topic, {})
        try:
            partition = self._broker.replicas.find(topic, index)
            partition.check_in_sync()
            appended = partition.end_transaction(
                marker.producer_id,
                marker.producer_epoch,
                marker.coordinator_epoch,
                commit=marker.transaction_result,
                transaction_version=marker.transaction_version,
                now_ms=self._broker.clock.wall_ms(),
            )
        except MillraceError as error:
            codes[index] = code_of(error)
            return
        codes[index] = ErrorCode.REQUEST_TIMED_OUT  # until it is committed
        told = partial(self._ended, marker, partition, appended.last_offset, codes)
        if partition.when_committed(appended.last_offset, told):
            self._waiting += 1
        else:
            self._tell_groups(marker, partition, appended.last_offset, codes)

    def _ended(
        self,
        marker: _Marker,
        partition: Partition,
        offset: int,
        codes: dict[int, ErrorCode],
        error: Exception | None,
    ) -> None:
        if error is None:
            self._tell_groups(marker, partition, offset, codes)
        else:
            codes[partition.index] = code_of(error) if isinstance(error, MillraceError) else _FAILED
        self._waiting -= 1
        if not self._waiting and not self._over.done():
            self._over.set_result(None)

    def _tell_groups(self, marker: _Marker, partition: Partition, offset: int, codes: dict[int, ErrorCode]) -> None:
        codes[partition.index] = ErrorCode.NONE
        if partition.topic != CONSUMER_OFFSETS_TOPIC:
            return
        try:
            self._broker.groups.transaction_ended(
                partition.index, marker.producer_id, marker.transaction_result, offset
            )
        except Exception:
            logger.exception("the groups of partition %d did not take the end of a transaction", partition.index)
            codes[partition.index] = _FAILED

    async def within(self, seconds: float) -> None:
        """Return when all markers are committed or never will be, or time is up."""
        if not self._waiting:
            return
        timer = self._broker.clock.call_later(seconds, self._expire)
        try:
            await self._over
        finally:
            timer.cancel()

    def _expire(self) -> None:
        if not self._over.done():
            self._over.set_result(None)


def _refused(request: WriteTxnMarkersRequest) -> WriteTxnMarkersResponse:
    results: _Results = {}
    for marker in request.markers:
        for topic in marker.topics:
            codes = results.setdefault(marker.producer_id, {}).setdefault(topic.name, {})
            codes.update(dict.fromkeys(topic.partition_indexes, ErrorCode.CLUSTER_AUTHORIZATION_FAILED))
    return _response(results)


def _response(results: _Results) -> WriteTxnMarkersResponse:
    return WriteTxnMarkersResponse(
        markers=[
            WriteTxnMarkersResponse.WritableTxnMarkerResult(
                producer_id=producer_id,
                topics=[
                    WriteTxnMarkersResponse.WritableTxnMarkerTopicResult(
                        name=name,
                        partitions=[
                            WriteTxnMarkersResponse.WritableTxnMarkerPartitionResult(
                                partition_index=index, error_code=code
                            )
                            for index, code in codes.items()
                        ],
                    )
                    for name, codes in topics.items()
                ],
            )
            for producer_id, topics in results.items()
        ]
    )
