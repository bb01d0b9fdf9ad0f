"""What is known of every run of a pipeline: a file that the run keeps, for whoever looks after it.

    RUNS/NAME-TIME-ABCDEF.json      written by the run itself (`RunKeeper`), whole or not at all, once a second at most
    RUNS/NAME-TIME-ABCDEF.log       what it said, if it was started in the background (`control`)

Only their owner can read them, and no secret is among the options. Whether a run still lives is not believed but seen:
a file that says so, of a process that is gone, is one of a run that was killed. Files of runs that have ended go after
a week, or when there are many. Nothing here needs Spark.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import stat
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from millrace.clock import Clock, SystemClock
from millrace.local.processes import is_same, process_key
from millrace.security.hiding import is_secret, without_passwords, without_secrets
from millrace.spark.pipelines.progress import QueryFigures, RecordsRead

RUNS_VARIABLE: Final = "MILLRACE_PIPELINE_RUNS"
EVERY_S: Final = 1.0
POINTS: Final = 60
POINT_S: Final = 5
"""A point of the history stands for so long; with `POINTS` that makes five minutes."""
MAX_RESTARTS: Final = 20
MAX_TEXT: Final = 2000
KEPT_MS: Final = 7 * 86_400_000
KEPT_RUNS: Final = 100
_VERSION: Final = 1
_RUN_ID: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}")

logger = logging.getLogger(__name__)


class State(Enum):
    """Where a run is."""

    STARTING = "starting"
    """Until its first batch is done."""
    RUNNING = "running"
    RESTARTING = "restarting"
    """A query has failed; all begin again after a pause."""
    STOPPING = "stopping"
    STOPPED = "stopped"
    """Somebody asked for it."""
    DONE = "done"
    """All that was there has been worked through."""
    FAILED = "failed"
    KILLED = "killed"
    """Its process is gone, and had no time to say so."""

    @property
    def is_over(self) -> bool:
        return self in _OVER


_OVER: Final = frozenset({State.STOPPED, State.DONE, State.FAILED, State.KILLED})


class Point(NamedTuple):
    """How a query did at some time, for a chart."""

    time_ms: int
    input_rate: float
    processed_rate: float
    lag: int | None
    batch_ms: int


class Restart(NamedTuple):
    """A failure after which the queries were started again."""

    time_ms: int
    reason: str
    failures: int
    """How many there were in a row."""


@dataclass(frozen=True, slots=True)
class QueryStatus:
    """The newest figures of a query, and some before them."""

    figures: QueryFigures
    points: tuple[Point, ...] = ()


@dataclass(frozen=True, slots=True)
class RunStatus:
    """All that is known of a run."""

    run_id: str
    pipeline: str
    file: str
    pid: int
    process: str
    """Tells its process from another one that has the same id later."""
    bootstrap: str
    options: Mapping[str, str]
    """Without secrets."""
    checkpoint: str
    master: str
    started_ms: int
    state: State = State.STARTING
    updated_ms: int = 0
    ended_ms: int | None = None
    error: str = ""
    records_read: int = 0
    queries: tuple[QueryStatus, ...] = ()
    restarts: tuple[Restart, ...] = ()
    """The newest of them."""
    restart_count: int = 0

    @property
    def last_error(self) -> str:
        return self.error or (self.restarts[-1].reason if self.restarts else "")

    @property
    def input_rate(self) -> float | None:
        """Of the query that has the most to read: several may read the same records."""
        return max((each.figures.input_rate for each in self.queries), default=None)

    @property
    def processed_rate(self) -> float | None:
        return max((each.figures.processed_rate for each in self.queries), default=None)

    @property
    def lag(self) -> int | None:
        """Of the query that is furthest behind."""
        return max((each.figures.lag for each in self.queries if each.figures.lag is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        return {
            "version": _VERSION,
            "run": self.run_id,
            "pipeline": self.pipeline,
            "file": self.file,
            "pid": self.pid,
            "process": self.process,
            "bootstrap": self.bootstrap,
            "options": dict(self.options),
            "checkpoint": self.checkpoint,
            "master": self.master,
            "started_ms": self.started_ms,
            "state": self.state.value,
            "updated_ms": self.updated_ms,
            "ended_ms": self.ended_ms,
            "error": self.error,
            "records_read": self.records_read,
            "queries": [{"figures": each.figures.as_dict(), "points": each.points} for each in self.queries],
            "restarts": self.restarts,
            "restart_count": self.restart_count,
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Self:
        """KeyError, TypeError or ValueError for what is no status."""
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']} is not known here")
        ended_ms = found["ended_ms"]
        return cls(
            run_id=str(found["run"]),
            pipeline=str(found["pipeline"]),
            file=str(found["file"]),
            pid=int(found["pid"]),
            process=str(found["process"]),
            bootstrap=str(found["bootstrap"]),
            options={str(name): str(value) for name, value in dict(found["options"]).items()},
            checkpoint=str(found["checkpoint"]),
            master=str(found["master"]),
            started_ms=int(found["started_ms"]),
            state=State(found["state"]),
            updated_ms=int(found["updated_ms"]),
            ended_ms=None if ended_ms is None else int(ended_ms),
            error=str(found["error"]),
            records_read=int(found["records_read"]),
            queries=tuple(_query_from(each) for each in found["queries"]),
            restarts=tuple(Restart(int(time), str(reason), int(count)) for time, reason, count in found["restarts"]),
            restart_count=int(found["restart_count"]),
        )


def _query_from(found: Mapping[str, Any]) -> QueryStatus:
    points = (
        Point(int(time), float(incoming), float(processed), None if lag is None else int(lag), int(batch_ms))
        for time, incoming, processed, lag, batch_ms in found["points"]
    )
    return QueryStatus(QueryFigures.from_dict(found["figures"]), tuple(points))


# --- where and under which name ---------------------------------------------------------------------------------------


def state_home() -> Path:
    """Where millrace keeps what it has to remember between two runs."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "millrace"


