"""The ZooKeeper of a cluster on this machine: it asks for a password, in a new directory and in one of before that."""

from __future__ import annotations

from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kazoo.exceptions import NoAuthError

from millrace.errors import StorageError
from millrace.local.cluster import LocalCluster
from millrace.local.zookeeper import ZooKeeperServers
from millrace.metadata.zookeeper_access import ZooKeeperAccess
from support.zookeeper import looking_at

STRANGER = ZooKeeperAccess("millrace", "guess")


def topics(cluster: LocalCluster) -> set[str]:
    return set(AdminClient({"bootstrap.servers": cluster.bootstrap}).list_topics(timeout=30).topics)


def assert_closed(cluster: LocalCluster) -> None:
    servers = cluster.zookeeper
    assert servers is not None
    with looking_at(servers.hosts, servers.access) as insider:
        paths = ["/", "/zookeeper", "/metadata", "/brokers/ids/1", "/controller", "/controller_epoch"]
        paths += [f"/metadata/deltas/{name}" for name in insider.get_children("/metadata/deltas")]
    with looking_at(servers.hosts, STRANGER) as client:
        for path in paths:
            for attempt in (client.get, client.get_children, client.exists):
                with pytest.raises(NoAuthError):
                    attempt(path)
        with pytest.raises(NoAuthError):
            client.create("/mine")


def test_a_new_cluster_and_its_second_start(tmp_path: Path) -> None:
    for _ in range(2):
        with LocalCluster(tmp_path, brokers=1) as cluster:
            assert_closed(cluster)
            password = (tmp_path / "zookeeper" / "password").read_text().strip()
            settings = tmp_path / "broker-1" / "server.properties"
            assert password in settings.read_text()
            assert settings.stat().st_mode & 0o777 == 0o600
            pid = cluster.brokers[1].pid
            for place in ("cmdline", "environ"):
                assert password.encode() not in Path(f"/proc/{pid}/{place}").read_bytes()
            assert password not in (tmp_path / "broker-1" / "log").read_text()


def test_a_directory_of_before_passwords_is_closed_and_goes_on(tmp_path: Path) -> None:
    with ZooKeeperServers(tmp_path / "zookeeper") as before:
        with LocalCluster(tmp_path, brokers=1, zookeeper=before.hosts) as cluster:
            admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
            admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result(30)
            (tmp_path / "broker-1" / "server.properties").chmod(0o644)
        with looking_at(before.hosts) as client:
            assert client.get_children("/metadata/deltas")
    with LocalCluster(tmp_path, brokers=1) as cluster:
        assert "orders" in topics(cluster)
        assert_closed(cluster)
    assert (tmp_path / "broker-1" / "server.properties").stat().st_mode & 0o777 == 0o600


def test_a_password_that_was_exchanged_is_told_in_one_line(tmp_path: Path) -> None:
    with LocalCluster(tmp_path, brokers=1):
        pass
    (tmp_path / "zookeeper" / "password").write_text("another\n")
    told = r"not allowed by ZooKeeper at .* to read /: check zookeeper\.digest\.username"
    with pytest.raises(StorageError, match=told), LocalCluster(tmp_path, brokers=1):
        pass
