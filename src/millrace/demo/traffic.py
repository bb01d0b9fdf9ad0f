"""The sample producers of the demo and what the broker acknowledged of each.

Four write records (a web front end, a chat server, changes of a users table, metrics of hosts), one writes log files
that `millrace produce --follow` carries into a topic. On purpose a few records are broken and a few are sent twice:
the account counts every acknowledged record by its kind, so that the end of the demo can say exactly what must have
come out where.
"""

from __future__ import annotations

import json
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

from millrace.clock import Clock, SystemClock

CLICKS: Final = "web.clicks"
PURCHASES: Final = "web.purchases"
CHAT: Final = "chat.messages"
USERS: Final = "db.users"
METRICS: Final = "host.metrics"
LOGS: Final = "logs.lines"
PARTITIONS: Final = {CLICKS: 4, PURCHASES: 4, CHAT: 2, USERS: 2, METRICS: 4, LOGS: 2}

GOOD: Final = "good"
BAD: Final = "bad"
REPEATED: Final = "repeated"
ERROR: Final = "error"
CLOSING: Final = "closing"

DEVICES: Final = ("phone", "web")
USER_COUNT: Final = 200
_BAD_ONE_IN: Final = 400
_REPEATED_ONE_IN: Final = 40
_PURCHASE_ONE_IN: Final = 10
_TICK_S: Final = 0.02
_FLUSH_S: Final = 20.0
_ROTATE_LINES: Final = 2000

Values = Iterator["Outgoing"]


class Outgoing(NamedTuple):
    """A record to be sent, and what kind it is in the account."""

    topic: str
    key: str
    value: bytes
    kind: str = GOOD


class Account:
    """Acknowledged records by topic and kind. Threads enter under one lock; totals are read under it too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._acked: Counter[tuple[str, str]] = Counter()
        self.bytes = 0
        self.failed = 0

    def acked(self, topic: str, kind: str | None = None) -> int:
        with self._lock:
            return sum(count for (name, what), count in self._acked.items() if name == topic and kind in {None, what})

    def total(self) -> int:
        with self._lock:
            return sum(self._acked.values())

    def enter(self, topic: str, kind: str, size_bytes: int) -> None:
        with self._lock:
            self._acked[topic, kind] += 1
            self.bytes += size_bytes

    def enter_failure(self) -> None:
        with self._lock:
            self.failed += 1

    def reporter(self, outgoing: Outgoing) -> Callable[[KafkaError | None, Message], None]:
        """What the producer calls with the broker's answer to one record."""

        def report(error: KafkaError | None, _message: Message) -> None:
            if error is not None:
                self.enter_failure()
            else:
                self.enter(outgoing.topic, outgoing.kind, len(outgoing.value))

        return report


def _json(**fields: Any) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def _now(clock: Clock) -> str:
    return _text(clock.wall_ms())


def _text(wall_ms: int) -> str:
    return datetime.fromtimestamp(wall_ms / 1000, UTC).isoformat(timespec="milliseconds")


