"""ElectLeaders, AlterPartitionReassignments and ListPartitionReassignments, at every version.

The rules themselves: tests/unit/cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.cluster.elections import ElectionKind
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.partitions import alter_partition_reassignments, elect_leaders, list_partition_reassignments
from millrace.metadata.deltas import PartitionState, TopicCreated
from millrace.model import TopicPartition, new_topic_id
from millrace.wire.messages.partitions import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
)
from support.handling import Handling
from support.metadata import cluster_of

Elections = ElectLeadersRequest.TopicPartitions
Move = AlterPartitionReassignmentsRequest.ReassignablePartition
MovedTopic = AlterPartitionReassignmentsRequest.ReassignableTopic
NOT_NEEDED = ApiError(ErrorCode.ELECTION_NOT_NEEDED, "it leads already")
NOT_AVAILABLE = ApiError(ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "it is not in sync")


class Scripted:
    """A controller that remembers what it was asked and answers what it was told."""

    is_controller = True

    def __init__(self, image: ClusterImage, answers: Any) -> None:
        self.image = image
        self.asked: list[Any] = []
        self._answers = answers

    async def elect_leaders(self, kind: ElectionKind, partitions: Sequence[TopicPartition] | None) -> Any:
        self.asked.append((kind, partitions))
        return self._answer()

    async def alter_reassignments(
        self, items: Sequence[Reassignment], *, allow_replication_factor_change: bool = True
    ) -> Any:
        self.asked.append((list(items), allow_replication_factor_change))
        return self._answer()

    def _answer(self) -> Any:
        if isinstance(self._answers, ApiError):
            raise self._answers
        return self._answers


def on_controller(answers: Any = None, image: ClusterImage | None = None) -> tuple[Scripted, Handling]:
    controller = Scripted(image or cluster_of(1, 2, 3), answers)
    clock = SimpleNamespace(monotonic=lambda: 0.0)
    services: Any = SimpleNamespace(
        broker_id=1, controller=controller, image=controller.image, config=BrokerConfig({}), clock=clock
    )
    return controller, Handling(controller, services)  # type: ignore[arg-type]


@pytest.mark.parametrize("version", range(3))
async def test_elections_have_an_outcome_each(version: int) -> None:
    places = [TopicPartition("a", 0), TopicPartition("a", 1), TopicPartition("b", 7)]
    controller, on = on_controller([(places[0], None), (places[1], NOT_NEEDED), (places[2], NOT_AVAILABLE)])
    wanted = [Elections(topic="a", partitions=[0, 1, 0]), Elections(topic="b", partitions=[7])]
    request = ElectLeadersRequest(topic_partitions=wanted)
    if version:
        request.election_type = 1
    response = await on.call(elect_leaders, request, version)
    assert controller.asked == [(ElectionKind.UNCLEAN if version else ElectionKind.PREFERRED, places)]
    assert response.error_code == 0
    assert [
        (topic.topic, [(each.partition_id, each.error_code, each.error_message) for each in topic.partition_result])
        for topic in response.replica_election_results
    ] == [
        ("a", [(0, 0, None), (1, ErrorCode.ELECTION_NOT_NEEDED, "it leads already")]),
        ("b", [(7, ErrorCode.PREFERRED_LEADER_NOT_AVAILABLE, "it is not in sync")]),
    ]


async def test_an_election_of_everything_leaves_out_what_needs_none() -> None:
    controller, on = on_controller([(TopicPartition("a", 0), NOT_NEEDED), (TopicPartition("b", 0), None)])
    response = await on.call(elect_leaders, ElectLeadersRequest(topic_partitions=None), 2)
    assert controller.asked == [(ElectionKind.PREFERRED, None)]
    (topic,) = response.replica_election_results
    assert (topic.topic, [each.partition_id for each in topic.partition_result]) == ("b", [0])


async def test_an_unknown_kind_of_election_is_refused() -> None:
    controller, on = on_controller()
    response = await on.call(elect_leaders, ElectLeadersRequest(election_type=9, topic_partitions=None), 1)
    assert response.error_code == ErrorCode.INVALID_REQUEST
    assert controller.asked == []


@pytest.mark.parametrize("version", range(3))
async def test_an_election_that_cannot_be_is_told_everywhere(version: int) -> None:
    _, on = on_controller(ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "cannot be written"))
    request = ElectLeadersRequest(topic_partitions=[Elections(topic="a", partitions=[0, 1])])
    response = await on.call(elect_leaders, request, version)
    assert response.error_code == (ErrorCode.KAFKA_STORAGE_ERROR if version else 0)
    (topic,) = response.replica_election_results
    assert [each.error_code for each in topic.partition_result] == [ErrorCode.KAFKA_STORAGE_ERROR] * 2


@pytest.mark.parametrize("version", range(2))
async def test_moves_have_an_outcome_each(version: int) -> None:
    wrong = ApiError(ErrorCode.INVALID_REPLICA_ASSIGNMENT, "there is no broker 9")
    controller, on = on_controller([None, wrong, None])
    request = AlterPartitionReassignmentsRequest(
        topics=[
            MovedTopic(
                name="a",
                partitions=[Move(partition_index=0, replicas=[1, 2]), Move(partition_index=1, replicas=[9])],
            ),
            MovedTopic(name="b", partitions=[Move(partition_index=4, replicas=None)]),
        ]
    )
    if version:
        request.allow_replication_factor_change = False
    response = await on.call(alter_partition_reassignments, request, version)
    items = [Reassignment("a", 0, (1, 2)), Reassignment("a", 1, (9,)), Reassignment("b", 4, None)]
    assert controller.asked == [(items, version == 0)]
    assert (response.error_code, response.error_message) == (0, None)
    assert [
        (topic.name, [(each.partition_index, each.error_code, each.error_message) for each in topic.partitions])
        for topic in response.responses
    ] == [
        ("a", [(0, 0, None), (1, ErrorCode.INVALID_REPLICA_ASSIGNMENT, "there is no broker 9")]),
        ("b", [(4, 0, None)]),
    ]


async def test_a_move_that_cannot_be_is_told_everywhere() -> None:
    _, on = on_controller(ApiError(ErrorCode.KAFKA_STORAGE_ERROR, "cannot be written"))
    request = AlterPartitionReassignmentsRequest(
        topics=[MovedTopic(name="a", partitions=[Move(partition_index=0, replicas=[1])])]
    )
    response = await on.call(alter_partition_reassignments, request, 1)
    assert response.error_code == ErrorCode.KAFKA_STORAGE_ERROR
    assert response.responses[0].partitions[0].error_code == ErrorCode.KAFKA_STORAGE_ERROR


async def test_moves_under_way_are_read_from_the_image() -> None:
    still = PartitionState((1, 2), (1, 2), 1)
    moving = PartitionState((3, 2, 1), (1, 2), 1, adding=(3,), removing=(1,))
    image = cluster_of(1, 2, 3).apply(
        (
            TopicCreated("a", new_topic_id(), (still, moving, moving)),
            TopicCreated("b", new_topic_id(), (still,)),
            TopicCreated("c", new_topic_id(), (moving,)),
        )
    )
    _, on = on_controller(image=image)

    async def listed(topics: Any) -> dict[str, list[int]]:
        response = await on.call(list_partition_reassignments, ListPartitionReassignmentsRequest(topics=topics), 0)
        assert (response.error_code, response.error_message) == (0, None)
        for topic in response.topics:
            for each in topic.partitions:
                assert (each.replicas, each.adding_replicas, each.removing_replicas) == ([3, 2, 1], [3], [1])
        return {topic.name: [each.partition_index for each in topic.partitions] for topic in response.topics}

    def asked(name: str, *indexes: int) -> Any:
        return ListPartitionReassignmentsRequest.ListPartitionReassignmentsTopics(
            name=name, partition_indexes=list(indexes)
        )

    assert await listed(None) == {"a": [1, 2], "c": [0]}
    assert await listed([asked("a", 0, 2, 2, 9, -1), asked("b", 0), asked("z", 0)]) == {"a": [2]}
    assert await listed([]) == {}
