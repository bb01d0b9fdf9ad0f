"""`millrace up` with several brokers: starting, looking after, and ending them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from millrace.cli.root import run
from millrace.cli.up import Supervision
from millrace.clock import ManualClock
from support.servers import answers

SRC = Path(__file__).resolve().parents[3] / "src"


class Up:
    """`millrace up` as a process, and what it has printed."""

    def __init__(self, directory: Path, *options: str) -> None:
        self.data = directory / "data"
        self.errors = directory / "stderr"
        with self.errors.open("wb") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "millrace", "up", "--port", "0", "--data", str(self.data), *options],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])},
            )

    def ready(self) -> list[int]:
        """The ports, once it is ready."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("ready bootstrap="), self.errors.read_text()
        return [int(address.rpartition(":")[2]) for address in line.removeprefix("ready bootstrap=").split(",")]

    def pid(self, broker_id: int) -> int | None:
        try:
            return int((self.data / f"broker-{broker_id}" / "pid").read_text())
        except (FileNotFoundError, ValueError):
            return None

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*options: str) -> Up:
        started.append(Up(tmp_path, *options))
        return started[-1]

    yield start
    for each in started:
        each.close()


def wait_for(condition: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def test_a_cluster_is_started_looked_after_and_stopped(up: Callable[..., Up]) -> None:
    cluster = up("--brokers", "3", "--restart", "--set", "num.partitions=3")
    ports = cluster.ready()
    assert len(ports) == 3 and all(map(answers, ports))
    settings = (cluster.data / "broker-2" / "server.properties").read_text().splitlines()
    assert {"node.id=2", "default.replication.factor=3", "min.insync.replicas=2", "num.partitions=3"} <= set(settings)
    children = cluster.children()
    assert len(children) == 4
    first = cluster.pid(2)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: "broker 2 was ended by SIGKILL" in cluster.errors.read_text())
    wait_for(lambda: cluster.pid(2) not in (None, first) and answers(ports[1]))
    children = cluster.children()
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(60) == 0, cluster.errors.read_text()
    assert not [child for child in children if child.is_running()]
    assert [cluster.pid(broker_id) for broker_id in (1, 2, 3)] == [None, None, None]


def test_a_cluster_that_becomes_one_broker_goes_on_with_its_metadata(up: Callable[..., Up]) -> None:
    for brokers in ("2", "1"):
        cluster = up("--brokers", brokers)
        assert len(cluster.ready()) == int(brokers)
        cluster.process.send_signal(signal.SIGINT)
        assert cluster.process.wait(60) == 0, cluster.errors.read_text()
    names = [line for line in (cluster.data / "broker-1" / "log").read_text().splitlines() if " of cluster " in line]
    assert len({line.split(" of cluster ")[1].split()[0] for line in names}) == 1 and len(names) == 2
    assert not (cluster.data / "broker-1" / "data" / "metadata.db").exists()


def test_a_second_signal_does_not_wait(up: Callable[..., Up]) -> None:
    cluster = up("--brokers", "2")
    cluster.ready()
    children = cluster.children()
    stuck = cluster.pid(1)
    assert stuck is not None
    os.kill(stuck, signal.SIGSTOP)  # a broker that will not stop by itself
    cluster.process.send_signal(signal.SIGTERM)
    wait_for(lambda: cluster.pid(2) is None)
    cluster.process.send_signal(signal.SIGTERM)
    assert cluster.process.wait(10) == 130
    psutil.wait_procs(children, timeout=10)
    assert not [child for child in children if child.is_running()]


def test_a_broker_that_cannot_start_ends_everything(up: Callable[..., Up], tmp_path: Path) -> None:
    (tmp_path / "data" / "broker-2").mkdir(parents=True)
    (tmp_path / "data" / "broker-2" / "data").write_text("in the way")
    cluster = up("--brokers", "2")
    assert cluster.process.wait(60) == 1
    (line,) = cluster.errors.read_text().splitlines()
    assert line.startswith("millrace: error: broker 2 did not start: ")


def test_the_data_of_a_single_broker_is_not_taken_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "broker-1" / "data").mkdir(parents=True)
    (tmp_path / "broker-1" / "data" / "metadata.db").touch()
    assert run(["up", "--brokers", "2", "--data", str(tmp_path)]) == 1
    assert "holds the data of a single broker" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["broker-1"]


# --- looking after, with processes that are not there ----------------------------------------------------------------


class FakeBroker:
    def __init__(self, broker_id: int, log_path: Path) -> None:
        self.broker_id = broker_id
        self.log_path = log_path
        self.exit_status: int | None = None
        self.launches = 0

    def launch(self) -> None:
        self.launches += 1
        self.exit_status = None


class FakeZooKeeper:
    def __init__(self, log_path: Path) -> None:
        self._log_path = log_path
        self.ended: dict[int, int] = {}

    def exited(self) -> dict[int, int]:
        return dict(self.ended)

    def log_path(self, node: int) -> Path:
        return self._log_path

    def launch(self, node: int) -> None:
        del self.ended[node]


class FakeCluster:
    def __init__(self, directory: Path) -> None:
        log = directory / "log"
        log.write_text("one\nthe last words\n")
        self.brokers = {1: FakeBroker(1, log), 2: FakeBroker(2, log)}
        self.zookeeper = FakeZooKeeper(log)


def test_a_broker_that_keeps_dying_is_started_after_longer_and_longer_pauses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, clock = FakeCluster(tmp_path), ManualClock()
    watch = Supervision(cluster, restart=True, clock=clock)  # type: ignore[arg-type]
    broker = cluster.brokers[2]
    for pause_s in (0.5, 1, 2, 4, 8, 16, 30, 30):
        broker.exit_status = 1
        watch.look()
        assert f"starting it again in {pause_s:g} s" in capsys.readouterr().err
        launches = broker.launches
        clock.advance(pause_s - 0.01)
        watch.look()
        assert broker.launches == launches
        clock.advance(0.02)
        watch.look()
        assert broker.launches == launches + 1
    clock.advance(61)
    broker.exit_status = -9
    watch.look()
    assert "broker 2 was ended by SIGKILL" in (said := capsys.readouterr().err)
    assert "starting it again in 0.5 s" in said
    assert cluster.brokers[1].launches == 0


def test_without_restart_an_end_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster, clock = FakeCluster(tmp_path), ManualClock()
    watch = Supervision(cluster, restart=False, clock=clock)  # type: ignore[arg-type]
    cluster.brokers[1].exit_status = 3
    cluster.zookeeper.ended[1] = -15
    for _ in range(3):
        watch.look()
        clock.advance(100)
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"millrace: broker 1 ended with status 3; see {tmp_path}/log (last line: the last words)"
    assert second == f"millrace: ZooKeeper server 1 was ended by SIGTERM; see {tmp_path}/log"
    assert cluster.brokers[1].launches == 0


def test_zookeeper_is_started_again_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = FakeCluster(tmp_path)
    cluster.zookeeper.ended[1] = 1
    Supervision(cluster, restart=True, clock=ManualClock()).look()  # type: ignore[arg-type]
    assert cluster.zookeeper.ended == {}
    assert "ZooKeeper server 1 ended with status 1" in capsys.readouterr().err
