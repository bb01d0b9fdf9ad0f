"""Numbered records under way while brokers die, and what must be there afterwards."""

from __future__ import annotations

import itertools
import threading
from types import TracebackType
from typing import Self

from clients.adapters.interface import Client, Pending, Sent
from clients.reading import read_all

RECORDS = 3000
PARTITIONS = 3


class Load:
    """Sends numbered records at a steady pace and waits for each acknowledgement in the end."""

    def __init__(self, client: Client, bootstrap: str, topic: str, records: int | None = RECORDS) -> None:
        """Without a number of `records` it goes on until `finish`."""
        self.pending: list[Pending] = []
        self.error: BaseException | None = None
        self._sender = client.sender(bootstrap, idempotent=True)
        self._topic = topic
        self._records = records
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="load")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join(90)
        self._sender.close()

    def _run(self) -> None:
        try:
            for number in itertools.count() if self._records is None else range(self._records):
                self.pending.append(
                    self._sender.send(self._topic, b"%d" % number, b"%d" % number, partition=number % PARTITIONS)
                )
                if number % 20 == 0 and self._ending.wait(0.01):
                    break
        except BaseException as error:
            self.error = error
            raise

    def wait_for_sent(self, count: int) -> None:
        pause = threading.Event()
        while len(self.pending) < count and self._thread.is_alive():
            pause.wait(0.005)

    def finish(self) -> list[Sent]:
        """Where every record lies, in the order they were sent."""
        if self._records is None:
            self._ending.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        assert self.error is None
        return [one.result(60) for one in self.pending]


def check_everything_is_there_once(client: Client, bootstrap: str, topic: str, sent: list[Sent]) -> None:
    """Every acknowledged record where its acknowledgement says, each once, in the order they were sent."""
    reader = client.reader(bootstrap)
    received = read_all(reader, [(topic, index) for index in range(PARTITIONS)])
    reader.close()
    by_place = {(one.partition, one.offset): one.value for one in received}
    for number, place in enumerate(sent):
        assert by_place.get(place) == b"%d" % number
    for index in range(PARTITIONS):
        values = [int(one.value or b"-1") for one in received if one.partition == index]
        assert values == list(range(index, len(sent), PARTITIONS))
