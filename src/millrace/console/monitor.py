"""What is asked of the cluster again and again while somebody looks, kept for lists and charts.

One thread for each user of the cluster reads what `admin.overview` reads, each part as often as it is worth and as the
cluster can bear: a part that took a second is not asked for again before ten have passed. When nobody has looked for
`UNWATCHED_S` it ends, and begins again with the next look. Pages take what is there, so that they cost the same with
ten topics and with ten thousand; only the first look waits.

A `View` is never changed once it is there. What could not be read stays as it was, and the view says why.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from millrace.admin import overview
from millrace.admin.errors import AdminError, Unreachable
from millrace.admin.words import Sum
from millrace.client.cluster import ClusterClient
from millrace.clock import Clock, SystemClock
from millrace.console.sessions import Access
from millrace.console.wording import explain, explain_admin
from millrace.errors import ApiError, ErrorCode, MillraceError

UNWATCHED_S: Final = 120.0
FIRST_LOOK_S: Final = 20.0
"""How long a page waits when nothing is known yet."""
WHOLE_LOOK_S: Final = 2.0
"""How long it waits for what a large cluster takes long to tell; then it shows what is there."""
FRESH_S: Final = 15.0
"""Older than this is not shown to somebody who comes back: it is read anew."""
POINTS: Final = 300
_SHARE: Final = 10
"""A part may take a tenth of the time at the most."""
_PAUSE_S: Final = 2.0

logger = logging.getLogger(__name__)


class Point(NamedTuple):
    """One moment of the charts; None is what was not known then."""

    time_s: float
    records_in: float | None
    bytes_in: float | None
    lag: int | None
    under_replicated: int


@dataclass(frozen=True, slots=True)
class View:
    """The cluster as it was last seen."""

    taken_s: float
    """On the clock that only goes forward."""
    topology: overview.Topology
    ends: overview.Offsets = field(default_factory=dict)
    sizes: overview.Sizes | None = None
    groups: overview.Groups | None = None
    commits: overview.Commits = field(default_factory=dict)
    group_lags: Mapping[str, Sum] = field(default_factory=dict)
    topic_lags: Mapping[str, overview.TopicLag] = field(default_factory=dict)
    rates: Mapping[str, float] = field(default_factory=dict)
    """Records per second that arrive, by topic."""
    byte_rates: Mapping[str, float] = field(default_factory=dict)
    points: tuple[Point, ...] = ()
    failure: str = ""
    """Why it is not newer; empty if it is as new as it should be."""

    @property
    def is_whole(self) -> bool:
        """Whether every part was read at least once."""
        return self.sizes is not None and self.groups is not None

    @property
    def records_in(self) -> float | None:
        return sum(self.rates.values()) if self.rates else None

    @property
    def bytes_in(self) -> float | None:
        return sum(self.byte_rates.values()) if self.byte_rates else None

    @property
    def lag(self) -> int | None:
        return sum(each.known for each in self.group_lags.values()) if self.group_lags else None

    @property
    def under_replicated(self) -> int:
        return sum(topic.under_replicated for topic in self.topology.topics.values())

    @property
    def offline(self) -> int:
        return sum(topic.offline for topic in self.topology.topics.values())


@dataclass(slots=True)
class _Part:
    """Something that is read from time to time."""

    every_s: float
    read: Callable[[ClusterClient, View], View]
    due_s: float = 0.0


class Monitor:
    """The one watcher of an `Access`: `page.access.companion(Monitor, Monitor)`."""

    def __init__(self, access: Access, clock: Clock | None = None) -> None:
        self._access = access
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._view: View | None = None
        self._failure: MillraceError | None = None
        self._looked_s = 0.0
        self._thread: threading.Thread | None = None
        self._ending = threading.Event()
        self._wake = threading.Event()
        self._last_ends: tuple[float, overview.Offsets] | None = None
        self._last_sizes: tuple[float, Mapping[str, int]] | None = None
        self._points: deque[Point] = deque(maxlen=POINTS)

    def __repr__(self) -> str:
        return f"Monitor({self._access!r}, {'watching' if self._thread is not None else 'at rest'})"

    def look(self) -> View:
        """The newest view; waits only if there is none that is fresh. Raises what the cluster answered instead."""
        began = self._clock.monotonic()
        deadline = began + FIRST_LOOK_S
        with self._changed:
            self._looked_s = began
            if self._thread is None:
                self._begin()
            while True:
                now = self._clock.monotonic()
                view = self._view
                if view is not None and (view.failure or self._is_good_enough(view, now - began)):
                    return view
                if view is None and self._failure is not None:
                    failure, self._failure = self._failure, None
                    raise failure
                if now >= deadline:
                    raise ApiError(ErrorCode.REQUEST_TIMED_OUT, "the cluster takes long to answer")
                self._changed.wait(min(deadline - now, 0.5))

    def _is_good_enough(self, view: View, waited_s: float) -> bool:
        is_fresh = self._clock.monotonic() - view.taken_s <= FRESH_S
        return is_fresh and (view.is_whole or waited_s >= WHOLE_LOOK_S)

    def changed(self) -> None:
        """Something was changed by us: read it again soon."""
        self._wake.set()

    def close(self) -> None:
        self._ending.set()
        self._wake.set()

    def _begin(self) -> None:
        self._failure = None
        thread = self._thread = threading.Thread(target=self._watch, name="console-monitor", daemon=True)
        thread.start()

    def _watch(self) -> None:
        parts = [
            _Part(3.0, self._read_topology),
            _Part(3.0, self._read_ends),
            _Part(5.0, self._read_groups),
            _Part(10.0, self._read_sizes),
        ]
        client = self._access.new_client()
        try:
            while not self._ending.is_set():
                with self._changed:
                    if self._clock.monotonic() - self._looked_s > UNWATCHED_S:
                        return
                failed = self._round(client, parts)
                soonest = min(part.due_s for part in parts)
                pause_s = _PAUSE_S if failed else max(soonest - self._clock.monotonic(), 0.05)
                if self._wake.wait(pause_s) and not self._ending.is_set():
                    self._wake.clear()
                    for part in parts:
                        part.due_s = 0.0
        except Exception:
            logger.exception("the console's view of the cluster ended; the next look begins it anew")
        finally:
            client.close()
            with self._changed:
                self._thread = None
                self._changed.notify_all()

    def _round(self, client: ClusterClient, parts: list[_Part]) -> bool:
        """Read what is due; True if something failed."""
        for part in parts:
            began = self._clock.monotonic()
            if part.due_s > began:
                continue
            try:
                view = part.read(client, self._view or View(began, overview.Topology(None, -1, (), {})))
            except (ApiError, AdminError) as error:
                self._failed(error)
                client.close()
                return True
            took = self._clock.monotonic() - began
            part.due_s = began + max(part.every_s, took * _SHARE)
            with self._changed:
                self._view = replace(view, taken_s=self._clock.monotonic(), failure="")
                self._failure = None
                self._changed.notify_all()
        return False

    def _failed(self, error: ApiError | AdminError) -> None:
        _, text = explain(error) if isinstance(error, ApiError) else explain_admin(error)
        with self._changed:
            self._failure = error
            if self._view is not None:
                self._view = replace(self._view, failure=text)
            self._changed.notify_all()

    # --- parts --------------------------------------------------------------------------------------------------------

    def _read_topology(self, client: ClusterClient, view: View) -> View:
        topology = overview.read_topology(client)
        if not topology.brokers:
            raise Unreachable("the cluster tells of no broker")
        return replace(view, topology=topology)

    def _read_ends(self, client: ClusterClient, view: View) -> View:
        now = self._clock.monotonic()
        ends = overview.read_ends(client, view.topology)
        rates: dict[str, float] = {}
        if self._last_ends is not None:
            then, before = self._last_ends
            rates = record_rates(before, ends, now - then)
        self._last_ends = (now, ends)
        view = _with_lags(replace(view, ends=ends, rates=rates))
        point = Point(
            self._clock.wall_ms() / 1000, view.records_in, view.bytes_in, view.lag, view.under_replicated + view.offline
        )
        self._points.append(point)
        return replace(view, points=tuple(self._points))

    def _read_groups(self, client: ClusterClient, view: View) -> View:
        groups = overview.read_groups(client, view.topology)
        commits = overview.read_commits(client, groups.rows)
        return _with_lags(replace(view, groups=groups, commits=commits))

    def _read_sizes(self, client: ClusterClient, view: View) -> View:
        now = self._clock.monotonic()
        sizes = overview.read_sizes(client, view.topology)
        leaders = {name: found.known for name in view.topology.topics if (found := sizes.of_topic(name)).complete}
        rates: dict[str, float] = {}
        if self._last_sizes is not None:
            then, before = self._last_sizes
            rates = {
                name: max(size - before[name], 0) / (now - then) for name, size in leaders.items() if name in before
            }
        self._last_sizes = (now, leaders)
        return replace(view, sizes=sizes, byte_rates=rates)


def _with_lags(view: View) -> View:
    return replace(
        view,
        group_lags=overview.group_lags(view.commits, view.ends),
        topic_lags=overview.topic_lags(view.commits, view.ends),
    )


def record_rates(before: overview.Offsets, now: overview.Offsets, seconds: float) -> dict[str, float]:
    """Records per second by topic, from where its partitions ended twice.

    An end that lies before the old one belongs to a topic that was deleted and made anew: it counts nothing.
    """
    if seconds <= 0:
        return {}
    rates = {}
    for name, ends in now.items():
        grown = [
            max(new - old, 0)
            for new, old in zip(ends, before.get(name, ()), strict=False)
            if new is not None and old is not None
        ]
        rates[name] = sum(grown) / seconds
    return rates
