"""What is counted of requests: how many, how large, how long in each stage, and the errors in their answers, by API.

Plain numbers, written by connections and handlers on the loop and read when somebody asks (`millrace.monitoring`). A
time that belongs in the first bucket is only added to the sum: most do, and what is missing in the buckets is put there
when they are read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

from millrace.metrics.histogram import SECONDS, HistogramValue
from millrace.wire.keys import ApiKey
from millrace.wire.schema import Array, Nested, Struct

STAGES: Final = ("queue", "local", "remote", "response")
_BUCKETS: Final = len(SECONDS) + 1
_FIRST: Final = SECONDS[0]


class Answered(Protocol):
    """A request that has waited, for something or for its turn, and was answered."""

    counts: ApiCounts
    came_at: float
    begun_at: float
    parked_at: float
    """When its handler was left."""
    ready_at: float
    """When its answer was there."""
    size_bytes: int
    told_bytes: int
    """Of the answer."""


class ApiCounts:
    """The counts of one API."""

    __slots__ = (
        "_local_s",
        "_queue_s",
        "_remote_s",
        "_response_s",
        "errors",
        "local",
        "queue",
        "remote",
        "request_bytes",
        "requests",
        "response",
        "response_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.errors: dict[int, int] = {}
        self.queue, self.local, self.remote, self.response = ([0] * _BUCKETS for _ in STAGES)
        self._queue_s = self._local_s = self._remote_s = self._response_s = 0.0

    def __repr__(self) -> str:
        return f"ApiCounts({self.requests} requests, {sum(self.errors.values())} errors)"

    def answered_at_once(self, queue_s: float, local_s: float, request_bytes: int, response_bytes: int) -> None:
        """A request that nobody had to wait for."""
        self.requests += 1
        self.request_bytes += request_bytes
        self.response_bytes += response_bytes
        self._local_s += local_s
        if local_s > _FIRST:
            self.local[bisect_left(SECONDS, local_s)] += 1
        if queue_s:
            self.waited(queue_s)

    def waited(self, queue_s: float, number: int = 1) -> None:
        """Requests were here for so long before they were begun."""
        self._queue_s += queue_s * number
        self.queue[bisect_left(SECONDS, queue_s)] += number

    def answered(self, requests: Sequence[Answered], sent_at: float) -> None:
        """Requests that have waited, and whose answers have left together: timed like the one in the middle."""
        number = len(requests)
        self.requests += number
        if number == 1:
            (middle,) = requests
            self.request_bytes += middle.size_bytes
            self.response_bytes += middle.told_bytes
        else:
            middle = requests[number // 2]
            self.request_bytes += sum([each.size_bytes for each in requests])
            self.response_bytes += sum([each.told_bytes for each in requests])
        begun_at, parked_at, ready_at = middle.begun_at, middle.parked_at, middle.ready_at
        stage_s = parked_at - begun_at
        self._local_s += stage_s * number
        if stage_s > _FIRST:
            self.local[bisect_left(SECONDS, stage_s)] += number
        stage_s = ready_at - parked_at
        self._remote_s += stage_s * number
        if stage_s > _FIRST:
            self.remote[bisect_left(SECONDS, stage_s)] += number
        stage_s = sent_at - ready_at
        self._response_s += stage_s * number
        if stage_s > _FIRST:
            self.response[bisect_left(SECONDS, stage_s)] += number
        if begun_at is not middle.came_at:
            self.waited(begun_at - middle.came_at, number)

    def failed(self, code: int) -> None:
        """An error in an answer."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def stages(self) -> Iterator[tuple[str, HistogramValue]]:
        """How long requests were in each stage."""
        for name in STAGES:
            counts: list[int] = list(getattr(self, name))
            counts[0] += self.requests - sum(counts)
            yield name, HistogramValue(SECONDS, tuple(counts), getattr(self, f"_{name}_s"))


def count_answered(requests: Sequence[Answered], sent_at: float) -> None:
    """Count requests whose answers have left together, neighbours of one API in one go."""
    start = 0
    for end in range(1, len(requests)):
        if requests[end].counts is not requests[start].counts:
            requests[start].counts.answered(requests[start:end], sent_at)
            start = end
    requests[start].counts.answered(requests[start:] if start else requests, sent_at)


class RequestCounts:
    """The counts of every API."""

    __slots__ = ("by_key",)

    def __init__(self) -> None:
        self.by_key: Final = {int(key): ApiCounts() for key in ApiKey}
        """A dictionary and nothing else: it is asked for every request."""

    def __repr__(self) -> str:
        return f"RequestCounts({sum(each.requests for each in self.by_key.values())} requests)"

    def __getitem__(self, key: int) -> ApiCounts:
        return self.by_key[key]

    def note_errors(self, key: int, response: Any) -> None:
        """Count the errors in a response, of its items as well. Produce and Fetch count theirs where they arise."""
        cls = type(response)
        try:
            walk = _walks[cls]
        except KeyError:
            walk = _walks[cls] = _make_walk(cls)
        if walk is not None:
            codes: list[int] = []
            walk(response, codes)
            for code in codes:
                self[key].failed(code)


# --- the errors of a response -----------------------------------------------------------------------------------------

_CODES: Final = ("error_code", "acknowledge_error_code")
"""The fields that hold an error."""
_Walk = Callable[[Any, list[int]], None]
_walks: dict[type, _Walk | None] = {}
"""How the errors in each class of responses are found; None where there can be none."""


def _make_walk(cls: type) -> _Walk | None:
    """Found once from the declaration: only what can hold an error is looked at."""
    if not issubclass(cls, Struct):
        return None
    own: list[str] = []
    arrays: list[tuple[str, _Walk]] = []
    structs: list[tuple[str, _Walk]] = []
    for field in cls.declaration.fields:
        if field.name in _CODES:
            own.append(field.name)
        is_array = isinstance(field.type, Array)
        element = field.type.element if isinstance(field.type, Array) else field.type
        if isinstance(element, Nested) and (walk := _make_walk(element.resolved())) is not None:
            (arrays if is_array else structs).append((field.name, walk))
    if not (own or arrays or structs):
        return None

    def find(struct: Any, codes: list[int]) -> None:
        codes.extend([code for name in own if (code := getattr(struct, name))])
        for name, walk in arrays:
            for item in getattr(struct, name) or ():
                walk(item, codes)
        for name, walk in structs:
            if (value := getattr(struct, name)) is not None:
                walk(value, codes)

    return find
