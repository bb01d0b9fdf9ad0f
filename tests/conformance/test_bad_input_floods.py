"""Bad input, floods of state: each request is valid, and there are far too many of them.

The numbers of the catalogue (a million producer ids, a hundred thousand groups) are scaled to seconds; what is asserted
is that memory per item is small, or that a bound holds. Not here: ACLs, quotas and metrics, which do not exist yet.
"""

from __future__ import annotations

import random
import select
import struct
import time
from collections.abc import Callable, Iterator

import pytest

from millrace.errors import ErrorCode
from millrace.wire.frame import RequestHeader, decode_response, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages import response_class
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.configs import DescribeConfigsRequest, IncrementalAlterConfigsRequest
from millrace.wire.messages.fetch import FetchResponse
from millrace.wire.messages.group_offsets import OffsetCommitRequest
from millrace.wire.messages.groups import (
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
)
from millrace.wire.messages.producers import DescribeProducersRequest, InitProducerIdRequest
from millrace.wire.schema import Request
from support.raw import (
    MIB,
    RawClient,
    WatchedBroker,
    api_versions_frame,
    batch,
    error_codes,
    fetch_request,
    framed,
    produce_request,
)

E = ErrorCode
SECRET = "hunter2-planted-secret"
SESSIONS = 50
MEMBERS = 5
REBALANCE_TIMEOUT_MS = 20_000


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    settings = {
        "max.incremental.fetch.session.cache.slots": str(SESSIONS),
        "group.max.size": str(MEMBERS),
        "sasl.jaas.config": f'org.example.Login required password="{SECRET}";',
        "ssl.key.password": SECRET,
    }
    with WatchedBroker(settings) as running:
        with running.connect() as client:
            client.create_topic("flooded")
        yield running


def pipeline(client: RawClient, version: int, make: Callable[[int], Request], count: int) -> list[set[ErrorCode]]:
    """Send `count` requests a hundred at a time; the error codes of each answer."""
    codes = []
    for start in range(0, count, 100):
        frames = []
        for number in range(start, min(start + 100, count)):
            request = make(number)
            frames.append(encode_request(RequestHeader(type(request).api_key, version, number, "raw"), request))
        client.send(b"".join(frames))
        for number in range(start, min(start + 100, count)):
            correlation_id, response = decode_response(
                response_class(type(request).api_key), version, client.read_frame(10)
            )
            assert correlation_id == number
            codes.append(error_codes(response))
    return codes


def test_producer_ids_without_end(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        codes = pipeline(client, 4, lambda _: InitProducerIdRequest(transactional_id=None), 5000)
        assert codes == [{E.NONE}] * 5000


def test_producers_without_end_in_one_partition(broker: WatchedBroker) -> None:
    """Each writes once and is never seen again."""
    count = 5000
    with broker.unharmed(), broker.connect() as client:
        codes = pipeline(
            client,
            9,
            lambda number: produce_request(
                "flooded", batch(producer_id=10_000 + number, producer_epoch=0, base_sequence=0), acks=1
            ),
            count,
        )
        assert codes == [{E.NONE}] * count
        wanted = DescribeProducersRequest.TopicRequest(name="flooded", partition_indexes=[0])
        response = client.call(DescribeProducersRequest(topics=[wanted]), 0)
        assert len(response.topics[0].partitions[0].active_producers) <= count


def test_producer_epochs_without_end(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        codes = pipeline(
            client,
            9,
            lambda number: produce_request(
                "flooded", batch(producer_id=5, producer_epoch=number, base_sequence=0), acks=1
            ),
            2000,
        )
        assert codes == [{E.NONE}] * 2000


def commit(group: str) -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(committed_offset=1)
    topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name="flooded", partitions=[partition])]
    return OffsetCommitRequest(group_id=group, topics=topics)


def test_groups_without_end(broker: WatchedBroker) -> None:
    count = 3000
    with broker.unharmed(), broker.connect() as client:
        client.find_coordinator("g")
        codes = pipeline(client, 8, lambda number: commit(f"flood-{number}"), count)
        assert codes == [{E.NONE}] * count
        listed = client.call(ListGroupsRequest(), 4)
        assert len([group for group in listed.groups if group.group_id.startswith("flood-")]) == count


