"""Bad input, names: topics that cannot be, paths that must not be, and group ids, which are free text.

Every request that carries a topic's name is tried with every bad name. None may reach the disk: the directory holds
exactly the same entries before and after, and nothing appears beside it.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from millrace.errors import ErrorCode
from millrace.wire.messages.cluster import DescribeTopicPartitionsRequest, MetadataRequest
from millrace.wire.messages.configs import DescribeConfigsRequest, IncrementalAlterConfigsRequest
from millrace.wire.messages.group_offsets import OffsetCommitRequest, OffsetFetchRequest
from millrace.wire.messages.groups import (
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    FindCoordinatorRequest,
    JoinGroupRequest,
    ListGroupsRequest,
)
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest
from millrace.wire.messages.offsets import ListOffsetsRequest, OffsetForLeaderEpochRequest
from millrace.wire.messages.producers import DescribeProducersRequest, InitProducerIdRequest
from millrace.wire.messages.records import DeleteRecordsRequest
from millrace.wire.messages.topics import CreatePartitionsRequest, CreateTopicsRequest, DeleteTopicsRequest
from millrace.wire.schema import Request
from support.raw import WatchedBroker, batch, error_codes, fetch_request, produce_request

E = ErrorCode
MARK = f"escape-{uuid.uuid4().hex[:8]}"
LONGEST = 249

BAD_NAMES = {
    "empty": "",
    "dot": ".",
    "dot-dot": "..",
    "250-characters": "n" * 250,
    "32767-characters": "n" * 32767,
    "slash": "/",
    "absolute-path": f"/tmp/{MARK}",
    "parent": f"../{MARK}",
    "far-parent": f"../../../../../../../../tmp/{MARK}",
    "passwd": "../../etc/passwd",
    "inner-parent": f"a/../../{MARK}",
    "slash-at-the-end": f"{MARK}/",
    "backslash": f"..\\{MARK}",
    "nul": "nul\0inside",
    "nul-at-the-end": "nul\0",
    "newline": "line\nbreak",
    "newline-at-the-end": "line\n",
    "space": "a b",
    "tab": "a\tb",
    "colon": "a:b",
    "percent": "%2e%2e%2f",
    "tilde": "~root",
    "star": "*",
    "dollar": "$(touch x)",
    "quote": "a'; DROP TABLE topics; --",
    "unicode": "\u0442\u043e\u043f\u0438\u043a",
    "fullwidth-dots": "\uff0e\uff0e",
    "unicode-digit": "topic\u0661",
    "emoji": "\U0001f600",
    "combining": "a\u0308",
    "right-to-left": "\u202eabc",
}

Ask = Callable[[str], tuple[Request, int]]


def _create(name: str) -> tuple[Request, int]:
    topics = [CreateTopicsRequest.CreatableTopic(name=name, num_partitions=1, replication_factor=1)]
    return CreateTopicsRequest(topics=topics, timeout_ms=1000), 7


def _create_validate_only(name: str) -> tuple[Request, int]:
    topics = [CreateTopicsRequest.CreatableTopic(name=name, num_partitions=1, replication_factor=1)]
    return CreateTopicsRequest(topics=topics, timeout_ms=1000, validate_only=True), 4


def _auto_create(name: str) -> tuple[Request, int]:
    topics = [MetadataRequest.MetadataRequestTopic(name=name)]
    return MetadataRequest(topics=topics, allow_auto_topic_creation=True), 9


def _auto_create_v0(name: str) -> tuple[Request, int]:
    return MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=name)]), 0


def _list_offsets(name: str) -> tuple[Request, int]:
    wanted = [ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-1)]
    topics = [ListOffsetsRequest.ListOffsetsTopic(name=name, partitions=wanted)]
    return ListOffsetsRequest(replica_id=-1, topics=topics), 7


def _epoch(name: str) -> tuple[Request, int]:
    wanted = [OffsetForLeaderEpochRequest.OffsetForLeaderPartition(partition=0, leader_epoch=0)]
    return OffsetForLeaderEpochRequest(
        topics=[OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic=name, partitions=wanted)]
    ), 4


def _delete_records(name: str) -> tuple[Request, int]:
    wanted = [DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=0)]
    topics = [DeleteRecordsRequest.DeleteRecordsTopic(name=name, partitions=wanted)]
    return DeleteRecordsRequest(topics=topics, timeout_ms=1000), 2


def _partitions(name: str) -> tuple[Request, int]:
    topics = [CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=2, assignments=None)]
    return CreatePartitionsRequest(topics=topics, timeout_ms=1000), 3


def _describe_configs(name: str) -> tuple[Request, int]:
    wanted = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=2, resource_name=name, configuration_keys=None
    )
    return DescribeConfigsRequest(resources=[wanted]), 4


def _alter_configs(name: str) -> tuple[Request, int]:
    change = IncrementalAlterConfigsRequest.AlterableConfig(name="retention.ms", config_operation=0, value="1")
    wanted = IncrementalAlterConfigsRequest.AlterConfigsResource(resource_type=2, resource_name=name, configs=[change])
    return IncrementalAlterConfigsRequest(resources=[wanted]), 1


def _commit(name: str) -> tuple[Request, int]:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=1)
    topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name=name, partitions=[partition])]
    return OffsetCommitRequest(group_id="names", topics=topics), 9


def _describe_producers(name: str) -> tuple[Request, int]:
    topics = [DescribeProducersRequest.TopicRequest(name=name, partition_indexes=[0])]
    return DescribeProducersRequest(topics=topics), 0


def _describe_partitions(name: str) -> tuple[Request, int]:
    return DescribeTopicPartitionsRequest(topics=[DescribeTopicPartitionsRequest.TopicRequest(name=name)]), 0


REQUESTS: dict[str, Ask] = {
    "create": _create,
    "create-validate-only": _create_validate_only,
    "auto-create": _auto_create,
    "auto-create-v0": _auto_create_v0,
    "produce": lambda name: (produce_request(name, batch()), 9),
    "fetch": lambda name: (fetch_request(name, 0), 12),
    "list-offsets": _list_offsets,
    "epoch": _epoch,
    "delete": lambda name: (DeleteTopicsRequest(topic_names=[name], timeout_ms=1000), 5),
    "delete-records": _delete_records,
    "create-partitions": _partitions,
    "describe-configs": _describe_configs,
    "alter-configs": _alter_configs,
    "commit": _commit,
    "describe-producers": _describe_producers,
    "describe-partitions": _describe_partitions,
}

NO_SUCH_TOPIC = {E.INVALID_TOPIC_EXCEPTION, E.UNKNOWN_TOPIC_OR_PARTITION, E.INVALID_REQUEST}
MAKES_TOPICS = {"create", "create-validate-only", "auto-create", "auto-create-v0"}


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        yield running


def entries(broker: WatchedBroker) -> set[Path]:
    """Every directory that the broker made, and what lies beside its home.

    Without those of the offsets topic: they are made at first use, which a group with any name is.
    """
    below = {path for path in broker.data_dir.rglob("*") if path.is_dir()}
    below -= set(broker.data_dir.rglob("__consumer_offsets-*"))
    return below | {path for path in broker.home.parent.iterdir() if MARK in path.name}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_a_bad_topic_name_is_an_error_and_never_a_path(broker: WatchedBroker, case: str) -> None:
    before = entries(broker)
    with broker.unharmed(), broker.connect() as client:
        for ask, make in REQUESTS.items():
            request, version = make(BAD_NAMES[case])
            codes = error_codes(client.call(request, version, within_s=1)) - {E.NONE}
            assert codes, f"{ask}: a topic that cannot be was found"
            assert codes <= ({E.INVALID_TOPIC_EXCEPTION} if ask in MAKES_TOPICS else NO_SUCH_TOPIC), ask
    assert entries(broker) == before
    assert not Path(f"/tmp/{MARK}").exists()
    assert not Path(f"/tmp/{MARK}-0").exists()


GOOD_NAMES = {
    "one-character": "x",
    "dots": "...",
    "leading-dot": ".hidden",
    "leading-dash": "-rf",
    "dashes": "--help",
    "digits": "12345",
    "looks-like-a-partition": "orders-0",
    "ends-in-delete": "orders.abc-delete",
    "ends-in-future": "orders.abc-future",
    "looks-like-a-file": "meta.properties",
    "looks-like-the-metadata": "metadata.db",
    "longest": "n" * LONGEST,
    "case": "Orders",
    "other-case": "ORDERS",
}


@pytest.mark.parametrize("case", GOOD_NAMES)
def test_an_odd_but_good_name_works_from_creation_to_deletion(broker: WatchedBroker, case: str) -> None:
    """Among them the longest one, whose directory gets a suffix when it is deleted."""
    name = GOOD_NAMES[case]
    with broker.unharmed(), broker.connect() as client:
        client.create_topic(name)
        assert client.produce(name, batch(b"value of " + name.encode())).error_code == 0
        assert name.encode() in bytes(client.fetch(name, 0).records or b"")
        deleted = client.call(DeleteTopicsRequest(topic_names=[name], timeout_ms=5000), 5)
        assert error_codes(deleted) == {E.NONE}
        assert client.produce(name, batch()).error_code == E.UNKNOWN_TOPIC_OR_PARTITION
        # At once again, while the old files may still be there.
        client.create_topic(name)
        assert client.fetch(name, 0).high_watermark == 0
        assert client.produce(name, batch()).base_offset == 0


def test_names_that_collide_in_metrics_are_refused(broker: WatchedBroker) -> None:
    """ "a.b" and "a_b" are one name where dots become underscores, so Kafka allows only one of them."""
    with broker.unharmed(), broker.connect() as client:
        client.create_topic("collide.one")
        client.create_topic("collide_two")
        for name in ("collide_one", "collide.two"):
            assert error_codes(client.call(*_create(name))) == {E.INVALID_TOPIC_EXCEPTION}
            assert E.INVALID_TOPIC_EXCEPTION in error_codes(client.call(*_auto_create(name)))
        both = CreateTopicsRequest(
            topics=[
                CreateTopicsRequest.CreatableTopic(name=name, num_partitions=1, replication_factor=1)
                for name in ("both.x", "both_x")
            ]
        )
        codes = [topic.error_code for topic in client.call(both, 7).topics]
        assert E.INVALID_TOPIC_EXCEPTION in codes


FREE_TEXTS = {
    "path": "../../../etc/passwd",
    "absolute": f"/tmp/{MARK}",
    "nul": "a\0b",
    "newline": "a\nb",
    "unicode": "\u0433\u0440\u0443\u043f\u043f\u0430 \U0001f600",
    "space": " ",
    "dot": ".",
    "dots": "..",
    "long": "g" * 5000,
    "longest": "g" * 32767,
    "quote": "a'; DROP TABLE groups; --",
    "format": "%s{0}",
}


@pytest.mark.parametrize("case", FREE_TEXTS)
def test_a_group_id_is_free_text_and_never_a_path(broker: WatchedBroker, case: str) -> None:
    group = FREE_TEXTS[case]
    with broker.connect() as client:
        client.topic("offsets", auto_create=True)
    before = entries(broker)
    with broker.unharmed(), broker.connect() as client:
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=42, committed_metadata=case)
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name="offsets", partitions=[partition])]
        assert error_codes(client.call(OffsetCommitRequest(group_id=group, topics=topics), 8)) == {E.NONE}
        wanted = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group, topics=None)
        (answer,) = client.call(OffsetFetchRequest(groups=[wanted]), 8).groups
        assert answer.group_id == group
        assert [each.committed_offset for topic in answer.topics for each in topic.partitions] == [42]
        found = client.call(FindCoordinatorRequest(key=group, key_type=0), 2)
        assert found.error_code == 0
        listed = {each.group_id for each in client.call(ListGroupsRequest(), 4).groups}
        assert group in listed
        described = client.call(DescribeGroupsRequest(groups=[group]), 4)
        assert error_codes(described) == {E.NONE}
        deleted = client.call(DeleteGroupsRequest(groups_names=[group]), 2)
        assert error_codes(deleted) == {E.NONE}
    assert entries(broker) == before


@pytest.mark.parametrize("case", FREE_TEXTS)
def test_the_other_free_texts_of_a_member(broker: WatchedBroker, case: str) -> None:
    text = FREE_TEXTS[case]
    join = JoinGroupRequest(
        group_id=f"member-{case}",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        member_id="",
        group_instance_id=text,
        protocol_type=text,
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name=text, metadata=text.encode())],
    )
    init = InitProducerIdRequest(transactional_id=text, transaction_timeout_ms=1000)
    before = entries(broker)
    with broker.unharmed(), broker.connect() as client:
        assert client.call(join, 5, within_s=5).error_code in {E.NONE, E.MEMBER_ID_REQUIRED, E.INVALID_REQUEST}
        assert client.call(init, 4, within_s=5).error_code != E.UNKNOWN_SERVER_ERROR
    assert entries(broker) == before


def test_log_dirs_of_topics_that_cannot_be(broker: WatchedBroker) -> None:
    topics = [
        DescribeLogDirsRequest.DescribableLogDirTopic(topic=name, partitions=[0, -1]) for name in BAD_NAMES.values()
    ]
    with broker.unharmed(), broker.connect() as client:
        response = client.call(DescribeLogDirsRequest(topics=topics), 4)
        assert not [topic for result in response.results for topic in result.topics if topic.partitions]
