"""Who gets which records of one partition in one share group: a state machine without clock, log or network.

The window [start, end) holds the records that are not done with, in runs of offsets that share everything. Below
the start everything is done with, above the end nothing was given out yet. Not here: reading the log and writing the
state (`share_partition`), what the coordinator keeps (`state`). Owner: `share_partition`, which also says what time
it is, carries out what `Changes` asks for, and finishes every `Acknowledgement` once.

Invariants
- A record is held by at most one member. An acknowledged record is never given out again.
- Every record ends acknowledged or archived; with a dead-letter topic it is archived after it was copied there.
- The start never goes back.
- An acknowledgement takes effect when its state is stored (`finish`): until then the record stays with its member,
  cannot be acknowledged twice and does not expire. A lock that runs out takes effect at once and is stored later.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from itertools import groupby
from math import ceil
from typing import Final, NamedTuple

from millrace.errors import ApiError, ErrorCode
from millrace.queues.batches import RecordState, StateBatch, join

AVAILABLE: Final = RecordState.AVAILABLE
ACQUIRED: Final = RecordState.ACQUIRED
ACKNOWLEDGED: Final = RecordState.ACKNOWLEDGED
ARCHIVING: Final = RecordState.ARCHIVING
ARCHIVED: Final = RecordState.ARCHIVED
_GIVEN_UP: Final = (ARCHIVED, ARCHIVING)

NO_MEMBER: Final = ""
MIN_CAREFUL_COUNT: Final = 2
MAX_BACKOFF_DOUBLINGS: Final = 32


class AcknowledgeType(IntEnum):
    """What a member says of a record."""

    GAP = 0
    """There is no such record: compacted away, or a transaction marker."""
    ACCEPT = 1
    RELEASE = 2
    REJECT = 3
    RENEW = 4
    """Not finished yet: the lock begins anew (KIP-1222)."""


_KINDS: Final = {kind.value: kind for kind in AcknowledgeType}


class AcquireMode(IntEnum):
    """How strictly `max_records` is taken (KIP-1206)."""

    BATCH_OPTIMIZED = 0
    RECORD_LIMIT = 1


class DeadLetterReason(Enum):
    """Why a record goes to the dead-letter topic; the value is the text of its `__dlq.errors.message` header."""

    REJECTED = "rejected by its consumer"
    DELIVERY_COUNT_EXCEEDED = "released, and delivered as often as the group allows"
    LOCK_TIMEOUT = "not acknowledged in time, and delivered as often as the group allows"


@dataclass(frozen=True, slots=True)
class Limits:
    """The settings of a group that matter here."""

    max_locks: int = 2_000
    max_deliveries: int = 5
    lock_ms: int = 30_000
    renews: bool = True
    backoff_ms: int = 0
    """How long a record rests after its first failed delivery; twice as long after each further one. 0: not at all."""
    backoff_max_ms: int = 0
    dead_letters: bool = False


@dataclass(frozen=True, slots=True)
class LogBatch:
    """A batch of the log by its offsets; not deliverable: transaction markers, or data of an aborted transaction."""

    first_offset: int
    last_offset: int
    is_deliverable: bool = True


class Acquired(NamedTuple):
    """Records that a member got."""

    first_offset: int
    last_offset: int
    delivery_count: int


class AcknowledgeBatch(NamedTuple):
    """What a member says of a range: one type for all of it, or one for each offset."""

    first_offset: int
    last_offset: int
    types: Sequence[int]


class DeadLetter(NamedTuple):
    """Records that are to be copied to the dead-letter topic; `dead_lettered` says that it is done."""

    first_offset: int
    last_offset: int
    delivery_count: int
    reason: DeadLetterReason


@dataclass(slots=True)
class Changes:
    """What follows from a step: to be stored, to be copied, and whether a waiting fetch may find records now."""

    store: list[StateBatch] = field(default_factory=list)
    dead_letters: list[DeadLetter] = field(default_factory=list)
    is_news: bool = False
    timed_out: int = 0
    """Records that were held for too long."""
    given_up: int = 0
    """Records that nobody will get any more, though nobody has accepted them."""


@dataclass(slots=True, eq=False)
class Acknowledgement:
    """An answer of a member whose state is being stored; identity is what counts."""

    store: list[StateBatch] = field(default_factory=list)


class _Outcome(NamedTuple):
    state: RecordState
    reason: DeadLetterReason | None = None
    is_gap: bool = False
    """There was no record."""


@dataclass(slots=True, eq=False)
class _Pending:
    acknowledgement: Acknowledgement
    outcome: _Outcome


@dataclass(slots=True)
class Run:
    """Neighbouring records of which the same is true."""

    first: int
    last: int
    state: RecordState
    delivery_count: int = 0
    member_id: str = NO_MEMBER
    deadline_ms: int = 0
    rests_until_ms: int = 0
    pending: _Pending | None = None

    def __len__(self) -> int:
        return self.last - self.first + 1

    def part(self, first: int, last: int) -> Run:
        return Run(
            first,
            last,
            self.state,
            self.delivery_count,
            self.member_id,
            self.deadline_ms,
            self.rests_until_ms,
            self.pending,
        )

    def continues(self, before: Run) -> bool:
        """Whether the two can be one."""
        return (
            self.state is before.state
            and self.delivery_count == before.delivery_count
            and self.pending is before.pending
            and self.deadline_ms == before.deadline_ms
            and self.rests_until_ms == before.rests_until_ms
            and self.member_id == before.member_id
        )


def _first(run: Run) -> int:
    return run.first


class Window:
    """The records in flight of one share-partition."""

    def __init__(self, start_offset: int, limits: Limits) -> None:
        self.limits = limits
        self.start_offset = start_offset
        self.end_offset = start_offset
        """The first offset that was never given out."""
        self._runs: list[Run] = []
        """Together exactly the window, in order."""
        self._available_from = start_offset
        """Nothing below it is available."""

    def __repr__(self) -> str:
        return f"Window({self.start_offset}..{self.end_offset}, {len(self._runs)} runs)"

    @classmethod
    def load(cls, start_offset: int, batches: Sequence[StateBatch], limits: Limits) -> tuple[Window, Changes]:
        """The window that stored state describes, and the dead letters that were on their way; ValueError: nonsense.

        What lies between stored batches was given out and never answered: it is available again.
        """
        window = cls(start_offset, limits)
        changes = Changes()
        for batch in batches:
            if batch.first_offset < window.end_offset or batch.last_offset < batch.first_offset:
                raise ValueError(f"state batch {batch} after {window!r}")
            if batch.first_offset > window.end_offset:
                window._append(Run(window.end_offset, batch.first_offset - 1, AVAILABLE))
            state = AVAILABLE if batch.state is ACQUIRED else batch.state
            count = 0 if state.is_terminal else batch.delivery_count
            window._append(Run(batch.first_offset, batch.last_offset, state, count))
            if state is ARCHIVING:
                is_worn_out = batch.delivery_count >= limits.max_deliveries
                reason = DeadLetterReason.DELIVERY_COUNT_EXCEEDED if is_worn_out else DeadLetterReason.REJECTED
                changes.dead_letters.append(
                    DeadLetter(batch.first_offset, batch.last_offset, batch.delivery_count, reason)
                )
        window._advance()
        return window, changes

    # --- questions ----------------------------------------------------------------------------------------------------

    @property
    def in_flight(self) -> int:
        """How much of the limit is used."""
        return self.end_offset - self.start_offset

    @property
    def completed(self) -> int:
        """How many records of the window are done with, or will be once their state is stored (KIP-1226)."""
        return sum(
            len(run)
            for run in self._runs
            if run.state.is_terminal or (run.pending is not None and run.pending.outcome.state.is_terminal)
        )

    def runs(self) -> Iterator[Run]:
        """The window piece by piece; not to be changed."""
        return iter(self._runs)

    def next_fetch_offset(self, now_ms: int) -> int | None:
        """Where to read for the next acquisition; None while there is nothing to give and no room for more."""
        first_available = None
        for position in range(self._index(self._available_from), len(self._runs)):
            run = self._runs[position]
            if run.state is AVAILABLE:
                if first_available is None:
                    first_available = self._available_from = run.first
                if run.rests_until_ms <= now_ms:
                    return run.first
        if first_available is None:
            self._available_from = self.end_offset
        return self.end_offset if self.in_flight < self.limits.max_locks else None

    def next_deadline_ms(self) -> int | None:
        """When the next lock runs out."""
        return min(
            (run.deadline_ms for run in self._runs if run.state is ACQUIRED and run.pending is None), default=None
        )

    def next_rested_ms(self, now_ms: int) -> int | None:
        """When the next resting record may be given out again."""
        return min(
            (run.rests_until_ms for run in self._runs if run.state is AVAILABLE and run.rests_until_ms > now_ms),
            default=None,
        )

    # --- acquiring ----------------------------------------------------------------------------------------------------

    def acquire(
        self,
        member_id: str,
        batches: Sequence[LogBatch],
        *,
        fetch_offset: int,
        max_records: int,
        now_ms: int,
        batch_size: int = 0,
        mode: AcquireMode = AcquireMode.BATCH_OPTIMIZED,
    ) -> list[Acquired]:
        """Give records of `batches`, which the log has from `fetch_offset` on, to a member.

        Whole batches where the mode allows it, then possibly more than `max_records`. Offsets that the log skips or
        that nobody may see are archived. `batch_size`: longer ranges are told in parts of about that many records.
        """
        assert fetch_offset <= self.end_offset, "what lies between was never read, and would be lost"
        taking = _Taking(member_id, max_records, now_ms, now_ms + self.limits.lock_ms, batch_size, mode)
        position = max(fetch_offset, self.start_offset)
        for batch in batches:
            if batch.last_offset < position:
                continue
            if batch.first_offset > position:
                self._skip(position, batch.first_offset - 1)
                position = batch.first_offset
            if batch.is_deliverable:
                self._take(taking, position, batch)
                if taking.is_over:
                    break
            else:
                self._skip(position, batch.last_offset)
            position = batch.last_offset + 1
        self._advance()
        return taking.result

    def _take(self, taking: _Taking, position: int, batch: LogBatch) -> None:
        """Acquire what is available of one batch of the log, from `position` on."""
        old_end = self.end_offset
        last_old = min(batch.last_offset, old_end - 1)
        while position <= last_old and not taking.is_over:
            run = self._runs[self._index(position)]
            last = min(run.last, last_old)
            if run.state is AVAILABLE and run.rests_until_ms <= taking.now_ms:
                last = self._take_again(taking, run, position, last, batch)
            position = last + 1
        first_new = max(position, old_end)
        if taking.is_over or first_new > batch.last_offset:
            taking.end_batch()
            return
        room = self.limits.max_locks - self.in_flight
        last = batch.last_offset
        if taking.mode is AcquireMode.RECORD_LIMIT:
            last = min(last, first_new + min(room, taking.remaining) - 1)
        if room > 0 and last >= first_new:
            self._append(Run(first_new, last, ACQUIRED, 1, taking.member_id, taking.deadline_ms))
            taking.took(first_new, last, 1)
        if room <= 0 or last < batch.last_offset:
            taking.is_over = True
        taking.end_batch()

    def _take_again(self, taking: _Taking, run: Run, first: int, last: int, batch: LogBatch) -> int:
        """Acquire available records that were delivered before; the last offset that was dealt with."""
        count = run.delivery_count
        if taking.mode is AcquireMode.RECORD_LIMIT:
            last = min(last, first + taking.remaining - 1)
        careful_from = max(MIN_CAREFUL_COUNT, ceil(self.limits.max_deliveries / 2))
        if count >= careful_from:
            # One bad record fails the batch it comes with. Delivered in ever smaller parts, and the last time alone,
            # it takes fewer and fewer others with it.
            if taking.count:
                taking.is_over = True
                return first - 1
            is_last_try = count >= self.limits.max_deliveries - 1 and self.limits.max_deliveries > MIN_CAREFUL_COUNT
            size = batch.last_offset - batch.first_offset + 1
            last = min(last, first + (1 if is_last_try else max(1, size >> (count - careful_from + 1))) - 1)
            taking.is_over = True
        begin, end = self._carve(first, last)
        for position in range(begin, end):
            taken = self._runs[position]
            taken.state, taken.delivery_count = ACQUIRED, count + 1
            taken.member_id, taken.deadline_ms, taken.rests_until_ms = taking.member_id, taking.deadline_ms, 0
        self._merge(begin, end)
        taking.took(first, last, count + 1)
        return last

    def _skip(self, first: int, last: int) -> None:
        """Nobody will ever get these: archive what is available of them, and what is new if it comes next."""
        last_old = min(last, self.end_offset - 1)
        if first <= last_old:
            begin, end = self._carve(first, last_old)
            for run in self._runs[begin:end]:
                if run.state is AVAILABLE:
                    run.state, run.delivery_count, run.rests_until_ms = ARCHIVED, 0, 0
            self._merge(begin, end)
        if last >= self.end_offset:
            self._append(Run(self.end_offset, last, ARCHIVED))

    # --- acknowledging ------------------------------------------------------------------------------------------------

    def acknowledge(self, member_id: str, batches: Sequence[AcknowledgeBatch], now_ms: int) -> Acknowledgement:
        """Take a member's word for records it holds: all of it or nothing (ApiError). `finish` makes it count.

        Renewals count at once. What is said of records below the start is passed over: they are gone.
        """
        said = pieces(batches)
        for first, last, kind in said:
            self._check(member_id, max(first, self.start_offset), last, kind)
        acknowledgement = Acknowledgement()
        known: dict[_Outcome, _Pending] = {}
        for first, last, kind in said:
            if last < self.start_offset:
                continue
            begin, end = self._carve(max(first, self.start_offset), last)
            for run in self._runs[begin:end]:
                if kind is AcknowledgeType.RENEW:
                    run.deadline_ms = now_ms + self.limits.lock_ms
                else:
                    self._propose(acknowledgement, run, self._outcome(kind, run.delivery_count), known)
            self._merge(begin, end)
        acknowledgement.store = join(acknowledgement.store)
        return acknowledgement

    def release(self, member_id: str) -> Acknowledgement:
        """The member is gone: everything it holds is released, once `finish` says that this is stored."""
        acknowledgement = Acknowledgement()
        known: dict[_Outcome, _Pending] = {}
        for run in self._runs:
            if run.state is ACQUIRED and run.member_id == member_id and run.pending is None:
                outcome = self._outcome(AcknowledgeType.RELEASE, run.delivery_count)
                self._propose(acknowledgement, run, outcome, known)
        acknowledgement.store = join(acknowledgement.store)
        return acknowledgement

    def finish(self, acknowledgement: Acknowledgement, *, is_stored: bool, now_ms: int) -> Changes:
        """The state of an acknowledgement was stored, or was not: then the members hold their records as before."""
        changes = Changes()
        for stored in acknowledgement.store:
            first = max(stored.first_offset, self.start_offset)
            if first > stored.last_offset or not self._runs:
                continue
            begin = end = self._index(first)
            while end < len(self._runs) and self._runs[end].first <= stored.last_offset:
                run = self._runs[end]
                end += 1
                pending = run.pending
                if pending is None or pending.acknowledgement is not acknowledgement:
                    continue
                run.pending = None
                if is_stored:
                    self._become(run, pending.outcome, now_ms, changes)
                elif run.deadline_ms <= now_ms:
                    self._expire(run, now_ms, changes)
            self._merge(begin, end)
        self._advance()
        return changes

    def _check(self, member_id: str, first: int, last: int, kind: AcknowledgeType) -> None:
        if last < first:
            return
        if last >= self.end_offset:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"offset {last} was not given out")
        if kind is AcknowledgeType.RENEW and not self.limits.renews:
            raise ApiError(ErrorCode.INVALID_RECORD_STATE, "this group does not renew locks")
        for position in range(self._index(first), len(self._runs)):
            run = self._runs[position]
            if run.first > last:
                return
            if run.state is not ACQUIRED or run.pending is not None or run.member_id != member_id:
                raise ApiError(
                    ErrorCode.INVALID_RECORD_STATE, f"offset {max(first, run.first)} is not held by this member"
                )

    @staticmethod
    def _propose(
        acknowledgement: Acknowledgement, run: Run, outcome: _Outcome, known: dict[_Outcome, _Pending]
    ) -> None:
        pending = known.get(outcome)
        if pending is None:
            pending = known[outcome] = _Pending(acknowledgement, outcome)
        run.pending = pending
        acknowledgement.store.append(StateBatch(run.first, run.last, outcome.state, run.delivery_count))

    def _outcome(self, kind: AcknowledgeType, delivery_count: int) -> _Outcome:
        match kind:
            case AcknowledgeType.ACCEPT:
                return _Outcome(ACKNOWLEDGED)
            case AcknowledgeType.GAP:
                return _Outcome(ARCHIVED, is_gap=True)
            case AcknowledgeType.REJECT:
                return self._given_up(DeadLetterReason.REJECTED)
            case _:
                return self._released(delivery_count, DeadLetterReason.DELIVERY_COUNT_EXCEEDED)

    def _released(self, delivery_count: int, reason: DeadLetterReason) -> _Outcome:
        return _Outcome(AVAILABLE) if delivery_count < self.limits.max_deliveries else self._given_up(reason)

    def _given_up(self, reason: DeadLetterReason) -> _Outcome:
        return _Outcome(ARCHIVING, reason) if self.limits.dead_letters else _Outcome(ARCHIVED)

    # --- time and the log ---------------------------------------------------------------------------------------------

    def expire(self, now_ms: int) -> Changes:
        """Release what was held for too long; it can be given out again at once."""
        changes = Changes()
        for run in self._runs:
            if run.state is ACQUIRED and run.pending is None and run.deadline_ms <= now_ms:
                self._expire(run, now_ms, changes)
        if changes.store:
            changes.store = join(changes.store)
            self._merge(0, len(self._runs))
            self._advance()
        return changes

    def _expire(self, run: Run, now_ms: int, changes: Changes) -> None:
        outcome = self._released(run.delivery_count, DeadLetterReason.LOCK_TIMEOUT)
        changes.store.append(StateBatch(run.first, run.last, outcome.state, run.delivery_count))
        changes.timed_out += len(run)
        self._become(run, outcome, now_ms, changes)

    def dead_lettered(self, letter: DeadLetter) -> Changes:
        """A dead letter was copied, or nobody wants it any more: the record is done with."""
        changes = Changes()
        first = max(letter.first_offset, self.start_offset)
        if first > letter.last_offset:
            return changes
        begin, end = self._carve(first, letter.last_offset)
        for run in self._runs[begin:end]:
            if run.state is ARCHIVING:
                changes.store.append(StateBatch(run.first, run.last, ARCHIVED, run.delivery_count))
                run.state, run.delivery_count = ARCHIVED, 0
        self._merge(begin, end)
        self._advance()
        changes.store = join(changes.store)
        changes.is_news = True  # the window may have room again
        return changes

    def move_log_start(self, log_start: int) -> bool:
        """The log begins at `log_start` now: what lies before it is gone, whoever holds it. Whether anything moved."""
        if log_start <= self.start_offset:
            return False
        if log_start >= self.end_offset:
            self._runs.clear()
            self.end_offset = log_start
        else:
            begin = self._carve(log_start, self.end_offset - 1)[0]
            del self._runs[:begin]
        self.start_offset = log_start
        self._advance()
        return True

    def _become(self, run: Run, outcome: _Outcome, now_ms: int, changes: Changes) -> None:
        """An acquired record is no longer held."""
        run.state = outcome.state
        run.member_id, run.deadline_ms = NO_MEMBER, 0
        changes.is_news = True
        if outcome.state in _GIVEN_UP and not outcome.is_gap:
            changes.given_up += len(run)
        if outcome.reason is not None:
            changes.dead_letters.append(DeadLetter(run.first, run.last, run.delivery_count, outcome.reason))
        elif outcome.state is AVAILABLE:
            run.rests_until_ms = self._rests_until(run.delivery_count, now_ms)
            self._available_from = min(self._available_from, run.first)
        else:
            run.delivery_count = 0  # nobody asks any more, and neighbours become one

    def _rests_until(self, delivery_count: int, now_ms: int) -> int:
        if self.limits.backoff_ms <= 0:
            return 0
        rest_ms = self.limits.backoff_ms << min(max(delivery_count - 1, 0), MAX_BACKOFF_DOUBLINGS)
        return now_ms + min(rest_ms, max(self.limits.backoff_max_ms, self.limits.backoff_ms))

    # --- runs ---------------------------------------------------------------------------------------------------------

    def _index(self, offset: int) -> int:
        """Where the run that has `offset` lies."""
        return max(bisect_right(self._runs, offset, key=_first) - 1, 0)

    def _carve(self, first: int, last: int) -> tuple[int, int]:
        """Have runs begin at `first` and end at `last`; the positions from and to which they lie there."""
        begin = self._index(first)
        run = self._runs[begin]
        if run.first < first:
            self._runs.insert(begin + 1, run.part(first, run.last))
            run.last = first - 1
            begin += 1
        end = self._index(last)
        run = self._runs[end]
        if run.last > last:
            self._runs.insert(end + 1, run.part(last + 1, run.last))
            run.last = last
        return begin, end + 1

    def _merge(self, begin: int, end: int) -> None:
        """Make one of neighbours between these positions, and beside them, of which the same is true."""
        begin, end = max(begin - 1, 0), end + 1
        merged: list[Run] = []
        for run in self._runs[begin:end]:
            if merged and run.continues(merged[-1]):
                merged[-1].last = run.last
            else:
                merged.append(run)
        self._runs[begin:end] = merged

    def _append(self, run: Run) -> None:
        self.end_offset = run.last + 1
        if self._runs and run.continues(self._runs[-1]):
            self._runs[-1].last = run.last
        else:
            self._runs.append(run)

    def _advance(self) -> None:
        """Let go of what is done with at the start."""
        done = 0
        while done < len(self._runs) and self._runs[done].state.is_terminal:
            done += 1
        if done:
            del self._runs[:done]
            self.start_offset = self._runs[0].first if self._runs else self.end_offset


@dataclass(slots=True)
class _Taking:
    """One acquisition under way."""

    member_id: str
    max_records: int
    now_ms: int
    deadline_ms: int
    batch_size: int
    mode: AcquireMode
    count: int = 0
    is_over: bool = False
    result: list[Acquired] = field(default_factory=list)
    _is_new_batch: bool = True

    @property
    def remaining(self) -> int:
        return self.max_records - self.count

    def took(self, first: int, last: int, delivery_count: int) -> None:
        self.count += last - first + 1
        before = self.result[-1] if self.result else None
        if (
            before is not None
            and before.last_offset + 1 == first
            and before.delivery_count == delivery_count
            and not self._begins_part(before)
        ):
            self.result[-1] = before._replace(last_offset=last)
        else:
            self.result.append(Acquired(first, last, delivery_count))
        self._is_new_batch = False
        if self.mode is AcquireMode.RECORD_LIMIT and self.remaining <= 0:
            self.is_over = True

    def end_batch(self) -> None:
        self._is_new_batch = True
        if self.remaining <= 0:
            self.is_over = True

    def _begins_part(self, before: Acquired) -> bool:
        return (
            self._is_new_batch
            and 0 < self.batch_size <= before.last_offset - before.first_offset + 1
            and self.mode is AcquireMode.BATCH_OPTIMIZED
        )


def pieces(batches: Sequence[AcknowledgeBatch]) -> list[tuple[int, int, AcknowledgeType]]:
    """Ranges with one type each; INVALID_REQUEST where the batches make no sense together."""
    found: list[tuple[int, int, AcknowledgeType]] = []
    before = -1
    for batch in batches:
        if batch.first_offset <= before or batch.last_offset < batch.first_offset:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the acknowledged ranges are not in order")
        before = batch.last_offset
        types = batch.types
        count = batch.last_offset - batch.first_offset + 1
        if len(types) not in {1, count}:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a range needs one acknowledge type, or one for each offset")
        first = batch.first_offset
        for value, same in groupby(types):
            kind = _KINDS.get(value)
            if kind is None:
                raise ApiError(ErrorCode.INVALID_REQUEST, f"{value} is no acknowledge type")
            last = first + (count if len(types) == 1 else len(list(same))) - 1
            found.append((first, last, kind))
            first = last + 1
    return found
