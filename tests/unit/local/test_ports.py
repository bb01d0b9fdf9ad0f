"""Ports that are chosen now and taken later: nobody else is given them meanwhile."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from millrace.errors import MillraceError
from millrace.local.cluster import LocalCluster
from millrace.local.ports import free_ports, is_free

HOST = "127.0.0.1"
OTHER_PROCESS = f"""
import sys
from millrace.local.ports import free_ports
print(*free_ports("{HOST}", 20), flush=True)
sys.stdin.read()
"""


def test_ports_differ_also_from_those_of_earlier_calls() -> None:
    """Nobody listens on the earlier ones yet: a cluster chooses those of ZooKeeper and of its brokers one by one."""
    ports = [port for _ in range(100) for port in free_ports(HOST, 3)]
    assert len(set(ports)) == 300
    assert all(is_free(HOST, port) for port in ports)


def test_a_port_on_which_somebody_listens_is_passed_over() -> None:
    (last,) = free_ports(HOST, 1)
    with suppress(OSError), socket.create_server((HOST, last + 1)):  # or somebody listens there already
        assert last + 1 not in free_ports(HOST, 3)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has names that vanish with their process")
def test_processes_that_live_at_the_same_time_have_different_ports() -> None:
    command, pipe = [sys.executable, "-c", OTHER_PROCESS], subprocess.PIPE
    others = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(4)]
    given = []
    try:
        for other in others:
            assert other.stdout is not None
            given += [int(port) for port in other.stdout.readline().split()]
        mine = free_ports(HOST, 300)  # while they live: their blocks are free again afterwards
    finally:
        for other in others:
            other.communicate()
    assert len(given) == len(set(given)) == 80
    assert not set(given) & set(mine)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_forked_child_has_a_block_of_its_own() -> None:
    mine = free_ports(HOST, 1)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"%d" % free_ports(HOST, 1)[0])
        os._exit(0)
    os.waitpid(child, 0)
    os.close(writer)
    childs = int(os.read(reader, 100))
    os.close(reader)
    assert abs(childs - mine[0]) != 1  # the next of the same block
    assert childs not in free_ports(HOST, 300)


def test_more_than_there_are() -> None:
    with pytest.raises(MillraceError, match="not even 100000 of the ports"):
        free_ports(HOST, 100_000)


def test_the_ports_of_a_cluster_are_all_different(tmp_path: Path) -> None:
    for _ in range(20):
        cluster = LocalCluster(tmp_path, brokers=3, zookeeper_nodes=3)
        assert cluster.zookeeper is not None
        ports = [*cluster.zookeeper.ports, *cluster.zookeeper._peer_ports, *cluster._ports.values()]
        assert len(set(ports)) == 12
