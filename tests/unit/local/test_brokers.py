"""A broker as a child process: started, killed, started again, and told why it did not start."""

from __future__ import annotations

import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from millrace.config.files import parse_properties
from millrace.local.brokers import BrokerFailed, BrokerProcess, write_properties
from millrace.local.cluster import cluster_defaults
from millrace.local.ports import free_ports
from support.servers import answers


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    (port,) = free_ports("127.0.0.1", 1)
    home = tmp_path / "broker-7"
    values = {"node.id": "7", "listeners": f"PLAINTEXT://127.0.0.1:{port}", "log.dirs": str(home / "data")}
    write_properties(home / "server.properties", values)
    broker = BrokerProcess(7, home / "server.properties")
    yield broker
    broker.kill()


def test_a_broker_is_killed_and_started_again(broker: BrokerProcess) -> None:
    address = broker.start()
    port = int(address.rpartition(":")[2])
    assert answers(port)
    pid = broker.pid
    assert broker.pid_path.read_text() == f"{pid}\n"
    assert broker.exit_status is None
    broker.kill()
    assert broker.pid is None and not answers(port)
    assert broker.start() == address
    assert broker.pid not in (None, pid) and answers(port)
    assert broker.terminate() == 0
    assert not broker.pid_path.exists()


def test_settings_in_the_environment_are_for_others(broker: BrokerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_SETTING_LISTENERS", "PLAINTEXT://nobody.invalid:1")
    assert answers(int(broker.start().rpartition(":")[2]))


def test_a_broker_that_was_killed_by_somebody_else_is_seen(broker: BrokerProcess) -> None:
    broker.start()
    assert broker._process is not None
    broker._process.send_signal(signal.SIGKILL)
    broker._process.wait()
    assert (broker.exit_status, broker.pid) == (-signal.SIGKILL, None)


def test_why_a_broker_did_not_start_is_told(broker: BrokerProcess) -> None:
    broker.config_path.write_text("node.id=7\nnum.partitions=many\n")
    with pytest.raises(BrokerFailed, match=r"broker 7 did not start: millrace: error: num\.partitions"):
        broker.start()


def test_a_broker_that_waits_for_zookeeper_can_be_stopped(broker: BrokerProcess) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        with broker.config_path.open("a") as properties:
            properties.write("listeners=PLAINTEXT://127.0.0.1:0\n")  # a port that was free might be taken meanwhile
            properties.write(f"zookeeper.connect=127.0.0.1:{silent.getsockname()[1]}\n")
            properties.write("zookeeper.session.timeout.ms=60000\n")
        silent.settimeout(60)
        broker.launch()
        try:
            silent.accept()[0].close()  # it has come as far as asking for ZooKeeper
        except TimeoutError:
            pytest.fail(f"it has not asked (exit status {broker.exit_status}): {broker.log_path.read_text()}")
        assert broker.terminate(timeout_s=20) == 0
    assert b"ready" not in broker.log_path.read_bytes()


def test_properties_are_read_back_as_written(tmp_path: Path) -> None:
    values = {
        "plain": "a b=c",
        "path": "C:\\temp\\new",
        "blank": "  x ",
        "empty": "",
        "lines": "a\nb\r\n",
        "text": "grün",
    }
    write_properties(tmp_path / "new" / "p", values)
    assert parse_properties((tmp_path / "new" / "p").read_text()) == values


def test_properties_are_replaced_as_a_whole_and_for_their_owner(tmp_path: Path) -> None:
    path = tmp_path / "p"
    path.write_text("old=1\n")
    path.chmod(0o644)
    (tmp_path / ".p.draft-killed").write_text("password=half")
    with path.open() as reader:
        write_properties(path, {"password": "secret"})
        assert reader.read() == "old=1\n", "whoever could read the old one does not read the new one"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in tmp_path.iterdir()] == ["p"]


@pytest.mark.parametrize(("brokers", "copies", "least"), [(1, "1", None), (2, "2", None), (3, "3", "2"), (9, "3", "2")])
def test_defaults_of_a_cluster(brokers: int, copies: str, least: str | None) -> None:
    values = cluster_defaults(brokers)
    assert (values["default.replication.factor"], values.get("min.insync.replicas")) == (copies, least)
