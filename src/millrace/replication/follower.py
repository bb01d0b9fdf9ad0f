"""Copying from leaders: one task per leader fetches for all partitions that this broker follows it in.

The same Fetch API as a consumer's, as a replica: a fetch offset promises that everything below it is here, and on disk
in `flush.mode=group`, because the leader commits on the strength of it. So a fetch is sent only after what the last one
brought was flushed.

One partition never holds up the others of its leader. One whose log raises, or whose answer was an error, is left out
of the fetch and tried again after a pause that grows; the first failure is logged, and that it is over. What was
brought is given a moment to reach the disk, nearly always enough for all of it; a partition that takes longer is left
out until it has been flushed.

Truncation follows leader epochs: a fetch carries the epoch of the last record here, the leader answers where its log
and this one part, and what lies beyond is cut (KIP-101, KIP-279, KIP-595).

A replica that is behind waits while the quota of a throttled partition is used up (KIP-73, `throttle`): it is left out
of the fetch, as one whose last answer was an error.

Not here: who leads (the image, through `replicas`), and when this replica counts (`isr`, on the leader's side).
Owner: the event loop; a partition is fetched by one task at a time, and what arrives for an epoch that is over is
dropped.
"""

from __future__ import annotations

import asyncio
import logging
import math
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from millrace.cluster.dialer import inter_broker_endpoint
from millrace.errors import ApiError, ErrorCode, MillraceError, ProtocolError
from millrace.tasks import Tasks, cancel
from millrace.wire.messages.fetch import FetchRequest, FetchResponse

if TYPE_CHECKING:
    from millrace.client.connection import Connection
    from millrace.clock import Clock
    from millrace.cluster.dialer import Dialer
    from millrace.cluster.image import ClusterImage
    from millrace.config import BrokerConfig
    from millrace.metadata.deltas import Endpoint
    from millrace.replication.partition import Partition

logger = logging.getLogger(__name__)

FETCH_VERSION: Final = 16
FIRST_PAUSE_S: Final = 0.02
"""After the first failure; doubled for each that follows, up to replica.fetch.backoff.ms."""
FLUSH_PATIENCE_S: Final = 0.1
"""How long a session waits for the flush of what it has brought before it goes on without that."""
_FINAL_EPOCH: Final = 2**31 - 1
_GRACE_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class FetchSettings:
    """How much and how long a fetch may take."""

    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    max_partition_bytes: int
    max_pause_s: float
    timeout_ms: int

    @classmethod
    def from_config(cls, config: BrokerConfig) -> FetchSettings:
        return cls(
            max_wait_ms=config.get_int("replica.fetch.wait.max.ms"),
            min_bytes=config.get_int("replica.fetch.min.bytes"),
            max_bytes=config.get_int("replica.fetch.response.max.bytes"),
            max_partition_bytes=config.get_int("replica.fetch.max.bytes"),
            max_pause_s=config.get_int("replica.fetch.backoff.ms") / 1000,
            timeout_ms=config.get_int("replica.socket.timeout.ms"),
        )


