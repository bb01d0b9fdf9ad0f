"""Moving about in the log: seek and replay, offsets by time, first and last offsets, committed offsets."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from clients.opened import Opened
from clients.reading import read_all, read_count
from millrace.testing import Cluster

# A client that is refused a connection while the broker is away may leave its socket to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning")

FIRST_MS = 1_700_000_000_000
STEP_MS = 1000
COUNT = 50


def fill(opened: Opened, cluster: Cluster, topic: str) -> None:
    """One partition, a record per second, in ten batches."""
    cluster.create_topic(topic)
    sender = opened.client.sender(opened.bootstrap)
    for number in range(COUNT):
        pending = sender.send(topic, b"%d" % number, timestamp_ms=FIRST_MS + number * STEP_MS, partition=0)
        if number % 5 == 4:
            pending.result(10)
    sender.flush()
    sender.close()


def test_seek_and_replay(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("replay")
    fill(opened, cluster, topic)
    reader = opened.reader()
    everything = read_all(reader, [(topic, 0)])
    assert [one.offset for one in everything] == list(range(COUNT))
    for start in (0, 7, COUNT - 1):  # 7 lies inside a batch
        reader.seek((topic, 0), start)
        assert read_count(reader, COUNT - start) == everything[start:]


def test_offsets_by_time(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("times")
    fill(opened, cluster, topic)
    reader = opened.reader()
    reader.assign([(topic, 0)])

    def at(timestamp_ms: int) -> int | None:
        return reader.offsets_for_time([(topic, 0)], timestamp_ms)[topic, 0]

    assert at(FIRST_MS - 1) == 0
    assert at(FIRST_MS) == 0
    assert at(FIRST_MS + 1) == 1
    assert at(FIRST_MS + 23 * STEP_MS) == 23
    assert at(FIRST_MS + 23 * STEP_MS - 1) == 23
    assert at(FIRST_MS + (COUNT - 1) * STEP_MS) == COUNT - 1
    assert at(FIRST_MS + COUNT * STEP_MS) in {None, COUNT}  # librdkafka turns 'none' into the end


def test_first_and_last_offsets(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("bounds")
    cluster.create_topic(topic, 2)
    reader = opened.reader()
    reader.assign([(topic, 0), (topic, 1)])
    assert reader.bounds((topic, 0)) == (0, 0)
    sender = opened.sender()
    for number in range(3):
        sender.send(topic, b"%d" % number, partition=1).result(10)
    assert reader.bounds((topic, 0)) == (0, 0)
    assert reader.bounds((topic, 1)) == (0, 3)


def test_committed_offsets_are_where_the_next_consumer_starts(
    opened: Opened, cluster: Cluster, fresh: Callable[[str], str]
) -> None:
    topic, group = fresh("committed"), fresh("group")
    fill(opened, cluster, topic)
    first = opened.client.reader(opened.bootstrap, group=group)
    first.subscribe(topic)
    seen = read_count(first, COUNT)
    first.commit()
    assert first.committed((topic, 0)) == COUNT
    first.close()
    opened.sender().send(topic, b"later", partition=0).result(10)
    second = opened.reader(group=group)
    second.subscribe(topic)
    (received,) = read_count(second, 1)
    assert (received.offset, received.value) == (COUNT, b"later")
    assert [one.offset for one in seen] == list(range(COUNT))


def test_committed_offsets_survive_a_restart(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    topic, group = fresh("restarted"), fresh("group")
    fill(opened, cluster, topic)
    reader = opened.client.reader(opened.bootstrap, group=group)
    reader.subscribe(topic)
    read_count(reader, COUNT)
    reader.commit()
    reader.close()
    cluster.restart()
    admin = opened.admin()
    assert admin.group_offsets(group) == {(topic, 0): COUNT}
    assert [one.offset for one in read_all(opened.reader(), [(topic, 0)])] == list(range(COUNT))
