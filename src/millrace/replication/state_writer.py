"""Writing to one led partition of an internal topic: appended at once, in effect when durable, in the order of the log.

So what is in a coordinator's memory is always what a replay would give, and whoever hung up does not stop a change.
Owner: a shard (`sharded.StateShard`), whose task runs `confirm`. Not here: what the records mean, and what a failed
write means to a client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from millrace.errors import ApiError, ErrorCode
from millrace.replication.state_topic import Entry, StateTopic


@dataclass(slots=True)
class _Write:
    base_offset: int
    last_offset: int
    apply: Callable[[int], None]
    done: asyncio.Future[None]


class StateWriter:
    """The writes of one partition that are under way."""

    def __init__(self, topic: StateTopic, index: int) -> None:
        self._topic = topic
        self._index = index
        self._writes: deque[_Write] = deque()
        self._written = asyncio.Event()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<writer of {self._topic.name}-{self._index}, {len(self._writes)} writes under way>"

    def write(self, entries: Sequence[Entry], apply: Callable[[int], None], now_ms: int) -> asyncio.Future[None]:
        """Append now; `apply(base offset)` is called and the future done once it is durable.

        ApiError or StorageError: nothing was appended. The future fails when the leadership is lost on the way.
        """
        if self._is_closed:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        appended = self._topic.append(self._index, entries, now_ms)
        return self._queue(appended.base_offset, appended.last_offset, apply)

    def settled(self) -> asyncio.Future[None] | None:
        """Done when everything written so far is in effect; None where it is already."""
        if not self._writes:
            return None
        last = self._writes[-1]
        return self._queue(last.base_offset, last.last_offset, nothing)

    async def confirm(self) -> None:
        """Put writes into effect as they become durable, until closed. ApiError: the leadership is lost."""
        while not self._is_closed:
            if not self._writes:
                self._written.clear()
                await self._written.wait()
                continue
            await self._topic.wait_committed(self._index, self._writes[0].last_offset)
            if self._writes:
                write = self._writes.popleft()
                write.apply(write.base_offset)
                if not write.done.done():
                    write.done.set_result(None)

    def close(self, error: ErrorCode) -> None:
        """Tell everybody who waits, and take nothing more."""
        self._is_closed = True
        self._written.set()
        writes, self._writes = self._writes, deque()
        for write in writes:
            if not write.done.done():
                write.done.set_exception(ApiError(error))

    def _queue(self, base_offset: int, last_offset: int, apply: Callable[[int], None]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who waits may have hung up: an error that nobody asks for is no news.
        done.add_done_callback(_look_at)
        self._writes.append(_Write(base_offset, last_offset, apply, done))
        self._written.set()
        return done


def nothing(_base_offset: int) -> None:
    """What a write does that counts already, or only says that it is durable."""


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
