"""kill -9 of the broker while records flow: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest

from clients.adapters.interface import Client
from clients.load import PARTITIONS, RECORDS, Load, check_everything_is_there_once
from support.servers import MillraceServer

# A client that is refused a connection while the broker is away may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")


PARENT = """
import sys
from support.servers import MillraceServer
server = MillraceServer()
server.start()
print(server.pid, server.home, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[MillraceServer]:
    with MillraceServer() as running:
        yield running


def test_kill_9_loses_nothing_acknowledged_and_duplicates_nothing(
    client: Client, server: MillraceServer, fresh: Callable[[str], str]
) -> None:
    topic = fresh("killed")
    admin = client.admin(server.bootstrap)
    admin.create_topic(topic, PARTITIONS)
    admin.close()
    with Load(client, server.bootstrap, topic) as load:
        for share in (4, 2):
            load.wait_for_sent(RECORDS // share)
            server.kill()
            server.start()
        sent = load.finish()
    assert len(sent) == RECORDS
    check_everything_is_there_once(client, server.bootstrap, topic, sent)


def test_committed_offsets_survive_kill_9(client: Client, server: MillraceServer, fresh: Callable[[str], str]) -> None:
    topic, group = fresh("offsets"), fresh("group")
    sender = client.sender(server.bootstrap)
    for number in range(20):
        sender.send(topic, b"%d" % number).result(20)
    sender.close()
    reader = client.reader(server.bootstrap, group=group)
    reader.subscribe(topic)
    received = []
    while len(received) < 20:
        received += reader.poll(1.0)
    reader.commit()
    reader.close()
    server.kill()
    server.start()
    admin = client.admin(server.bootstrap)
    assert admin.group_offsets(group) == {(topic, 0): 20}
    admin.close()


def test_kill_9_of_the_driver_ends_its_server() -> None:
    """Otherwise every run that is killed leaves a broker behind."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=pipe, stdout=pipe, text=True, env=environment
    ) as driver:
        assert driver.stdout is not None
        pid, home = driver.stdout.readline().split()
        server = psutil.Process(int(pid))
        driver.kill()
    _, left = psutil.wait_procs([server], timeout=10)
    for process in left:
        process.kill()
    shutil.rmtree(home)
    assert not left, "the server outlived its driver"
