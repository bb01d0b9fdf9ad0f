"""What groups have not read yet: in records, and in seconds.

Only for scrapes that ask for groups. A group's coordinator knows what it has committed; where the partitions end it
finds like this:

- A partition with a replica here, leading or following: its high watermark. A follower's is what its leader said last.
- Any other: the leader is asked by ListOffsets, all partitions of a leader in one request, within `ASK_S`, and the
  answer is believed for `BELIEVED_S`. Where there is none the partition is told as unknown, and missing in the sums.

Seconds are the age of the first record that is not committed by the group, 0 where there is none:

- With a replica here, by the timestamp of its batch, of which only the header is read; that is remembered for as long
  as the group stays there. Inside of a batch it is the largest timestamp of the batch.
- Otherwise, or if the batch has no timestamp, by when a scrape has first seen the end beyond that offset: at least so
  long ago. That is less than the truth for as long as nobody has scraped.

Owner: the event loop; one scrape at a time for each set of details, and what is remembered may be shared by two.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from millrace.cluster.channel import within
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.metrics.catalog import Detail
from millrace.model import NO_TIMESTAMP
from millrace.wire.messages.offsets import ListOffsetsRequest, ListOffsetsResponse

if TYPE_CHECKING:
    from millrace.groups.shard import GroupShard
    from millrace.handlers.context import Services
    from millrace.monitoring.collector import Pace, Scrape
    from millrace.replication.partition import Partition

logger = logging.getLogger(__name__)

ASK_S: Final = 2.0
BELIEVED_S: Final = 5.0
MAX_PER_REQUEST: Final = 1000
SAMPLES: Final = 240
"""Ends of a partition that are remembered, for the age of what lies in it: an hour of scrapes every 15 s."""
LIST_OFFSETS_VERSION: Final = 7
_LATEST: Final = -1
_CLIENT: Final = -1
_STEP: Final = 16

Place = tuple[str, int]


class Lags:
    """The lag of the groups that this broker coordinates."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._asked: dict[Place, tuple[float, int]] = {}
        """Of partitions that are elsewhere: when their leader was asked, and where they ended."""
        self._samples: dict[Place, deque[tuple[float, int]]] = {}
        self._timestamps: dict[tuple[str, int, int], int] = {}
        """Of the batch at an offset that a group has committed, as long as it does."""

    def __repr__(self) -> str:
        return f"Lags({len(self._asked)} partitions of others, {len(self._timestamps)} timestamps)"

    @property
    def coordinated(self) -> Sequence[GroupShard]:
        return self._services.groups.shards

    async def ends(self, places: Iterable[Place], pace: Pace) -> Mapping[Place, int]:
        """Where partitions end; those are missing of which that is not known."""
        ends: dict[Place, int] = {}
        elsewhere: dict[int, list[Place]] = defaultdict(list)
        image, now = self._services.image, self._services.clock.monotonic()
        for number, place in enumerate(places):
            if number % _STEP == 0:
                await pace.step()
            partition = self._services.replicas.held(*place)
            if partition is not None:
                is_open = partition.is_open
                ends[place] = partition.high_watermark.offset if is_open else partition.known_high_watermark
                continue
            asked = self._asked.get(place)
            if asked is not None and now - asked[0] < BELIEVED_S:
                ends[place] = asked[1]
                continue
            topic = image.topic(place[0])
            if topic is not None and place[1] < len(topic.partitions):
                leader = topic.partitions[place[1]].leader
                if image.is_live(leader):
                    elsewhere[leader].append(place)
        if elsewhere:
            found = await pace.elsewhere(self._ask(elsewhere))
            self._asked = {place: each for place, each in self._asked.items() if now - each[0] < BELIEVED_S}
            for place, end in found.items():
                self._asked[place] = (now, end)
                ends[place] = end
        return ends

    async def _ask(self, elsewhere: Mapping[int, Sequence[Place]]) -> Mapping[Place, int]:
        found: dict[Place, int] = {}

        async def ask(leader: int, places: Sequence[Place]) -> None:
            topics: dict[str, list[int]] = defaultdict(list)
            for topic, index in places:
                topics[topic].append(index)
            request = ListOffsetsRequest(
                replica_id=_CLIENT,
                topics=[
                    ListOffsetsRequest.ListOffsetsTopic(
                        name=topic,
                        partitions=[
                            ListOffsetsRequest.ListOffsetsPartition(partition_index=index, timestamp=_LATEST)
                            for index in indexes
                        ],
                    )
                    for topic, indexes in topics.items()
                ],
            )
            services = self._services
            try:
                asked = services.peers.request(leader, request, LIST_OFFSETS_VERSION, round(ASK_S * 1000))
                answer: ListOffsetsResponse = await within(services.clock, asked, ASK_S)
            except ApiError as error:
                logger.info("broker %d does not say where its partitions end: %s", leader, error)
                return
            for answered in answer.topics:
                for each in answered.partitions:
                    if each.error_code == ErrorCode.NONE:
                        found[answered.name, each.partition_index] = each.offset

        await asyncio.gather(
            *(
                ask(leader, places[start : start + MAX_PER_REQUEST])
                for leader, places in elsewhere.items()
                for start in range(0, len(places), MAX_PER_REQUEST)
            )
        )
        return found

    # --- seconds ------------------------------------------------------------------------------------------------------

    def sample(self, ends: Mapping[Place, int]) -> None:
        """Remember where partitions end now, and forget those that nobody asks for any more."""
        now = self._services.clock.monotonic()
        samples: dict[Place, deque[tuple[float, int]]] = {}
        for place, end in ends.items():
            seen = samples[place] = self._samples.get(place) or deque(maxlen=SAMPLES)
            if not seen or seen[-1][1] != end:
                seen.append((now, end))
        self._samples = samples

    def age_s(self, place: Place, offset: int) -> float:
        """How old the record at an offset is, or at least is."""
        services = self._services
        timestamp_ms = self._timestamp(services.replicas.held(*place), offset)
        if timestamp_ms != NO_TIMESTAMP:
            return max(services.clock.wall_ms() - timestamp_ms, 0) / 1000
        first_seen = next((since for since, end in self._samples.get(place, ()) if end > offset), None)
        return 0.0 if first_seen is None else services.clock.monotonic() - first_seen

    def _timestamp(self, partition: Partition | None, offset: int) -> int:
        if partition is None:
            return NO_TIMESTAMP
        key = (partition.topic, partition.index, offset)
        known = self._timestamps.get(key)
        if known is None:
            try:
                log = partition.log
                header = log.batch_header(max(offset, log.start_offset))
            except MillraceError:
                return NO_TIMESTAMP  # of a log that is offline, or was cut meanwhile
            is_first = header.base_offset >= offset and header.delete_horizon_ms is None
            known = header.base_timestamp_ms if is_first else header.largest_timestamp_ms
            self._timestamps[key] = known
        return known

    def keep_timestamps(self, used: Iterable[tuple[str, int, int]]) -> None:
        """Groups have moved on: forget the batches where none of them stands."""
        self._timestamps = {key: self._timestamps[key] for key in used if key in self._timestamps}


