"""flush.mode of one topic is changed while another one is written: nobody waits for a flush that nobody asked for."""

from __future__ import annotations

import itertools
import threading
import time

import pytest
from confluent_kafka import Producer

from clients.adapters.confluent import Confluent
from millrace.testing import Cluster

LONGEST_PAUSE_S = 2.0


class Writer:
    """A stock producer with acks=all that writes all the time, and when each of its records was acknowledged."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        self.acked_at: list[float] = []
        self.errors: list[str] = []
        self._topic = topic
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "acks": "all",
                "linger.ms": 1,
                "message.timeout.ms": 30_000,
                "log_level": 2,
            }
        )
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="writer")
        self._thread.start()

    def _run(self) -> None:
        for number in itertools.count():
            self._producer.produce(self._topic, b"%d" % number, on_delivery=self._delivered)
            self._producer.poll(0)
            if self._ending.wait(0.002):
                break
        self._producer.flush(40)

    def _delivered(self, error: object, _: object) -> None:
        if error is None:
            self.acked_at.append(time.monotonic())
        else:
            self.errors.append(str(error))

    def write_more(self, records: int = 100) -> None:
        """Return when so many more were acknowledged."""
        goal, deadline = len(self.acked_at) + records, time.monotonic() + 30
        while len(self.acked_at) < goal and time.monotonic() < deadline:
            time.sleep(0.005)
        assert len(self.acked_at) >= goal, "nothing is acknowledged any more"

    def finish(self) -> None:
        self._ending.set()
        self._thread.join(60)

    @property
    def longest_pause_s(self) -> float:
        return max(after - before for before, after in itertools.pairwise(self.acked_at))


@pytest.mark.parametrize("brokers", [1, 3])
def test_flush_mode_of_an_idle_topic_changes_while_another_one_is_written(brokers: int) -> None:
    with Cluster(brokers=brokers) as cluster:
        cluster.create_topic("idle", 3, config={"flush.mode": "os"})
        cluster.create_topic("busy", 3, config={"flush.mode": "group"})
        admin = Confluent().admin(cluster.bootstrap_servers)
        idle = Confluent().sender(cluster.bootstrap_servers, codec="none", idempotent=False)
        writer = Writer(cluster.bootstrap_servers, "busy")
        try:
            writer.write_more()
            for step, mode in enumerate(("group", "os", "interval", "group")):
                sent = [idle.send("idle", b"v", partition=index) for index in range(3)]
                assert all(one.result(10).offset >= 0 for one in sent)
                admin.set_topic_config("idle", "flush.mode", mode)
                cluster.create_topic(f"another-{step}")  # a new partition, so a new fetch session that asks for all
                writer.write_more()
        finally:
            writer.finish()
            idle.close()
            admin.close()
    assert writer.errors == []
    assert writer.longest_pause_s < LONGEST_PAUSE_S
