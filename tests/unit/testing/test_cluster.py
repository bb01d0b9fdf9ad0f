"""The in-process broker: quick to start, and nothing is left of it."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from millrace.broker import Broker
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.testing import Cluster
from millrace.testing.cluster import MAX_OPEN_FILES
from support.servers import answers
from support.topics import Topics, numbered

SRC = Path(__file__).resolve().parents[3] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}


def port_of(cluster: Cluster) -> int:
    return int(cluster.bootstrap_servers.rpartition(":")[2])


def open_descriptors() -> list[str]:
    """What the open descriptors point to; the one that lists them is gone by the time it is read."""
    targets = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            targets.append(str(entry.readlink()))
        except FileNotFoundError:
            continue
    return sorted(targets)


def test_it_answers_and_is_gone_after_close() -> None:
    with Cluster() as cluster:
        port = port_of(cluster)
        assert answers(port)
        home = cluster.data_dir
        assert home.is_dir()
    assert not home.exists()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)
    with pytest.raises(RuntimeError, match="not running"):
        _ = cluster.bootstrap_servers


def test_nothing_is_left_behind() -> None:
    """In a process of its own: clients that other tests have left in this one still open and close their sockets."""
    code = (
        "import gc, threading, warnings\n"
        "from collections import Counter\n"
        "from millrace.testing import Cluster\n"
        "from unit.testing.test_cluster import answers, open_descriptors, port_of\n"
        "with Cluster():  # what is imported or cached at the first use is not a leak\n"
        "    pass\n"
        "threads, descriptors = set(threading.enumerate()), Counter(open_descriptors())\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    for _ in range(3):\n"
        "        with Cluster() as cluster:\n"
        "            cluster.create_topic('t', 3)\n"
        "            assert answers(port_of(cluster))\n"
        "    gc.collect()\n"
        "print([str(one.message) for one in caught])\n"
        "print(sorted(map(str, set(threading.enumerate()) - threads)))\n"
        "print(sorted((Counter(open_descriptors()) - descriptors).elements()))\n"
    )
    environment = {**ENVIRONMENT, "PYTHONPATH": os.pathsep.join([str(SRC), str(SRC.parent / "tests")])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.stdout.splitlines() == ["[]", "[]", "[]"], done.stdout + done.stderr


def test_it_leaves_the_process_most_of_its_low_descriptors() -> None:
    with Cluster(brokers=3) as cluster:
        cluster.create_topic("t", 120)
        Topics(cluster.bootstrap_servers).send("t", numbered(120, partitions=120))
        home = str(cluster.data_dir.parent)
        assert 0 < sum(target.startswith(home) for target in open_descriptors()) <= MAX_OPEN_FILES + 10


def test_starting_takes_less_than_a_tenth_of_a_second() -> None:
    """In a process of its own, after import, as a test suite sees it; the best of five, because machines are shared."""
    code = (
        "import time\n"
        "from millrace.testing import Cluster\n"
        "best = 9.0\n"
        "for _ in range(5):\n"
        "    began = time.perf_counter()\n"
        "    cluster = Cluster()\n"
        "    cluster.start()\n"
        "    best = min(best, time.perf_counter() - began)\n"
        "    cluster.close()\n"
        "print(best)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert float(done.stdout) < 0.1


def test_two_at_a_time_do_not_know_each_other() -> None:
    with Cluster() as one, Cluster() as other:
        assert port_of(one) != port_of(other)
        one.create_topic("t")
        other.create_topic("t")


def test_a_topic_that_exists_is_refused() -> None:
    with Cluster() as cluster:
        cluster.create_topic("orders", 2, config={"retention.ms": "1000"})
        with pytest.raises(ApiError) as caught:
            cluster.create_topic("orders")
        assert caught.value.code is ErrorCode.TOPIC_ALREADY_EXISTS
        with pytest.raises(ApiError) as caught:
            cluster.create_topic("no/such/name")
        assert caught.value.code is ErrorCode.INVALID_TOPIC_EXCEPTION


def test_restart_keeps_the_port_and_the_topics() -> None:
    with Cluster() as cluster:
        cluster.create_topic("orders")
        address = cluster.bootstrap_servers
        cluster.restart()
        assert cluster.bootstrap_servers == address
        assert answers(port_of(cluster))
        with pytest.raises(ApiError):
            cluster.create_topic("orders")


def test_it_can_be_used_again_after_close() -> None:
    cluster = Cluster()
    for _ in range(2):
        with cluster:
            cluster.create_topic("fresh")  # would be refused if anything of the first life were left


def test_a_setting_that_is_wrong_is_raised_to_the_caller() -> None:
    threads = set(threading.enumerate())
    cluster = Cluster(settings={"num.partitions": "many"})
    with pytest.raises(ConfigError, match=r"num\.partitions"):
        cluster.start()
    assert set(threading.enumerate()) <= threads
    cluster.close()


def test_a_start_that_hangs_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    async def hang(_: Broker) -> None:
        await asyncio.Event().wait()

    threads = set(threading.enumerate())
    monkeypatch.setattr(Broker, "start", hang)
    monkeypatch.setattr("millrace.testing.cluster.START_TIMEOUT_S", 0.2)
    cluster = Cluster()
    with pytest.raises(RuntimeError, match="not ready within"):
        cluster.start()
    assert set(threading.enumerate()) <= threads
    monkeypatch.undo()
    with cluster:
        assert answers(port_of(cluster))


def test_wrong_uses_are_told() -> None:
    with pytest.raises(ConfigError, match="at least one"):
        Cluster(brokers=0)
    with Cluster() as cluster, pytest.raises(RuntimeError, match="running already"):
        cluster.start()
    with pytest.raises(RuntimeError, match="not running"):
        Cluster().restart()
    Cluster().close()
