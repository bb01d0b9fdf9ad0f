"""Where rounds of compaction run: in a child process, so that their work never holds up the broker's loop.

A thread would not do: the interpreter runs one thread at a time and lets go of it only every few milliseconds, which
is what every request would then wait, several times over. The child reads jobs from its standard input and writes what
comes of them to its standard output, one pickled value after another; nobody else writes to those pipes. It dies with
the broker.

What is not here: which jobs there are and what becomes of the results (`cleaner`). A worker's `run` and `close` block
and belong to one thread at a time; `stop` may be called from any and returns at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final, Protocol

from millrace.clock import SystemClock
from millrace.errors import CorruptLogError, StorageError
from millrace.storage.compaction_job import Cleaned, CompactionJob, Failed, Finished, run
from millrace.storage.files import Files

_NICE: Final = 10
_PR_SET_PDEATHSIG: Final = 1


class Worker(Protocol):
    """Someone who does rounds of compaction, one after another."""

    def run(self, job: CompactionJob, report: Callable[[Cleaned], object]) -> Finished:
        """Do a round; raises `StorageError`, also when it was stopped."""

    def stop(self) -> None:
        """End the round that is under way, if there is one, and take no other."""

    def close(self) -> None:
        """After the last round: stop, and let go of everything. Waits for the disk where the worker does."""


class ThreadWorker:
    """In the thread that calls: for tests, and where there can be no other process."""

    def __init__(self) -> None:
        self._stopped = threading.Event()

    def run(self, job: CompactionJob, report: Callable[[Cleaned], object]) -> Finished:
        return run(job, Files(sync=job.sync), SystemClock(), report, self._stopped)

    def stop(self) -> None:
        self._stopped.set()

    close = stop


class ProcessWorker:
    """In a child process, which is started with the first round."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    def run(self, job: CompactionJob, report: Callable[[Cleaned], object]) -> Finished:
        child = self._start()
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            pickle.dump(job, child.stdin)
            child.stdin.flush()
            while True:
                result = pickle.load(child.stdout)  # noqa: S301 - from our own child
                if isinstance(result, Failed):
                    raise (CorruptLogError if result.is_corrupt else StorageError)(result.reason)
                if isinstance(result, Finished):
                    return result
                report(result)
        except (EOFError, OSError, pickle.UnpicklingError, ValueError) as error:
            raise StorageError(f"the compaction of {job.directory} ended early") from error

    def _start(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise StorageError("compaction has stopped")
            if self._child is None:
                # However the package was found here, the child finds it too.
                paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
                self._child = subprocess.Popen(  # noqa: S603 - our own interpreter and our own module
                    [sys.executable, "-m", __name__, str(os.getpid())],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                    # What a terminal or a shell sends to the broker's group is for the broker. No session of its own:
                    # Linux shares the processor out by sessions first, and being nice counts only within one.
                    process_group=0,
                )
            return self._child

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            if self._child is not None:
                self._child.kill()

    def close(self) -> None:
        self.stop()
        child = self._child
        if child is None:
            return
        child.wait()  # one that waits for the disk dies only then
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


# --- the child --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Do rounds until there are no more."""
    _follow_parent(int(sys.argv[1]))
    jobs, results = sys.stdin.buffer, sys.stdout.buffer
    while True:
        try:
            job = pickle.load(jobs)  # noqa: S301 - from the broker that has started us
        except EOFError:
            return
        _send(results, _outcome(job, lambda cleaned: _send(results, cleaned)))


def _outcome(job: CompactionJob, report: Callable[[Cleaned], object]) -> Finished | Failed:
    try:
        return run(job, Files(sync=job.sync), SystemClock(), report)
    except StorageError as error:
        return Failed(str(error), isinstance(error, CorruptLogError))


def _send(results: IO[bytes], result: Cleaned | Finished | Failed) -> None:
    pickle.dump(result, results)
    results.flush()


def _follow_parent(parent: int) -> None:
    """Go last among those who want the processor, leave signals to the broker, and die when it does.

    More exactly when the thread of the broker does that has started us: it outlives our rounds.
    """
    os.nice(_NICE)
    for number in (signal.SIGINT, signal.SIGTERM):  # a supervisor sends its own to everybody
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        raise SystemExit("the broker is gone")


if __name__ == "__main__":
    main()
