"""The overview of a cluster against running brokers: it says what the detailed questions say, and where nobody answers.

And topics as `admin` makes, grows, trims and deletes them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from millrace.admin import configs, groups, overview, queues, topics
from millrace.admin.errors import AdminError
from millrace.client.cluster import ClusterClient
from millrace.client.queue import QueueConsumer, QueueRecord, Verdict
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ErrorCode
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.testing import Cluster

VALUE = b"x" * 100


@pytest.fixture(scope="module")
def brokers() -> Iterator[Cluster]:
    with Cluster(brokers=2) as running:
        yield running


@pytest.fixture
def client(brokers: Cluster) -> Iterator[ClusterClient]:
    settings = ClientSettings.from_properties({"bootstrap.servers": brokers.bootstrap_servers})
    with ClusterClient(settings) as opened:
        yield opened


def produce(client: ClusterClient, topic: str, index: int, count: int) -> None:
    now_ms = SystemClock().wall_ms()
    made = [Record(offset, now_ms, None, VALUE) for offset in range(count)]
    client.produce({TopicPartition(topic, index): encode_batch(made)})


def create(client: ClusterClient, *names: str, partitions: int = 1, replicas: int = 1) -> None:
    made = topics.create_topics(client, names, partitions=partitions, replication_factor=replicas)
    assert set(made.values()) == {None}
    for name in names:
        assert client.partition_count(name) == partitions


def test_it_says_what_the_detailed_questions_say(client: ClusterClient) -> None:
    create(client, "orders", partitions=4)
    create(client, "copied", replicas=2)
    produce(client, "orders", 0, 30)
    produce(client, "orders", 3, 10)
    produce(client, "copied", 0, 5)
    for name, offset in (("quick", 30), ("slow", 12)):
        client.commit_offsets(name, {TopicPartition("orders", 0): offset, TopicPartition("orders", 3): 10})

    topology = overview.read_topology(client)
    assert [each.broker_id for each in topology.brokers] == [1, 2]
    assert [name for name, topic in topology.topics.items() if not topic.internal] == ["copied", "orders"]
    orders, copied = topology.topics["orders"], topology.topics["copied"]
    assert (len(orders.partitions), orders.replication_factor, orders.offline, orders.under_replicated) == (4, 1, 0, 0)
    assert {each.leader for each in orders.partitions} == {1, 2}
    assert set(copied.partitions[0].replicas) == {1, 2}

    ends = overview.read_ends(client, topology)
    assert (ends["orders"], ends["copied"]) == ((30, 0, 0, 10), (5,))
    assert overview.read_ends(client, topology, ["copied"]) == {"copied": (5,)}
    assert overview.records(overview.read_starts(client, topology), ends, "orders").or_none == 40

    sizes = overview.read_sizes(client, topology)
    assert sizes.silent == ()
    assert sizes.of_topic("orders").or_none == sizes.totals["orders"]
    assert sizes.of_topic("orders").known > 40 * len(VALUE)
    assert sizes.totals["copied"] >= sizes.of_topic("copied").known > 5 * len(VALUE)
    assert sum(sizes.brokers.values()) == sum(sizes.totals.values())

    found = overview.read_groups(client, topology)
    assert [(each.name, each.type, each.state) for each in found.rows] == [
        (each.name, each.type, each.state) for each in groups.list_groups(client)
    ]
    commits = overview.read_commits(client, found.rows)
    lags = overview.group_lags(commits, ends)
    for name, lag in (("quick", 0), ("slow", 18)):
        view = groups.describe_group(client, name)
        assert view is not None
        assert lags[name] == groups.total_lag(groups.read_lag(client, view))
        assert lags[name].or_none == lag
    assert overview.topic_lags(commits, ends)["orders"] == overview.TopicLag(groups=2, largest=18, total=18)


def test_queues_have_the_lag_that_the_broker_tells(client: ClusterClient) -> None:
    create(client, "jobs")
    produce(client, "jobs", 0, 10)
    configs.change(client, configs.group("workers"), {"share.auto.offset.reset": "earliest"})
    with QueueConsumer(client, "workers", ["jobs"]) as member:
        held: list[QueueRecord] = []
        while len(held) < 4:
            held += member.poll(max_records=4 - len(held), max_wait_ms=500, strict=True)
        assert member.acknowledge(held, Verdict.ACCEPT) == []
    topology = overview.read_topology(client)
    rows = [each for each in overview.read_groups(client, topology).rows if each.name == "workers"]
    commits = overview.read_commits(client, rows)
    (position,) = queues.positions_of(client, "workers").values()
    assert commits == {"workers": (overview.Committed("jobs", 0, position.start or 0, position.lag),)}
    assert overview.group_lags(commits, overview.read_ends(client, topology))["workers"].or_none == 6


def test_topics_are_made_grown_trimmed_and_deleted(client: ClusterClient) -> None:
    made = topics.create_topics(client, ["t", "bad/name"], partitions=1, settings={"retention.ms": "60000"})
    assert made["t"] is None
    assert made["bad/name"] is not None
    assert made["bad/name"].code is ErrorCode.INVALID_TOPIC_EXCEPTION
    again = topics.create_topics(client, ["t"])["t"]
    assert again is not None
    assert again.code is ErrorCode.TOPIC_ALREADY_EXISTS
    assert topics.create_topics(client, ["tried"], only_try=True) == {"tried": None}
    assert "tried" not in client.topics(["tried"])
    assert configs.read_value(client, configs.topic("t"), "retention.ms") == "60000"
    topics.add_partitions(client, "t", 3)
    assert topics.chosen_partitions(client, ["t:2", "t"]) == [TopicPartition("t", index) for index in (2, 0, 1, 2)]
    produce(client, "t", 0, 10)
    assert topics.delete_records(client, {TopicPartition("t", 0): 4}) == {TopicPartition("t", 0): 4}
    assert topics.offset_bounds(client, [TopicPartition("t", 0)]) == {TopicPartition("t", 0): (4, 10)}
    with pytest.raises(AdminError, match="has no partition '3'"):
        topics.chosen_partitions(client, ["t:3"])
    assert topics.delete_topics(client, ["t"]) == {"t": None}
    missing = topics.delete_topics(client, ["t"])["t"]
    assert missing is not None
    assert missing.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    with pytest.raises(AdminError, match="there is no topic 't'"):
        topics.require_topic(client, "t")


def test_a_broker_that_is_gone_leaves_gaps_that_are_told(brokers: Cluster, client: ClusterClient) -> None:
    create(client, "spread", partitions=4)
    for index in range(4):
        produce(client, "spread", index, 3)
    before = overview.read_topology(client)
    of_second = [index for index, each in enumerate(before.topics["spread"].partitions) if each.leader == 2]
    brokers.stop_broker(2)
    try:
        sizes, ends = overview.read_sizes(client, before), overview.read_ends(client, before)
        assert sizes.silent == (2,)
        assert not sizes.of_topic("spread").complete
        assert [index for index, end in enumerate(ends["spread"]) if end is None] == of_second
        assert overview.read_groups(client, before).silent == (2,)
        after = overview.read_topology(client)
        while after.topics["spread"].offline < len(of_second):
            client.pause(0.1)
            after = overview.read_topology(client)
        assert overview.read_ends(client, after)["spread"] == ends["spread"]
    finally:
        brokers.start_broker(2)
