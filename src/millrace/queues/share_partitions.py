"""Every share-partition of a broker: made and loaded when a member first asks, closed when the leadership is over.

Owner of the share-partitions. Handlers call it. Not here: what happens inside one (`share_partition`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable
from uuid import UUID

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.queues.records import ShareKey
from millrace.queues.sessions import ShareSessions, TopicPartitionId
from millrace.queues.settings import QueueSettings
from millrace.queues.share_partition import Persister, SharePartition
from millrace.replication.partition import Partition


class SharePartitions:
    """The share-partitions whose partitions this broker leads, and the sessions of the members that read them."""

    def __init__(
        self,
        *,
        find: Callable[[UUID, int], Partition],
        persister: Persister,
        settings_of: Callable[[str], QueueSettings],
        is_member: Callable[[str, str], bool],
        max_sessions: int,
        clock: Clock,
    ) -> None:
        """`find` raises what a client is told where this broker does not lead a partition."""
        self.sessions = ShareSessions(max_sessions)
        self.settings_of = settings_of
        self.is_member = is_member
        """Whether a member belongs to a group, as far as this broker can tell."""
        self._find = find
        self._persister = persister
        self._clock = clock
        self._partitions: dict[ShareKey, SharePartition] = {}
        self._loading: dict[ShareKey, asyncio.Task[SharePartition]] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self._closed = False

    def __repr__(self) -> str:
        return f"<{len(self._partitions)} share-partitions, {self.sessions!r}>"

    async def get(self, key: ShareKey) -> SharePartition:
        """A share-partition, loaded; ApiError. Cancellation does not stop the loading: others may wait for it."""
        if self._closed:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the broker is shutting down")
        partition = self._find(key.topic_id, key.partition)
        found = self._partitions.get(key)
        if found is not None:
            if found.error is None and found.leader_epoch == partition.leader_epoch:
                return found
            self._drop(key, partition.not_leader())
        loading = self._loading.get(key)
        if loading is None:
            loading = asyncio.get_running_loop().create_task(self._load(key, partition), name=f"load {key}")
            self._loading[key] = loading
            loading.add_done_callback(lambda _: self._loading.pop(key, None))
            loading.add_done_callback(_look_at)
        return await asyncio.shield(loading)

    def end_session(self, group_id: str, member_id: str) -> None:
        """A member is done here: what it holds is released in the background."""
        self._release(group_id, member_id, self.sessions.end(group_id, member_id))

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
        for task in (*self._loading.values(), *self._releases):
            task.cancel()

    async def stop(self) -> None:
        """Return when nothing runs any more."""
        self.begin_closing()
        await asyncio.gather(*self._loading.values(), *self._releases, return_exceptions=True)

    async def _load(self, key: ShareKey, partition: Partition) -> SharePartition:
        made = SharePartition(
            key,
            partition,
            persister=self._persister,
            settings=lambda: self.settings_of(key.group_id),
            clock=self._clock,
        )
        await made.load()
        if self._closed:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER, "the broker is shutting down")
        self._partitions[key] = made
        return made

    def _drop(self, key: ShareKey, error: ApiError) -> None:
        self._partitions.pop(key).close(error)

    def _release(self, group_id: str, member_id: str, partitions: Iterable[TopicPartitionId]) -> None:
        for topic_id, index in partitions:
            found = self._partitions.get(ShareKey(group_id, topic_id, index))
            if found is not None and found.error is None:
                task = asyncio.get_running_loop().create_task(_released(found, member_id))
                self._releases.add(task)
                task.add_done_callback(self._releases.discard)


async def _released(partition: SharePartition, member_id: str) -> None:
    # Where it cannot be stored the locks run out by themselves.
    with contextlib.suppress(ApiError):
        await partition.release(member_id)


def _look_at(task: asyncio.Task[SharePartition]) -> None:
    if not task.cancelled():
        task.exception()
