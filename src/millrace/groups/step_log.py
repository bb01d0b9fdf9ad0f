"""From decisions to the log: how the records and timers of one event of a KIP-848 or share group take effect.

An event's records have been applied to the group while they were decided on. Here they are appended, in one batch or
several; what the log refuses is taken back. Owner: the shard. Not here: decisions (`modern.step`, `share.step`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

from millrace.errors import ApiError
from millrace.groups.timers import CancelTimer, GroupTimers, SetTimer, StartTimer, TimerEffect
from millrace.replication.state_topic import Entry

BATCH_BYTES: Final = 512 * 1024
"""The records of one event go into one batch up to here; a batch must fit max.message.bytes."""
NO_LIMIT: Final = 2**63
"""For events that are whole or not at all: the first one of a group, and a change of its protocol."""
RETRY_MS: Final = 1_000
"""After how long a removal that the log refused is tried again."""


class LogHost(Protocol):
    """The shard, as far as it is needed here."""

    def append(self, entries: Sequence[Entry]) -> asyncio.Future[None]:
        """Append now; done when durable. ApiError where the log refuses."""


class Decided(Protocol):
    """One event that was decided."""

    timers: list[TimerEffect]

    @property
    def group_id(self) -> str: ...

    def entries(self) -> Iterable[Entry]:
        """Its records, for the log."""

    def undo(self, from_record: int = 0) -> None:
        """Take the records from the given one on back."""


def append_step(
    host: LogHost, step: Decided, timers: GroupTimers, *, is_whole: bool = False
) -> asyncio.Future[None] | None:
    """Write the records of a step; None where it has none. Its timers are then the caller's to set.

    A refusal takes back what is not in the log (ApiError). What is, counts: a member in it has its session.
    """
    done: asyncio.Future[None] | None = None
    written = 0
    for batch in batches(step.entries(), NO_LIMIT if is_whole else BATCH_BYTES):
        try:
            done = host.append(batch)
        except ApiError as refusal:
            step.undo(written)
            if written:
                set_timers(timers, step.group_id, step.timers)
            raise ApiError(refusal.code, f"the state of group {step.group_id} cannot be written") from refusal
        written += len(batch)
    return done


def set_timers(timers: GroupTimers, group_id: str, effects: Iterable[TimerEffect]) -> None:
    """Do what an event decided about timers."""
    for effect in effects:
        key = (group_id, effect.key)
        match effect:
            case SetTimer(_, delay_ms):
                timers.set(key, delay_ms)
            case StartTimer(_, delay_ms):
                if key not in timers:
                    timers.set(key, delay_ms)
            case CancelTimer():
                timers.cancel(key)


def batches(entries: Iterable[Entry], max_bytes: int) -> Iterable[list[Entry]]:
    """The entries of an event, in batches of a size that the log takes.

    The targets of thousands of members may not fit one. Cut short anywhere they are older than the group's epoch, and
    are computed again.
    """
    batch: list[Entry] = []
    size = 0
    for entry in entries:
        batch.append(entry)
        size += len(entry[0]) + len(entry[1] or b"")
        if size >= max_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
