"""What is done once in a Python process of Spark's: at the start of one kept for many tasks, at a stream's end."""

from __future__ import annotations

import gc
import os
import socket
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Final

_FREEZES: Final = 2
"""Arrow, pandas and numba load much of themselves when they are first used: the second task has more to hide."""

_tasks_begun = 0


def prepare_worker() -> None:
    """Load what every task needs and take all that is loaded out of the collector's sight; call it in a task.

    PySpark's workers collect garbage after every task. Arrow, numba and pandas are some hundred thousand objects that
    live as long as the process, and walking over them takes longer than the rest of a small micro-batch.
    """
    global _tasks_begun
    if _tasks_begun == _FREEZES:
        return
    _tasks_begun += 1
    from pyspark import TaskContext

    from millrace.spark.compiled import load_kernels

    load_kernels()
    if TaskContext.get() is None:  # not in a worker: what others freeze is their own business
        return
    gc.collect()
    gc.freeze()


_DAEMON: Final = "pyspark.daemon"
_STREAM_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"


def leave_when_let_go() -> None:
    """Have a worker process of a session that is not ours end without a word from its second task on.

    This is called in its first one, by the import of the source. Sessions of `millrace.spark.session` do better where
    they can: their workers come from `millrace.spark.daemon`.
    """
    daemon = sys.modules["__main__"]
    if _name_of(daemon) == _DAEMON:
        quieten(daemon)


def quieten(daemon: ModuleType) -> None:
    """Have the workers of a daemon of PySpark's end without a word when Spark wants them no more.

    Spark hangs up on a worker that was idle for a minute, and on all of them at the end, whatever they do. PySpark
    takes the end of the input for a failure, tries to report it to who has hung up, and dies of the broken pipe with a
    traceback on the user's terminal, in runs that succeed. What goes wrong within a task is not concerned: Spark is
    told of it before it could come here.
    """
    work: Callable[[socket.socket, bool], int] = daemon.worker

    def worker(sock: socket.socket, authenticated: bool) -> int:
        try:
            return work(sock, authenticated) if sock.recv(1, socket.MSG_PEEK) else os._exit(0)
        except (BrokenPipeError, ConnectionResetError):
            os._exit(0)

    daemon.worker = worker  # type: ignore[attr-defined]


def leave_if_abandoned() -> None:
    """End the process of a stream reader that Spark has hung up on, for the same reason; the last act of its `stop`."""
    runs_a_stream = _STREAM_RUNNER in sys.modules or _name_of(sys.modules["__main__"]) == _STREAM_RUNNER
    if runs_a_stream and isinstance(sys.exc_info()[1], EOFError | BrokenPipeError | ConnectionResetError):
        os._exit(0)


def _name_of(module: ModuleType) -> str:
    """What was run with `python -m` has the name `__main__`, and its own in its spec."""
    return "" if module.__spec__ is None else module.__spec__.name
