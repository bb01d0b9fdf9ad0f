"""The audit log of running brokers: who asked for what, in the file and in the internal topic."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.model import AUDIT_LOG_TOPIC
from millrace.records.batch import split
from millrace.records.decode import decode_records
from millrace.testing import Cluster
from millrace.wire.messages.acls import CreateAclsRequest
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.configs import AlterConfigsRequest, IncrementalAlterConfigsRequest
from millrace.wire.messages.groups import HeartbeatRequest
from millrace.wire.messages.records import DeleteRecordsRequest
from millrace.wire.messages.topics import CreateTopicsRequest, DeleteTopicsRequest
from support.ocsf import problems
from support.raw import RawClient, batch
from support.sasl import SaslClient, add_user

Events = list[dict[str, Any]]
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"
PATIENCE_S = 20.0


def _client(bootstrap: str) -> RawClient:
    host, _, port = bootstrap.rpartition(":")
    return RawClient((host, int(port)))


def _eventually(read: Callable[[], Events], enough: Callable[[Events], bool]) -> Events:
    """The events, once there are enough; each of them is well-formed."""
    deadline = time.monotonic() + PATIENCE_S
    while not enough(events := read()):
        assert time.monotonic() < deadline, [event["message"] for event in events]
        time.sleep(0.02)
    assert [wrong for event in events for wrong in problems(event)] == []
    return events


def _of(events: Events, operation: str) -> Events:
    return [event for event in events if event.get("api", {}).get("operation") == operation]


def _from_file(path: Path) -> Events:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- one broker, with rules: the file ---------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Cluster, Path]]:
    """A broker on whose second listener people log in: root may everything, alice nothing."""
    path = tmp_path / "audit.log"
    settings = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:ANONYMOUS;User:root",
        "audit.log.path": str(path),
    }
    with Cluster(settings=settings) as cluster:
        with _client(cluster.bootstrap_servers_of("PLAINTEXT")) as client:
            for user in ("root", "alice"):
                add_user(client, user, f"{user}-secret")
            client.create_topic("orders")
        yield cluster, path


def _logged_in(cluster: Cluster, user: str) -> SaslClient:
    host, _, port = cluster.bootstrap_servers_of("SASL_PLAINTEXT").rpartition(":")
    client = SaslClient((host, int(port)))
    assert client.log_in("SCRAM-SHA-256", user, f"{user}-secret").error_code == ErrorCode.NONE
    return client


def test_denials_are_told_with_the_rule_that_decided(guarded: tuple[Cluster, Path]) -> None:
    cluster, path = guarded
    with _client(cluster.bootstrap_servers_of("PLAINTEXT")) as client:
        rule = CreateAclsRequest.AclCreation(
            resource_type=2, resource_name="orders", principal="User:alice", host="*", operation=4, permission_type=2
        )
        assert client.call(CreateAclsRequest(creations=[rule]), 3).results[0].error_code == ErrorCode.NONE
    with _logged_in(cluster, "alice") as client:
        for _ in range(3):
            assert client.produce("orders", batch(b"v")).error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert client.fetch("orders", 0).error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        heartbeat = HeartbeatRequest(group_id="readers", generation_id=1, member_id="m")
        assert client.call(heartbeat, 4).error_code == ErrorCode.GROUP_AUTHORIZATION_FAILED
        request = CreateTopicsRequest(topics=[CreateTopicsRequest.CreatableTopic(name="mine", num_partitions=1)])
        (refused,) = client.call(request, 7).topics
        assert refused.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        assert client.call(MetadataRequest(topics=None), 12).topics == [], "what is left out of a list is no denial"
    events = _eventually(lambda: _from_file(path), lambda events: bool(_of(events, "CreateTopics")[1:]))
    denied = [event for event in events if event.get("action") == "Denied"]
    told = {
        (event["api"]["operation"], event["unmapped"]["operations"][0], event["resources"][0]["name"]): event
        for event in denied
    }
    assert len(told) == len(denied), "the same again is counted"
    assert told.keys() == {
        ("Produce", "WRITE", "orders"),
        ("Fetch", "READ", "orders"),
        ("Heartbeat", "READ", "readers"),
        ("CreateTopics", "CREATE", "mine"),
    }
    assert told["Produce", "WRITE", "orders"]["status_detail"] == "DENY User:alice from *: WRITE on TOPIC orders"
    assert told["Fetch", "READ", "orders"]["status_detail"] == "no rule allows it"
    assert {event["actor"]["user"]["name"] for event in denied} == {"alice"}
    assert {event["dst_endpoint"]["svc_name"] for event in denied} == {"SASL_PLAINTEXT"}


def test_changes_are_told_with_who_made_them(guarded: tuple[Cluster, Path]) -> None:
    cluster, path = guarded
    with _logged_in(cluster, "root") as client:
        config = IncrementalAlterConfigsRequest.AlterableConfig(name="retention.ms", value="1000")
        resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=2, resource_name="orders", configs=[config]
        )
        client.call(IncrementalAlterConfigsRequest(resources=[resource]), 1)
        client.produce("orders", batch(b"v"))
        client.call(DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="orders")]), 6)
        client.call(DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="orders")]), 6)
    events = _eventually(lambda: _from_file(path), lambda events: len(_of(events, "DeleteTopics")) == 2)
    (changed,) = _of(events, "IncrementalAlterConfigs")
    assert changed["resources"] == [{"type": "TOPIC", "name": "orders", "data": {"settings": ["retention.ms"]}}]
    assert changed["actor"]["user"]["name"] == "root"
    assert changed["actor"]["authorizations"][0]["policy"]["name"] == "a super user"
    assert [event["status"] for event in _of(events, "DeleteTopics")] == ["Success", "Failure"]
    assert _of(events, "Produce") == []


def test_a_topic_that_metadata_makes_is_told_of_with_who_asked(guarded: tuple[Cluster, Path]) -> None:
    cluster, path = guarded
    asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name) for name in ("new", "no good")])
    with _logged_in(cluster, "root") as client:
        for _ in range(2):
            codes = {topic.name: topic.error_code for topic in client.call(asked, 12).topics}
            assert codes == {"new": ErrorCode.NONE, "no good": ErrorCode.INVALID_TOPIC_EXCEPTION}
        client.call(DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(name="new")]), 6)
    events = _eventually(lambda: _from_file(path), lambda events: bool(_of(events, "DeleteTopics")))
    (made,) = _of(events, "Metadata")
    assert made["resources"] == [{"type": "TOPIC", "name": "new"}]
    assert (made["activity_name"], made["status"]) == ("Create", "Success")
    assert made["actor"]["user"]["name"] == "root"
    assert made["actor"]["authorizations"][0]["policy"]["name"] == "a super user"


def test_a_right_on_all_topics_does_not_reach_the_topic(tmp_path: Path) -> None:
    """Whoever may do everything with topics could otherwise erase what is written about them."""
    path = tmp_path / "audit.log"
    settings = {
        "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256",
        "authorizer.class.name": AUTHORIZER,
        "super.users": "User:ANONYMOUS",
        "audit.log.path": str(path),
        "audit.log.topic.enable": "true",
    }
    config = IncrementalAlterConfigsRequest.AlterableConfig(name="retention.ms", value="1000")
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=2, resource_name=AUDIT_LOG_TOPIC, configs=[config]
    )
    entry = AlterConfigsRequest.AlterableConfig(name="retention.ms", value="1000")
    replaced = AlterConfigsRequest.AlterConfigsResource(resource_type=2, resource_name=AUDIT_LOG_TOPIC, configs=[entry])
    new = CreateTopicsRequest.CreatableTopic(name=AUDIT_LOG_TOPIC, num_partitions=1, replication_factor=1)
    with Cluster(settings=settings) as cluster, _client(cluster.bootstrap_servers_of("PLAINTEXT")) as root:
        add_user(root, "alice", "alice-secret")
        rule = CreateAclsRequest.AclCreation(
            resource_type=2, resource_name="*", principal="User:alice", host="*", operation=2, permission_type=3
        )
        assert root.call(CreateAclsRequest(creations=[rule]), 3).results[0].error_code == ErrorCode.NONE
        deadline = time.monotonic() + PATIENCE_S
        while (topic := root.topic(AUDIT_LOG_TOPIC)).error_code:
            assert time.monotonic() < deadline
            time.sleep(0.02)

        def outcomes(client: RawClient) -> list[int]:
            by_id = DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=topic.topic_id)
            return [
                client.call(IncrementalAlterConfigsRequest(resources=[resource]), 1).responses[0].error_code,
                client.call(AlterConfigsRequest(resources=[replaced]), 2).responses[0].error_code,
                client.call(CreateTopicsRequest(topics=[new]), 7).topics[0].error_code,
                client.call(DeleteTopicsRequest(topic_names=[AUDIT_LOG_TOPIC]), 5).responses[0].error_code,
                client.call(DeleteTopicsRequest(topics=[by_id]), 6).responses[0].error_code,
            ]

        with _logged_in(cluster, "alice") as alice:
            assert outcomes(alice) == [ErrorCode.CLUSTER_AUTHORIZATION_FAILED] * 5
            alice.create_topic("hers")
        denied = _eventually(
            lambda: [event for event in _from_file(path) if event.get("action") == "Denied"],
            lambda events: len(events) == 4,
        )
        assert {event["api"]["operation"] for event in denied} == {
            "IncrementalAlterConfigs",
            "AlterConfigs",
            "CreateTopics",
            "DeleteTopics",
        }
        exists, gone = ErrorCode.TOPIC_ALREADY_EXISTS, ErrorCode.UNKNOWN_TOPIC_ID
        assert outcomes(root) == [ErrorCode.NONE, ErrorCode.NONE, exists, ErrorCode.NONE, gone]


# --- several brokers: the topic ---------------------------------------------------------------------------------------


def _from_topic(bootstrap: str) -> Events:
    """What the only partition of the topic holds; any replica tells."""
    with _client(bootstrap.partition(",")[0]) as client:
        answer = client.fetch(AUDIT_LOG_TOPIC, 0, partition_max_bytes=16 << 20)
    batches = split(memoryview(bytes(answer.records or b"")))
    return [json.loads(record.value or b"") for each in batches for record in decode_records(each.data)]


def test_every_broker_writes_to_the_topic_and_a_change_is_told_once() -> None:
    """One partition: brokers that do not lead it write through its leader. What is passed on is told by one broker."""
    settings = {
        "audit.log.topic.enable": "true",
        "audit.log.topic.num.partitions": "1",
        "message.max.bytes": "500",  # for clients
    }
    topic = DeleteRecordsRequest.DeleteRecordsTopic
    partition = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=0)
    with Cluster(brokers=3, settings=settings) as cluster:
        for number, address in enumerate(cluster.bootstrap_servers.split(","), start=1):
            with _client(address) as client:
                client.create_topic(f"by-{number}")  # by the controller, whoever is asked
                # By nobody but the leader: two brokers refuse, and tell of that.
                client.call(DeleteRecordsRequest(topics=[topic(name="by-1", partitions=[partition])]), 2)
        events = _eventually(
            lambda: _from_topic(cluster.bootstrap_servers),
            lambda events: len(_of(events, "CreateTopics")) >= 3 and len(_of(events, "DeleteRecords")) >= 3,
        )
    assert sorted(event["resources"][0]["name"] for event in _of(events, "CreateTopics")) == ["by-1", "by-2", "by-3"]
    assert {event["src_endpoint"]["ip"] for event in events} == {"127.0.0.1"}
    deletions = {event["metadata"]["log_provider"]: event["status"] for event in _of(events, "DeleteRecords")}
    assert deletions.keys() == {"broker-1", "broker-2", "broker-3"}
    assert sorted(deletions.values()) == ["Failure", "Failure", "Success"]
    numbers = [(event["metadata"]["log_provider"], event["metadata"]["sequence"]) for event in events]
    assert len(set(numbers)) == len(numbers) == 6


def test_clients_cannot_write_to_the_topic() -> None:
    with Cluster(settings={"audit.log.topic.enable": "true"}) as cluster, _client(cluster.bootstrap_servers) as client:
        client.create_topic("a")
        deadline = time.monotonic() + PATIENCE_S
        while (topic := client.topic(AUDIT_LOG_TOPIC)).error_code:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert topic.is_internal
        assert len(topic.partitions) == 12
        assert client.produce(AUDIT_LOG_TOPIC, batch(b"v")).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
