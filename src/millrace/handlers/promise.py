"""An answer that comes later and is passed on in the very call that makes it.

An asyncio future does so a turn of the loop later. On the hot path that turn is time in which whole requests are
handled, while an answer that is ready waits. A promise is always kept; what went wrong is an answer, too, and may be an
exception.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class Promise(Generic[T]):
    """Made by a handler, waited for by one connection."""

    __slots__ = ("_waiter",)

    def __init__(self) -> None:
        self._waiter: Callable[[T], object] | None = None

    def then(self, waiter: Callable[[T], object]) -> None:
        """Have `waiter` called with the answer; to be called before the promise can be kept."""
        self._waiter = waiter

    def keep(self, answer: T) -> None:
        """Give the answer; whoever does not wait any more is not told."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            waiter(answer)

    def cancel(self) -> None:
        """Nobody waits any more."""
        self._waiter = None
