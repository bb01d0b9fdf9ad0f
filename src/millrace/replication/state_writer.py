"""Writing to one led partition of an internal topic: appended at once, in effect when durable, in the order of the log.

So what is in a coordinator's memory is always what a replay would give, and whoever hung up does not stop a change.
`write` never puts anything into effect itself: whoever can take that in the middle of its work asks for it
(`apply_durable`). What others append to the partition, the markers of transactions, takes its place in the order by its
offset (`note`). Owner: a shard (`sharded.StateShard`), whose task runs `confirm`. Not here: what the records mean, and
what a failed write means to a client.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from millrace.errors import ApiError, ErrorCode
from millrace.replication.state_topic import Entry, StateTopic, Transaction


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
        self._turn: asyncio.Future[None] | None = None
        """What `confirm` waits for: the first write is durable, or is not the first any more."""
        self._failure: Exception | None = None
        """What ends `confirm`: a write is in the log and could not be put into effect."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"StateWriter({self._topic.name}-{self._index}, {len(self._writes)} writes under way)"

    def write(
        self,
        entries: Sequence[Entry],
        apply: Callable[[int], None],
        now_ms: int,
        transaction: Transaction | None = None,
    ) -> asyncio.Future[None]:
        """Append now; `apply(base offset)` is called and the future done once it is durable.

        ApiError or StorageError: nothing was appended. The future fails when the leadership is lost on the way.
        """
        if self._is_closed:
            raise ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER)
        appended = self._topic.append(self._index, entries, now_ms, transaction)
        return self._queue(appended.base_offset, appended.last_offset, apply)

    def note(self, offset: int, apply: Callable[[int], None]) -> None:
        """Somebody else has appended a record at `offset`: `apply(offset)` is called once it is durable, in its turn.

        It may be told at any time after the append: what lies before it in the log is in effect before it, and so is
        what lies behind it after it, unless it was in effect already.
        """
        if not self._is_closed:
            self._queue(offset, offset, apply)

    def apply_durable(self) -> None:
        """Put into effect what is durable already, which is all where a write needs nobody else; without a wait."""
        while self._writes and self._topic.is_committed(self._index, self._writes[0].last_offset):
            try:
                self._put_first_into_effect()
            except Exception as error:
                self._failure = error
                self._written.set()
                raise
            finally:
                self._end_turn()

    def all_applied(self) -> asyncio.Future[None] | None:
        """Done when everything written so far is in effect; None where it is already."""
        if not self._writes:
            return None
        last = self._writes[-1]
        return self._queue(last.base_offset, last.last_offset, nothing)

    async def confirm(self) -> None:
        """Put writes into effect as they become durable, until closed. ApiError: the leadership is lost."""
        while not self._is_closed:
            if self._failure is not None:
                raise self._failure
            if not self._writes:
                self._written.clear()
                await self._written.wait()
                continue
            first = self._writes[0]
            self._turn = turn = asyncio.get_running_loop().create_future()
            if self._topic.when_committed(self._index, first.last_offset, partial(_reached, turn)):
                await turn
            if self._writes and self._writes[0] is first:
                self._put_first_into_effect()

    def close(self, error: ErrorCode) -> None:
        """Tell everybody who waits, and take nothing more."""
        self._is_closed = True
        self._written.set()
        self._end_turn()
        writes, self._writes = self._writes, deque()
        for write in writes:
            if not write.done.done():
                write.done.set_exception(ApiError(error))

    def _put_first_into_effect(self) -> None:
        first = self._writes.popleft()
        first.apply(first.base_offset)
        if not first.done.done():
            first.done.set_result(None)

    def _queue(self, base_offset: int, last_offset: int, apply: Callable[[int], None]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Who waits may have hung up: an error that nobody asks for is no news.
        done.add_done_callback(_look_at)
        place = len(self._writes)
        while place and self._writes[place - 1].last_offset > last_offset:
            place -= 1
        self._writes.insert(place, _Write(base_offset, last_offset, apply, done))
        self._written.set()
        if place == 0:
            self._end_turn()
        return done

    def _end_turn(self) -> None:
        if self._turn is not None:
            _reached(self._turn, None)


def nothing(_base_offset: int) -> None:
    """What a write does that counts already, or only says that it is durable."""


def _reached(turn: asyncio.Future[None], error: Exception | None) -> None:
    if turn.done():
        return
    if error is None:
        turn.set_result(None)
    else:
        turn.set_exception(error)


def _look_at(done: asyncio.Future[None]) -> None:
    if not done.cancelled():
        done.exception()
