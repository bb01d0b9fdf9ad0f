"""Three brokers, and the same answers from each: changes are passed on to the controller, and seen where they began.

Over sockets, and with `millrace cluster`. Faults are not here (tests/cluster).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from millrace.cli.root import run
from millrace.client.blocking import BlockingConnection
from millrace.config import ConfigSource
from millrace.errors import ErrorCode
from millrace.handlers.forwarding import error_codes
from millrace.metadata.deltas import ResourceType
from millrace.testing import Cluster
from millrace.wire.messages.brokers import BrokerHeartbeatRequest
from millrace.wire.messages.cluster import DescribeClusterRequest, MetadataRequest, UnregisterBrokerRequest
from millrace.wire.messages.configs import DescribeConfigsRequest, IncrementalAlterConfigsRequest
from millrace.wire.messages.partitions import (
    AlterPartitionReassignmentsRequest,
    ElectLeadersRequest,
    ListPartitionReassignmentsRequest,
)
from millrace.wire.messages.producers import InitProducerIdRequest
from millrace.wire.messages.quorum import DescribeQuorumRequest
from millrace.wire.messages.topics import CreatePartitionsRequest, CreateTopicsRequest, DeleteTopicsRequest
from millrace.wire.schema import Request

BROKERS = (1, 2, 3)


class Asked:
    """A running cluster and a connection to each of its brokers."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._connections = {
            broker_id: BlockingConnection(*_address(text))
            for broker_id, text in zip(BROKERS, cluster.bootstrap_servers.split(","), strict=True)
        }

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    def ask(self, broker_id: int, message: Request, version: int | None = None) -> Any:
        return self._connections[broker_id].request(message, version)

    def good(self, broker_id: int, message: Request) -> Any:
        """An answer without any error in it."""
        answer = self.ask(broker_id, message)
        assert set(error_codes(answer)) <= {ErrorCode.NONE}, answer
        return answer

    def create(self, broker_id: int, name: str, replicas: list[list[int]]) -> None:
        assignments = [
            CreateTopicsRequest.CreatableReplicaAssignment(partition_index=index, broker_ids=brokers)
            for index, brokers in enumerate(replicas)
        ]
        topic = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=-1, replication_factor=-1, assignments=assignments
        )
        self.good(broker_id, CreateTopicsRequest(topics=[topic]))

    def partitions(self, broker_id: int, name: str) -> list[Any]:
        request = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=name)], allow_auto_topic_creation=False
        )
        (topic,) = self.ask(broker_id, request).topics
        assert topic.error_code == 0
        return sorted(topic.partitions, key=lambda partition: partition.partition_index)

    @property
    def controller(self) -> int:
        return int(self.good(1, DescribeClusterRequest()).controller_id)

    @property
    def others(self) -> list[int]:
        return [broker_id for broker_id in BROKERS if broker_id != self.controller]


def wait_until(condition: Callable[[], bool], within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.02)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


@pytest.fixture(scope="module")
def asked() -> Iterator[Asked]:
    with Cluster(brokers=3) as cluster:
        brokers = Asked(cluster)
        yield brokers
        brokers.close()


@pytest.fixture
def command(asked: Asked, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def call(*argv: str, noun: str = "cluster") -> Any:
        assert run([noun, *argv, "--json", "--bootstrap", asked.cluster.bootstrap_servers]) == 0
        return json.loads(capsys.readouterr().out)

    return call


@pytest.mark.parametrize("broker_id", BROKERS)
def test_topics_come_grow_and_go_through_any_broker(asked: Asked, broker_id: int) -> None:
    name = f"life-{broker_id}"
    asked.create(broker_id, name, [[1, 2, 3], [2, 3, 1]])
    # The broker that was asked knows it at once, whoever made it.
    assert [partition.replica_nodes for partition in asked.partitions(broker_id, name)] == [[1, 2, 3], [2, 3, 1]]
    more = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=5, assignments=None)
    asked.good(broker_id, CreatePartitionsRequest(topics=[more]))
    assert len(asked.partitions(broker_id, name)) == 5
    asked.good(broker_id, DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name=name)]))
    request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name)], allow_auto_topic_creation=False)
    (gone,) = asked.ask(broker_id, request).topics
    assert gone.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("broker_id", BROKERS)
def test_refusals_of_the_controller_are_told_as_they_are(asked: Asked, broker_id: int) -> None:
    bad = CreateTopicsRequest.CreatableTopic(name=f"bad-{broker_id}", num_partitions=1, replication_factor=9)
    (refused,) = asked.ask(broker_id, CreateTopicsRequest(topics=[bad])).topics
    assert refused.error_code == ErrorCode.INVALID_REPLICATION_FACTOR
    alive = asked.ask(broker_id, UnregisterBrokerRequest(broker_id=1))
    assert alive.error_code == ErrorCode.INVALID_REQUEST and "alive" in alive.error_message


