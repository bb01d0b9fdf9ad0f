"""Files that are no part of a log any more and stay on disk for a while: `file.delete.delay.ms` and its default.

Until then whoever deleted by mistake can copy them away. A directory that gets full cannot wait for that, and a broker
that stops does not leave them to its next start. Owner: the event loop; the removing itself is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from millrace.clock import Clock, Timer


class _Waiting(NamedTuple):
    directory: Path
    timer: Timer


class Removals:
    """What waits to be removed, by the data directory in which it lies."""

    def __init__(self, clock: Clock, act: Callable[[Callable[[], object]], object]) -> None:
        """`act` is given what removes files when the time has come."""
        self._clock = clock
        self._act = act
        self._waiting: dict[Callable[[], object], _Waiting] = {}

    def __repr__(self) -> str:
        return f"Removals({len(self._waiting)} waiting)"

    def later(self, directory: Path, work: Callable[[], object], delay_ms: int) -> None:
        """Do `work`, which removes something in `directory`, after so long."""
        if delay_ms <= 0:
            self._act(work)
            return
        timer = self._clock.call_later(delay_ms / 1000, lambda: self._do(work))
        self._waiting[work] = _Waiting(directory, timer)

    def hurry(self, directory: Path | None = None) -> None:
        """Remove now what waits, of one directory or of all."""
        for work in [work for work, each in self._waiting.items() if directory in (None, each.directory)]:
            self._do(work)

    def forget(self) -> None:
        """Remove nothing more; what is left the next start finds."""
        for each in self._waiting.values():
            each.timer.cancel()
        self._waiting.clear()

    def _do(self, work: Callable[[], object]) -> None:
        self._waiting.pop(work).timer.cancel()
        self._act(work)
