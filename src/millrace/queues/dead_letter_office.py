"""Where dead letters are written: reads the records that were given up, and appends letters to the group's topic.

`deliver` returns when the letters are committed in the dead-letter topic, on this broker or another; until then their
records are not done with, and whoever asked asks again. So a letter may be written twice, and never not at all.
Owner: the event loop; the share-partitions call it, one letter at a time each. Not here: what a letter says
(`dead_letters`), when to try again (`share_partition`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final, Protocol
from uuid import UUID

from millrace.clock import Clock
from millrace.cluster.channel import within
from millrace.cluster.image import ClusterImage, TopicImage
from millrace.cluster.peers import Peers
from millrace.errors import ApiError, ErrorCode
from millrace.queues import dead_letters
from millrace.queues.acquisition import DeadLetter
from millrace.queues.counting import QueueCounts
from millrace.queues.records import ShareKey
from millrace.queues.settings import DeadLetterSettings, QueueSettings
from millrace.records.batch import Batch, split
from millrace.records.decode import Record, decode_records
from millrace.replication.partition import Partition
from millrace.wire.messages.produce import ProduceRequest

_READ_BYTES: Final = 256 * 1024
_TIMEOUT_S: Final = 10.0
_PRODUCE_VERSION: Final = 13
_ACKS_ALL: Final = -1


class Office(Protocol):
    """What a share-partition needs of the office."""

    async def deliver(self, key: ShareKey, source: Partition, letter: DeadLetter, settings: QueueSettings) -> int: ...


class DeadLetterOffice:
    """Writes the dead letters of this broker's share-partitions."""

    def __init__(
        self,
        *,
        broker_id: int,
        settings: DeadLetterSettings,
        image: Callable[[], ClusterImage],
        topic_setting: Callable[[str, str], Any],
        find: Callable[[UUID, int], Partition],
        make_topic: Callable[[str], Awaitable[object]],
        peers: Peers,
        clock: Clock,
        counts: QueueCounts | None = None,
    ) -> None:
        """`topic_setting(topic, name)` is a setting of a topic; `make_topic` makes one that takes dead letters."""
        self._broker_id = broker_id
        self._settings = settings
        self._image = image
        self._topic_setting = topic_setting
        self._find = find
        self._make_topic = make_topic
        self._peers = peers
        self._clock = clock
        self._counts = counts or QueueCounts()

    def __repr__(self) -> str:
        return f"DeadLetterOffice(broker {self._broker_id})"

    async def deliver(self, key: ShareKey, source: Partition, letter: DeadLetter, settings: QueueSettings) -> int:
        """Write the first letters of a range, at least one record's; the last offset that is dealt with now.

        ApiError: nothing is known to be written. Records that the log does not have any more get no letter. A group
        that has no dead-letter topic any more wants none.
        """
        if not settings.dead_letter_topic:
            return letter.last_offset
        topic = await self._topic(settings.dead_letter_topic, source.topic)
        originals, last_offset = _read(source, letter)
        written = list(
            dead_letters.letters(
                key,
                source.topic,
                letter,
                originals,
                copies=settings.copies_dead_letters,
                now_ms=self._clock.wall_ms(),
            )
        )
        index = key.partition % len(topic.partitions)
        for batch in dead_letters.batches(written, int(self._topic_setting(topic.name, "max.message.bytes"))):
            await self._append(topic, index, batch)
        self._counts.dead_letters += len(written)
        return last_offset

    async def _topic(self, name: str, source: str) -> TopicImage:
        topic = self._image().topic(name)
        reason = dead_letters.unusable_reason(
            name,
            source,
            exists=topic is not None,
            is_enabled=topic is not None and bool(self._topic_setting(name, dead_letters.TAKES_DEAD_LETTERS)),
            settings=self._settings,
        )
        if reason is not None:
            raise ApiError(ErrorCode.INVALID_CONFIG, f"{name} cannot take dead letters: {reason}")
        if topic is None:
            await self._make_topic(name)
            topic = self._image().topic(name)
        if topic is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"{name} is not there yet")
        return topic

    async def _append(self, topic: TopicImage, index: int, batch: bytes) -> None:
        leader = topic.partitions[index].leader
        if leader == self._broker_id:
            partition = self._find(topic.topic_id, index)
            partition.check_in_sync()
            appended = partition.append(batch)
            await within(self._clock, partition.wait_committed(appended.last_offset), _TIMEOUT_S)
            return
        item = ProduceRequest.PartitionProduceData(index=index, records=batch)
        data = ProduceRequest.TopicProduceData(name=topic.name, topic_id=topic.topic_id, partition_data=[item])
        timeout_ms = round(_TIMEOUT_S * 1000)
        request = ProduceRequest(acks=_ACKS_ALL, timeout_ms=timeout_ms, topic_data=[data])
        response = await self._peers.request(leader, request, _PRODUCE_VERSION, timeout_ms)
        (answered,) = response.responses
        (result,) = answered.partition_responses
        if result.error_code:
            raise ApiError(ErrorCode(result.error_code), result.error_message or "")


def _read(source: Partition, letter: DeadLetter) -> tuple[list[Record], int]:
    """Records of the range from its beginning on, as many as one read gives; and the last offset that covers."""
    offset = max(letter.first_offset, source.log.start_offset)
    if offset > letter.last_offset or offset >= source.committed.offset:
        return [], letter.last_offset
    found: list[Record] = []
    covered = letter.last_offset
    for batch in split(source.read(offset, _READ_BYTES, at_least_one=True).data):
        covered = batch.header.last_offset
        if batch.header.base_offset > letter.last_offset:
            break
        if not batch.header.is_control:
            found += (each for each in _records(batch) if offset <= each.offset <= letter.last_offset)
    return found, min(covered, letter.last_offset)


def _records(batch: Batch) -> list[Record]:
    """The records of a batch; where nobody can read them, which may be why they were given up, their offsets alone."""
    header = batch.header
    try:
        return decode_records(batch.data)
    except ApiError:
        offsets = range(header.base_offset, header.last_offset + 1)
        return [Record(offset, header.max_timestamp_ms, None, None) for offset in offsets]
