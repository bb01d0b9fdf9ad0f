"""Images: sharing, and refusal of deltas that do not fit. The fold itself is in tests/models/test_image.py."""

from __future__ import annotations

import time
import uuid

import pytest

from millrace.cluster.image import ClusterImage, changes_between, metric_name
from millrace.errors import StorageError
from millrace.metadata.deltas import (
    BrokerFenced,
    ConfigChanged,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ResourceType,
    TopicCreated,
    TopicDeleted,
    decode,
    encode,
)
from support.metadata import cluster_of

STATE = PartitionState((1,), (1,), 1)


def created(name: str, number: int) -> TopicCreated:
    return TopicCreated(name, uuid.UUID(int=number), (STATE,))


@pytest.mark.parametrize(
    "change",
    [
        created("taken", 99),
        TopicDeleted("gone", uuid.UUID(int=5)),
        PartitionsAdded(uuid.UUID(int=5), (STATE,)),
        PartitionChanged(uuid.UUID(int=5), 0, STATE),
        PartitionChanged(uuid.UUID(int=9), 1, STATE),
    ],
)
def test_changes_that_do_not_fit_are_refused(change: object) -> None:
    image = cluster_of(1).apply((created("taken", 9),))
    with pytest.raises(StorageError):
        image.apply((change,))  # type: ignore[arg-type]


def test_a_fence_for_an_older_incarnation_is_void() -> None:
    image = cluster_of(1, 2)
    assert image.apply((BrokerFenced(2, 101, fenced=True),)).is_live(2)
    assert not image.apply((BrokerFenced(2, 102, fenced=True),)).is_live(2)
    assert not image.is_live(7)
    assert [broker.broker_id for broker in image.live_brokers] == [1, 2]


def test_untouched_maps_are_shared() -> None:
    image = cluster_of(1).apply((created("a", 2),))
    fenced = image.apply((BrokerFenced(1, 101, fenced=True),))
    assert fenced.topics is image.topics and fenced.configs is image.configs
    assert image.apply((created("b", 3),)).brokers is image.brokers


def test_a_change_does_not_copy_ten_thousand_topics() -> None:
    image = cluster_of(1).apply(tuple(created(f"topic-{number}", number + 2) for number in range(10_000)))

    def quickest(start: ClusterImage) -> float:
        times = []
        for number in range(50):
            begin = time.perf_counter()
            start.apply((created(f"new-{number}", 10**6 + number),))
            times.append(time.perf_counter() - begin)
        return min(times)

    assert quickest(image) < 0.001
    assert len(image.topics) == 10_000


def test_partitions_are_found() -> None:
    image = cluster_of(1).apply((TopicCreated("a", uuid.UUID(int=5), (STATE, PartitionState((1, 2), (2,), 2))),))
    assert image.partition(uuid.UUID(int=5), 0) == STATE
    assert image.partition(uuid.UUID(int=5), 2) is image.partition(uuid.UUID(int=5), -1) is None
    assert image.partition(uuid.UUID(int=6), 0) is None
    assert [index for _, index, _ in image.partitions()] == [0, 1]
    assert [index for _, index, _ in image.led_by(1)] == [0]
    assert [index for _, index, _ in image.in_sync_on(2)] == [1]
    assert [index for _, index, _ in image.held_by(1)] == [0, 1]


def test_a_move_under_way_is_written_down_and_a_quiet_partition_is_as_before() -> None:
    moving = PartitionState((3, 1), (1,), 1, 4, 5, adding=(3,), removing=(1,))
    change = PartitionChanged(uuid.UUID(int=5), 0, moving)
    assert b'"state":[[3,1],[1],1,4,5,[3],[1]]' in encode((change,)) and decode(encode((change,))) == (change,)
    assert b'"state":[[1],[1],1,0,0]' in encode((PartitionChanged(uuid.UUID(int=5), 0, STATE),))
    image = cluster_of(1, 3).apply((TopicCreated("a", uuid.UUID(int=5), (moving,)),))
    assert image.topics["a"].replication_factor == 1


def test_two_changes_of_a_partition_in_one_delta_and_a_topic_that_goes() -> None:
    image = cluster_of(1).apply((created("a", 5),))
    second = PartitionState((1,), (1,), 1, 7, 7)
    topic_id = uuid.UUID(int=5)
    changes = (PartitionChanged(topic_id, 0, STATE), PartitionsAdded(topic_id, (STATE,)))
    grown = image.apply((*changes, PartitionChanged(topic_id, 1, second), PartitionChanged(topic_id, 0, second)))
    assert grown.topics["a"].partitions == (second, second) and grown.topics["a"] is grown.topics_by_id[topic_id]
    gone = image.apply((PartitionChanged(topic_id, 0, second), TopicDeleted("a", topic_id), created("a", 6)))
    assert gone.topics["a"].topic_id == uuid.UUID(int=6) and topic_id not in gone.topics_by_id


def test_the_difference_of_two_images_knows_a_topic_that_was_made_again() -> None:
    setting = ConfigChanged(ResourceType.TOPIC, "a", (("retention.ms", "5"),))
    old = cluster_of(1, 2).apply((created("a", 5), created("b", 6), setting))
    new = old.apply((TopicDeleted("a", uuid.UUID(int=5)), created("a", 7), setting, BrokerFenced(2, 102, fenced=True)))
    assert old.apply(changes_between(old, new)) == new
    assert changes_between(new, new) == ()


def test_names_that_collide_in_metrics() -> None:
    assert metric_name("a.b") == metric_name("a_b") == "a_b"
    assert metric_name("ab") is None
    assert "1 brokers" in repr(cluster_of(1))
