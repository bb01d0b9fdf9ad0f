"""Where each leader epoch begins in a log: the answer to "up to which offset do our logs agree?" (KIP-101, KIP-279).

Kept in `leader-epoch-checkpoint` (format: `checkpoint`). Every batch carries its epoch, so an entry that a crash lost
is found again by the scan of recovery; the file is replaced, synced, before a flush that covers the epoch counts as
done.

Invariant: epochs and start offsets both increase strictly.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from millrace.model import NO_EPOCH


class LeaderEpochs:
    """The epochs of one log, oldest first."""

    __slots__ = ("_epochs", "_starts", "dirty")

    def __init__(self, entries: Iterable[tuple[int, int]] = ()) -> None:
        self._epochs: list[int] = []
        self._starts: list[int] = []
        self.dirty = False
        """Whether the file is behind."""
        for epoch, start in entries:
            self._epochs.append(epoch)
            self._starts.append(start)

    def __repr__(self) -> str:
        return f"LeaderEpochs({self.entries()})"

    @property
    def latest(self) -> int:
        return self._epochs[-1] if self._epochs else NO_EPOCH

    def entries(self) -> list[tuple[int, int]]:
        return list(zip(self._epochs, self._starts, strict=True))

    def assign(self, epoch: int, start_offset: int) -> None:
        """Note that `epoch` begins at `start_offset`; entries that contradict it give way, an older one is ignored."""
        if epoch < 0 or (self._epochs and epoch <= self._epochs[-1]):
            return
        # An epoch that got no record before the next one began leaves an entry with the same start: it is useless.
        while self._starts and self._starts[-1] >= start_offset:
            self._epochs.pop()
            self._starts.pop()
        self._epochs.append(epoch)
        self._starts.append(start_offset)
        self.dirty = True

    def end_offset_for(self, epoch: int, log_end_offset: int) -> tuple[int, int]:
        """The largest epoch at or below `epoch` and where it ends; (-1, -1) where nothing is known."""
        if epoch < 0 or not self._epochs or epoch > self._epochs[-1]:
            return (NO_EPOCH, -1)
        if epoch == self._epochs[-1]:
            return (epoch, log_end_offset)
        slot = bisect_right(self._epochs, epoch)
        if slot == 0:
            return (epoch, self._starts[0])
        return (self._epochs[slot - 1], self._starts[slot])

    def epoch_for(self, offset: int) -> int:
        """The epoch that wrote `offset`; -1 where it is not known."""
        slot = bisect_right(self._starts, offset)
        return self._epochs[slot - 1] if slot else NO_EPOCH

    def truncate_end(self, end_offset: int) -> None:
        """Forget the epochs that begin at or after the log's new end."""
        while self._starts and self._starts[-1] >= end_offset:
            self._epochs.pop()
            self._starts.pop()
            self.dirty = True

    def truncate_start(self, start_offset: int) -> None:
        """Forget the epochs that end before the log's new start; the one in force there now begins there."""
        slot = bisect_right(self._starts, start_offset) - 1
        if slot < 0 or (slot == 0 and self._starts[0] == start_offset):
            return
        del self._epochs[:slot]
        del self._starts[:slot]
        self._starts[0] = start_offset
        self.dirty = True

    def clear(self) -> None:
        self.dirty = self.dirty or bool(self._epochs)
        self._epochs.clear()
        self._starts.clear()
