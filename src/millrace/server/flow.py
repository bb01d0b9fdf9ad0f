"""Bounds on what a broker holds for its peers: memory, and connections in all, of a listener and per address.

`MemoryBudget` counts bytes of requests from the moment they arrive until their reply is handed to the socket, and bytes
of answers that peers have not taken; `answers` sees to it that these leave a quarter. Over the budget, connections stop
reading and line up; they go on in that order as bytes are given back. While whole requests hold less than half of it,
the first in the line is let through all the same: the rest then lies in half-received requests and unread answers,
which may never give anything back, and a broker full of them would otherwise wait for itself for ever. At twice the
budget that ends, too: whoever sends then is closed. Who has not logged in, and sends more than a login needs, is closed
over the budget already: the rest is for those who have.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from millrace.security.quotas import canonical_address

DEFAULT_BUDGET_BYTES: Final = 256 * 1024 * 1024


class MemoryBudget:
    """Bytes of requests in flight and unread answers, shared by all connections of a broker."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self.used_bytes = 0
        self.serving_bytes = 0
        """Of requests that have arrived whole and wait for their reply; they come back by themselves."""
        self._line: deque[Callable[[], None]] = deque()

    def __repr__(self) -> str:
        return f"MemoryBudget({self.used_bytes:,} of {self.limit_bytes:,} bytes, {len(self._line)} waiting)"

    @property
    def exhausted(self) -> bool:
        return self.used_bytes > self.limit_bytes

    @property
    def overrun(self) -> bool:
        """Lining up was not enough."""
        return self.used_bytes > 2 * self.limit_bytes

    def take(self, size_bytes: int) -> None:
        self.used_bytes += size_bytes

    def give_back(self, size_bytes: int) -> None:
        self.used_bytes -= size_bytes
        self._admit()

    def begin_serving(self, size_bytes: int) -> None:
        self.serving_bytes += size_bytes

    def end_serving(self, size_bytes: int) -> None:
        self.serving_bytes -= size_bytes
        self.used_bytes -= size_bytes
        if self._line:
            self._admit()

    def line_up(self, resume: Callable[[], None]) -> None:
        """Call `resume` once there is room, or once nobody who could make room is left."""
        self._line.append(resume)
        self._admit()

    def leave_line(self, resume: Callable[[], None]) -> None:
        if resume in self._line:
            self._line.remove(resume)
            self._admit()

    def _admit(self) -> None:
        while self._line and (not self.exhausted or self.serving_bytes <= self.limit_bytes // 2):
            resume = self._line.popleft()
            resume()
            if self.exhausted:
                return


class Admission(Protocol):
    """Who counts connections."""

    def admit(self, host: str, /) -> str | None:
        """Count one more connection, or say why it may not be."""

    def release(self, host: str, /) -> None:
        """One that was admitted has ended."""


class ConnectionLimits:
    """How many connections there may be, in all and from one address; all may change, and hold for whoever is new."""

    def __init__(
        self,
        total: Callable[[], int],
        per_host: Callable[[], int],
        of_hosts: Callable[[], Mapping[str, int]] = dict,
        possible: int | None = None,
    ) -> None:
        """`of_hosts` are the addresses with a limit of their own, `possible` is what nobody may exceed."""
        self._total = total
        self._per_host = per_host
        self._of_hosts = of_hosts
        self._possible = possible
        self._open: Counter[str] = Counter()
        self.count = 0

    def admit(self, host: str, *, beyond_total: bool = False) -> str | None:
        """Count one more connection, or say why it may not be; brokers may come `beyond_total`."""
        if self._possible is not None and self.count >= self._possible:
            return f"the process has descriptors for {self._possible} connections"
        if not beyond_total and self.count >= (total := self._total()):
            return f"max.connections is {total}"
        address = canonical_address(host)  # one that comes by IPv4 and IPv6 is one
        own = self._of_hosts().get(address)
        if own is not None and self._open[address] >= own:
            return f"max.connections.per.ip.overrides allows {address} {own}"
        if own is None and self._open[address] >= (per_host := self._per_host()):
            return f"max.connections.per.ip is {per_host}"
        self._open[address] += 1
        self.count += 1
        return None

    def release(self, host: str) -> None:
        address = canonical_address(host)
        self.count -= 1
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


class ListenerLimits:
    """The same for one listener, which may have a limit of its own.

    One that only brokers use is not held to the limit of all: clients that use that up would otherwise keep brokers
    from each other.
    """

    def __init__(self, limits: ConnectionLimits, listener: str, most: Callable[[], int], *, for_brokers: bool) -> None:
        self._limits = limits
        self._listener = listener
        self._most = most
        self._for_brokers = for_brokers
        self.count = 0

    def admit(self, host: str) -> str | None:
        if self.count >= (most := self._most()):
            return f"max.connections of listener {self._listener} is {most}"
        refusal = self._limits.admit(host, beyond_total=self._for_brokers)
        if refusal is None:
            self.count += 1
        return refusal

    def release(self, host: str) -> None:
        self.count -= 1
        self._limits.release(host)
