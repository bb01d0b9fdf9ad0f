"""What is done once in a Python process that Spark keeps for many tasks."""

from __future__ import annotations

import gc
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