async def collect_lags(lags: Lags, scrape: Scrape) -> None:
    """A part of a scrape: only where groups are asked for."""
    by_group = Detail.GROUPS in scrape.details
    by_partition = Detail.GROUP_PARTITIONS in scrape.details
    if not by_group and not by_partition:
        return
    committed = await _committed(lags, scrape)
    places = dict.fromkeys(place for group in committed.values() for place in group)
    ends = await lags.ends(places, scrape.pace)
    lags.sample(ends)
    groups: list[tuple[tuple[str, ...], Sequence[Any]]] = []
    partitions: list[tuple[tuple[str, ...], Sequence[Any]]] = []
    used: list[tuple[str, int, int]] = []
    number = 0
    for group_id, offsets in committed.items():
        records = unknown = 0
        seconds = 0.0
        for (topic, index), offset in offsets.items():
            number += 1
            if number % _STEP == 0:
                await scrape.pace.step()
            end = ends.get((topic, index))
            lag = age_s = None
            if end is None:
                unknown += 1
            else:
                lag = max(end - offset, 0)
                age_s = lags.age_s((topic, index), offset) if lag else 0.0
                records += lag
                seconds = max(seconds, age_s)
                used.append((topic, index, offset))
            if by_partition:
                partitions.append(((group_id, topic, str(index)), (offset, lag, age_s)))
        if by_group:
            groups.append(((group_id,), (records, seconds, unknown)))
    lags.keep_timestamps(used)
    if groups:
        families = (
            "millrace_group_lag_records",
            "millrace_group_lag_seconds",
            "millrace_group_lag_unknown_partitions",
        )
        scrape.sheet.add_table(families, groups)
    if partitions:
        families = (
            "millrace_group_partition_committed_offset",
            "millrace_group_partition_lag_records",
            "millrace_group_partition_lag_seconds",
        )
        scrape.sheet.add_table(families, partitions)


async def _committed(lags: Lags, scrape: Scrape) -> dict[str, dict[Place, int]]:
    """What every group that is coordinated here has committed."""
    found: dict[str, dict[Place, int]] = {}
    for shard in lags.coordinated:
        for group_id in (*shard.classic.groups, *shard.modern.groups):
            offsets = {
                (topic, index): each.offset
                for topic, partitions in shard.offsets.of_group(group_id).items()
                for index, each in partitions.items()
                if each.offset >= 0
            }
            if offsets:
                found[group_id] = offsets
            await scrape.pace.step()
    return found
