"""Ctrl-C as something to look at, for commands that finish what they have in their hands first."""

from __future__ import annotations

import select
import signal
import socket
from types import FrameType, TracebackType
from typing import Self


class Interruptions:
    """Ctrl-C as something to look at: the first one is remembered, a second one raises KeyboardInterrupt.

    An exception in the middle of a read would lose the lines that were read but not yet sent. So reads wait with
    `wait_readable`, which a signal ends, and the loop looks at `came` when no line is in its hands.
    """

    def __init__(self) -> None:
        self._asked = False
        self._wake_up, self._woken = socket.socketpair()

    def __enter__(self) -> Self:
        self._wake_up.setblocking(False)
        self._woken.setblocking(False)
        self._previous_fd = signal.set_wakeup_fd(self._woken.fileno(), warn_on_full_buffer=False)
        self._previous = signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._previous)
        signal.set_wakeup_fd(self._previous_fd)
        self._wake_up.close()
        self._woken.close()

    def came(self) -> bool:
        return self._asked

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True

    def wait_readable(self, fd: int) -> None:
        """Return when `fd` has something to read, or a signal came."""
        select.select([fd, self._wake_up.fileno()], [], [])

    def wait(self, seconds: float) -> None:
        """Return after this time, or when a signal came."""
        select.select([self._wake_up.fileno()], [], [], seconds)
