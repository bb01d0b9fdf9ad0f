"""What the processes of `millrace up` lay open: where they listen, and what they show of their secrets."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from millrace.security.exposure import is_loopback
from support.raw import RawClient
from support.up import ENVIRONMENT, Up


def _listening(up: Up) -> set[tuple[str, int]]:
    """Every address at which a process of it takes connections."""
    own = psutil.Process(up.process.pid)
    return {
        (connection.laddr.ip, connection.laddr.port)
        for process in (own, *own.children(recursive=True))
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.parametrize("options", [(), ("--secure",), ("--brokers", "2")], ids=["one", "secured", "cluster"])
def test_redpanda_cve_2026_82266_nothing_listens_to_the_world(tmp_path: Path, options: tuple[str, ...]) -> None:
    """No port but those of brokers, two each, and ZooKeeper; none that another machine reaches, unless asked for."""
    up = Up(tmp_path, *options)
    try:
        ports = up.ready()
        found = _listening(up)
    finally:
        up.close()
    assert set(ports) <= {port for _, port in found}
    assert [address for address in found if not is_loopback(address[0].removeprefix("::ffff:"))] == []
    zookeepers = 1 if "--brokers" in options else 0
    metrics = len(ports)
    assert len({port for _, port in found}) == len(ports) + metrics + zookeepers
    assert "may read, write and delete everything" not in up.errors.read_text()


def test_who_opens_a_port_to_the_world_is_told(tmp_path: Path) -> None:
    up = Up(tmp_path, "--host", "0.0.0.0")
    try:
        (port,) = up.ready()
        assert "millrace: everybody who reaches PLAINTEXT://0.0.0.0:0 may read" in up.errors.read_text()
        assert ("0.0.0.0", port) in _listening(up)
    finally:
        up.close()


def test_the_passwords_of_a_secured_broker_are_in_no_log(tmp_path: Path) -> None:
    up = Up(tmp_path, "--secure")
    try:
        up.ready()
    finally:
        up.close()
    passwords = list(_passwords(up.data / "security" / "users.json"))
    assert len(passwords) == 3
    logs = [up.errors, *(path for path in up.data.rglob("*log") if path.is_file())]
    for path in logs:
        text = path.read_text(errors="replace")
        assert not any(password in text for password in passwords), path


def _passwords(path: Path) -> list[str]:
    found: dict[str, str] = json.loads(path.read_text())
    return list(found.values())


def test_settings_of_a_detached_process_are_not_in_the_list_of_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millrace"]
    data = str(tmp_path / "data")
    settings = ["--set", "ssl.key.password=hunter2", "--set", "num.partitions=7"]
    up = [*command, "up", "--detach", "--port", "0", "--data", data, *settings]
    started = subprocess.run(up, capture_output=True, text=True, timeout=60, check=True, env=ENVIRONMENT)
    try:
        assert "ssl.key.password on a command line is no secret" in started.stderr
        assert "hunter2" not in started.stderr
        pid = int((tmp_path / "data" / "broker-1" / "pid").read_text())
        assert "hunter2" not in " ".join(psutil.Process(pid).cmdline())
        bootstrap = started.stdout.splitlines()[0].removeprefix("ready bootstrap=")
        with RawClient((bootstrap.rpartition(":")[0], int(bootstrap.rpartition(":")[2]))) as client:
            assert len(client.topic("made-by-asking", auto_create=True).partitions) in (0, 7)
            assert len(client.topic("made-by-asking").partitions) == 7, "they count all the same"
    finally:
        subprocess.run([*command, "down", "--data", data], timeout=60, check=True, env=ENVIRONMENT)
