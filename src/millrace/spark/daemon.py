"""The process that starts Spark's Python workers in a session of ours: PySpark's own, with workers that leave quietly.

Run by Spark, which is told of it by `spark.python.daemon.module`. Not for executors elsewhere: this module reaches them
with the code that is shipped, which is after their daemon has started.
"""

from __future__ import annotations

from pyspark import daemon

from millrace.spark.worker import quieten

if __name__ == "__main__":
    quieten(daemon)
    daemon.manager()
