"""`millrace up --detach`, `status` and `down`: by the locks of the folder, never by a process id that may be old."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import psutil
import pytest

from millrace.cli.root import run
from millrace.local.folder import Folder, Holder, InUse, Kind
from millrace.local.processes import is_alive
from support.servers import answers
from support.up import ENVIRONMENT, wait_for


class Command:
    """`millrace` in a folder, as a process; a folder that is still in use at the end is ended."""

    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(self, *words: str, exit_code: int = 0) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "millrace", *words, "--data", str(self.data)],
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == exit_code, (done.returncode, done.stdout, done.stderr)
        return done.stdout, done.stderr

    def status(self, exit_code: int = 0) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self("status", "--json", exit_code=exit_code)[0])
        return told


@pytest.fixture
def millrace_in(tmp_path: Path) -> Iterator[Command]:
    command = Command(tmp_path / "data")
    yield command
    holder = Folder(command.data).holder()
    if holder is not None:
        process = psutil.Process(holder.pid)
        children = process.children()
        process.kill()
        psutil.wait_procs([process, *children], timeout=30)


def test_a_broker_in_the_background(millrace_in: Command) -> None:
    assert "nothing runs" in millrace_in("down")[0]
    assert millrace_in.status(exit_code=3) == {
        "data": str(millrace_in.data),
        "holds": "nothing",
        "pid": None,
        "since_ms": None,
        "bootstrap": None,
        "security": None,
        "brokers": [],
    }
    out, err = millrace_in("up", "--detach", "--port", "0", "--set", "num.partitions=3")
    ready, metrics = out.splitlines()
    bootstrap = ready.removeprefix("ready bootstrap=")
    port = int(bootstrap.rpartition(":")[2])
    assert out == f"ready bootstrap={bootstrap}\n{metrics}\n" and answers(port)
    assert b"millrace_records_in_total 0\n" in urlopen(metrics.removeprefix("metrics=")).read()
    assert f"log: {millrace_in.data}/log" in err and f"millrace down --data {millrace_in.data}" in err
    assert out in (millrace_in.data / "log").read_text()

    (line,) = millrace_in("up", "--detach", "--port", "0", exit_code=1)[1].splitlines()
    assert "millrace: error: millrace runs in" in line and bootstrap in line and "millrace down" in line
    assert "runs in" in millrace_in("up", "--port", "0", exit_code=1)[1]

    told = millrace_in.status()
    (broker,) = told["brokers"]
    assert told["bootstrap"] == broker["address"] == bootstrap
    assert told["pid"] == broker["pid"] and broker["data_bytes"] > 0 and broker["since_ms"] >= told["since_ms"]
    shown = millrace_in("status")[0]
    assert f"running in {millrace_in.data} for" in shown and bootstrap in shown

    assert millrace_in("down")[0] == f"stopped 1 broker in {millrace_in.data}\n"
    assert not answers(port) and not is_alive(told["pid"])
    assert (millrace_in.data / "broker-1" / "data" / ".kafka_cleanshutdown").exists()
    assert millrace_in("down")[0] == f"nothing runs in {millrace_in.data}\n"
    assert [one["pid"] for one in millrace_in.status(exit_code=3)["brokers"]] == [None]


def test_a_cluster_in_the_background(millrace_in: Command, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = millrace_in("up", "--detach", "--brokers", "2", "--port", "0")
    ready, *metrics = out.splitlines()
    for broker_id, line in enumerate(metrics, start=1):
        assert f'broker_id="{broker_id}"' in urlopen(line.removeprefix("metrics=")).read().decode()
    assert len(metrics) == 2
    address = ["--bootstrap", ready.removeprefix("ready bootstrap=")]
    assert run(["topics", "create", "orders", *address]) == 0
    wait_for(lambda: run(["cluster", "health", *address]) == 0)
    ports = [int(address.rpartition(":")[2]) for address in ready.removeprefix("ready bootstrap=").split(",")]
    told = millrace_in.status()
    children = psutil.Process(told["pid"]).children()
    first, second = (one["pid"] for one in told["brokers"])
    assert {first, second} <= {child.pid for child in children}
    os.kill(second, signal.SIGKILL)
    wait_for(lambda: not is_alive(second))
    assert [one["pid"] for one in millrace_in.status(exit_code=1)["brokers"]] == [first, None]
    assert "not running" in millrace_in("status", exit_code=1)[0]
    wait_for(lambda: run(["cluster", "health", *address]) == 1 and "under-replicated" in capsys.readouterr().out)
    assert run(["cluster", "health", *address]) == 1
    problems = capsys.readouterr().out.splitlines()
    assert problems[0] == "broker 2 is not running (if it is gone for good: millrace cluster remove 2)"
    assert any(line.startswith("orders-0: under-replicated; replicas ") for line in problems)
    # Started by hand, as the operations page says, it is ended with the others.
    config = millrace_in.data / "broker-2" / "server.properties"
    by_hand = subprocess.Popen(
        [
            *(sys.executable, "-m", "millrace", "broker", "--config", str(config)),
            "--pid-file",
            str(config.parent / "pid"),
        ],
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert by_hand.stdout is not None and by_hand.stdout.readline().startswith(b"ready")
        wait_for(lambda: run(["cluster", "health", *address]) == 0)
        assert millrace_in("down")[0] == f"stopped 2 brokers in {millrace_in.data}\n"
        assert by_hand.wait(30) == 0
    finally:
        by_hand.kill()
        by_hand.communicate()
    psutil.wait_procs(children, timeout=30)
    assert not any(child.is_running() for child in children) and not any(map(answers, ports))


def test_what_was_killed_is_told_and_goes_on(millrace_in: Command) -> None:
    millrace_in("up", "--detach", "--port", "0")
    pid = millrace_in.status()["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: not is_alive(pid))
    assert f"what ran there (pid {pid}) was killed" in millrace_in("down")[0]
    assert f"(pid {pid}) was killed" in millrace_in("status", exit_code=3)[0]
    millrace_in("up", "--detach", "--port", "0")
    millrace_in("down")
    assert millrace_in("down")[0] == f"nothing runs in {millrace_in.data}\n"


def test_a_start_that_fails_in_the_background_says_why(millrace_in: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        out, err = millrace_in("up", "--detach", "--port", str(port), exit_code=1)
    assert not out and err == f"millrace: error: port {port} is already in use on 127.0.0.1: choose another\n"
    assert not millrace_in.data.exists()
    (line,) = millrace_in("up", "--detach", "--set", "num.partitions=0", exit_code=1)[1].splitlines()
    assert line.startswith("millrace: error: num.partitions")


def test_a_process_id_that_was_left_behind_is_nobodys(millrace_in: Command) -> None:
    """The lock file and the pid file name processes that live and have nothing to do with the folder."""
    folder = Folder(millrace_in.data)
    folder.data(1).mkdir(parents=True)
    pid_file = folder.home(1) / "pid"
    pid_file.write_text(f"{os.getpid()}\n")
    os.utime(pid_file, (1_000_000_000, 1_000_000_000))
    (folder.path / "up.lock").write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1, "since_ms": 1}))
    assert folder.holder() is None
    assert [broker.pid for broker in folder.brokers()] == [None]
    assert "was killed" in millrace_in("down")[0]  # and this process is still here to see it


def test_an_id_in_a_lock_that_is_held_is_believed_only_of_the_process_that_wrote_it(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    with folder.use() as use:
        use.ready({1: "127.0.0.1:1"})
        holder = folder.holder()
        assert holder is not None and (holder.pid, holder.bootstrap) == (os.getpid(), "127.0.0.1:1")
        with (
            pytest.raises(InUse, match=rf"runs in {tmp_path} already \(pid {os.getpid()}, 127\.0\.0\.1:1\)"),
            Folder(tmp_path).use(),
        ):
            pass
        (tmp_path / "up.lock").write_text(json.dumps({"pid": os.getpid(), "start_ticks": 1, "since_ms": 1}))
        assert folder._live_holder() is None
    assert folder.holder() is None and folder.last_holder() is None


@pytest.mark.parametrize("text", [b"", b"{}", b"not json", b'{"pid": 1, "more": 2}'])
def test_what_is_no_holder(text: bytes) -> None:
    assert Holder.parse(text) is None


def test_what_a_folder_holds(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert folder.kind is Kind.NOTHING
    folder.data(1).mkdir(parents=True)
    assert folder.kind is Kind.NOTHING
    (folder.data(1) / "orders-0").mkdir()
    assert folder.kind is Kind.LOGS_ALONE
    folder.zookeeper.mkdir()
    assert folder.kind is Kind.CLUSTER
    (folder.data(1) / "metadata.db").touch()
    assert folder.kind is Kind.SINGLE, "what ZooKeeper has is a draft as long as the file is there"