def default_runs() -> Path:
    """The folder of the status files, unless another one is named."""
    given = os.environ.get(RUNS_VARIABLE)
    return Path(given) if given else state_home() / "pipelines"


def new_run_id(pipeline: str, clock: Clock | None = None) -> str:
    """A name for a run that no other one has, and that a person can read."""
    name = re.sub(r"[^A-Za-z0-9_]+", "_", pipeline)[:100] or "_"
    began = datetime.fromtimestamp((clock or SystemClock()).wall_ms() / 1000, UTC)
    return f"{name}-{began:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


def is_run_id(text: str) -> bool:
    """Whether this may be the name of a run: it is one of a file, and names no other folder."""
    return _RUN_ID.fullmatch(text) is not None


def status_path(folder: Path, run_id: str) -> Path:
    assert is_run_id(run_id), run_id
    return folder / f"{run_id}.json"


def log_path(folder: Path, run_id: str) -> Path:
    """Where a run in the background writes what it says."""
    assert is_run_id(run_id), run_id
    return folder / f"{run_id}.log"


def prepare(folder: Path) -> None:
    """Make the folder, for its owner alone; who else is let into one that exists already is its owner's choice."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)


# --- reading ----------------------------------------------------------------------------------------------------------


def read_run(folder: Path, run_id: str) -> RunStatus | None:
    """One run as it is now; None if there is none of that name."""
    return _read(status_path(folder, run_id)) if is_run_id(run_id) else None


def read_runs(folder: Path) -> list[RunStatus]:
    """All runs as they are now, those that are not over first, then the newest first."""
    found = [status for path in folder.glob("*.json") if (status := _read(path)) is not None]
    return sorted(found, key=lambda each: (each.state.is_over, -each.started_ms, each.run_id))


def _read(path: Path) -> RunStatus | None:
    """None for a file that is none of ours, or was lost half written with the machine's power."""
    try:
        found = RunStatus.from_json(json.loads(path.read_bytes()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if found.run_id != path.stem:
        return None
    return found if found.state.is_over or is_same(found.pid, found.process) else replace(found, state=State.KILLED)


def remove_old(folder: Path, now_ms: int) -> None:
    """Remove what was kept of runs that ended long ago, or before many others."""
    over = [each for each in read_runs(folder) if each.state.is_over]
    for place, each in enumerate(over):
        if place >= KEPT_RUNS or now_ms - (each.ended_ms or each.updated_ms) > KEPT_MS:
            for path in (status_path(folder, each.run_id), log_path(folder, each.run_id)):
                path.unlink(missing_ok=True)
    for path in (*folder.glob("*.log"), *folder.glob(".*.draft")):  # of runs that did not come to a status
        name = path.stem.removeprefix(".")
        if is_run_id(name) and not status_path(folder, name).exists():
            try:
                if now_ms - path.stat().st_mtime_ns // 1_000_000 > KEPT_MS:
                    path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Query:
    figures: QueryFigures
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=POINTS))

    def add(self, figures: QueryFigures, now_ms: int) -> None:
        self.figures = figures
        point = Point(now_ms, figures.input_rate, figures.processed_rate, figures.lag, figures.batch_ms)
        if self.points and self.points[-1].time_ms // (POINT_S * 1000) == now_ms // (POINT_S * 1000):
            self.points.pop()
        self.points.append(point)


