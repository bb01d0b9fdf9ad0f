"""What is counted of requests: how many, how large, how long in each stage, and the errors in their answers, by API.

Plain numbers, written by connections and handlers on the loop and read when somebody asks (`millrace.monitoring`). A
time of zero is not written down: most requests never waited, and what is missing is put where it belongs when the
histogram is read.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from typing import Any, Final

from millrace.metrics.histogram import SECONDS, HistogramValue
from millrace.wire.schema import Array, Nested, Struct

STAGES: Final = ("queue", "local", "remote", "response")
_BUCKETS: Final = len(SECONDS) + 1


class ApiCounts:
    """The counts of one API."""

    __slots__ = (
        "_local", "_local_s", "_queue", "_queue_s", "_remote", "_remote_s", "_response", "_response_s",
        "errors", "request_bytes", "requests", "response_bytes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.requests = 0
        self.request_bytes = 0
        self.response_bytes = 0
        self.errors: dict[int, int] = {}
        self._queue, self._local, self._remote, self._response = ([0] * _BUCKETS for _ in STAGES)
        self._queue_s = self._local_s = self._remote_s = self._response_s = 0.0

    def __repr__(self) -> str:
        return f"ApiCounts({self.requests} requests, {sum(self.errors.values())} errors)"

    def answered_at_once(self, queue_s: float, local_s: float, request_bytes: int, response_bytes: int) -> None:
        """A request that nobody had to wait for."""
        self.requests += 1
        self.request_bytes += request_bytes
        self.response_bytes += response_bytes
        if queue_s:
            self._queue[bisect_left(SECONDS, queue_s)] += 1
            self._queue_s += queue_s
        self._local[bisect_left(SECONDS, local_s)] += 1
        self._local_s += local_s

    def answered(
        self,
        queue_s: float,
        local_s: float,
        remote_s: float,
        response_s: float,
        request_bytes: int,
        response_bytes: int,
    ) -> None:
        """A request that has waited, for something or for its turn."""
        self.requests += 1
        self.request_bytes += request_bytes
        self.response_bytes += response_bytes
        if queue_s:
            self._queue[bisect_left(SECONDS, queue_s)] += 1
            self._queue_s += queue_s
        self._local[bisect_left(SECONDS, local_s)] += 1
        self._local_s += local_s
        if remote_s:
            self._remote[bisect_left(SECONDS, remote_s)] += 1
            self._remote_s += remote_s
        self._response[bisect_left(SECONDS, response_s)] += 1
        self._response_s += response_s

    def failed(self, code: int) -> None:
        """An error in an answer."""
        self.errors[code] = self.errors.get(code, 0) + 1

    def stages(self) -> Iterator[tuple[str, HistogramValue]]:
        """How long requests were in each stage."""
        for name in STAGES:
            counts = list(getattr(self, f"_{name}"))
            counts[0] += self.requests - sum(counts)
            yield name, HistogramValue(SECONDS, tuple(counts), getattr(self, f"_{name}_s"))


class RequestCounts(dict[int, ApiCounts]):
    """The counts of every API that was asked for something, by its key."""

    __slots__ = ()

    def __missing__(self, key: int) -> ApiCounts:
        found = self[key] = ApiCounts()
        return found

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
