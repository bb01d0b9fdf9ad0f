"""Every share-partition of a broker: made and loaded when a member first asks, closed when the leadership is over.

Owner of the share-partitions. Handlers call it. Not here: what happens inside one (`partition`).

Invariants: when the last session of a group ends here its share-partitions are let go, once what its members held is
released: without members a group may be reset or deleted, and whoever comes next must read the state anew. Until what
the old ones had to store is stored, nobody does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import UUID

from millrace.clock import Clock
from millrace.cluster.channel import within
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.queues.counting import QueueCounts
from millrace.queues.dead_letter_office import Office
from millrace.queues.partition import Persister, SharePartition
from millrace.queues.records import ShareKey
from millrace.queues.sessions import ShareSessions
from millrace.queues.settings import QueueSettings
from millrace.replication.partition import Partition
from millrace.tasks import Tasks, awaited

_FAREWELL_S: Final = 5.0
"""How long a new member waits until what the last ones left behind is stored."""


class SharePartitions:
    """The share-partitions whose partitions this broker leads, and the sessions of the members that read them."""

    def __init__(
        self,
        *,
        find: Callable[[UUID, int], Partition],
        persister: Persister,
        office: Office,
        settings_of: Callable[[str], QueueSettings],
        holds_lease: Callable[[], bool],
        max_sessions: int,
        clock: Clock,
        counts: QueueCounts | None = None,
    ) -> None:
        """`find` raises what a client is told where this broker does not lead a partition.

        `holds_lease` tells whether it leads as it thinks it does; without that, fetches are confirmed first.
        """
        self.sessions = ShareSessions(max_sessions)
        self.settings_of = settings_of
        self.holds_lease = holds_lease
        self.counts = counts or QueueCounts()
        self._find = find
        self._persister = persister
        self._office = office
        self._clock = clock
        self.tasks = Tasks(clock, told=(MillraceError,))
        """What members have asked for, and what happens whether or not they still wait."""
        self._tasks = Tasks(clock, told=(MillraceError,))
        self._partitions: dict[ShareKey, SharePartition] = {}
        self._loading: dict[ShareKey, asyncio.Task[SharePartition]] = {}
        self._farewells: dict[str, _Farewell] = {}
        """Groups of which sessions have ended, until what their members held is released."""
        self._closed = False

    def __repr__(self) -> str:
        return f"SharePartitions({len(self._partitions)}, {self.sessions!r})"

    def __iter__(self) -> Iterator[SharePartition]:
        """Those that are loaded."""
        return iter(tuple(self._partitions.values()))

    def loaded(self, key: ShareKey) -> SharePartition | None:
        """A share-partition, if it can be used at once; `get` says what is the matter where it cannot."""
        found = self._partitions.get(key)
        if found is None or found.error is not None or found.leader_epoch != found.partition.leader_epoch:
            return None
        farewell = self._farewells.get(key.group_id)
        return None if farewell is not None and farewell.is_last else found

    async def get(self, key: ShareKey) -> SharePartition:
        """A share-partition, loaded; ApiError. Cancellation does not stop the loading: others may wait for it."""
        if self._closed:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the broker is shutting down")
        farewell = self._farewells.get(key.group_id)
        if farewell is not None and farewell.is_last:
            farewell.somebody_came.set()
            await within(self._clock, asyncio.shield(farewell.task), _FAREWELL_S)
        partition = self._find(key.topic_id, key.partition)
        found = self._partitions.get(key)
        if found is not None:
            if found.error is None and found.leader_epoch == partition.leader_epoch:
                return found
            self._drop(key, partition.not_leader())
        loading = self._loading.get(key)
        if loading is None:
            loading = self._tasks.start(f"load {key}", self._load(key, partition))
            self._loading[key] = loading
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
        return await asyncio.shield(loading)

    def end_session(self, group_id: str, member_id: str) -> None:
        """A member is done here, or left its group: what it holds is released in the background."""
        if not self.sessions.end(group_id, member_id) or self._closed:
            return
        farewell = self._farewells.get(group_id)
        if farewell is None:
            task = self._tasks.start(f"farewells of {group_id}", self._see_off(group_id))
            farewell = self._farewells[group_id] = _Farewell(task)
        farewell.leavers.append(member_id)
        if not self.sessions.has_members(group_id):
            farewell.is_last = True

    def connection_lost(self, group_id: str, member_id: str, connection: object) -> None:
        """The session of a member ends with the connection on which it began."""
        if self.sessions.is_bound(group_id, member_id, connection):
            self.end_session(group_id, member_id)

    def unled(self, topic_id: UUID, indexes: Iterable[int]) -> None:
        """This broker does not lead these partitions any more, or leads them in another epoch."""
        gone = set(indexes)
        error = ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the leadership of this partition is over")
        for key in [key for key in self._partitions if key.topic_id == topic_id and key.partition in gone]:
            self._drop(key, error)

    def begin_closing(self) -> None:
        """Answer everybody who waits, and nobody any more."""
        self._closed = True
        error = ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the broker is shutting down")
        for key in list(self._partitions):
            self._drop(key, error)
        self._tasks.cancel()

    async def stop(self) -> None:
        """Return when nothing runs any more."""
        self.begin_closing()
        await self._tasks.stop()
        await self.tasks.stop()

    async def _load(self, key: ShareKey, partition: Partition) -> SharePartition:
        made = SharePartition(
            key,
            partition,
            persister=self._persister,
            office=self._office,
            settings=lambda: self.settings_of(key.group_id),
            clock=self._clock,
            counts=self.counts,
        )
        await made.load()
        if self._closed:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the broker is shutting down")
        self._partitions[key] = made
        return made

    def _drop(self, key: ShareKey, error: ApiError) -> None:
        self._partitions.pop(key).close(error)

    async def _see_off(self, group_id: str) -> None:
        """Release what members held that are gone; with the last of them, let go of the group's share-partitions."""
        farewell = self._farewells[group_id]
        try:
            while farewell.leavers:
                leavers, farewell.leavers = farewell.leavers, []
                # Of all share-partitions: a member may hold records of one that its session does not read any more.
                led = [found for key, found in self._partitions.items() if key.group_id == group_id]
                await asyncio.gather(*(_released(found, member_id) for found in led for member_id in leavers))
            if farewell.is_last:
                await self._let_go(group_id, farewell)
        finally:
            del self._farewells[group_id]

    async def _let_go(self, group_id: str, farewell: _Farewell) -> None:
        left = {key: found for key, found in self._partitions.items() if key.group_id == group_id}
        # Dead letters are still written: otherwise they would wait for the next member. If one comes, they are left to
        # what it loads, but not writes of state: those would come after what it reads.
        idle: asyncio.Future[Any] = awaited(_wait_idle(left.values()))
        came: asyncio.Future[Any] = awaited(farewell.somebody_came.wait())
        try:
            await asyncio.wait({idle, came}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.gather(*(found.written() for found in left.values()))
        finally:
            idle.cancel()
            came.cancel()
        error = ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the group had no members here any more")
        for key, found in left.items():
            if self._partitions.get(key) is found:
                self._drop(key, error)


@dataclass(slots=True, eq=False)
class _Farewell:
    """Members of a group that are gone, and whether they were the last."""

    task: asyncio.Task[None]
    leavers: list[str] = field(default_factory=list)
    is_last: bool = False
    somebody_came: asyncio.Event = field(default_factory=asyncio.Event)


async def _wait_idle(partitions: Iterable[SharePartition]) -> bool:
    for partition in partitions:
        await partition.wait_idle()
    return True


async def _released(partition: SharePartition, member_id: str) -> None:
    # Where it cannot be stored the locks run out by themselves.
    with contextlib.suppress(ApiError):
        await partition.release(member_id)
