"""What is done once in a Python process of Spark's: at the start of one kept for many tasks, at a stream's end."""

from __future__ import annotations

import gc
import os
import sys
from typing import Final

_FREEZES: Final = 2
"""Arrow, pandas and numba load much of themselves when they are first used: the second task has more to hide."""

_tasks_begun = 0


def settle() -> None:
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


_STREAM_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"


def leave_if_abandoned() -> None:
    """End the process of a stream reader that Spark has hung up on; the last thing its `stop` does.

    Spark ends a stream by closing the socket on which it asks the reader. PySpark's loop takes that for a failure,
    stops the reader, tries to report the failure on the same socket, and dies of the broken pipe with a traceback on
    the user's terminal, in every run that succeeds. Nobody is left to be told anything, so the process ends here.
    """
    if _runs_a_stream() and isinstance(sys.exc_info()[1], EOFError | BrokenPipeError | ConnectionResetError):
        os._exit(0)


def _runs_a_stream() -> bool:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return _STREAM_RUNNER in sys.modules or (spec is not None and spec.name == _STREAM_RUNNER)