@pytest.mark.parametrize("broker_id", BROKERS)
def test_settings_of_one_broker_are_taken_by_any_and_obeyed_by_that_one(asked: Asked, broker_id: int) -> None:
    name, value = "leader.replication.throttled.rate", str(1000 + broker_id)
    setting = IncrementalAlterConfigsRequest.AlterableConfig(name=name, config_operation=0, value=value)
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=ResourceType.BROKER, resource_name=str(broker_id), configs=[setting]
    )
    asked.good(BROKERS[broker_id % 3], IncrementalAlterConfigsRequest(resources=[resource]))
    # The same again through the broker itself waits until its own image has it.
    asked.good(broker_id, IncrementalAlterConfigsRequest(resources=[resource]))
    wanted = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=ResourceType.BROKER, resource_name=str(broker_id), configuration_keys=[name]
    )
    (result,) = asked.good(broker_id, DescribeConfigsRequest(resources=[wanted])).results
    (config,) = result.configs
    assert (config.value, config.config_source) == (value, ConfigSource.DYNAMIC_BROKER_CONFIG)


def test_producer_ids_of_all_brokers_are_different(asked: Asked) -> None:
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0)
    ids = [asked.good(broker_id, request).producer_id for broker_id in BROKERS * 3]
    assert len(set(ids)) == len(ids)


def test_every_broker_names_the_same_controller_and_quorum(asked: Asked) -> None:
    controller = asked.controller
    partition = DescribeQuorumRequest.PartitionData(partition_index=0)
    topic = DescribeQuorumRequest.TopicData(topic_name="__cluster_metadata", partitions=[partition])
    for broker_id in BROKERS:
        told = asked.good(broker_id, DescribeClusterRequest())
        assert told.controller_id == controller
        assert sorted(each.broker_id for each in told.brokers) == list(BROKERS)
        (described,) = asked.good(broker_id, DescribeQuorumRequest(topics=[topic])).topics[0].partitions
        assert described.leader_id == controller
        assert [voter.replica_id for voter in described.current_voters] == list(BROKERS)


def test_what_is_for_the_controller_is_not_passed_on(asked: Asked) -> None:
    going = BrokerHeartbeatRequest(broker_id=1, broker_epoch=-5, want_shut_down=True)
    for broker_id in asked.others:
        assert asked.ask(broker_id, going, 1).error_code == ErrorCode.NOT_CONTROLLER
    assert asked.ask(asked.controller, going, 1).error_code == ErrorCode.STALE_BROKER_EPOCH


def test_a_move_and_an_election_through_a_broker_that_is_not_the_controller(asked: Asked) -> None:
    asker = asked.others[0]
    asked.create(asker, "moved", [[1, 2]])
    move = AlterPartitionReassignmentsRequest.ReassignablePartition(partition_index=0, replicas=[3, 2])
    topic = AlterPartitionReassignmentsRequest.ReassignableTopic(name="moved", partitions=[move])
    asked.good(asker, AlterPartitionReassignmentsRequest(topics=[topic]))
    wait_until(lambda: not asked.good(asker, ListPartitionReassignmentsRequest(topics=None)).topics)
    (partition,) = asked.partitions(asker, "moved")
    assert (partition.replica_nodes, sorted(partition.isr_nodes)) == ([3, 2], [2, 3])
    wanted = [ElectLeadersRequest.TopicPartitions(topic="moved", partitions=[0])]
    answer = asked.ask(asker, ElectLeadersRequest(topic_partitions=wanted))
    assert set(error_codes(answer)) <= {ErrorCode.NONE, ErrorCode.ELECTION_NOT_NEEDED}


def test_the_command_line_drains_a_broker(asked: Asked, command: Callable[..., Any]) -> None:
    asked.create(1, "drained", [[2, 1], [3, 2], [1, 3]])
    moved = command("reassign", "--drain", "2", "--topic", "drained", "--yes", "--throttle", "100000000")
    assert {tuple(sorted(row["replicas"])) for row in moved["partitions"]} == {(1, 3)}
    assert command("reassign", "--status") == []
    assert {tuple(sorted(each.isr_nodes)) for each in asked.partitions(1, "drained")} == {(1, 3)}


def test_a_broker_that_stops_and_returns(asked: Asked, command: Callable[..., Any]) -> None:
    asked.create(1, "kept", [[2, 1, 3], [1, 2, 3]])
    asked.cluster.stop_broker(2)
    for broker_id in (1, 3):
        told = asked.good(broker_id, DescribeClusterRequest(include_fenced_brokers=True))
        assert {each.broker_id: each.is_fenced for each in told.brokers} == {1: False, 2: True, 3: False}
        first, second = asked.partitions(broker_id, "kept")
        assert (first.leader_id, first.offline_replicas, 2 in first.isr_nodes) == (1, [2], False)
        assert second.leader_id == 1
    described = command("describe")
    assert [one["state"] == "fenced" for one in described["brokers"]] == [False, True, False]
    places = [(one["topic"], one["partition"]) for one in described["under_replicated"]]
    assert {("kept", 0), ("kept", 1)} <= set(places)
    (lagging,) = command("describe", "kept", "--under-replicated", noun="topics")
    assert [(one["partition"], one["isr"]) for one in lagging["partitions"]] == [(0, [1, 3]), (1, [1, 3])]
    assert command("describe", "kept", "--unavailable", noun="topics") == []
    asked.cluster.start_broker(2)
    wait_until(lambda: not command("describe")["under_replicated"])
    elected = command("elect", "--topic", "kept")
    assert {(one["partition"], one["result"]) for one in elected} == {(0, "elected"), (1, "not needed")}
    assert [each.leader_id for each in asked.partitions(1, "kept")] == [2, 1]