class RunKeeper:
    """Keeps the status of the run that this process is, from `with` to its end.

    Told of everything by the run; a thread of its own writes, so that nothing waits for a disk. A folder that cannot be
    written is a warning, and the run goes on without.
    """

    def __init__(self, folder: Path, described: RunStatus, secret_values: Iterable[str], clock: Clock) -> None:
        self._folder = folder
        self._status = described
        self._secrets = tuple(secret_values)
        self._clock = clock
        self._queries: dict[str, _Query] = {}
        self._read = RecordsRead()
        self._changed = threading.Condition()
        self._is_new = False
        self._closed = False
        self._has_failed = False
        self._thread: threading.Thread | None = None

    def __repr__(self) -> str:
        return f"RunKeeper({self._status.run_id}, {self._status.state.value})"

    @classmethod
    def of_this_process(
        cls,
        folder: Path,
        *,
        pipeline: str,
        file: Path,
        bootstrap: str,
        options: Mapping[str, str],
        checkpoint: str,
        master: str,
        run_id: str = "",
        clock: Clock | None = None,
    ) -> Self:
        """For a run that is about to begin; `options` with their secrets, which go no further."""
        clock = clock or SystemClock()
        now_ms = clock.wall_ms()
        described = RunStatus(
            run_id=run_id or new_run_id(pipeline, clock),
            pipeline=pipeline,
            file=str(file),
            pid=os.getpid(),
            process=process_key(os.getpid()),
            bootstrap=bootstrap,
            options=without_secrets(options),
            checkpoint=checkpoint,
            master=master,
            started_ms=now_ms,
            updated_ms=now_ms,
        )
        return cls(folder, described, [value for name, value in options.items() if is_secret(name)], clock)

    @property
    def run_id(self) -> str:
        return self._status.run_id

    @property
    def status(self) -> RunStatus:
        """As it is now."""
        with self._changed:
            return self._snapshot()

    def __enter__(self) -> Self:
        try:
            prepare(self._folder)
            remove_old(self._folder, self._clock.wall_ms())
        except OSError as error:
            self._tell(error)
        self._write(self.status)
        self._thread = threading.Thread(target=self._keep, name="millrace-pipeline-status", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """The end of the run: as it said it would be, or by what it raised."""
        with self._changed:
            if isinstance(error, KeyboardInterrupt):
                self._change(state=State.STOPPED)
            elif error is not None:
                text = str(error) or type(error).__name__
                self._change(state=State.FAILED, error=self._shown(text))
            elif not self._status.state.is_over:
                self._change(state=State.DONE)
            self._change(ended_ms=self._clock.wall_ms())
            self._closed = True
            self._changed.notify_all()
        assert self._thread is not None
        self._thread.join()
        self._write(self.status)

    # --- what happens -------------------------------------------------------------------------------------------------

    def progress(self, figures: QueryFigures) -> None:
        """A batch of a query is done, or it says that there was nothing to do."""
        now_ms = self._clock.wall_ms()
        with self._changed:
            query = self._queries.setdefault(figures.name, _Query(figures))
            query.add(figures, now_ms)
            self._read.add(figures)
            is_ending = self._status.state in {State.STOPPING, *_OVER}
            self._change(state=self._status.state if is_ending else State.RUNNING, records_read=self._read.total)

    def restarting(self, reason: str, pause_s: float, failures: int) -> None:  # noqa: ARG002  # as views are told
        """A query has failed, and all start again after a pause."""
        restart = Restart(self._clock.wall_ms(), self._shown(reason), failures)
        with self._changed:
            self._change(
                state=State.RESTARTING,
                restarts=(*self._status.restarts, restart)[-MAX_RESTARTS:],
                restart_count=self._status.restart_count + 1,
            )

    def stopping(self) -> None:
        """A stop was asked for; batches that run are finished first."""
        with self._changed:
            self._change(state=State.STOPPING)

    def done(self, *, stopped: bool) -> None:
        """It has come to its end: by a stop, or because there was no more to do."""
        with self._changed:
            self._change(state=State.STOPPED if stopped else State.DONE)

    # --- the file -----------------------------------------------------------------------------------------------------

    def _change(self, **values: Any) -> None:
        self._status = replace(self._status, updated_ms=self._clock.wall_ms(), **values)
        self._is_new = True
        self._changed.notify_all()

    def _snapshot(self) -> RunStatus:
        queries = tuple(QueryStatus(each.figures, tuple(each.points)) for each in self._queries.values())
        return replace(self._status, queries=queries)

    def _shown(self, text: str) -> str:
        return without_passwords(" ".join(text.split()), self._secrets)[:MAX_TEXT]

    def _keep(self) -> None:
        """Write what is new, with a pause after it; the end is written by whoever ends the run."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed, EVERY_S)
                self._changed.wait_for(lambda: self._closed or self._is_new)
                if self._closed:
                    return
                self._is_new = False
                status = self._snapshot()
            self._write(status)

    def _write(self, status: RunStatus) -> None:
        draft = self._folder / f".{status.run_id}.draft"
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            with open(os.open(draft, flags, stat.S_IRUSR | stat.S_IWUSR), "w", encoding="utf-8") as file:  # noqa: PTH123
                json.dump(status.as_json(), file)
            draft.replace(status_path(self._folder, status.run_id))
        except OSError as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        """Once: a run does not end, nor fill a log, because it cannot be watched."""
        if not self._has_failed:
            self._has_failed = True
            logger.warning("this run is not noted in %s, and no console will show it: %s", self._folder, error)