class Fetchers:
    """Every leader that this broker follows, and the partitions of each."""

    def __init__(
        self,
        *,
        dialer: Dialer,
        broker_epoch: Callable[[], int],
        settings: FetchSettings,
        clock: Clock,
        lost: Callable[[int], None],
        reached: Callable[[int], None],
    ) -> None:
        """`lost` is told which leader cannot be fetched from any more, `reached` which one can (again)."""
        self.settings = settings
        self.dialer = dialer
        self.broker_id = dialer.broker_id
        self.broker_epoch = broker_epoch
        self.clock = clock
        self.lost = lost
        self.reached = reached
        self._endpoints: dict[int, Endpoint] = {}
        self._fetchers: dict[int, Fetcher] = {}
        self._leaders: dict[Partition, int] = {}
        self.tasks = Tasks(clock)
        self._stopped = False

    def __repr__(self) -> str:
        return f"Fetchers({len(self._leaders)} partitions of {len(self._fetchers)} leaders)"

    async def stop(self) -> None:
        """Fetch nothing any more; returns when every task has ended."""
        self._stopped = True
        self._fetchers.clear()
        self._leaders.clear()
        await self.tasks.stop()

    def assign(self, partition: Partition) -> None:
        """Fetch from the leader that the partition's state names, in that epoch."""
        leader = partition.state.leader
        if self._leaders.get(partition) != leader:
            self.forget(partition)
        if leader < 0 or self._stopped:
            return
        self._leaders[partition] = leader
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = Fetcher(leader, self)
            fetcher.set_endpoint(self._endpoints.get(leader))
        fetcher.put(partition)

    def forget(self, partition: Partition) -> None:
        """Do not fetch for it any more."""
        leader = self._leaders.pop(partition, None)
        if leader is None:
            return
        fetcher = self._fetchers[leader]
        fetcher.remove(partition)
        if fetcher.is_idle:
            del self._fetchers[leader]
            cancel(fetcher.task)

    def brokers_changed(self, image: ClusterImage) -> None:
        """Take over the addresses of the image."""
        found = ((broker_id, inter_broker_endpoint(image, broker_id)) for broker_id in image.brokers)
        self._endpoints = {broker_id: endpoint for broker_id, endpoint in found if endpoint is not None}
        for leader, fetcher in self._fetchers.items():
            fetcher.set_endpoint(self._endpoints.get(leader))


@dataclass(slots=True)
class _FollowedPartition:
    """One followed partition: the epoch it is followed in, and what the leader's session knows of it."""

    partition: Partition
    leader_epoch: int
    sent: tuple[int, int, int] | None = None
    """Fetch offset, last epoch and log start as last sent in this session; None where the session does not have it."""
    position: tuple[int, int, int] = (0, -1, 0)
    """The same as it is sent next."""
    failures: int = 0
    not_before: float = 0.0
    unflushed_since: float | None = None
    """Since when it waits for nothing but the disk."""
    trouble: str = ""
    """Why it could not be copied the last time, as it was logged."""
    has_missed: bool = False
    """What the leader told last was not taken over: the session has to forget that, or it will not be told again."""
    is_behind: bool = True
    """Whether the leader has committed more than what is here, as far as is known."""


