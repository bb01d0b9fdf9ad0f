"""Client quotas: for whom they are, whose is the one that counts, and how much is too much.

A quota is for an entity: a user, a client id, both, or an address, each by its name or as the default of all that have
no name of their own. Of those that fit a request the most specific one counts, for each kind of quota by itself:

    user and client id, user and any client, user,
    any user and client id, any user and any client, any user,
    client id, any client

Who is held to one number together follows from where it was set: all clients of a user, everybody with a client id, or
one client id of one user. A client that gives no id is a client like any other, and the defaults hold for it (in Kafka
they do not, so that leaving the id away gets around them).

Everything here is a value or counts with the time it is given; who keeps it is `metering`.
"""

from __future__ import annotations

import ipaddress
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from typing import Final, TypeAlias

QuotaEntity: TypeAlias = tuple[tuple[str, str | None], ...]
"""Whom a quota is for: pairs of kind (`user`, `client-id`, `ip`) and name, None for the default; in order of kind."""

USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"

PRODUCER_BYTE_RATE: Final = "producer_byte_rate"
CONSUMER_BYTE_RATE: Final = "consumer_byte_rate"
REQUEST_PERCENTAGE: Final = "request_percentage"
CONTROLLER_MUTATION_RATE: Final = "controller_mutation_rate"
CONNECTION_CREATION_RATE: Final = "connection_creation_rate"

CLIENT_KEYS: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE, REQUEST_PERCENTAGE, CONTROLLER_MUTATION_RATE)
"""Quotas of users and client ids; the one of addresses is CONNECTION_CREATION_RATE."""

MAX_REMEMBERED: Final = 10_000
MAX_NAME: Final = 256
"""Characters of a client id that are kept as they are: clients invent ids, and may send 32 KiB of one."""

Share: TypeAlias = tuple[str | None, str | None]
"""Who counts together: a user, a client id, or one client id of one user."""


def quota_entity(parts: Mapping[str, str | None]) -> QuotaEntity:
    """An entity in the one order in which it is kept."""
    return tuple(sorted(parts.items()))


@dataclass(frozen=True, slots=True)
class Limit:
    """What one request is held to: the number, and whose count it is."""

    rate: float
    share: Share


def candidates(user: str, client_id: str) -> Iterator[tuple[QuotaEntity, Share]]:
    """The entities that a client belongs to, the most specific first, each with who counts together under it."""
    counted = _shortened(client_id)
    one = (user, counted)
    yield quota_entity({USER: user, CLIENT_ID: client_id}), one
    yield quota_entity({USER: user, CLIENT_ID: None}), one
    yield quota_entity({USER: user}), (user, None)
    yield quota_entity({USER: None, CLIENT_ID: client_id}), one
    yield quota_entity({USER: None, CLIENT_ID: None}), one
    yield quota_entity({USER: None}), (user, None)
    yield quota_entity({CLIENT_ID: client_id}), (None, counted)
    yield quota_entity({CLIENT_ID: None}), (None, counted)


def _shortened(client_id: str) -> str:
    """Another name for a long one, as good as that for telling who it is."""
    if len(client_id) <= MAX_NAME:
        return client_id
    return sha256(client_id.encode(errors="surrogatepass")).hexdigest()


Limits: TypeAlias = Mapping[str, Limit]
"""What holds for one client, by the key of the quota; what is not there is not limited."""


@dataclass(frozen=True, slots=True)
class QuotaTable:
    """All quotas of a cluster as they are asked for. It remembers what it found, for a bounded number of clients."""

    clients: Mapping[QuotaEntity, Mapping[str, float]] = field(default_factory=dict)
    addresses: Mapping[str | None, float] = field(default_factory=dict)
    _remembered: dict[tuple[str, str], Limits] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> QuotaTable:
        """The table of what the cluster's image has."""
        clients: dict[QuotaEntity, Mapping[str, float]] = {}
        addresses: dict[str | None, float] = {}
        for entity, values in quotas.items():
            parts = dict(entity)
            if IP not in parts:
                clients[entity] = values
            elif CONNECTION_CREATION_RATE in values:
                name = parts[IP]
                addresses[None if name is None else canonical_address(name)] = values[CONNECTION_CREATION_RATE]
        return cls(clients, addresses)

    def limits(self, user: str, client_id: str) -> Limits:
        """What holds for a client."""
        if len(client_id) > MAX_NAME:
            return self._find(user, client_id)
        client = (user, client_id)
        found = self._remembered.get(client)
        if found is None:
            if len(self._remembered) >= MAX_REMEMBERED:
                self._remembered.clear()
            found = self._remembered[client] = self._find(user, client_id)
        return found

    def _find(self, user: str, client_id: str) -> Limits:
        found: dict[str, Limit] = {}
        for entity, share in candidates(user, client_id):
            for key, rate in self.clients.get(entity, {}).items():
                found.setdefault(key, Limit(rate, share))
        return found

    def connection_rate(self, address: str) -> float | None:
        """How many connections per second an address may open."""
        return self.addresses.get(canonical_address(address), self.addresses.get(None))


