"""kill -9 of the broker while records flow: nothing acknowledged is lost, nothing is there twice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from clients.adapters.interface import Client, Pending, Sent
from clients.reading import read_all
from support.servers import MillraceServer

# A client that is refused a connection while the broker is away may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

RECORDS = 3000
PARTITIONS = 3


@pytest.fixture
def server() -> Iterator[MillraceServer]:
    with MillraceServer() as running:
        yield running


class Load:
    """Sends numbered records at a steady pace and waits for each acknowledgement in the end."""

    def __init__(self, client: Client, bootstrap: str, topic: str) -> None:
        self.pending: list[Pending] = []
        self.error: BaseException | None = None
        self._sender = client.sender(bootstrap, idempotent=True)
        self._topic = topic
        self._thread = threading.Thread(target=self._run, name="load")

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        pause = threading.Event()
        try:
            for number in range(RECORDS):
                self.pending.append(
                    self._sender.send(self._topic, b"%d" % number, b"%d" % number, partition=number % PARTITIONS)
                )
                if number % 20 == 0:
                    pause.wait(0.01)
        except BaseException as error:
            self.error = error
            raise

    def wait_for_sent(self, count: int) -> None:
        pause = threading.Event()
        while len(self.pending) < count and self._thread.is_alive():
            pause.wait(0.005)

    def finish(self) -> list[Sent]:
        self._thread.join(90)
        assert not self._thread.is_alive()
        assert self.error is None
        sent = [one.result(60) for one in self.pending]
        self._sender.close()
        return sent


def test_kill_9_loses_nothing_acknowledged_and_duplicates_nothing(
    client: Client, server: MillraceServer, fresh: Callable[[str], str]
) -> None:
    topic = fresh("killed")
    admin = client.admin(server.bootstrap)
    admin.create_topic(topic, PARTITIONS)
    admin.close()
    load = Load(client, server.bootstrap, topic)
    load.start()
    for share in (4, 2):
        load.wait_for_sent(RECORDS // share)
        server.kill()
        server.start()
    sent = load.finish()
    assert len(sent) == RECORDS

    reader = client.reader(server.bootstrap)
    received = read_all(reader, [(topic, index) for index in range(PARTITIONS)])
    reader.close()
    by_place = {(one.partition, one.offset): one.value for one in received}
    for number, place in enumerate(sent):
        assert by_place.get(place) == b"%d" % number
    for index in range(PARTITIONS):
        values = [int(one.value or b"-1") for one in received if one.partition == index]
        assert values == list(range(index, RECORDS, PARTITIONS))  # each once, in the order they were sent


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
