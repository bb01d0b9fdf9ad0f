"""What is done once in a Python process that Spark keeps for many tasks."""

from __future__ import annotations

import gc

_settled = False


def settle() -> None:
    """Load what every task needs and take all that is loaded out of the collector's sight; call it in a task.

    PySpark's workers collect garbage after every task. Arrow, numba and pandas are some hundred thousand objects that
    live as long as the process, and walking over them takes longer than the rest of a small micro-batch.
    """
    global _settled
    if _settled:
        return
    _settled = True
    from pyspark import TaskContext

    from millrace.spark.compiled import load_kernels

    load_kernels()
    if TaskContext.get() is None:  # not in a worker: what others freeze is their own business
        return
    gc.collect()
    gc.freeze()