NO_QUOTAS: Final = QuotaTable()


def canonical_address(text: str) -> str:
    """An address in the one way in which it is compared; text that is none stays as it is."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return text
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


@dataclass(frozen=True)
class Windows:
    """Over which time a rate is taken: `count` samples of `seconds` each, the last of which is still being filled."""

    count: int = 11
    seconds: float = 1.0

    @cached_property
    def span_s(self) -> float:
        return self.count * self.seconds

    def most(self, rate: float) -> float:
        """The largest amount that is not too much by itself, where nothing else was counted."""
        return rate * max(self.count - 1, 1) * self.seconds


class Rate:
    """How much per second, over the last windows (Kafka's sampled rate).

    The time it is divided by is never less than all windows but the last: who begins may be fast for so long.
    """

    __slots__ = ("_samples", "_total", "_windows")

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._samples: deque[list[float]] = deque()
        """When it began, when something was counted last, and how much."""
        self._total = 0.0

    def __repr__(self) -> str:
        return f"Rate({self._total:g} in {len(self._samples)} samples)"

    def add(self, amount: float, now: float) -> None:
        samples = self._samples
        if not samples or now - samples[-1][0] >= self._windows.seconds:
            samples.append([now, now, 0.0])
        sample = samples[-1]
        sample[1] = now
        sample[2] += amount
        self._total += amount

    def is_idle(self, now: float) -> bool:
        """Whether nothing of what was counted counts any more: such a one is as good as a new one."""
        return not self._samples or now - self._samples[-1][1] >= self._windows.span_s

    def excess_s(self, bound: float, now: float, more: float = 0.0) -> float:
        """How long nothing may be added until the rate, with `more` added now, is back at `bound`; 0.0: it is not over.

        A rate over a window becomes the bound in a window that is longer by (rate - bound) / bound of itself.
        """
        window_s = self._window_s(now)
        rate = (self._total + more) / window_s
        if rate <= bound:
            return 0.0
        return (rate - bound) / bound * window_s if bound > 0 else math.inf

    def _window_s(self, now: float) -> float:
        samples, windows = self._samples, self._windows
        while samples and now - samples[0][1] >= windows.span_s:
            self._total -= samples.popleft()[2]
        if not samples:
            self._total = 0.0  # what rounding has left
        elapsed_s = now - samples[0][0] if samples else 0.0
        missing = windows.count - 1 - int(elapsed_s / windows.seconds)
        if missing > 0:
            elapsed_s += missing * windows.seconds
        return max(elapsed_s, 0.001)


class TokenBucket:
    """What may be done at once, and how fast that comes back (KIP-599). It may be emptied beyond its bottom."""

    __slots__ = ("_filled_at", "_tokens", "_windows")

    def __init__(self, windows: Windows) -> None:
        self._windows = windows
        self._tokens = math.inf
        self._filled_at = 0.0

    def __repr__(self) -> str:
        return f"TokenBucket({self._tokens:g})"

    def take(self, amount: float, rate: float, now: float) -> None:
        """Take so much out; a negative amount is put back."""
        self._fill(rate, now)
        self._tokens = min(self._tokens - amount, self._most(rate))

    def is_idle(self, now: float) -> bool:
        return now - self._filled_at >= self._windows.span_s and self._tokens >= 0

    def excess_s(self, rate: float, now: float) -> float:
        """How long until it is no longer below its bottom."""
        self._fill(rate, now)
        return max(-self._tokens / rate, 0.0)

    def _fill(self, rate: float, now: float) -> None:
        gained = (now - self._filled_at) * rate
        self._tokens = min(self._tokens + gained, self._most(rate))
        self._filled_at = now

    def _most(self, rate: float) -> float:
        return rate * self._windows.span_s
