"""The share groups of one led partition: the decisions of `protocol`, their records in the log, their timers, and what
the share coordinator has to be told.

As with KIP-848 groups an event is decided and its records are appended without a wait in between, and the answer leaves
when they are durable. A member that joins is answered when what it subscribes to has been begun, so that it gets its
partitions with the first answer; if that takes long it is asked to come back soon.

Owner: the shard, on whose loop everything runs. Not here: loading (`shard`), share-partitions (`queues`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeVar
from uuid import UUID

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.groups.counting import GroupCounts
from millrace.groups.environment import JOINING, LEAVING, Environment, HeartbeatResult
from millrace.groups.settings import GroupSettings, GroupTimes
from millrace.groups.share import partitions as share_partitions
from millrace.groups.share import protocol
from millrace.groups.share.group import ShareGroup
from millrace.groups.share.partitions import Deletion
from millrace.groups.share.protocol import ShareHeartbeat
from millrace.groups.share.records import Begun, ShareRecord
from millrace.groups.share.step import Partitions, ShareStep
from millrace.groups.step_log import RETRY_MS, LogHost, append_step, set_timers
from millrace.groups.timers import GroupTimers, TimerKey
from millrace.tasks import Tasks

logger = logging.getLogger(__name__)

_WAIT_MS: Final = 1_000
"""How long a heartbeat waits for share-partitions to be begun, before its member is asked to come back."""
RESET: Final = -1
"""A start offset that the group's reset strategy chooses."""

R = TypeVar("R")


class ShareCoordinators(Protocol):
    """The share coordinators, as far as a group has to tell them something. ApiError."""

    async def initialize(self, group_id: str, topic_id: UUID, partition: int, epoch: int, start_offset: int) -> None:
        """Begin a share-partition, or begin it anew."""

    async def delete(self, group_id: str, topic_id: UUID, partition: int) -> None:
        """Forget a share-partition."""


class NoShareCoordinators:
    """Where there are no share coordinators, everything is well."""

    async def initialize(self, group_id: str, topic_id: UUID, partition: int, epoch: int, start_offset: int) -> None:
        pass

    async def delete(self, group_id: str, topic_id: UUID, partition: int) -> None:
        pass


@dataclass(frozen=True, slots=True)
class ShareGroupDependencies:
    """What the coordinator gives its shards to ask, and whom they tell."""

    image: Callable[[], ClusterImage] = ClusterImage
    times: Callable[[str], GroupTimes] = lambda _group_id: GroupTimes()
    coordinators: ShareCoordinators = field(default_factory=NoShareCoordinators)
    left: Callable[[str, str], None] = lambda _group_id, _member_id: None
    """Hears of members that are gone: what they hold here can go to others."""


class Host(LogHost, Protocol):
    """The shard, as far as it is needed here."""

    def knows(self, group_id: str) -> bool:
        """Whether there is a group of another kind with this id."""

    async def when_durable(self, done: asyncio.Future[None] | None) -> None:
        """Wait for one append, or for everything so far; ApiError where it does not become durable in time."""

    def now_ms(self) -> int: ...


