"""Images: sharing, and refusal of deltas that do not fit. The fold itself is in tests/models/test_image.py."""

from __future__ import annotations

import time
import uuid

import pytest

from millrace.cluster.image import ClusterImage, metric_name
from millrace.errors import StorageError
from millrace.metadata.deltas import (
    BrokerFenced,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    TopicCreated,
    TopicDeleted,
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


def test_names_that_collide_in_metrics() -> None:
    assert metric_name("a.b") == metric_name("a_b") == "a_b"
    assert metric_name("ab") is None
    assert "1 brokers" in repr(cluster_of(1))
