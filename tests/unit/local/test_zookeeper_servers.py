"""ZooKeeper from the pyspark wheel: how it starts, and what is said when it cannot."""

from __future__ import annotations

import importlib.util
import re
import socket
import stat
from pathlib import Path

import pytest

from millrace.errors import ConfigError
from millrace.installing import install_hint
from millrace.local import java
from millrace.local.zookeeper import ZooKeeperFailed, ZooKeeperServers


def test_servers_keep_their_ports_and_stop(zookeeper: ZooKeeperServers) -> None:
    hosts, pid = zookeeper.hosts, zookeeper.pid(1)
    assert pid is not None and zookeeper.exited() == {}
    zookeeper.restart(1)
    assert zookeeper.hosts == hosts
    assert zookeeper.pid(1) not in (None, pid)


def test_one_or_three(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1 or 3 servers"):
        ZooKeeperServers(tmp_path, nodes=2)


@pytest.mark.parametrize("found", [b"", b"\n", b"\xff"])
def test_a_damaged_password_is_told(tmp_path: Path, found: bytes) -> None:
    (tmp_path / "password").write_bytes(found)
    with pytest.raises(ConfigError, match="password is damaged: put back"):
        assert ZooKeeperServers(tmp_path, asks_for_password=True).access


def test_a_password_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    made = ZooKeeperServers(tmp_path / "new", asks_for_password=True).access
    assert ZooKeeperServers(tmp_path / "new", asks_for_password=True).access == made
    path = tmp_path / "new" / "password"
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    servers = ZooKeeperServers(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        servers.ports = [taken.getsockname()[1]]
        with pytest.raises(ZooKeeperFailed, match=r"ended with status \d+ at its start: \S+"):
            servers.start()
        assert list(servers.exited()) == [1]
    servers.stop()


def test_without_pyspark_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    advice = f"{install_hint('spark')} or give --zookeeper HOST:PORT"
    with pytest.raises(ConfigError, match=re.escape(advice)):
        ZooKeeperServers(tmp_path).start()


def test_without_java_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setattr(java, "_home_in_wheel", lambda: None)
    with pytest.raises(ConfigError, match=r"a cluster needs ZooKeeper: .*needs Java 17 or newer; found none"):
        ZooKeeperServers(tmp_path).start()
