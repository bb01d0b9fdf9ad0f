"""One SparkSession per process of tests, and the broker that the source's tests read.

MILLRACE_SPARK_TEST_BOOTSTRAP names a broker that is already running, such as Apache Kafka: the same tests then run
against it, without those that have to kill the broker or damage its files.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest
from pyspark.sql import SparkSession

from millrace.spark.session import build_session
from millrace.testing import Cluster
from support.topics import Topics

EXTERNAL = os.environ.get("MILLRACE_SPARK_TEST_BOOTSTRAP", "")


@pytest.fixture(scope="session", autouse=True)
def quick_java() -> Iterator[None]:
    """Short queries never earn back what the optimising compiler costs: without it a third less work, also for the
    drivers that tests start as processes. `spark-submit` hands these options on without a word, unlike Java itself."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
        yield


@pytest.fixture(scope="session")
def spark(quick_java: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    home = tmp_path_factory.mktemp("spark")
    session = build_session(
        "tests",
        # A task may fail as often as on a cluster by default. Where a test kills the workers of two tasks at once, the
        # retry of one may be given the worker that the other has let go, which Spark does not know to be dead yet.
        master="local[2,4]",
        options={
            "spark.driver.memory": "1g",
            "spark.sql.shuffle.partitions": "2",
            "spark.sql.warehouse.dir": str(home / "warehouse"),
            "spark.local.dir": str(home / "local"),
        },
    )
    yield session
    session.stop()


@pytest.fixture(autouse=True)
def room_for_callbacks(request: pytest.FixtureRequest) -> None:
    """py4j's callback server waits with select(), which refuses descriptors from 1,024 on. Its thread then dies while
    its socket still listens, and Spark's call of a foreachBatch function waits for ever: better to fail here."""
    if "spark" in request.fixturenames and lowest_free_descriptor() > 500:
        gc.collect()  # logs that other tests have left
        assert lowest_free_descriptor() < 1000, "this process holds too many descriptors for py4j"


def lowest_free_descriptor() -> int:
    descriptor = os.dup(0)
    os.close(descriptor)
    return descriptor


@pytest.fixture(autouse=True)
def active_session(request: pytest.FixtureRequest) -> None:
    """Spark looks for a Python data source in the session that is active in the JVM's thread, and a write does not make
    its own session that; py4j may serve this thread by another one of the JVM than it did before."""
    if "spark" in request.fixturenames:
        session: SparkSession = request.getfixturevalue("spark")
        assert session._jvm is not None
        session._jvm.org.apache.spark.sql.classic.SparkSession.setActiveSession(session._jsparkSession)


@pytest.fixture(scope="session")
def bootstrap() -> Iterator[str]:
    """A broker for the whole run, ours or an external one; tests use topics of their own."""
    if EXTERNAL:
        yield EXTERNAL
        return
    with Cluster() as cluster:
        yield cluster.bootstrap_servers


@pytest.fixture(scope="session")
def topics(bootstrap: str) -> Topics:
    return Topics(bootstrap)


@pytest.fixture
def our_broker() -> None:
    """For tests that kill the broker or change its files."""
    if EXTERNAL:
        pytest.skip("needs a broker of its own that it may kill or damage; an external one is given")