def test_groups_that_are_only_asked_for_leave_nothing(broker: WatchedBroker) -> None:
    """Coordinators, descriptions and heartbeats of groups that do not exist do not make them."""
    with broker.unharmed(max_growth_bytes=8 * MIB), broker.connect() as client:
        pipeline(client, 4, lambda number: DescribeGroupsRequest(groups=[f"ghost-{number}"]), 3000)
        pipeline(client, 3, lambda number: HeartbeatRequest(group_id=f"ghost-{number}", member_id="m"), 3000)
        listed = client.call(ListGroupsRequest(), 4)
        assert not [group for group in listed.groups if group.group_id.startswith("ghost-")]


def join(group: str, member_id: str = "", instance_id: str | None = None) -> JoinGroupRequest:
    return JoinGroupRequest(
        group_id=group,
        session_timeout_ms=REBALANCE_TIMEOUT_MS,
        rebalance_timeout_ms=REBALANCE_TIMEOUT_MS,
        member_id=member_id,
        group_instance_id=instance_id,
        protocol_type="consumer",
        protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")],
    )


def refusals(clients: list[RawClient], at_least: int) -> int:
    """How many are told that the group is full, when `at_least` are or the rebalance would soon be over."""
    waiting = {client.socket: client for client in clients}
    refused, deadline = 0, time.monotonic() + REBALANCE_TIMEOUT_MS / 2000
    while refused < at_least and (rest_s := deadline - time.monotonic()) > 0:
        for answered in select.select(list(waiting), [], [], rest_s)[0]:
            response = waiting.pop(answered).response(ApiKey.JOIN_GROUP, 5)
            refused += response.error_code == E.GROUP_MAX_SIZE_REACHED
    return refused


def test_members_that_never_come_back(broker: WatchedBroker) -> None:
    """From v4 on a newcomer is given an id and asked to come again; these never do (KIP-394)."""
    with broker.unharmed(), broker.connect() as client:
        codes = pipeline(client, 5, lambda _: join("pending"), 3000)
        assert set().union(*codes) <= {E.MEMBER_ID_REQUIRED, E.GROUP_MAX_SIZE_REACHED}


def test_members_over_the_limit(broker: WatchedBroker) -> None:
    """Only the first of a group is answered at once; the others wait for it to rejoin, each on its connection.

    As in Kafka, one that has yet to rejoin does not count while a rebalance gathers members, so there may be one more.
    """
    clients = [broker.connect() for _ in range(MEMBERS * 3)]
    with broker.unharmed():
        try:
            full = 0
            waiting: list[RawClient] = []
            for client in clients:
                given = client.call(join("crowded"), 5)
                assert given.error_code in {E.MEMBER_ID_REQUIRED, E.GROUP_MAX_SIZE_REACHED}
                if given.error_code == E.MEMBER_ID_REQUIRED:
                    client.request(join("crowded", given.member_id), 5)
                    waiting.append(client)
                else:
                    full += 1
            at_least = MEMBERS * 3 - MEMBERS - 1
            assert full + refusals(waiting, at_least - full) >= at_least
        finally:
            for client in clients:
                client.close()


def test_static_members_over_the_limit(broker: WatchedBroker) -> None:
    clients = [broker.connect() for _ in range(MEMBERS * 3)]
    with broker.unharmed():
        try:
            for number, client in enumerate(clients):
                client.request(join("static", instance_id=f"instance-{number}"), 5)
            at_least = MEMBERS * 3 - MEMBERS - 1
            assert refusals(clients, at_least) >= at_least
        finally:
            for client in clients:
                client.close()


def test_leaving_for_everybody(broker: WatchedBroker) -> None:
    members = [LeaveGroupRequest.MemberIdentity(member_id=f"m{number}") for number in range(20_000)]
    with broker.unharmed(), broker.connect() as client:
        response = client.call(LeaveGroupRequest(group_id="nobody", members=members), 4, within_s=2)
        assert error_codes(response) & {E.UNKNOWN_MEMBER_ID, E.GROUP_ID_NOT_FOUND}


