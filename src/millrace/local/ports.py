"""Ports for child processes: free now, and nobody else's of ours while the process that listens on them is down.

A port is chosen here and taken later, by a child; a broker that is restarted gives its port up in between. So nobody
but the owner may be given it meanwhile. Outgoing connections are not: the ports lie below the range from which the
system gives them theirs. Other processes that choose ports here are not either: each has a block of ports to itself,
and goes through it in order. Who has a block is told by a name that only one socket of a network can have (Linux's
abstract names: they vanish with their process, and are as separate as the ports of separate networks are). Where
there are no such names, or no block is left, ports are chosen at random, and only differ within this process.
"""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
from pathlib import Path
from typing import Final

from millrace.errors import MillraceError

_OUTGOING_PORTS: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_FIRST_OUTGOING_PORT: Final = 32768
_LOWEST_PORT: Final = 15_000
_BLOCK: Final = 500


def free_ports(host: str, count: int) -> list[int]:
    """Ports on which nobody listens; none of them is given again soon."""
    return _this_process().take(host, count)


def is_free(host: str, port: int) -> bool:
    """Whether nobody listens there now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError:
        return False
    return True


class _Ports:
    """The ports of one process, given in order, each again only when all others had their turn."""

    def __init__(self) -> None:
        self.pid: Final = os.getpid()
        self._lock = threading.Lock()
        end = max(_first_outgoing_port(), _LOWEST_PORT + _BLOCK)
        starts = range(_LOWEST_PORT, end - _BLOCK + 1, _BLOCK)
        start = _claim_one_of(random.sample(starts, len(starts)))
        self._ports = range(_LOWEST_PORT, end) if start is None else range(start, start + _BLOCK)
        self._next = random.randrange(len(self._ports))  # noqa: S311 - not a secret

    def take(self, host: str, count: int) -> list[int]:
        taken: list[int] = []
        with self._lock:
            for _ in self._ports:
                port = self._ports[self._next]
                self._next = (self._next + 1) % len(self._ports)
                if is_free(host, port):
                    taken.append(port)
                if len(taken) == count:
                    return taken
        first, last = self._ports[0], self._ports[-1]
        raise MillraceError(f"not even {count} of the ports from {first} to {last} are free on {host}")


def _claim_one_of(starts: list[int]) -> int | None:
    """The first block that nobody has; a socket whose name says that it is ours stays open as long as the process."""
    if sys.platform != "linux":
        return None
    claim = socket.socket(socket.AF_UNIX)
    for start in starts:
        try:
            claim.bind(f"\0millrace-ports-{start}")
        except OSError:
            continue
        claim.detach()  # nobody closes it, and nobody is warned of that
        return start
    claim.close()
    return None


_ports: _Ports | None = None


def _this_process() -> _Ports:
    global _ports
    if _ports is None or _ports.pid != os.getpid():  # a forked child shares our socket, and must not share our ports
        _ports = _Ports()
    return _ports


def _first_outgoing_port() -> int:
    try:
        return int(_OUTGOING_PORTS.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return _USUAL_FIRST_OUTGOING_PORT
