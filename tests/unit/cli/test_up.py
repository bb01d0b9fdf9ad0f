"""`millrace up` with several brokers: starting, looking after, and ending them."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient, NewTopic

from millrace.cli.output import CommandError
from millrace.cli.root import run
from millrace.cli.up import Start, Supervision, what_to_start
from millrace.clock import ManualClock
from millrace.local.brokers import BrokerFailed, BrokerProcess, write_properties
from millrace.local.folder import Folder
from millrace.local.zookeeper import ZooKeeperServers
from support.servers import answers
from support.up import ENVIRONMENT, Up, wait_for


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Callable[..., Up]]:
    started: list[Up] = []

    def start(*options: str) -> Up:
        started.append(Up(tmp_path, *options))
        return started[-1]

    yield start
    for each in started:
        each.close()


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


# --- what a folder holds decides what is started in it ----------------------------------------------------------------


def produce(port: int, topic: str, values: list[str]) -> None:
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}"})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(30) == 0


def consume(port: int, topic: str, group: str, count: int, start: str = "earliest") -> list[str]:
    """So many records of a topic as a member of a group, which commits them."""
    settings = {"bootstrap.servers": f"127.0.0.1:{port}", "group.id": group, "auto.offset.reset": start}
    consumer = Consumer({**settings, "enable.auto.commit": False})
    try:
        consumer.subscribe([topic])
        messages = consumer.consume(count, timeout=60)
        assert all(message.error() is None for message in messages) and len(messages) == count
        consumer.commit(asynchronous=False)
        return [message.value().decode() for message in messages]
    finally:
        consumer.close()


Describe = Callable[..., Any]


@pytest.fixture
def described(capsys: pytest.CaptureFixture[str]) -> Describe:
    """What `millrace NOUN describe [NAME] --json` says."""

    def describe(port: int, *words: str) -> Any:
        capsys.readouterr()
        noun, *names = words
        assert run([noun, "describe", *names, "--json", "--bootstrap", f"127.0.0.1:{port}"]) == 0
        return json.loads(capsys.readouterr().out)

    return describe


def test_a_single_broker_grows_into_a_cluster_and_nothing_is_lost(up: Callable[..., Up], described: Describe) -> None:
    alone = up()
    (port,) = alone.ready()
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{port}"})
    wanted = NewTopic("orders", 3, 1, config={"retention.ms": "123456789"})
    admin.create_topics([wanted, NewTopic("empty", 2, 1)])["orders"].result(30)
    produce(port, "orders", [f"order {number}" for number in range(300)])
    read = consume(port, "orders", "billing", 100)
    (before,) = described(port, "topics", "orders")
    cluster_id = described(port, "cluster")["cluster_id"]
    alone.stop()

    cluster = up("--brokers", "3")
    ports = cluster.ready()
    assert "their metadata moves to ZooKeeper, once" in (said := cluster.errors.read_text())
    assert "2 topics came along, on broker 1" in said
    seen = described(ports[2], "cluster")
    assert seen["cluster_id"] == cluster_id and len(seen["brokers"]) == 3 and not seen["offline"]
    (after,) = described(ports[2], "topics", "orders")
    assert after["configs"]["retention.ms"] == "123456789"

    def ends(topic: dict[str, Any]) -> list[Any]:
        return [
            (one["partition"], one["leader"], one["start_offset"], one["end_offset"]) for one in topic["partitions"]
        ]

    assert ends(after) == ends(before)
    assert len(described(ports[1], "topics", "empty")[0]["partitions"]) == 2
    rest = consume(ports[1], "orders", "billing", 200)
    assert sorted(read + rest) == sorted(f"order {number}" for number in range(300)), "the group goes on"
    late = "acks=all is taken, although min.insync.replicas is 2 now"
    produce(ports[2], "orders", [late])
    produce(ports[2], "made-now", ["new"])
    (made,) = described(ports[0], "topics", "made-now")
    assert len(made["partitions"][0]["replicas"]) == 3
    # What groups have committed does not hang on broker 1 for long.
    wait_for(lambda: len(described(ports[0], "topics", "__consumer_offsets")[0]["partitions"][0]["isr"]) == 3)
    cluster.stop()

    again = up()  # as many as there were
    ports = again.ready()
    assert len(ports) == 3 and "starting all its 3 brokers" in again.errors.read_text()
    # Partitions are read in any order: the last record may be alone in one, and come first.
    everything = [late, *(f"order {number}" for number in range(300))]
    assert sorted(consume(ports[0], "orders", "another", 301)) == sorted(everything)
    again.stop()


def test_a_single_broker_grows_into_a_cluster_with_the_users_own_zookeeper(
    up: Callable[..., Up], tmp_path: Path
) -> None:
    alone = up()
    (port,) = alone.ready()
    produce(port, "orders", ["one"])
    alone.stop()
    with ZooKeeperServers(tmp_path / "ensemble") as ensemble:
        cluster = up("--brokers", "2", "--zookeeper", f"{ensemble.hosts}/mine")
        assert consume(cluster.ready()[1], "orders", "readers", 1) == ["one"]
        cluster.stop()
        assert not (cluster.data / "zookeeper").exists()
        again = up()  # the folder knows how many there were, and with which ZooKeeper
        ports = again.ready()
        assert len(ports) == 2 and consume(ports[0], "orders", "others", 1) == ["one"]
        again.stop()


def test_a_broker_of_a_service_takes_its_metadata_to_zookeeper(tmp_path: Path) -> None:
    config = tmp_path / "server.properties"
    alone = {"broker.id": "7", "listeners": "PLAINTEXT://127.0.0.1:0", "log.dirs": str(tmp_path / "data")}
    write_properties(config, alone)
    broker = BrokerProcess(7, config)
    try:
        port = int(broker.start().rpartition(":")[2])
        produce(port, "orders", ["one"])
        broker.terminate()
        with ZooKeeperServers(tmp_path / "ensemble") as ensemble:
            write_properties(config, {**alone, "zookeeper.connect": ensemble.hosts})
            with pytest.raises(
                BrokerFailed, match="is the metadata of a broker without ZooKeeper, and would not count"
            ):
                broker.start()
            command = [sys.executable, "-m", "millrace", "broker", "--config", str(config), "--migrate"]
            for _ in range(2):  # the second time there is nothing left to move
                with subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
                    assert process.stdout is not None
                    port = int(process.stdout.readline().rpartition(":")[2])
                    assert consume(port, "orders", f"readers-{port}", 1) == ["one"]
                    process.terminate()
                    assert process.wait(60) == 0
    finally:
        broker.kill()
    assert run(["broker", "--config", str(config), "--migrate", "--set", "zookeeper.connect="]) == 2


def test_a_single_broker_that_was_killed_grows_too(up: Callable[..., Up]) -> None:
    alone = up()
    (port,) = alone.ready()
    produce(port, "orders", ["one"])
    alone.process.kill()
    alone.process.wait()
    assert (alone.data / "broker-1" / "data" / "metadata.db-wal").exists()
    ports = up("--brokers", "2").ready()
    assert consume(ports[1], "orders", "readers", 1) == ["one"]


def test_a_start_that_is_killed_on_its_way_leaves_one_broker_or_a_cluster(up: Callable[..., Up]) -> None:
    alone = up()
    (port,) = alone.ready()
    produce(port, "orders", ["one"])
    alone.stop()
    ends: list[Callable[[Up], bool]] = [
        lambda it: (it.data / "zookeeper" / "1" / "log").exists(),
        lambda it: (it.data / "zookeeper" / "1" / "data" / "version-2").exists(),
        lambda it: not (it.data / "broker-1" / "data" / "metadata.db").exists(),
    ]
    for number, moment in enumerate(ends):
        growing = up("--brokers", "2")
        wait_for(lambda moment=moment, growing=growing: moment(growing))  # type: ignore[misc]
        children = growing.children()
        growing.process.kill()
        growing.process.wait()
        psutil.wait_procs(children, timeout=60)  # they end with it
        again = up()
        ports = again.ready()
        assert consume(ports[0], "orders", f"readers-{number}", 1) == ["one"]
        again.stop()
    assert len(up("--brokers", "2").ready()) == 2


def test_a_failed_start_takes_back_what_it_made(up: Callable[..., Up], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for brokers in ("1", "2"):
            failed = up("--brokers", brokers, "--port", str(port))
            assert failed.process.wait(60) == 1
            assert f"port {port} is already in use on 127.0.0.1" in failed.errors.read_text()
            assert not failed.data.exists()
    (failed.data / "broker-2").mkdir(parents=True)
    (failed.data / "broker-2" / "notes").write_text("mine")
    failed = up("--brokers", "2", "--set", "log.dirs=/dev/null/nowhere")
    assert failed.process.wait(60) == 1
    assert [path.name for path in failed.data.iterdir() if path.name != "up.lock"] == ["broker-2"]
    assert (failed.data / "broker-2" / "notes").read_text() == "mine"


def test_a_failed_start_keeps_what_was_there(up: Callable[..., Up]) -> None:
    alone = up()
    (port,) = alone.ready()
    produce(port, "orders", ["one"])
    alone.stop()
    with (alone.data / "broker-1" / "data" / ".lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as if the broker ran: its metadata cannot be moved
        failed = up("--brokers", "2")
        assert failed.process.wait(60) == 1
    assert "is in use by another broker" in failed.errors.read_text()
    assert not (failed.data / "broker-2").exists() and not (failed.data / "zookeeper").exists()
    (port,) = up().ready()
    assert consume(port, "orders", "readers", 1) == ["one"]


def test_logs_without_their_metadata_are_not_served_as_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broker-1" / "data" / "orders-0").mkdir(parents=True)
    assert run(["up", "--data", str(tmp_path), "--port", "0"]) == 1
    assert "holds logs whose metadata is in a ZooKeeper: say in which" in capsys.readouterr().err
    assert (tmp_path / "broker-1" / "data" / "orders-0").is_dir()


def test_what_is_started_depends_on_what_is_there(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    assert what_to_start(folder, None, None) == Start(1, is_single=True)
    assert what_to_start(folder, 3, None) == Start(3)
    assert what_to_start(folder, None, "zk:2181") == Start(1, zookeeper="zk:2181")
    for broker_id in (1, 2, 3):
        folder.data(broker_id).mkdir(parents=True)
        (folder.home(broker_id) / "server.properties").write_text("zookeeper.connect=zk:2181/here\n")
    found = what_to_start(folder, None, None)
    assert (found.brokers, found.zookeeper, found.is_single) == (3, "zk:2181/here", False)
    assert "starting all its 3 brokers" in found.remark
    assert "and only 1 will run" in what_to_start(folder, 1, None).remark
    assert what_to_start(folder, 4, None) == Start(4, zookeeper="zk:2181/here")
    folder.zookeeper.mkdir()
    assert what_to_start(folder, None, None).zookeeper is None
    with pytest.raises(CommandError, match="has a ZooKeeper of its own"):
        what_to_start(folder, None, "zk:2181")


# --- looking after, with processes that are not there -----------------------------------------------------------------


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
