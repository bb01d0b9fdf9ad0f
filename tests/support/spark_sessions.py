"""A local Spark session with Spark's own JVM Kafka connector or without it, for tests and benchmarks that compare.

The JVM belongs to the session here: it ends with the `with` block, so that a later session of the same process can
have other jars. The sessions of tests/spark are not made here.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from pyspark import SparkContext
from pyspark.sql import SparkSession

from support.maven import ROOT, jars_of

CONNECTOR_POM = ROOT / "tests" / "jvm" / "spark" / "pom.xml"
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.memory": "1g",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.showConsoleProgress": "false",
}


def connector_jars() -> list[Path]:
    """Spark's JVM Kafka connector. Raises JarsUnavailable."""
    return jars_of(CONNECTOR_POM, "spark-connector")


@contextmanager
def local_session(
    jars: Sequence[Path] = (), settings: Mapping[str, str] | None = None, *, cores: int = 2
) -> Iterator[SparkSession]:
    """A session in a JVM of its own; with `jars` on its class path."""
    if SparkSession.getActiveSession() is not None:
        raise RuntimeError("a Spark session is running in this process already")
    os.environ["PYSPARK_PYTHON"] = sys.executable  # workers would run whatever python3 is first on PATH
    with tempfile.TemporaryDirectory(prefix="spark-") as home:
        builder = SparkSession.builder.master(f"local[{cores}]").appName("millrace")
        places = {"spark.sql.warehouse.dir": f"{home}/warehouse", "spark.local.dir": f"{home}/local"}
        if jars:
            places["spark.jars"] = ",".join(map(str, jars))
        for name, value in {**SETTINGS, **places, **(settings or {})}.items():
            builder = builder.config(name, value)
        spark = builder.getOrCreate()
        try:
            spark.sparkContext.setLogLevel("ERROR")
            yield spark
        finally:
            spark.stop()
            _end_jvm()


def _end_jvm() -> None:
    """PySpark keeps the JVM until Python ends; a JVM started by PySpark ends when its input does."""
    gateway, SparkContext._gateway, SparkContext._jvm = SparkContext._gateway, None, None
    if gateway is None:
        return
    child = gateway.proc
    gateway.shutdown()
    child.stdin.close()
    child.wait(30)