class ShareGroups:
    """The share groups of one shard."""

    def __init__(
        self,
        host: Host,
        *,
        settings: GroupSettings,
        dependencies: ShareGroupDependencies,
        timers: GroupTimers,
        clock: Clock,
        counts: GroupCounts | None = None,
    ) -> None:
        self._counts = counts or GroupCounts()
        self.groups: dict[str, ShareGroup] = {}
        self._host = host
        self._settings = settings
        self._dependencies = dependencies
        self._timers = timers
        self._clock = clock
        self._telling: dict[str, asyncio.Task[Any]] = {}
        """By group, the last of what the share coordinators are being told. A group's news are told in their order."""
        self._tasks = Tasks(clock, told=(ApiError,))
        """Everything that they are being told."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"ShareGroups({len(self.groups)})"

    def __contains__(self, group_id: object) -> bool:
        return group_id in self.groups

    # Life

    def replay(self, record: ShareRecord) -> None:
        """Apply one record of the log."""
        group = self.groups.get(record.group_id)
        if group is None:
            if record.value is None:
                return
            group = self.groups[record.group_id] = ShareGroup(record.group_id)
        group.apply(record)
        self._drop_if_blank(group)

    def loaded(self) -> None:
        """Everything was replayed: members have a session from now on."""
        for group in self.groups.values():
            step = self._step(group)
            protocol.loaded(step)
            set_timers(self._timers, group.group_id, step.timers)

    def close(self) -> None:
        """Somebody else coordinates: what is not finished here is finished there."""
        self._is_closed = True
        self._tasks.cancel()

    async def ended(self) -> None:
        """Return when nothing runs any more; to be called after `close`."""
        await self._tasks.stop()

    def timer_fired(self, group_id: str, key: TimerKey) -> None:
        group = self.groups.get(group_id)
        if group is None:
            return
        try:
            self._decide(group, lambda step: protocol.timer_fired(step, key))
        except ApiError as error:
            logger.warning("member %s of %r is not removed yet: %s", key.member_id, group, error)
            self._timers.set((group_id, key), RETRY_MS)
        else:
            logger.info("member %s of %r has not shown itself in time", key.member_id, group)
            self._dependencies.left(group_id, key.member_id)

    # Members

    async def heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResult:
        """ShareGroupHeartbeat; returns when what it changed is durable. Cancellation takes nothing back."""
        protocol.check_request(request)
        if request.epoch == LEAVING:
            result, _, done = self._decide(self._known(group_id), lambda step: protocol.leave(step, request))
            await self._host.when_durable(done)
            self._dependencies.left(group_id, request.member_id)
            return result
        known = self.groups.get(group_id)
        before = {} if known is None else known.partitions.initialized
        result = await self._heartbeat(group_id, request)
        if not await self._has_news(group_id, before):
            return result
        again = await self._heartbeat(group_id, replace(request, epoch=result.epoch))
        # What did not change a second time is news all the same: the member has heard neither answer.
        return again if again.assignment is not None else replace(again, assignment=result.assignment)

    async def _heartbeat(self, group_id: str, request: ShareHeartbeat) -> HeartbeatResult:
        group = self._begun(group_id) if request.epoch == JOINING else self._known(group_id)
        result, step, done = self._decide(group, lambda step: protocol.heartbeat(step, request))
        partitions = step.to_initialize
        if partitions:
            self._tell(group_id, lambda: self._initialize(group, partitions, done))
        await self._host.when_durable(done)
        return result

    async def _has_news(self, group_id: str, before: Mapping[UUID, Begun]) -> bool:
        """Wait a moment for share-partitions that are being begun; whether there are any now that were not there."""
        telling, group = self._telling.get(group_id), self.groups.get(group_id)
        if group is None:
            return False
        if telling is not None:
            over = asyncio.Event()
            timer = self._clock.call_later(_WAIT_MS / 1000, over.set)
            telling.add_done_callback(lambda _: over.set())
            try:
                await over.wait()
            finally:
                timer.cancel()
        return group.partitions.initialized is not before and group.partitions.initialized != before

    # Share-partitions

    async def _initialize(self, group: ShareGroup, partitions: Partitions, done: asyncio.Future[None] | None) -> None:
        """Tell the share coordinators, once it is in the log that they will be told."""
        try:
            await self._host.when_durable(done)
            await self._begin_at(group, partitions, lambda _topic_id, _index: RESET)
        except ApiError as error:
            logger.warning("share-partitions of %r are begun with a later heartbeat: %s", group, error)

    async def _begin_at(
        self, group: ShareGroup, partitions: Partitions, offset_of: Callable[[UUID, int], int]
    ) -> dict[tuple[UUID, int], ApiError]:
        coordinators, group_id, epoch = self._dependencies.coordinators, group.group_id, group.epoch.epoch
        errors = await _ask_each(
            partitions,
            lambda topic_id, index: coordinators.initialize(
                group_id, topic_id, index, epoch, offset_of(topic_id, index)
            ),
        )
        await self._finish_initializing(group, partitions, errors)
        return errors

    async def _finish_initializing(
        self, group: ShareGroup, partitions: Partitions, errors: Mapping[tuple[UUID, int], ApiError]
    ) -> None:
        if self.groups.get(group.group_id) is not group:
            return
        failed = {
            topic_id: frozenset(index for index in indices if (topic_id, index) in errors)
            for topic_id, indices in partitions.items()
        }
        worked = {topic_id: indices - failed[topic_id] for topic_id, indices in partitions.items()}

        def finish(step: ShareStep) -> None:
            share_partitions.initialized(step, worked)
            share_partitions.not_initialized(step, failed)

        for error in {str(error): error for error in errors.values()}.values():
            logger.warning("share-partitions of %r are not begun yet: %s", group, error)
        _, _, done = self._decide(group, finish)
        await self._host.when_durable(done)

    async def set_offsets(
        self, group_id: str, offsets: Mapping[tuple[UUID, int], int]
    ) -> dict[tuple[UUID, int], ApiError]:
        """Begin share-partitions anew at these offsets, for a group without members; what failed.

        A group that does not exist is made. ApiError: the request as a whole is refused.
        """
        group = self._begun(group_id)
        partitions = _by_topic(offsets)
        _, _, done = self._decide(group, lambda step: share_partitions.begin_anew(step, partitions))

        async def begin() -> dict[tuple[UUID, int], ApiError]:
            await self._host.when_durable(done)
            return await self._begin_at(group, partitions, lambda topic_id, index: offsets[topic_id, index])

        return await asyncio.shield(self._tell(group_id, begin))

    async def delete_offsets(self, group_id: str, names: Sequence[str]) -> tuple[Deletion, dict[UUID, ApiError]]:
        """Forget the share-partitions of topics, for a group without members: what there was, and what failed."""
        group = self._known(group_id)
        deletion, _, done = self._decide(group, lambda step: share_partitions.begin_deletion(step, names))

        async def forget() -> dict[UUID, ApiError]:
            await self._host.when_durable(done)
            errors = await self._forget(group_id, deletion.partitions)
            gone = deletion.partitions.keys() - errors.keys()
            if gone and self.groups.get(group_id) is group:
                _, _, forgotten = self._decide(group, lambda step: share_partitions.deleted(step, gone))
                await self._host.when_durable(forgotten)
            return errors

        return deletion, await asyncio.shield(self._tell(group_id, forget))

    async def delete(self, group_id: str) -> None:
        """Delete a group without members, with its share-partitions; ApiError."""
        group = self._known(group_id)
        partitions, _, done = self._decide(group, share_partitions.begin_end)

        def end(step: ShareStep) -> None:
            # Somebody may have joined meanwhile.
            share_partitions.check_empty(group)
            for record in group.tombstones():
                step.write(record)

        async def forget() -> None:
            await self._host.when_durable(done)
            for error in (await self._forget(group_id, partitions)).values():
                raise error
            if self.groups.get(group_id) is not group:
                raise _not_found(group_id)
            _, _, ended = self._decide(group, end)
            self._drop_if_blank(group)
            await self._host.when_durable(ended)

        await asyncio.shield(self._tell(group_id, forget))

    async def forget_topics(self, topic_ids: Collection[UUID]) -> None:
        """Topics are gone."""
        for group in list(self.groups.values()):
            _, _, done = self._decide(group, lambda step: share_partitions.forget_topics(step, topic_ids))
            if done is not None:
                await self._host.when_durable(done)

    async def _forget(self, group_id: str, partitions: Partitions) -> dict[UUID, ApiError]:
        coordinators = self._dependencies.coordinators
        errors = await _ask_each(partitions, lambda topic_id, index: coordinators.delete(group_id, topic_id, index))
        return {topic_id: error for (topic_id, _), error in errors.items()}

    # Inside

    def _known(self, group_id: str) -> ShareGroup:
        group = self.groups.get(group_id)
        if group is None:
            raise _not_found(group_id)
        return group

    def _begun(self, group_id: str) -> ShareGroup:
        """The group, or a new one that nobody knows of before something of it is in the log."""
        if self._host.knows(group_id):
            raise _not_found(group_id)
        return self.groups.get(group_id) or ShareGroup(group_id)

    def _step(self, group: ShareGroup) -> ShareStep:
        dependencies = self._dependencies
        return ShareStep(
            group,
            Environment(dependencies.image(), self._settings, dependencies.times(group.group_id), self._host.now_ms()),
        )

    def _decide(
        self, group: ShareGroup, decide: Callable[[ShareStep], R]
    ) -> tuple[R, ShareStep, asyncio.Future[None] | None]:
        """Let an event happen: all of it, or nothing where it is an ApiError."""
        step = self._step(group)
        epoch_before = group.epoch.epoch
        try:
            result = decide(step)
        except BaseException:
            step.undo()
            raise
        is_new = group.group_id not in self.groups
        done = append_step(self._host, step, self._timers, is_whole=is_new)
        if group.epoch.epoch > epoch_before:
            self._counts.share_rebalances += 1
        set_timers(self._timers, group.group_id, step.timers)
        if is_new and not group.is_blank:
            self.groups[group.group_id] = group
        return result, step, done

    def _tell(self, group_id: str, tell: Callable[[], Coroutine[Any, Any, R]]) -> asyncio.Task[R]:
        """Tell the share coordinators something after what they are being told already: in a task of its own, for
        whoever asked for it may hang up."""
        before = self._telling.get(group_id)

        async def in_turn() -> R:
            try:
                if before is not None:
                    await asyncio.wait((before,))
                return await tell()
            except asyncio.CancelledError:
                if not self._is_closed:
                    raise
                raise ApiError(
                    ErrorCode.NOT_COORDINATOR, "this broker does not coordinate the group any more"
                ) from None

        task = self._tasks.start(f"share-partitions of {group_id}", in_turn())
        self._telling[group_id] = task
        task.add_done_callback(lambda task: self._told(group_id, task))
        return task

    def _told(self, group_id: str, task: asyncio.Task[Any]) -> None:
        if self._telling.get(group_id) is task:
            del self._telling[group_id]

    def _drop_if_blank(self, group: ShareGroup) -> None:
        if group.is_blank and self.groups.get(group.group_id) is group:
            del self.groups[group.group_id]


def _not_found(group_id: str) -> ApiError:
    return ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"{group_id} is no share group")


def _by_topic(slots: Iterable[tuple[UUID, int]]) -> dict[UUID, frozenset[int]]:
    topics: dict[UUID, set[int]] = {}
    for topic_id, index in slots:
        topics.setdefault(topic_id, set()).add(index)
    return {topic_id: frozenset(indices) for topic_id, indices in topics.items()}


async def _ask_each(
    partitions: Partitions, ask: Callable[[UUID, int], Awaitable[None]]
) -> dict[tuple[UUID, int], ApiError]:
    """Ask for every partition; those that failed, and why."""

    async def one(topic_id: UUID, index: int) -> ApiError | None:
        try:
            await ask(topic_id, index)
        except ApiError as error:
            return error
        return None

    slots = [(topic_id, index) for topic_id, indices in partitions.items() for index in sorted(indices)]
    outcomes = await asyncio.gather(*(one(*slot) for slot in slots))
    return {slot: error for slot, error in zip(slots, outcomes, strict=True) if error is not None}