def web_front_end(rng: random.Random, clock: Clock) -> Values:
    """Clicks, a purchase for some of them; now and then a click is sent twice, or is not JSON."""
    pages = ("/", "/search", "/cart", "/checkout", "/help")
    number = 0
    while True:
        number += 1
        click, user = f"c{rng.getrandbits(40):010x}-{number}", f"user-{rng.randrange(USER_COUNT)}"
        value = _json(id=click, user=user, page=rng.choice(pages), took_ms=rng.randrange(3, 400), ts=_now(clock))
        yield Outgoing(CLICKS, user, value)
        if rng.randrange(_REPEATED_ONE_IN) == 0:
            yield Outgoing(CLICKS, user, value, REPEATED)
        if rng.randrange(_BAD_ONE_IN) == 0:
            yield Outgoing(CLICKS, user, value[: len(value) // 2], BAD)
        if rng.randrange(_PURCHASE_ONE_IN) == 0:
            amount = rng.randrange(100, 20_000) / 100
            yield Outgoing(PURCHASES, user, _json(id=f"p{number}", click=click, amount=amount, ts=_now(clock)))


def closing_records(clock: Clock) -> list[Outgoing]:
    """A click and a purchase from some minutes ahead, which belong to nothing: the clock of an event-time join moves
    only with its events, and clicks that were never paid for leave it when that clock has passed them."""
    later = _text(clock.wall_ms() + 5 * 60_000)  # pipelines take events from ten minutes ahead for mistakes
    return [
        Outgoing(CLICKS, "end", _json(id="end", user="none", device="none", ts=later), CLOSING),
        Outgoing(PURCHASES, "end", _json(id="end", click="none", ts=later), CLOSING),
    ]


def chat_server(rng: random.Random, clock: Clock) -> Values:
    texts = ("hello", "has anyone tried the new build?", "back in five minutes", "that fixed it, thanks")
    number = 0
    while True:
        number += 1
        room, user = rng.choice(("lobby", "support", "random")), f"user-{rng.randrange(USER_COUNT)}"
        yield Outgoing(CHAT, room, _json(id=f"m{number}", room=room, user=user, text=rng.choice(texts), ts=_now(clock)))


def user_changes(rng: random.Random, clock: Clock) -> Values:
    """The users table as a stream of its changes: first every row, then an update now and then."""
    names = ("Ada", "Grace", "Edsger", "Barbara", "Donald", "Radia", "Leslie", "Margaret")
    yield from (_user(rng, clock, number, names) for number in range(USER_COUNT))
    while True:
        yield _user(rng, clock, rng.randrange(USER_COUNT), names)


def _user(rng: random.Random, clock: Clock, number: int, names: tuple[str, ...]) -> Outgoing:
    user = f"user-{number}"
    country, tier = rng.choice(("DE", "FR", "IN", "BR", "US")), rng.choice(("free", "free", "paid"))
    row = _json(user=user, name=f"{rng.choice(names)} {number}", country=country, tier=tier, ts=_now(clock))
    return Outgoing(USERS, user, row)


def host_metrics(rng: random.Random, clock: Clock) -> Values:
    load = {f"host-{number:02}": 0.5 for number in range(24)}
    while True:
        host = rng.choice(tuple(load))
        load[host] = min(1.0, max(0.0, load[host] + rng.uniform(-0.05, 0.05)))
        value = _json(name="cpu", value=round(load[host], 3), ts=_now(clock), tags={"host": host})
        yield Outgoing(METRICS, host, value)
        if rng.randrange(_BAD_ONE_IN) == 0:
            yield Outgoing(METRICS, host, b"cpu=high", BAD)


@dataclass(frozen=True, slots=True)
class Source:
    """One sample producer: who it is, how much of the whole rate it takes, how the client compresses."""

    name: str
    share: float
    compression: str
    values: Callable[[random.Random, Clock], Values]


SOURCES: Final = (
    Source("web front end", 0.40, "lz4", web_front_end),
    Source("chat server", 0.10, "snappy", chat_server),
    Source("users table", 0.02, "none", user_changes),
    Source("host metrics", 0.30, "zstd", host_metrics),
)
LOG_SHARE: Final = 0.18


class SourceThread(threading.Thread):
    """Writes one source's records at a steady rate until told to stop, then waits for every acknowledgement."""

    def __init__(
        self, source: Source, rate_per_s: float, account: Account, settings: dict[str, Any], seed: int
    ) -> None:
        super().__init__(name=source.name, daemon=True)
        self.error: str | None = None
        self._clock = SystemClock()
        self._values = source.values(random.Random(seed), self._clock)  # noqa: S311  # invented data, not a secret
        self._rate_per_s = rate_per_s
        self._account = account
        self._stopping = threading.Event()
        self._producer = Producer(
            {
                **settings,
                "compression.type": source.compression,
                "linger.ms": 5,
                "enable.idempotence": True,
                "message.timeout.ms": 20_000,
            }
        )

    def send_first(self, count: int) -> None:
        """Send the first `count` records at once and wait for them; before the thread is started."""
        self.send_now(islice(self._values, count))

    def send_now(self, values: Iterable[Outgoing]) -> None:
        """Send records at once and wait for them; before the thread is started, or after it has ended."""
        for outgoing in values:
            self._send(outgoing)
        self._flush()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        began = self._clock.monotonic()
        sent = 0
        while not self._stopping.wait(_TICK_S):
            due = int((self._clock.monotonic() - began) * self._rate_per_s)
            while sent < due and not self._stopping.is_set():
                self._send(next(self._values))
                sent += 1
            self._producer.poll(0)
        self._flush()

    def _send(self, outgoing: Outgoing) -> None:
        report = self._account.reporter(outgoing)
        while True:
            try:
                self._producer.produce(outgoing.topic, outgoing.value, outgoing.key, on_delivery=report)
                return
            except BufferError:  # the client's queue is full: the broker is behind
                self._producer.poll(0.1)

    def _flush(self) -> None:
        if self._producer.flush(_FLUSH_S):
            self.error = f"{self.name}: {len(self._producer)} records were never acknowledged"


class LogWriter(threading.Thread):
    """A program that logs to a file and rotates it, as its operators would have it do."""

    def __init__(self, path: Path, rate_per_s: float, seed: int) -> None:
        super().__init__(name=f"log file {path.name}", daemon=True)
        self.path = path
        self.lines: Counter[str] = Counter()
        """Lines written, by kind: good, error, and bad for those no pattern fits."""
        self._rate_per_s = rate_per_s
        self._rng = random.Random(seed)  # noqa: S311  # invented data, not a secret
        self._clock = SystemClock()
        self._stopping = threading.Event()

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        began = self._clock.monotonic()
        file = self.path.open("a", buffering=1)
        written = 0
        try:
            while not self._stopping.wait(_TICK_S):
                due = int((self._clock.monotonic() - began) * self._rate_per_s)
                while written < due:
                    kind, line = self._line()
                    file.write(line + "\n")
                    self.lines[kind] += 1
                    written += 1
                    if written % _ROTATE_LINES == 0:
                        file.close()
                        self.path.rename(self.path.with_suffix(".log.1"))
                        file = self.path.open("a", buffering=1)
        finally:
            file.close()

    def _line(self) -> tuple[str, str]:
        rng = self._rng
        if rng.randrange(_BAD_ONE_IN) == 0:
            return BAD, "Traceback (most recent call last):"
        level = rng.choices(("INFO", "WARN", "ERROR"), (90, 8, 2))[0]
        text = rng.choice(("request served", "cache miss", "retrying after a timeout", "connection closed"))
        host = f"host-{rng.randrange(24):02}"
        return ERROR if level == "ERROR" else GOOD, f"{_now(self._clock)} {host} {self.path.stem}: {level} {text}"
