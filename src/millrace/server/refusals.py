"""What the log says of peers that are turned away: connections that are refused, handshakes and logins that fail, bytes
that are no protocol.

Anybody can bring these about, as fast as a network carries them. So each has its line while they are few:
`LINES_PER_HOST` of one address and `LINES` of all within `SPAN_S`. What goes beyond that is counted, and told in one
line when the span is over. Not here: the audit log, which counts by itself (`security.audit`).

Owner: the event loop.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer

logger = logging.getLogger(__name__)

SPAN_S: Final = 10.0
LINES_PER_HOST: Final = 20
LINES: Final = 200
MAX_HOSTS: Final = 1000
"""Addresses that are counted one by one."""
_OTHERS: Final = "others"


class Refusals:
    """The lines of one listener."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._told: Counter[str] = Counter()
        self._lines = 0
        self._untold: Counter[str] = Counter()
        self._span: Timer | None = None

    def __repr__(self) -> str:
        return f"Refusals({self._lines} told, {self._untold.total()} not)"

    def tell(self, host: str, message: str, *args: object, level: int = logging.INFO) -> None:
        """Say, or count, that somebody at `host` was turned away; `message` and `args` are those of a logger."""
        if self._span is None:
            self._span = self._clock.call_later(SPAN_S, self._end_span)
        if self._lines < LINES and self._told[host] < LINES_PER_HOST:
            self._lines += 1
            self._told[host] += 1
            logger.log(level, message, *args)
        else:
            self._untold[host if host in self._untold or len(self._untold) < MAX_HOSTS else _OTHERS] += 1

    def stop(self) -> None:
        """Tell what was counted. More may come."""
        if self._span is not None:
            self._span.cancel()
            self._end_span()

    def _end_span(self) -> None:
        untold = self._untold
        self._span, self._lines, self._told, self._untold = None, 0, Counter(), Counter()
        if untold:
            ((host, most),) = untold.most_common(1)
            logger.warning(
                "%d more peers were turned away than these lines tell, within %.0f s: %d of them from %s",
                untold.total(),
                SPAN_S,
                most,
                host,
            )
