"""Memory for answers that peers have not taken yet: what one may weigh, who waits for it, and who is closed for it.

The invariant: answers of records hold at most three quarters of the broker's memory budget and one batch. It holds
because whoever makes one (Fetch, ShareFetch) asks for room first, reads no more than that, and has it counted before
anything else happens. So requests keep a quarter of the budget, whatever consumers do. Other answers count as well and
do not ask: they are small, and a connection has one of them unread before it is asked nothing more.

Room is graded. An answer may have an eighth of what is left of the first half of the budget, or `SMALL_BYTES` where
that is less; one batch comes in any case, as the protocol promises a consumer. Many that do not read thus use up the
first half ever more slowly, and the quarter after it is for small answers alone. Beyond that nobody gets anything: a
fetch waits as it waits for records, for as long as it said, and then is answered without any. Whoever has not taken an
answer gets no second one, and one that waits for its turn behind another is the only one that does: so a peer that does
not read costs its own answer, and at most one more that it asked for ahead of time.

Peers that never read could hold all of that for ever, and everybody else would wait for them. So while room is short,
connections that do not take what they have are closed, those first that take the least: after `PATIENCE_S`, and when
nothing is left after `EXHAUSTED_PATIENCE_S`, so that a healthy client is answered within a second even then. Their
clients come back and fetch again. While room is not short a consumer may take all the time it wants.

Followers count, and do not ask: replication does not wait for consumers. What they hold is bounded by their number and
`replica.fetch.response.max.bytes`, as each has one fetch under way. Owner: the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer
    from millrace.server.flow import MemoryBudget

logger = logging.getLogger(__name__)

SHARE: Final = 8
"""An answer gets this part of what is left; less than this part of the whole is short."""
SMALL_BYTES: Final = 64 * 1024
LOOK_S: Final = 0.125
"""Between two looks at who takes what it has, while room is short."""
PATIENCE_S: Final = 30.0
"""By then clients have given up on the answer themselves."""
EXHAUSTED_PATIENCE_S: Final = 0.25
WORTH_WAITING: Final = 20
"""Whoever takes less than this part of what it has, within the patience, is stalled."""


class Holder(Protocol):
    """A connection: whoever makes room by reading, or by being closed."""

    @property
    def held_bytes(self) -> int:
        """Of answers that its peer could have taken, were it to read."""

    @property
    def taken_bytes(self) -> int:
        """Of such answers, taken since the connection began."""

    def abort(self) -> None: ...


class AnswerRoom:
    """Counts what all connections of a broker hold, and hands out the rest."""

    def __init__(self, budget: MemoryBudget, clock: Clock) -> None:
        self._budget = budget
        self._clock = clock
        self._large_bytes = budget.limit_bytes // 2
        self._limit_bytes = budget.limit_bytes * 3 // 4
        self.used_bytes = 0
        self.holders: set[Holder] = set()
        """Every connection."""
        self._line: dict[Callable[[], None], Callable[[], bool]] = {}
        """How fetches are woken that wait for room, in order, and how they are asked whether it is their turn."""
        self._timer: Timer | None = None
        self._asked_in_vain = False
        """Since the last look somebody had to do with little, or nothing."""
        self._seen: dict[Holder, tuple[int, float]] = {}
        """While room is short: what each holder had taken when it last took a good part of what it has."""

    def __repr__(self) -> str:
        return f"AnswerRoom({self.used_bytes:,} of {self._limit_bytes:,} bytes, {len(self._line)} waiting)"

    def room(self) -> int:
        """How many bytes the next answer may have, beyond its first batch; 0 if there must be none now."""
        left_bytes = self._large_bytes - self.used_bytes
        if left_bytes * SHARE >= self._large_bytes:
            return left_bytes // SHARE
        self._asked_in_vain = True
        if self._timer is None:
            self._timer = self._clock.call_later(LOOK_S, self._look)
        return 0 if self._is_exhausted else max(left_bytes // SHARE, SMALL_BYTES)

    @property
    def _is_exhausted(self) -> bool:
        return self.used_bytes >= self._limit_bytes

    def take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes
        self._budget.take(size_bytes)

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._budget.give_back(size_bytes)
        if self._line:
            self._admit()

    def line_up(self, wake: Callable[[], None], is_free: Callable[[], bool]) -> None:
        """Have `wake` called once, when there may be room and `is_free` says that its connection may have some."""
        self._line[wake] = is_free

    def leave_line(self, wake: Callable[[], None]) -> None:
        self._line.pop(wake, None)

    def _admit(self) -> None:
        left_bytes = self._limit_bytes - self.used_bytes
        for wake, is_free in tuple(self._line.items()):
            if left_bytes <= 0:
                return
            if is_free():
                del self._line[wake]
                left_bytes -= SMALL_BYTES
                wake()

    # --- shortage -----------------------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Close who keeps memory from others without taking it, and look again for as long as it is short."""
        exhausted = self._is_exhausted
        is_short = self._asked_in_vain or bool(self._line and exhausted)
        self._asked_in_vain = False
        self._timer = self._clock.call_later(LOOK_S, self._look) if is_short or self._line else None
        self._admit()  # whoever was woken before may not have used its turn
        if not is_short:
            self._seen.clear()
            return
        stalled = self._stalled(EXHAUSTED_PATIENCE_S if exhausted else PATIENCE_S)
        wanted_bytes = (self._limit_bytes if exhausted else self._large_bytes) - self._large_bytes // SHARE
        used_bytes = self.used_bytes
        for holder, seconds in stalled:
            if used_bytes <= wanted_bytes:
                break
            used_bytes -= holder.held_bytes
            logger.warning(
                "closing %r: for %.1f s it has not read %d bytes of answers, and others need the memory",
                holder,
                seconds,
                holder.held_bytes,
            )
            self._seen.pop(holder, None)
            holder.abort()

    def _stalled(self, patience_s: float) -> list[tuple[Holder, float]]:
        """Those who for that long have taken hardly anything of what they have, the worst and largest first."""
        now = self._clock.monotonic()
        found: list[tuple[float, int, Holder, float]] = []
        for holder in self.holders:
            held_bytes = holder.held_bytes
            if not held_bytes:
                self._seen.pop(holder, None)
                continue
            taken_bytes = holder.taken_bytes
            before_bytes, since = self._seen.setdefault(holder, (taken_bytes, now))
            part = (taken_bytes - before_bytes) / held_bytes
            if part * WORTH_WAITING >= 1:
                self._seen[holder] = taken_bytes, now
            elif now - since >= patience_s:
                found.append((part, -held_bytes, holder, now - since))
        found.sort(key=lambda each: each[:2])
        return [(holder, seconds) for _, _, holder, seconds in found]

    def left(self, holder: Holder) -> None:
        """A connection is gone, and has given back what it held."""
        self.holders.discard(holder)
        self._seen.pop(holder, None)