def test_fetch_sessions_over_the_limit(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        assert not any(error_codes(client.call(produce_request("flooded", batch(), acks=1), 9)))
        opened = []
        for _ in range(SESSIONS * 4):
            response: FetchResponse = client.call(fetch_request("flooded", 0, session_epoch=0), 12)
            assert response.error_code == 0
            assert response.responses[0].partitions[0].records, "a fetch without a session is a fetch all the same"
            opened.append(response.session_id)
        living = 0
        for session_id in filter(None, opened):
            again = client.call(fetch_request("flooded", 0, session_id=session_id, session_epoch=1), 12)
            assert again.error_code in {E.NONE, E.FETCH_SESSION_ID_NOT_FOUND}
            living += again.error_code == E.NONE
        assert 0 < living <= SESSIONS


def test_topics_without_end_by_asking(broker: WatchedBroker) -> None:
    count = 500
    request = MetadataRequest(
        topics=[MetadataRequest.MetadataRequestTopic(name=f"asked-{number}") for number in range(count)],
        allow_auto_topic_creation=True,
    )
    with broker.unharmed(), broker.connect() as client:
        response = client.call(request, 9, within_s=5)
        assert len(response.topics) == count
        assert error_codes(response) <= {
            E.NONE,
            E.LEADER_NOT_AVAILABLE,
            E.UNKNOWN_TOPIC_OR_PARTITION,
            E.THROTTLING_QUOTA_EXCEEDED,
        }


def test_client_ids_without_end(broker: WatchedBroker) -> None:
    count = 5000
    with broker.unharmed(max_growth_bytes=8 * MIB), broker.connect() as client:
        for start in range(0, count, 100):
            numbers = range(start, start + 100)
            client.send(
                b"".join(
                    framed(ApiKey.METADATA, 1, struct.pack(">i", 0), client_id=b"id-%d" % each) for each in numbers
                )
            )
            for _ in numbers:
                client.read_frame()


def test_connections_that_come_and_go(broker: WatchedBroker) -> None:
    with broker.unharmed(max_growth_bytes=8 * MIB):
        for number in range(1000):
            client = broker.connect()
            if number % 2:
                client.send(api_versions_frame())
            client.reset() if number % 3 else client.close()


def test_settings_changed_without_end(broker: WatchedBroker) -> None:
    def change(number: int) -> Request:
        setting = IncrementalAlterConfigsRequest.AlterableConfig(
            name="retention.ms", config_operation=0, value=str(1_000_000 + number)
        )
        resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=2, resource_name="flooded", configs=[setting]
        )
        return IncrementalAlterConfigsRequest(resources=[resource])

    with broker.unharmed(), broker.connect() as client:
        assert pipeline(client, 1, change, 300) == [{E.NONE}] * 300


@pytest.mark.parametrize("name", ["1", ""], ids=["this-broker", "default"])
@pytest.mark.parametrize("keys", [None, ["sasl.jaas.config", "ssl.key.password"]], ids=["all", "named"])
def test_secrets_are_never_told(broker: WatchedBroker, name: str, keys: list[str] | None) -> None:
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=4, resource_name=name, configuration_keys=keys
    )
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)
    with broker.unharmed(), broker.connect() as client:
        client.request(request, 4)
        frame = client.read_frame()
        assert SECRET.encode() not in frame
        _, response = decode_response(response_class(ApiKey.DESCRIBE_CONFIGS), 4, frame)
        (result,) = response.results  # type: ignore[attr-defined]
        secrets = {
            entry.name: entry for entry in result.configs if entry.name in {"sasl.jaas.config", "ssl.key.password"}
        }
        assert all(entry.value is None and entry.is_sensitive for entry in secrets.values())
        if name:
            assert len(secrets) == 2


def test_secrets_are_not_in_the_log(broker: WatchedBroker) -> None:
    """The last test of the module: everything that was logged so far is looked at."""
    setting = IncrementalAlterConfigsRequest.AlterableConfig(
        name="ssl.keystore.password", config_operation=0, value=f"{SECRET}-new"
    )
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=4, resource_name="1", configs=[setting]
    )
    with broker.unharmed(), broker.connect() as client:
        client.call(IncrementalAlterConfigsRequest(resources=[resource]), 1)
        client.try_send(framed(ApiKey.METADATA, 1, SECRET.encode()))
        client.expect_close()
    assert SECRET not in broker.log_text()


def test_a_storm_of_everything(broker: WatchedBroker) -> None:
    """Valid and broken peers, mixed, for a second: the bystander must not notice."""
    chance = random.Random(7)
    with broker.unharmed():
        deadline = time.monotonic() + 1
        while time.monotonic() < deadline:
            client = broker.connect()
            match chance.randrange(5):
                case 0:
                    client.try_send(chance.randbytes(200))
                case 1:
                    client.alive()
                case 2:
                    client.request(fetch_request("flooded", 0, max_wait_ms=1000, min_bytes=MIB), 12)
                case 3:
                    client.send(struct.pack(">i", 10 * MIB) + bytes(1000))
                case 4:
                    client.try_send(framed(chance.randrange(90), chance.randrange(10), chance.randbytes(60)))
            client.reset() if chance.random() < 0.5 else client.close()
