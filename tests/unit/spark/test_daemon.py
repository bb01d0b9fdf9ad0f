"""Workers of Spark's that are hung up on, as at the end of a session: asked the way the JVM does, without one."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from millrace.spark.session import session_settings
from support.up import wait_for

NO_TASK = b"nonsense"
"""A worker that gets this instead of a task fails, and tells who asked."""


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    return session_settings("local[2]", {})["spark.python.daemon.module"]


@pytest.fixture
def errors(tmp_path: Path) -> Path:
    return tmp_path / "errors"


@pytest.fixture
def daemon(module: str, errors: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The daemon of a session, with the variables that Spark gives it."""
    told = {
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "SPARK_REUSE_WORKER": "1",
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
    }
    with (
        tempfile.TemporaryDirectory() as folder,  # a short name: the path of a socket has room for a hundred letters
        errors.open("wb") as sink,
        subprocess.Popen(
            [sys.executable, "-m", module, "pyspark.worker"],
            env=os.environ | told | {"PYTHON_WORKER_FACTORY_SOCK_DIR": folder},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sink,
        ) as process,
    ):
        yield process
        process.kill()


def begin_worker(daemon: subprocess.Popen[bytes]) -> tuple[socket.socket, int]:
    """A new worker, which waits for its first task: the connection to it, and its process id."""
    assert daemon.stdout is not None
    (length,) = struct.unpack(">i", daemon.stdout.read(4))
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(60)
    connection.connect(daemon.stdout.read(length).decode())
    (pid,) = struct.unpack(">i", connection.recv(4, socket.MSG_WAITALL))
    return connection, pid


def test_a_worker_that_is_hung_up_on_in_its_first_task_says_nothing(
    daemon: subprocess.Popen[bytes], errors: Path
) -> None:
    connection, pid = begin_worker(daemon)
    connection.sendall(NO_TASK)
    connection.close()
    wait_for(lambda: not psutil.pid_exists(pid))
    assert errors.read_text() == ""


def test_a_worker_that_is_hung_up_on_before_its_first_task_says_nothing(
    daemon: subprocess.Popen[bytes], errors: Path
) -> None:
    connection, pid = begin_worker(daemon)
    connection.close()
    wait_for(lambda: not psutil.pid_exists(pid))
    assert errors.read_text() == ""


def test_a_failure_is_told_to_who_asked(daemon: subprocess.Popen[bytes], errors: Path) -> None:
    connection, pid = begin_worker(daemon)
    connection.sendall(NO_TASK)
    assert b"Traceback" in connection.recv(1 << 16)
    connection.close()
    wait_for(lambda: not psutil.pid_exists(pid))
    assert errors.read_text() == ""


def test_a_python_of_the_users_own_need_not_have_this_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/another/python")
    assert "spark.python.daemon.module" not in session_settings("local[2]", {})
    monkeypatch.setenv("PYSPARK_PYTHON", sys.executable)
    assert "spark.python.daemon.module" not in session_settings("spark://host:7077", {})
