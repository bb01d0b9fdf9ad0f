"""What runs on behalf of somebody who looks at pages: their scans and tails, each in a thread of its own.

One `Workbench` for each user of the cluster. How many run at a time is bounded, and so is how many that are over are
kept. A scan goes on only while somebody looks: a page that is left behind does not read ten million records for nobody.

Called from worker threads and from the loop; a lock guards the tables, and is never held while something is waited for.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Final

from millrace.client.settings import ClientSettings
from millrace.clock import Clock, SystemClock
from millrace.console.records.plan import ScanRequest
from millrace.console.records.scan import Scan
from millrace.console.records.tail import Tail, TailRequest

MAX_RUNNING: Final = 8
MAX_KEPT: Final = 16
"""Scans that are over, for who comes back to their pages."""
UNWATCHED_S: Final = 20.0
_NAME_BYTES: Final = 16

logger = logging.getLogger(__name__)


class Busy(Exception):
    """Too much runs already; the text says what to do."""


class ScanAtWork:
    """A scan and its thread."""

    def __init__(self, name: str, scan: Scan, clock: Clock) -> None:
        self.name = name
        self.scan = scan
        self._clock = clock
        self._over = threading.Event()
        self._looked_s = clock.monotonic()

    def __repr__(self) -> str:
        return f"ScanAtWork({self.scan!r})"

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def look(self) -> None:
        """Somebody still wants it."""
        self._looked_s = self._clock.monotonic()

    def wait(self, seconds: float) -> bool:
        """Whether it is over, at the latest after so long."""
        return self._over.wait(seconds)

    def run(self) -> None:
        try:
            for _ in self.scan.steps():
                if self._clock.monotonic() - self._looked_s > UNWATCHED_S:
                    self.scan.cancel()
        finally:
            self._over.set()


class TailAtWork:
    """A tail and its thread."""

    def __init__(self, name: str, tail: Tail) -> None:
        self.name = name
        self.tail = tail

    def __repr__(self) -> str:
        return f"TailAtWork({self.tail!r})"


class Workbench:
    """The scans and tails of one user."""

    def __init__(self, settings: ClientSettings, clock: Clock | None = None) -> None:
        self._settings = settings
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._scans: dict[str, ScanAtWork] = {}
        self._tails: dict[str, TailAtWork] = {}

    def __repr__(self) -> str:
        return f"Workbench({len(self._scans)} scans, {len(self._tails)} tails)"

    def scan(self, request: ScanRequest) -> ScanAtWork:
        """Begin a scan. FilterError; Busy."""
        work = ScanAtWork(secrets.token_urlsafe(_NAME_BYTES), Scan(self._settings, request), self._clock)
        with self._lock:
            running = [each for each in self._scans.values() if not each.is_over]
            self._make_room(len(running) + len(self._tails))
            over = [name for name, each in self._scans.items() if each.is_over]
            for name in over[: max(len(over) - MAX_KEPT, 0)]:
                del self._scans[name]
            self._scans[work.name] = work
        self._begin(f"console-scan-{request.topic}", work.run)
        return work

    def find_scan(self, name: str) -> ScanAtWork | None:
        with self._lock:
            return self._scans.get(name)

    def tail(self, request: TailRequest) -> TailAtWork:
        """Begin a tail; whoever began it ends it. FilterError; Busy."""
        work = TailAtWork(secrets.token_urlsafe(_NAME_BYTES), Tail(self._settings, request))
        with self._lock:
            self._make_room(len(self._tails) + sum(not each.is_over for each in self._scans.values()))
            self._tails[work.name] = work
        self._begin(f"console-tail-{request.topic}", work.tail.run)
        return work

    def find_tail(self, name: str) -> TailAtWork | None:
        with self._lock:
            return self._tails.get(name)

    def end_tail(self, work: TailAtWork) -> None:
        work.tail.stop()
        with self._lock:
            self._tails.pop(work.name, None)

    def close(self) -> None:
        """End everything; the threads follow."""
        with self._lock:
            scans, self._scans = list(self._scans.values()), {}
            tails, self._tails = list(self._tails.values()), {}
        for scan in scans:
            scan.scan.cancel()
        for tail in tails:
            tail.tail.stop()

    @staticmethod
    def _make_room(running: int) -> None:
        if running >= MAX_RUNNING:
            raise Busy(f"{running} scans and live views run already: cancel one, or close its page, and try again")

    @staticmethod
    def _begin(name: str, work: Callable[[], None]) -> None:
        threading.Thread(target=_logged, args=(name, work), name=name, daemon=True).start()


def _logged(name: str, work: Callable[[], None]) -> None:
    """What a thread raises nobody would see otherwise."""
    try:
        work()
    except Exception:
        logger.exception("%s ended by an error of its own", name)
