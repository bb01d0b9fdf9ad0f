"""What clients have used of their quotas on this broker, and how long one has to be quiet that used too much.

`ClientQuotas` keeps the counts, `Meter` is one request as it is counted. Owner: the event loop.

Bounds: a count is kept while it matters, and at most `MAX_COUNTS` of them, the ones used last: clients can invent
client ids. Without any quota nothing is kept, and `active` is all that a request has to look at.

Not here: who is asked (`server.throttling`, `handlers`), and what the numbers mean (`quotas`).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from millrace.clock import Clock, SystemClock
from millrace.security.quotas import (
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    NO_QUOTAS,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    Limit,
    Limits,
    QuotaEntity,
    QuotaTable,
    Rate,
    Share,
    TokenBucket,
    Windows,
)
from millrace.security.sessions import Session

if TYPE_CHECKING:
    from millrace.config import BrokerConfig

MAX_COUNTS: Final = 10_000
MAX_THROTTLE_MS: Final = 2**31 - 1
"""What the field of an answer holds."""
_PERCENT: Final = 100.0

K = TypeVar("K")


class ClientQuotas:
    """The quotas in force, and what was counted under them."""

    def __init__(
        self,
        *,
        clock: Clock | None = None,
        windows: Windows = Windows(),
        controller_windows: Windows = Windows(),
    ) -> None:
        self.clock = clock or SystemClock()
        self.windows = windows
        self._controller_windows = controller_windows
        self.table = NO_QUOTAS
        self.active = False
        """Whether some user or client id has a quota."""
        self._source: object = None
        self.throttled: dict[str, tuple[int, float]] = {}
        """By the name of a quota: how often clients were told to wait for it, and for how many seconds in all."""
        self._rates: OrderedDict[tuple[str, Share], Rate] = OrderedDict()
        self._buckets: OrderedDict[Share, TokenBucket] = OrderedDict()

    @classmethod
    def from_config(cls, config: BrokerConfig, clock: Clock) -> ClientQuotas:
        return cls(
            clock=clock,
            windows=Windows(config.get_int("quota.window.num"), config.get_int("quota.window.size.seconds")),
            controller_windows=Windows(
                config.get_int("controller.quota.window.num"), config.get_int("controller.quota.window.size.seconds")
            ),
        )

    def __repr__(self) -> str:
        entities = len(self.table.clients) + len(self.table.addresses)
        return f"ClientQuotas({entities} entities, {len(self._rates) + len(self._buckets)} counts)"

    def take(self, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
        """Follow what the cluster's image has; what was counted stays where it is still limited."""
        if quotas is self._source:
            return
        self._source = quotas
        self.table = QuotaTable.of(quotas)
        self.active = bool(self.table.clients)
        limited = {key for values in self.table.clients.values() for key in values}
        for key in [key for key in self._rates if key[0] not in limited]:
            del self._rates[key]
        if CONTROLLER_MUTATION_RATE not in limited:
            self._buckets.clear()

    def limits(self, session: Session, client_id: str | None) -> Limits:
        """What holds for a client; nothing, most of the time."""
        return self.table.limits(session.principal.partition(":")[2], client_id or "")

    def meter(self, session: Session, client_id: str | None) -> Meter | None:
        """One request of a client, to be counted; None where it is not limited."""
        limits = self.limits(session, client_id)
        return Meter(self, limits) if limits else None

    def mutations(self, session: Session, client_id: str | None, *, strict: bool) -> MutationQuota | None:
        """What a client may change in the cluster's metadata with one request; None where it is not limited."""
        limit = self.limits(session, client_id).get(CONTROLLER_MUTATION_RATE) if self.active else None
        return None if limit is None else MutationQuota(self, limit, strict=strict)

    def note_throttled(self, key: str, seconds: float) -> None:
        """Somebody has to wait for so long because of this quota."""
        times, waited_s = self.throttled.get(key, (0, 0.0))
        self.throttled[key] = (times + 1, waited_s + seconds)

    def rate(self, key: str, share: Share) -> Rate:
        name = (key, share)
        found = self._rates.get(name)
        if found is None:
            make_room(self._rates, self.clock.monotonic())
            found = self._rates[name] = Rate(self.windows)
        self._rates.move_to_end(name)
        return found

    def bucket(self, share: Share) -> TokenBucket:
        found = self._buckets.get(share)
        if found is None:
            make_room(self._buckets, self.clock.monotonic())
            found = self._buckets[share] = TokenBucket(self._controller_windows)
        self._buckets.move_to_end(share)
        return found


def make_room(counts: OrderedDict[K, Rate] | OrderedDict[K, TokenBucket], now: float) -> None:
    """Forget who counts for nothing any more, and if need be who was here least recently."""
    while counts and (len(counts) >= MAX_COUNTS or counts[next(iter(counts))].is_idle(now)):
        counts.popitem(last=False)


