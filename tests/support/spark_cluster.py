"""A standalone Spark cluster on this machine, from the pyspark wheel: one master, workers with an executor each.

The Python of the workers has every third-party package of this environment, but not millrace: the site-packages folder
is put on PYTHONPATH, where the .pth file of an editable install has no effect. So whatever of millrace runs there was
shipped. Every process is ended by the object that started it; ports are chosen by the system.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Self

import psutil
import pyspark

from millrace.local.java import find_java, home_for_spark
from support.servers import ServerFailed

HOST = "127.0.0.1"
START_TIMEOUT_S = 180.0
FAST_JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""For processes that do not live long enough to earn back what compilers cost."""
_MASTER = "org.apache.spark.deploy.master.Master"
_WORKER = "org.apache.spark.deploy.worker.Worker"
_EXECUTOR = "org.apache.spark.executor.CoarseGrainedExecutorBackend"


class SparkCluster:
    """`with SparkCluster(workers=2) as cluster`: `cluster.url` is the master, `cluster.python` what workers run."""

    def __init__(self, workers: int = 2, *, worker_memory: str = "700m") -> None:
        self._workers = workers
        self._worker_memory = worker_memory
        self._processes: list[subprocess.Popen[bytes]] = []
        self._home = Path(tempfile.mkdtemp(prefix="millrace-spark-cluster-"))
        self.url = ""
        self.python = self._home / "python"

    def __enter__(self) -> Self:
        try:
            self._write_python()
            common = ["--host", HOST, "--port", "0", "--webui-port", "0"]
            self._start("master", _MASTER, *common)
            self.url = self._wait_for("master", r"Starting Spark master at (spark://\S+)")
            for number in range(self._workers):
                name = f"worker-{number}"
                sizes = ["--cores", "1", "--memory", self._worker_memory, "--work-dir", str(self._home / name)]
                self._start(name, _WORKER, *common, *sizes, self.url)
            for number in range(self._workers):
                self._wait_for(f"worker-{number}", r"(Successfully registered with master)")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for process in reversed(self._processes):
            # The process group: a worker's executors are its children.
            try:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(20)
            except ProcessLookupError:
                pass
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(20)
        self._processes.clear()
        shutil.rmtree(self._home, ignore_errors=True)

    def executors(self) -> list[psutil.Process]:
        """The executors that run, of whatever application."""
        children = [each for process in self._processes for each in psutil.Process(process.pid).children()]
        return [each for each in children if _is_executor(each)]

    def log_of(self, name: str) -> str:
        return (self._home / f"{name}.log").read_text(errors="replace")

    def _write_python(self) -> None:
        base = getattr(sys, "_base_executable", sys.executable)
        packages = sysconfig.get_path("purelib")
        self.python.write_text(f'#!/bin/sh\nPYTHONPATH="$PYTHONPATH:{packages}" exec "{base}" -s "$@"\n')
        self.python.chmod(0o755)

    def _start(self, name: str, main_class: str, *arguments: str) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYSPARK"))}
        environment |= {"JAVA_HOME": str(home_for_spark(find_java())), "SPARK_DAEMON_MEMORY": "200m"}
        environment |= {"SPARK_DAEMON_JAVA_OPTS": FAST_JAVA}
        program = Path(pyspark.__file__).parent / "bin" / "spark-class"
        with (self._home / f"{name}.log").open("wb") as log:
            self._processes.append(
                subprocess.Popen(
                    [str(program), main_class, *arguments],
                    env=environment,
                    cwd=self._home,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )

    def _wait_for(self, name: str, pattern: str) -> str:
        deadline = time.monotonic() + START_TIMEOUT_S
        pause = threading.Event()
        while time.monotonic() < deadline:
            found = re.search(pattern, self.log_of(name))
            if found:
                return found.group(1)
            pause.wait(0.05)
        raise ServerFailed(f"{name} did not say '{pattern}':\n{self.log_of(name)[-2000:]}")


def _is_executor(process: psutil.Process) -> bool:
    try:
        return _EXECUTOR in process.cmdline()
    except psutil.Error:  # gone, or about to be
        return False
