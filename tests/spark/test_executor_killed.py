"""A real executor, the JVM of a standalone cluster, killed while its tasks read; the counts stay exact."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.gated_driver import QUERIES
from support.servers import ROOT
from support.spark_cluster import SparkCluster
from support.spark_queries import TIMEOUT_S
from support.topics import Sent, Topics

GATE_TIMEOUT_S = 120
"""Before the first task stands the start of a driver and two executors."""
COUNT = 20_000
"""Records of 1,000 bytes in each of two partitions: far more than what pipes hold while a task waits at the gate."""


def executor_at_the_gate(home: Path, driver: subprocess.Popen[str]) -> int:
    """The pid of the first executor of which a task has come to the gate."""
    deadline = time.monotonic() + GATE_TIMEOUT_S
    while True:
        for path in home.glob("reached-*"):
            return int(path.name.rpartition("-")[2])
        assert driver.poll() is None, driver.communicate()[1][-3000:]
        assert time.monotonic() < deadline, f"no task came to the gate in {home}"
        time.sleep(0.02)


@pytest.mark.cluster
@pytest.mark.timeout(300)  # processes of its own, each with a JVM: slow on a busy machine
def test_an_executor_killed_in_the_middle_of_a_batch_query_and_of_a_stream(topics: Topics, tmp_path: Path) -> None:
    topic = topics.create(partitions=2)
    topics.send(topic, [Sent(bytes(1000), partition=number % 2) for number in range(2 * COUNT)], batch_size=65536)
    exact = [[number, COUNT, COUNT * (COUNT - 1) // 2, COUNT] for number in range(2)]
    with SparkCluster(workers=2) as cluster:
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        driver = subprocess.Popen(
            [sys.executable, "-m", "support.gated_driver", cluster.url, topics.bootstrap, topic, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": str(cluster.python)},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert driver.stdout is not None
        try:
            for killed, name in enumerate(QUERIES, 1):
                home = tmp_path / name
                home.mkdir(exist_ok=True)
                executor = executor_at_the_gate(home, driver)
                assert b"CoarseGrainedExecutorBackend" in Path(f"/proc/{executor}/cmdline").read_bytes()
                os.kill(executor, signal.SIGKILL)
                (home / "open").touch()
                line = driver.stdout.readline()
                assert line, driver.communicate()[1][-3000:]
                assert json.loads(line) == exact
                assert (home / "again").exists()
                assert (
                    len(re.findall(r"Removing executor \S+ because it is EXITED", cluster.log_of("master"))) == killed
                )
            _, told = driver.communicate(timeout=TIMEOUT_S)
            assert driver.returncode == 0, told[-3000:]
        finally:
            driver.kill()
            driver.communicate()