class Meter:
    """One request of a client that has a quota: what it brings, what it gets, and the loop's time for it.

    It counts time from when it is made, but for when the request waits (`pause`, `resume`).
    """

    __slots__ = ("_limits", "_quotas", "_since", "_spent_s", "_throttled_by", "throttle_ms")

    def __init__(self, quotas: ClientQuotas, limits: Limits) -> None:
        self._quotas = quotas
        self._limits = limits
        self._spent_s = 0.0
        self._since: float | None = quotas.clock.monotonic()
        self._throttled_by = ""
        self.throttle_ms = 0
        """How long the client has to be quiet, by what is known so far."""

    def __repr__(self) -> str:
        return f"Meter({sorted(self._limits)}, {self._spent_s:.6f} s, {self.throttle_ms} ms)"

    def pause(self) -> None:
        if self._since is not None:
            self._spent_s += self._quotas.clock.monotonic() - self._since
            self._since = None

    def resume(self) -> None:
        if self._since is None:
            self._since = self._quotas.clock.monotonic()

    def received(self, size_bytes: int) -> None:
        """The client has produced so much."""
        self._count(PRODUCER_BYTE_RATE, size_bytes)

    def sent(self, size_bytes: int) -> None:
        """The client gets so much, whether or not that is too much."""
        self._count(CONSUMER_BYTE_RATE, size_bytes)

    @property
    def room_bytes(self) -> float:
        """The most that an answer can have without being too much by itself."""
        limit = self._limits.get(CONSUMER_BYTE_RATE)
        return float("inf") if limit is None else self._quotas.windows.most(limit.rate)

    def may_send(self, size_bytes: int) -> bool:
        """Whether the client may have so much now; if not, nothing was counted.

        More than fits into all windows is sent when nothing else was: a batch is not cut, and would never be.
        """
        limit = self._limits.get(CONSUMER_BYTE_RATE)
        if limit is None:
            return True
        now = self._quotas.clock.monotonic()
        rate = self._quotas.rate(CONSUMER_BYTE_RATE, limit.share)
        excess_s = rate.excess_s(limit.rate, now, size_bytes)
        self._throttle(CONSUMER_BYTE_RATE, excess_s)
        if self.throttle_ms and not (size_bytes > self.room_bytes and rate.is_idle(now)):
            return False
        rate.add(size_bytes, now)
        return True

    def charge(self) -> int:
        """Count the time, and say for how long the client has to be quiet; what comes after counts next time."""
        self._count_time(judged=True)
        return self.throttle_ms

    def finish(self) -> None:
        """Count time that nobody is judged by now."""
        self._count_time(judged=False)

    def _count(self, key: str, amount: float) -> None:
        limit = self._limits.get(key)
        if limit is not None:
            now = self._quotas.clock.monotonic()
            rate = self._quotas.rate(key, limit.share)
            rate.add(amount, now)
            self._throttle(key, rate.excess_s(limit.rate, now))

    def _count_time(self, *, judged: bool) -> None:
        limit = self._limits.get(REQUEST_PERCENTAGE)
        if limit is None:
            return
        now = self._quotas.clock.monotonic()
        if self._since is not None:
            self._spent_s += now - self._since
        spent_s, self._spent_s, self._since = self._spent_s, 0.0, now
        rate = self._quotas.rate(REQUEST_PERCENTAGE, limit.share)
        rate.add(spent_s * _PERCENT, now)
        if judged:
            # Kafka's cap: one slow request must not silence a client for long.
            self._throttle(REQUEST_PERCENTAGE, min(rate.excess_s(limit.rate, now), self._quotas.windows.seconds))

    def _throttle(self, key: str, excess_s: float) -> None:
        if excess_s and (throttle_ms := milliseconds(excess_s)) > self.throttle_ms:
            self.throttle_ms = throttle_ms
            self._throttled_by = key

    def tell(self, throttle_ms: int) -> None:
        """The client is told to be quiet for so long: longer than by this meter where the controller asks for it."""
        key = self._throttled_by if throttle_ms == self.throttle_ms else CONTROLLER_MUTATION_RATE
        self._quotas.note_throttled(key, throttle_ms / 1000)


class MutationQuota:
    """What one request may create and delete, in partitions (KIP-599).

    Strict: refused as long as the bucket is below its bottom, and never told to wait otherwise; one change may still be
    larger than what is left. Otherwise nothing is refused, and the client has to be quiet instead.
    """

    def __init__(self, quotas: ClientQuotas, limit: Limit, *, strict: bool) -> None:
        self._clock = quotas.clock
        self._bucket = quotas.bucket(limit.share)
        self._rate = limit.rate
        self._strict = strict
        self._is_refused = False

    def __repr__(self) -> str:
        return f"MutationQuota({self._bucket!r}, {self._rate:g}/s, {'strict' if self._strict else 'permissive'})"

    def admit(self, partitions: int) -> bool:
        """Whether a change of so many partitions may go ahead; then it is counted."""
        now = self._clock.monotonic()
        if self._strict and self._bucket.excess_s(self._rate, now) > 0:
            self._is_refused = True
            return False
        self._bucket.take(partitions, self._rate, now)
        return True

    def give_back(self, partitions: int) -> None:
        """A change that was admitted did not happen."""
        self._bucket.take(-partitions, self._rate, self._clock.monotonic())

    @property
    def throttle_ms(self) -> int:
        """How long the client has to wait."""
        if self._strict and not self._is_refused:
            return 0
        return milliseconds(self._bucket.excess_s(self._rate, self._clock.monotonic()))


def milliseconds(seconds: float) -> int:
    """Rounded up: who waits for as long as it is told has waited long enough."""
    return min(math.ceil(min(seconds, MAX_THROTTLE_MS) * 1000), MAX_THROTTLE_MS)
