"""What rights are about, beyond the matrix: forged requests, sessions, waits, what is told of rights, forwarding."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import pytest

from millrace.cluster.planning import Plan
from millrace.errors import ErrorCode
from millrace.metadata.deltas import AclsChanged, ResourceType
from millrace.model import TRANSACTION_STATE_TOPIC
from millrace.security.acls import OPERATIONS_OF, Operation, PatternKind, Permission, ResourceKind
from millrace.testing import Cluster
from millrace.wire.frame import RequestHeader, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from support.authorization_rows import request_of
from support.on_loop import on_loop
from support.raw import PeerClosed, RawClient, batch, fetch_request, produce_request
from support.ruled_broker import AUTHORIZER, EVERYTHING, RuledBroker, acl, ruled_broker

TOPIC, GROUP, CLUSTER = ResourceKind.TOPIC, ResourceKind.GROUP, ResourceKind.CLUSTER
READ_TOPIC = acl(Operation.READ, TOPIC, "t")
WRITE_TOPIC = acl(Operation.WRITE, TOPIC, "t")
REFUSED = ErrorCode.TOPIC_AUTHORIZATION_FAILED


@pytest.fixture(scope="module")
def running() -> Iterator[RuledBroker]:
    with ruled_broker({"transaction.state.log.num.partitions": "1"}) as broker:
        broker.cluster.create_topic("t")
        broker.cluster.create_topic("u")
        find = {"key_type": 1, "coordinator_keys": ["any"]}
        while broker.call(ApiKey.FIND_COORDINATOR, 4, **find).coordinators[0].error_code:
            pass
        yield broker


@pytest.fixture
def broker(running: RuledBroker) -> RuledBroker:
    running.rules(EVERYTHING)
    return running


def end_offset(broker: RuledBroker, topic: str = "t") -> int:
    found = broker.services.replicas.held(topic, 0)
    assert found is not None
    return on_loop(broker.cluster, lambda: found.log.end_offset)


# --- forged requests --------------------------------------------------------------------------------------------------


def test_cve_2018_1288_forged_follower_fetch(broker: RuledBroker) -> None:
    """A client that may read, and says that it is a replica, gets nothing and moves nothing."""
    assert broker.client.produce("t", batch(b"a")).error_code == 0
    own = broker.services.image.brokers[1]
    topic_id = broker.services.image.topics["t"].topic_id
    forged = {
        "max_bytes": 1000,
        "replica_state": {"replica_id": 1, "replica_epoch": own.broker_epoch},
        "topics": [{"topic_id": topic_id, "partitions": [{"partition": 0, "partition_max_bytes": 1000}]}],
    }
    broker.rules([READ_TOPIC, acl(Operation.DESCRIBE, TOPIC), acl(Operation.ALL, GROUP)])
    response = broker.call(ApiKey.FETCH, 17, **forged)
    ((answer,),) = [topic.partitions for topic in response.responses]
    assert (answer.error_code, answer.records) == (REFUSED, b"")
    broker.rules([acl(Operation.CLUSTER_ACTION, CLUSTER)])
    ((answer,),) = [topic.partitions for topic in broker.call(ApiKey.FETCH, 17, **forged).responses]
    assert answer.error_code != REFUSED, "a broker's right is enough, without READ"


@pytest.mark.parametrize("named", [None, "mine", "another's"])
def test_cve_2018_17196_transactional_right_by_the_batch(broker: RuledBroker, named: str | None) -> None:
    """What a batch says of itself counts: a request that does not name its transactional id gains nothing."""
    begun = broker.call(ApiKey.INIT_PRODUCER_ID, 5, transactional_id="another's", transaction_timeout_ms=60_000)
    broker.rules([WRITE_TOPIC, acl(Operation.WRITE, ResourceKind.TRANSACTIONAL_ID, "mine")])
    sent = batch(
        b"x", producer_id=begun.producer_id, producer_epoch=begun.producer_epoch, base_sequence=0, transactional=True
    )
    request = produce_request("t", sent)
    request.transactional_id = named
    before = end_offset(broker), end_offset(broker, TRANSACTION_STATE_TOPIC)
    ((answer,),) = [each.partition_responses for each in broker.client.call(request, 12).responses]
    refused = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    # Whose id it is that `mine` may write decides its coordinator, which does not know this producer.
    assert answer.error_code == (ErrorCode.INVALID_PRODUCER_ID_MAPPING if named == "mine" else refused)
    assert (end_offset(broker), end_offset(broker, TRANSACTION_STATE_TOPIC)) == before


def test_a_batch_beside_a_forged_one_is_refused_with_it(broker: RuledBroker) -> None:
    broker.rules([acl(Operation.WRITE, TOPIC)])
    request = produce_request("t", batch(b"x", producer_id=1, producer_epoch=0, base_sequence=0, transactional=True))
    request.topic_data += produce_request("u", batch(b"y")).topic_data
    before = end_offset(broker, "u")
    codes = {
        partition.error_code
        for topic in broker.client.call(request, 12).responses
        for partition in topic.partition_responses
    }
    assert codes == {ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}
    assert end_offset(broker, "u") == before


def test_an_idempotent_batch_takes_no_more_than_the_topic(broker: RuledBroker) -> None:
    broker.rules([WRITE_TOPIC])
    begun = broker.call(ApiKey.INIT_PRODUCER_ID, 5, transactional_id=None, transaction_timeout_ms=60_000)
    assert begun.error_code == 0, "who may write to a topic may have an id"
    sent = batch(b"x", producer_id=begun.producer_id, producer_epoch=0, base_sequence=0)
    assert broker.client.produce("t", sent).error_code == 0
    assert broker.client.produce("u", sent).error_code == REFUSED


def test_a_refused_produce_without_an_answer_closes_the_connection(broker: RuledBroker) -> None:
    broker.rules([READ_TOPIC])
    before = end_offset(broker)
    with broker.connect() as client:
        client.request(produce_request("t", batch(b"x"), acks=0), 9)
        assert client.expect_close() == []
    assert end_offset(broker) == before


def test_clients_do_not_write_internal_topics_whatever_their_rights(broker: RuledBroker) -> None:
    broker.client.find_coordinator("g")
    assert broker.client.produce("__consumer_offsets", batch(b"x")).error_code == ErrorCode.INVALID_TOPIC_EXCEPTION
    added = broker.call(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id="x",
        v3_and_below_topics=[{"name": "__consumer_offsets", "partitions": [0]}],
    )
    ((partition,),) = [topic.results_by_partition for topic in added.results_by_topic_v3_and_below]
    assert partition.partition_error_code == REFUSED


# --- fetches ----------------------------------------------------------------------------------------------------------


def partitions_of(response: Any) -> dict[str, int]:
    return {topic.topic: partition.error_code for topic in response.responses for partition in topic.partitions}


def test_an_incremental_fetch_is_judged_each_time(broker: RuledBroker) -> None:
    assert broker.client.produce("t", batch(b"a")).error_code == 0
    both = [acl(Operation.READ, TOPIC)]
    broker.rules(both)
    first = fetch_request("t", end_offset(broker), session_epoch=0)
    first.topics += fetch_request("u", end_offset(broker, "u")).topics
    begun = broker.client.call(first, 12)
    assert partitions_of(begun) == {"t": 0, "u": 0}
    assert begun.session_id

    def again(epoch: int) -> dict[str, int]:
        request = fetch_request("t", 0, session_id=begun.session_id, session_epoch=epoch)
        request.topics = []
        return partitions_of(broker.client.call(request, 12))

    assert again(1) == {}
    broker.rules([acl(Operation.READ, TOPIC, "u")])
    assert again(2) == {"t": REFUSED}
    assert again(3) == {"t": REFUSED}, "said as long as it is so"
    broker.rules(both)
    assert again(4) == {"t": 0}
    assert again(5) == {}


def test_a_fetch_that_waits_was_judged_when_it_came(broker: RuledBroker) -> None:
    broker.rules([READ_TOPIC, WRITE_TOPIC])
    with broker.connect() as reader:
        request = fetch_request("t", end_offset(broker), max_wait_ms=10_000)
        reader.request(request, 12)
        sessions = broker.services.replicas.held("t", 0)
        assert sessions is not None
        deadline = time.monotonic() + 5
        while not sessions.high_watermark._watchers:  # until it waits
            assert time.monotonic() < deadline
            time.sleep(0.001)
        broker.rules([WRITE_TOPIC])
        assert broker.client.produce("t", batch(b"late")).error_code == 0
        assert partitions_of(reader.response(ApiKey.FETCH, 12)) == {"t": 0}
        reader.request(request, 12)
        assert partitions_of(reader.response(ApiKey.FETCH, 12)) == {"t": REFUSED}


def test_a_queue_gives_nothing_of_a_topic_that_may_not_be_read(broker: RuledBroker) -> None:
    """Not beside the refusal either; and what was refused is not held by who asked for it."""
    earliest = [{"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}]
    group = {"resource_type": ResourceType.GROUP, "resource_name": "queue", "configs": earliest}
    broker.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, resources=[group])
    assert broker.client.produce("t", batch(b"for readers")).error_code == 0
    topic_id = broker.services.image.topics["t"].topic_id
    member = str(UUID(int=1))
    joining = {"group_id": "queue", "member_id": member, "member_epoch": 0, "subscribed_topic_names": ["t"]}
    assert broker.call(ApiKey.SHARE_GROUP_HEARTBEAT, 1, **joining).error_code == 0

    def fetched() -> tuple[int, int]:
        response = broker.call(
            ApiKey.SHARE_FETCH,
            2,
            group_id="queue",
            member_id=member,
            share_session_epoch=0,
            max_wait_ms=5000,
            min_bytes=1,
            max_bytes=10_000,
            max_records=100,
            topics=[{"topic_id": topic_id, "partitions": [{"partition_index": 0}]}],
        )
        ((answer,),) = [topic.partitions for topic in response.responses]
        return answer.error_code, len(answer.acquired_records) + len(answer.records)

    broker.rules([acl(Operation.READ, GROUP), acl(Operation.DESCRIBE, TOPIC)])
    assert fetched() == (REFUSED, 0)
    broker.rules([acl(Operation.READ, GROUP), READ_TOPIC])
    code, size = fetched()
    assert code == 0
    assert size > 0


# --- what is told -----------------------------------------------------------------------------------------------------


def bits(*operations: Operation) -> int:
    return sum(1 << operation for operation in operations)


def test_everything_allowed_is_told_as_such(broker: RuledBroker) -> None:
    asked = {"topics": [{"name": "t"}], "include_topic_authorized_operations": True}
    response = broker.call(ApiKey.METADATA, 10, **asked, include_cluster_authorized_operations=True)
    assert response.topics[0].topic_authorized_operations == bits(*OPERATIONS_OF[TOPIC])
    assert response.cluster_authorized_operations == bits(*OPERATIONS_OF[CLUSTER])


def test_operations_are_told_by_the_rules(broker: RuledBroker) -> None:
    broker.client.find_coordinator("g")
    broker.call(
        ApiKey.OFFSET_COMMIT,
        9,
        group_id="g",
        generation_id_or_member_epoch=-1,
        topics=[{"name": "t", "partitions": [{"partition_index": 0, "committed_offset": 0}]}],
    )
    broker.rules([
        acl(Operation.WRITE, TOPIC, "t"),
        acl(Operation.ALTER_CONFIGS, TOPIC, "t"),
        acl(Operation.READ, GROUP, "g", pattern=PatternKind.PREFIXED),
        acl(Operation.ALL, CLUSTER),
        acl(Operation.ALTER, CLUSTER, permission=Permission.DENY),
    ])  # fmt: skip
    topic = bits(Operation.WRITE, Operation.DESCRIBE, Operation.ALTER_CONFIGS, Operation.DESCRIBE_CONFIGS)
    asked = {"topics": [{"name": "t"}, {"name": "u"}], "include_topic_authorized_operations": True}
    metadata = broker.call(ApiKey.METADATA, 13, **asked)
    told = {each.name: each.topic_authorized_operations for each in metadata.topics}
    assert told == {"t": topic, "u": -(1 << 31)}, "of what may not be known nothing is said"
    described = broker.call(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, topics=[{"name": "t"}], response_partition_limit=1)
    assert described.topics[0].topic_authorized_operations == topic
    groups = broker.call(ApiKey.DESCRIBE_GROUPS, 5, groups=["g"], include_authorized_operations=True)
    assert groups.groups[0].authorized_operations == bits(Operation.READ, Operation.DESCRIBE)
    cluster = broker.call(ApiKey.DESCRIBE_CLUSTER, 1, include_cluster_authorized_operations=True, endpoint_type=1)
    assert cluster.cluster_authorized_operations == bits(*OPERATIONS_OF[CLUSTER] - {Operation.ALTER})


def test_a_topic_that_is_deleted_by_its_id_is_named_only_to_who_may_describe_it(broker: RuledBroker) -> None:
    topic_id = broker.services.image.topics["t"].topic_id
    asked = {"topics": [{"name": None, "topic_id": topic_id}], "timeout_ms": 1000}
    for rule, name in ((acl(Operation.DESCRIBE, TOPIC, "t"), "t"), (acl(Operation.DESCRIBE, TOPIC, "u"), None)):
        broker.rules([rule])
        (answer,) = broker.call(ApiKey.DELETE_TOPICS, 6, **asked).responses
        assert (answer.error_code, answer.name) == (REFUSED, name)


def test_a_pattern_matches_what_its_member_may_describe(broker: RuledBroker) -> None:
    broker.client.find_coordinator("patterns")
    broker.rules([acl(Operation.READ, GROUP), acl(Operation.DESCRIBE, TOPIC, "u")])
    joined = broker.call(
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        1,
        group_id="patterns",
        member_id="m",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_regex=".*",
        topic_partitions=[],
    )
    assert joined.error_code == 0
    topics = broker.services.image.topics_by_id
    assert [topics[each.topic_id].name for each in joined.assignment.topic_partitions] == ["u"]


def test_a_pattern_loses_what_its_member_may_no_longer_describe(
    broker: RuledBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace.groups.modern.step._JUDGE_INTERVAL_MS", 0)
    topics = broker.services.image.topics_by_id
    broker.client.find_coordinator("losing")
    member: dict[str, Any] = {"group_id": "losing", "member_id": "m"}
    broker.rules([acl(Operation.READ, GROUP), acl(Operation.DESCRIBE, TOPIC)])
    joined = broker.call(
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        1,
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_regex="[tu]",
        topic_partitions=[],
        **member,
    )
    assert sorted(topics[each.topic_id].name for each in joined.assignment.topic_partitions) == ["t", "u"]
    broker.rules([acl(Operation.READ, GROUP), acl(Operation.DESCRIBE, TOPIC, "u")])
    told = broker.call(
        ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, member_epoch=joined.member_epoch, topic_partitions=None, **member
    )
    assert [topics[each.topic_id].name for each in told.assignment.topic_partitions] == ["u"]


# --- several brokers --------------------------------------------------------------------------------------------------


def test_a_controller_judges_by_who_asked_and_not_by_who_passed_it_on() -> None:
    """Whichever broker a request comes to, and though brokers may do much that their clients may not."""
    settings = {**AUTHORIZER, "allow.everyone.if.no.acl.found": "true"}
    with Cluster(brokers=2, settings=settings) as cluster:
        image = cluster._brokers[1].services.image  # type: ignore[union-attr]
        controller = cluster._brokers[image.controller_id].services
        assert controller is not None
        rules = (
            acl(Operation.CLUSTER_ACTION, CLUSTER),
            acl(Operation.CREATE, TOPIC, "mine", pattern=PatternKind.PREFIXED),
            acl(Operation.READ, TOPIC, principal="User:nobody"),  # so that there is a rule about every topic
        )
        cluster._on_loop(controller.controller.change(lambda _: Plan(None, (AclsChanged(added=rules),))))
        addresses = [(host, int(port)) for host, port in (e.split(":") for e in cluster.bootstrap_servers.split(","))]
        for number, address in enumerate(addresses):
            with RawClient(address) as client:
                topics = [
                    {"name": f"{whose}-{number}", "num_partitions": 1, "replication_factor": 1}
                    for whose in ("others", "mine")
                ]
                response = client.call(request_of(ApiKey.CREATE_TOPICS, {"topics": topics, "timeout_ms": 9000}), 7)
                codes = [(topic.name, topic.error_code) for topic in response.topics]
                assert codes == [(f"others-{number}", REFUSED), (f"mine-{number}", ErrorCode.NONE)]

        # The second judgement, which the first did not take away: a broker that passes on what it should not have.
        host, port = addresses[image.controller_id - 1]
        inner = request_of(ApiKey.CREATE_TOPICS, {"topics": [{"name": "others-9", "num_partitions": 1}]})
        frame = encode_request(RequestHeader(ApiKey.CREATE_TOPICS, 7, 1, "app"), inner)[4:]
        alice = b"\0\0\x05User\x06alice\0\0"
        envelope = request_of(
            ApiKey.ENVELOPE, {"request_data": frame, "request_principal": alice, "client_host_address": b"\x0a\0\0\1"}
        )
        with RawClient((host, port)) as client:
            answer = client.call(envelope, 0)
        assert answer.error_code == ErrorCode.NONE
        assert b"User:alice may not CREATE" in answer.response_data
        assert "others-9" not in controller.image.topics


def test_internal_requests_are_for_the_listener_of_brokers() -> None:
    """A broker's right is not enough where brokers have a listener of their own."""
    settings = {
        "listeners": "INSIDE://127.0.0.1:0,PLAINTEXT://127.0.0.1:0",
        "listener.security.protocol.map": "INSIDE:PLAINTEXT,PLAINTEXT:PLAINTEXT",
        "inter.broker.listener.name": "PLAINTEXT",
    }
    with ruled_broker(settings) as broker:
        alter = broker.call(ApiKey.ALTER_PARTITION, 3, broker_id=1)
        assert alter.error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED
        envelope = {"request_data": b"", "request_principal": None, "client_host_address": b""}
        assert broker.call(ApiKey.ENVELOPE, 0, **envelope).error_code == ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def test_without_an_authorizer_everybody_may() -> None:
    with Cluster() as cluster:
        cluster.create_topic("t")
        host, port = cluster.bootstrap_servers.split(":")
        with RawClient((host, int(port))) as client:
            assert client.produce("t", batch(b"x")).error_code == 0
            response = client.call(request_class(ApiKey.DESCRIBE_QUORUM)(), 2)
            assert response.error_code == 0


def test_super_users_may_everything(running: RuledBroker) -> None:
    del running
    with Cluster(settings={**AUTHORIZER, "super.users": "User:root; User:ANONYMOUS"}) as cluster:
        cluster.create_topic("t")


def test_nobody_may_anything_without_rules() -> None:
    with Cluster(settings=AUTHORIZER) as cluster:
        host, port = cluster.bootstrap_servers.split(":")
        with RawClient((host, int(port))) as client:
            assert client.topic("t").error_code == REFUSED
            assert client.produce("t", batch(b"x")).error_code == REFUSED
            with pytest.raises(PeerClosed):
                client.request(produce_request("t", batch(b"x"), acks=0), 9)
                client.read_frame()