class Fetcher:
    """All that is followed of one leader."""

    def __init__(self, leader: int, owner: Fetchers) -> None:
        self.leader = leader
        self.owner = owner
        self.partitions: dict[tuple[uuid.UUID, int], _FollowedPartition] = {}
        self._endpoint: Endpoint | None = None
        self._changed = asyncio.Event()
        self._session: _Session | None = None
        self._pause_s = 0.0
        self.task = owner.tasks.keep(f"fetch from broker {leader}", self._run)

    def __repr__(self) -> str:
        return f"Fetcher(broker {self.leader}, {len(self.partitions)} partitions)"

    @property
    def is_idle(self) -> bool:
        return not self.partitions

    def put(self, partition: Partition) -> None:
        key = (partition.topic_id, partition.index)
        known = self.partitions.get(key)
        if known is None or known.partition is not partition or known.leader_epoch != partition.leader_epoch:
            self.partitions[key] = _FollowedPartition(partition, partition.leader_epoch)
            self._note_change()

    def remove(self, partition: Partition) -> None:
        self.partitions.pop((partition.topic_id, partition.index), None)
        self._note_change()

    def set_endpoint(self, endpoint: Endpoint | None) -> None:
        if endpoint != self._endpoint:
            self._endpoint = endpoint
            self._note_change()

    def _note_change(self) -> None:
        """Partitions or the address are not what the session was opened for: a new one is opened at once.

        The fetch under way may wait for half a second, which a partition with a new leader must not. Nothing is lost
        with its answer.
        """
        self._changed.set()
        if self._session is not None:
            self._session.end()

    async def _run(self) -> None:
        while True:
            # What changes together, in one delta or a few, costs one session.
            await asyncio.sleep(0)
            self._changed.clear()
            try:
                await self._fetch_until_changed()
                self._pause_s = 0.0
                continue
            except ProtocolError as error:
                logger.error("broker %d does not speak the protocol: %s", self.leader, error)  # noqa: TRY400
            except ApiError as error:
                if self._changed.is_set():
                    continue
                self._note_failure(error)
            except Exception:  # the root of the task: a bug must not end replication for good
                logger.exception("fetching from broker %d failed", self.leader)
            await self._pause()

    def _note_failure(self, error: ApiError) -> None:
        if not self._pause_s:
            logger.warning("broker %d cannot be fetched from: %s", self.leader, error)
        self.owner.lost(self.leader)

    async def _pause(self) -> None:
        self._pause_s = min(max(self._pause_s * 2, FIRST_PAUSE_S), self.owner.settings.max_pause_s)
        timer = self.owner.clock.call_later(self._pause_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()

    async def _fetch_until_changed(self) -> None:
        if self._endpoint is None or not self.partitions:
            await self._changed.wait()
            return
        owner = self.owner
        connection = await owner.dialer.open(self._endpoint, self.leader, timeout_ms=owner.settings.timeout_ms)
        if self._changed.is_set():
            connection.abort()
            return
        self._session = session = _Session(self, connection)
        connection.when_ended(session.connection_ended)
        try:
            await session.fetch_until_ended()
        finally:
            self._session = None
            session.end()


class _Session:
    """One fetch session on one connection: the leader remembers what was asked, and only changes are told (KIP-227)."""

    def __init__(self, fetcher: Fetcher, connection: Connection) -> None:
        self._leader = fetcher.leader
        self._owner = fetcher.owner
        self._clock = fetcher.owner.clock
        self._connection = connection
        self._partitions = dict(fetcher.partitions)
        self._ended = False
        self._wake = asyncio.Event()
        self._session_id = 0
        self._epoch = 0
        for followed in self._partitions.values():
            followed.sent, followed.has_missed = None, False
            followed.failures, followed.not_before, followed.unflushed_since = 0, 0.0, None

    def end(self) -> None:
        self._ended = True
        self._wake.set()
        self._connection.abort()

    def connection_ended(self) -> None:
        """Pass on at once that the leader is gone: the next fetch, which would fail, may have to wait for a flush."""
        if not self._ended:
            self._owner.lost(self._leader)

    async def fetch_until_ended(self) -> None:
        touched: Iterable[_FollowedPartition] = tuple(self._partitions.values())
        while True:
            await self._flush(touched)
            await self._rest()
            if self._ended:
                return
            request = self._request()
            timeout_ms = request.max_wait_ms + max(self._owner.settings.timeout_ms, _GRACE_MS)
            response = await self._connection.request(request, FETCH_VERSION, timeout_ms=timeout_ms)
            if not self._session_id:
                self._owner.reached(self._leader)
            touched = self._take(response)

    async def _flush(self, touched: Iterable[_FollowedPartition]) -> None:
        """Wait until what these partitions have may be promised, or for as long as the others can wait for it."""
        until_s: float | None = None
        for followed in touched:
            while not self._ended and self._is_current(followed) and not self._is_flushed(followed):
                now = self._clock.monotonic()
                until_s = now + FLUSH_PATIENCE_S if until_s is None else until_s
                if now >= until_s:
                    break
                await self._sleep(until_s - now, (followed,))

    def _is_flushed(self, followed: _FollowedPartition) -> bool:
        try:
            return followed.partition.is_flushed
        except Exception:  # noqa: BLE001 - `_prepare` meets it as well, and says so
            return True

    async def _rest(self) -> None:
        """While every partition has to wait there is nothing to ask for: a fetch of nothing is answered at once."""
        while not self._ended:
            now = self._clock.monotonic()
            pause_s = math.inf
            for followed in self._partitions.values():
                wait_s = self._prepare(followed, now)
                if wait_s <= 0:
                    return
                pause_s = min(pause_s, wait_s)
            await self._sleep(
                pause_s, [followed for followed in self._partitions.values() if followed.unflushed_since is not None]
            )

    async def _sleep(self, seconds: float, unflushed: Iterable[_FollowedPartition]) -> None:
        """Until the time is up, one of these partitions was flushed, or the session ends."""
        wake = self._wake
        wake.clear()
        timer = self._clock.call_later(seconds, wake.set)
        for followed in unflushed:
            followed.partition.flush_watchers.add(wake.set)
        try:
            await wake.wait()
        finally:
            timer.cancel()
            for followed in unflushed:
                followed.partition.flush_watchers.discard(wake.set)

    def _prepare(self, followed: _FollowedPartition, now: float) -> float:
        """Find out where a partition goes on (`position`): 0, or how long it has to wait before it is fetched again.

        It failed, it is not on disk yet, or it has used its quota.
        """
        wait_s = followed.not_before - now
        if wait_s > 0 and followed.unflushed_since is None:
            return wait_s
        partition = followed.partition
        try:
            followed.position = (*partition.fetch_position(), partition.log.start_offset)
            if followed.position != followed.sent and not partition.is_flushed:
                return self._wait_for_flush(followed, now)
            followed.unflushed_since = None
        except Exception as error:  # noqa: BLE001 - of one log: the others go on
            self._failed(followed, error)
            return followed.not_before - now
        quota = partition.follower_quota
        if quota is not None and followed.is_behind and self._owner.broker_id not in partition.state.isr:
            return max(quota.wait_s(), 0.0)
        return 0.0

    def _wait_for_flush(self, followed: _FollowedPartition, now: float) -> float:
        """How long a partition is left out that is not on disk yet: a tenth of the time that it takes already."""
        if followed.unflushed_since is None:
            followed.unflushed_since = now
            followed.partition.log.flush_soon()  # whoever made it wait for the disk may not have asked for that
        if followed.not_before <= now:
            patience_s = max((now - followed.unflushed_since) / 10, FIRST_PAUSE_S)
            followed.not_before = now + min(patience_s, self._owner.settings.max_pause_s)
        return followed.not_before - now

    def _is_current(self, followed: _FollowedPartition) -> bool:
        partition = followed.partition
        return partition.leadership is None and partition.leader_epoch == followed.leader_epoch

    # --- asking -------------------------------------------------------------------------------------------------------

    def _request(self) -> FetchRequest:
        settings = self._owner.settings
        now = self._clock.monotonic()
        wait_ms = settings.max_wait_ms
        topics: dict[uuid.UUID, FetchRequest.FetchTopic] = {}
        forgotten: dict[uuid.UUID, FetchRequest.ForgottenTopic] = {}
        for (topic_id, index), followed in self._partitions.items():
            wait_s = self._prepare(followed, now)
            # The pause after a failure may be over by now: this one fetch goes without the partition all the same.
            is_left_out = wait_s > 0 or (followed.has_missed and followed.sent is not None)
            followed.has_missed = False
            if is_left_out:
                wait_ms = min(wait_ms, max(int(wait_s * 1000), 1))
                if followed.sent is not None:
                    followed.sent = None
                    gone = forgotten.setdefault(topic_id, FetchRequest.ForgottenTopic(topic_id=topic_id, partitions=[]))
                    gone.partitions.append(index)
                continue
            position = followed.position
            if followed.sent != position:
                followed.sent = position
                topic = topics.setdefault(topic_id, FetchRequest.FetchTopic(topic_id=topic_id, partitions=[]))
                topic.partitions.append(
                    FetchRequest.FetchPartition(
                        partition=index,
                        current_leader_epoch=followed.leader_epoch,
                        fetch_offset=position[0],
                        last_fetched_epoch=position[1],
                        log_start_offset=position[2],
                        partition_max_bytes=settings.max_partition_bytes,
                    )
                )
        return FetchRequest(
            replica_state=FetchRequest.ReplicaState(
                replica_id=self._owner.broker_id, replica_epoch=self._owner.broker_epoch()
            ),
            max_wait_ms=wait_ms,
            min_bytes=settings.min_bytes,
            max_bytes=settings.max_bytes,
            session_id=self._session_id,
            session_epoch=self._epoch,
            topics=list(topics.values()),
            forgotten_topics_data=list(forgotten.values()),
        )

    # --- copying ------------------------------------------------------------------------------------------------------

    def _take(self, response: FetchResponse) -> list[_FollowedPartition]:
        """Take over what the leader sent; returns the partitions that have changed."""
        if response.error_code:
            raise ApiError(ErrorCode(response.error_code), f"broker {self._leader} ended the fetch session")
        self._session_id = response.session_id
        self._epoch = 1 if self._epoch == _FINAL_EPOCH else self._epoch + 1
        if not self._session_id:
            # The leader keeps no session for us: everything is told again.
            self._epoch = 0
            for followed in self._partitions.values():
                followed.sent = None
        touched = []
        for topic in response.responses:
            for answer in topic.partitions:
                found = self._partitions.get((topic.topic_id, answer.partition_index))
                if found is None or not self._is_current(found):
                    continue
                try:
                    self._take_one(found, answer)
                except Exception as error:  # noqa: BLE001 - of one log: the others go on
                    self._failed(found, error)
                    continue
                if found.trouble:
                    logger.info("%r is copied again", found.partition)
                found.failures, found.trouble = 0, ""
                touched.append(found)
        return touched

    def _failed(self, followed: _FollowedPartition, error: Exception) -> None:
        """Leave a partition out for a while; said once for as long as it is the same."""
        text = str(error)
        if isinstance(error, ApiError) and error.code in _PASSING:
            logger.debug("%r cannot be copied now: %s", followed.partition, text)
        elif text != followed.trouble:
            followed.trouble = text
            level = logging.WARNING if isinstance(error, ApiError) else logging.ERROR
            trace = None if isinstance(error, MillraceError) else error
            logger.log(level, "%r cannot be copied, and is tried again: %s", followed.partition, text, exc_info=trace)
        followed.unflushed_since = None
        followed.has_missed = True
        self._delay(followed)

    def _delay(self, followed: _FollowedPartition) -> None:
        longest_s = self._owner.settings.max_pause_s
        followed.not_before = self._clock.monotonic() + min(FIRST_PAUSE_S * 2**followed.failures, longest_s)
        followed.failures = min(followed.failures + 1, 10)

    def _take_one(self, followed: _FollowedPartition, answer: FetchResponse.PartitionData) -> None:
        partition = followed.partition
        code = answer.error_code
        if code == ErrorCode.OFFSET_OUT_OF_RANGE:
            self._start_over(partition, answer.log_start_offset)
            return
        if code:
            raise ApiError(ErrorCode(code))
        if answer.diverging_epoch.end_offset >= 0:
            before = partition.log.end_offset
            partition.truncate_to_leader(answer.diverging_epoch.epoch, answer.diverging_epoch.end_offset)
            logger.info("%r was cut from %d to %d to follow its leader", partition, before, partition.log.end_offset)
            return
        if answer.records:
            partition.append_from_leader(memoryview(answer.records), followed.leader_epoch)
            if partition.follower_quota is not None:
                partition.follower_quota.take(len(answer.records))
        followed.is_behind = answer.high_watermark > partition.log.end_offset
        partition.follow_leader_marks(answer.high_watermark, answer.log_start_offset)

    def _start_over(self, partition: Partition, leader_start: int) -> None:
        """The leader has nothing at our offset: its log begins later, or an unclean election made it another log."""
        if leader_start < 0:
            raise ApiError(ErrorCode.OFFSET_OUT_OF_RANGE, "the leader does not say where its log begins")
        logger.warning("%r starts over at offset %d, where its leader's log begins", partition, leader_start)
        partition.restart_at(leader_start)


_PASSING: Final = frozenset(
    {
        ErrorCode.NOT_LEADER_OR_FOLLOWER,
        ErrorCode.FENCED_LEADER_EPOCH,
        ErrorCode.UNKNOWN_LEADER_EPOCH,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        ErrorCode.UNKNOWN_TOPIC_ID,
    }
)
"""What a leader says whose image is behind ours, or ahead: the next delta ends it."""
