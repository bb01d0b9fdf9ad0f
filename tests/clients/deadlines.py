"""Calls of client libraries that may wait for ever, with an end."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, call: Callable[[], T]) -> T:
    """What the call returns or raises; TimeoutError when it does not come back, which leaves its thread behind."""
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised where the test looks
            outcome.set_exception(error)

    threading.Thread(target=run, name="call with a deadline", daemon=True).start()
    return outcome.result(seconds)
