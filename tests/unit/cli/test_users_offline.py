"""`millrace users --offline`: the user as whom brokers log in to each other is there before they start."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from millrace.cli.root import run
from millrace.local.brokers import BrokerProcess, write_properties
from millrace.local.ports import free_ports
from millrace.local.zookeeper import ZooKeeperServers
from support.certificates import Pki
from support.up import wait_for

MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


def write_config(path: Path, data: Path | None, protocol: str = "SASL_PLAINTEXT", **more: str) -> Path:
    """The settings of a broker that logs in to itself and to others as `broker`."""
    settings = {
        "node.id": path.stem,
        "listeners": f"{protocol}://127.0.0.1:{free_ports('127.0.0.1', 1)[0]}",
        "inter.broker.listener.name": protocol,
        "sasl.enabled.mechanisms": "SCRAM-SHA-512",
        "sasl.mechanism.inter.broker.protocol": "SCRAM-SHA-512",
        "sasl.jaas.config": f'{MODULE} required username="broker" password="secret";',
        **({} if data is None else {"log.dirs": str(data)}),
        **{name.replace("_", "."): value for name, value in more.items()},
    }
    write_properties(path, settings)
    return path


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "1.properties", tmp_path / "data")


@pytest.fixture
def password_file(tmp_path: Path) -> Path:
    path = tmp_path / "password"
    path.write_text("secret\n")
    return path


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a command says, on stdout or, where it fails, on stderr."""

    def told(*words: object, exit_code: int = 0) -> str:
        assert run([str(word) for word in words]) == exit_code
        captured = capsys.readouterr()
        return captured.err if exit_code else captured.out

    return told


def client(password: str, protocol: str = "SASL_PLAINTEXT", **more: str) -> list[str]:
    names = {"security.protocol": protocol, "sasl.mechanism": "SCRAM-SHA-512"}
    values = {**names, "sasl.username": "broker", "sasl.password": password}
    values |= {name.replace("_", "."): value for name, value in more.items()}
    return [word for name, value in values.items() for word in ("--client", f"{name}={value}")]


def test_a_user_of_the_first_start(config: Path, password_file: Path, told: Callable[..., str]) -> None:
    there = ("--offline", "--config", config)
    assert told("users", "list", *there, "--json") == "[]\n"
    assert not (config.parent / "data").exists(), "nothing is made by asking"
    added = told("users", "add", "broker", *there, "--password-file", password_file)
    assert added == "added broker (SCRAM-SHA-512)\n"
    broker = BrokerProcess(1, config)
    try:
        address = broker.start()
        found = json.loads(told("users", "list", "--json", "--bootstrap", address, *client("secret")))
        assert [one["user"] for one in found] == ["broker"]
        # While it runs it is asked, not bypassed.
        refused = told("users", "passwd", "broker", *there, "--generate", exit_code=1)
        assert "in use by another process (a broker that runs is asked without --offline)" in refused
    finally:
        broker.terminate()
    assert "millrace users passwd broker" in told("users", "add", "broker", *there, "--generate", exit_code=1)
    (changed,) = json.loads(told("users", "passwd", "broker", *there, "--generate", "--json"))
    assert changed["result"] == "changed" and len(changed["password"]) >= 24
    told("users", "add", "broker", *there, "--generate", "-m", "SCRAM-SHA-256", "--iterations", "4096")
    assert json.loads(told("users", "list", *there, "--json")) == [
        {"user": "broker", "mechanism": "SCRAM-SHA-256", "iterations": 4096},
        {"user": "broker", "mechanism": "SCRAM-SHA-512", "iterations": 8192},
    ]
    told("users", "remove", "broker", *there, "--yes")
    assert json.loads(told("users", "list", *there, "--json")) == []


def test_brokers_over_tls_log_in_to_each_other_as_it(
    tmp_path: Path, password_file: Path, told: Callable[..., str]
) -> None:
    """With ZooKeeper, which asks for a password itself."""
    pki = Pki(tmp_path)
    with ZooKeeperServers(tmp_path / "zookeeper", asks_for_password=True) as servers:
        more = {
            "zookeeper_connect": servers.hosts,
            "ssl_keystore_type": "PEM",
            "ssl_keystore_location": str(pki.server),
            "ssl_truststore_type": "PEM",
            "ssl_truststore_location": str(pki.trusted),
        }
        access = {name.replace(".", "_"): value for name, value in servers.access.as_settings().items()}
        first, second = (
            write_config(tmp_path / f"{number}.properties", tmp_path / str(number), "SASL_SSL", **more, **access)
            for number in (1, 2)
        )
        told("users", "add", "broker", "--offline", "-c", first, "--password-file", password_file)
        brokers = [
            BrokerProcess(1, first),
            BrokerProcess(2, second, pid_path=tmp_path / "2.pid", log_path=tmp_path / "2.log"),
        ]
        try:
            for broker in brokers:
                broker.launch()
            address, _ = [broker.wait_until_ready() for broker in brokers]
            login = ("--bootstrap", address, *client("secret", "SASL_SSL", ssl_ca_location=str(pki.trusted)))
            told("topics", "create", "orders", "--replication-factor", "2", *login)
            wait_for(lambda: run(["cluster", "health", *login]) == 0)  # replicated: one is the other's client
            assert "healthy: 2 brokers" in told("cluster", "health", *login)
            refused = told("users", "passwd", "broker", "--offline", "-c", first, "--generate", exit_code=1)
            assert "the cluster runs (broker 1, 2 is registered)" in refused
        finally:
            for broker in brokers:
                broker.ask_to_stop()
            for broker in brokers:
                broker.wait_stopped()


@pytest.mark.parametrize("words", [["--offline"], ["--config", "server.properties"]])
def test_offline_needs_the_settings_and_they_need_it(words: list[str], told: Callable[..., str]) -> None:
    refused = told("users", "add", "broker", "--generate", *words, exit_code=2)
    assert "--offline and --config FILE belong together" in refused


def test_a_name_that_is_no_text(config: Path, password_file: Path, told: Callable[..., str]) -> None:
    words = ("users", "add", "\udcff", "--offline", "--config", config, "--password-file", password_file)
    assert "the name of the user is not text in UTF-8" in told(*words, exit_code=2)


def test_settings_that_name_no_metadata(tmp_path: Path, config: Path, told: Callable[..., str]) -> None:
    add = ("users", "add", "broker", "--offline", "--generate", "--config")
    assert "cannot read" in told(*add, tmp_path / "missing", exit_code=1)
    nowhere = write_config(tmp_path / "2.properties", None)
    assert "set zookeeper.connect or log.dirs" in told(*add, nowhere, exit_code=1)
    (port,) = free_ports("127.0.0.1", 1)
    silent = {"zookeeper_connect": f"127.0.0.1:{port}", "zookeeper_connection_timeout_ms": "500"}
    nobody = write_config(tmp_path / "3.properties", tmp_path / "other", **silent)
    assert "no ZooKeeper answered" in told(*add, nobody, exit_code=1)
    told(*add, config)
    # That broker goes to ZooKeeper one day, and its metadata with it: nothing may be there before.
    moving = write_config(tmp_path / "4.properties", tmp_path / "data", **silent)
    assert "has not moved to ZooKeeper yet" in told(*add, moving, exit_code=1)
