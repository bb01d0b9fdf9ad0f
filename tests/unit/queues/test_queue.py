"""A topic read as a queue, over sockets: records go to one member at a time, and what was accepted stays so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from confluent_kafka import Producer

from millrace.errors import ErrorCode
from millrace.queues.acquisition import Limits
from millrace.queues.records import ShareKey
from millrace.queues.settings import QueueSettings
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest
from support.queues import Member, begin, connect, coordinator_of, leader_of, let_everybody_in, refusal, taken

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
LOCK_MS = 30_000
SETTINGS = {"share.coordinator.state.topic.num.partitions": "3"}


def produce(cluster: Cluster, count: int, topic: str = "t") -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, "log_level": 0, "linger.ms": 50})
    for number in range(count):
        producer.produce(topic, b"%d" % number, partition=0)
    assert producer.flush(30) == 0


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with Cluster(settings=SETTINGS) as running:
        running.create_topic("t")
        let_everybody_in(running)
        yield running


@pytest.fixture
async def member(cluster: Cluster) -> AsyncIterator[Member]:
    connection, topic_id = await leader_of(cluster.bootstrap_servers, "t")
    key = ShareKey("g", topic_id, 0)
    await begin(cluster.bootstrap_servers, key, 0)
    async with connection:
        yield Member(connection, key)


def locks_last(cluster: Cluster, lock_ms: int) -> None:
    (broker,) = cluster._brokers.values()
    assert broker.services is not None
    broker.services.queues.settings_of = lambda _group: QueueSettings(Limits(lock_ms=lock_ms))


def other(member: Member, name: str = "other") -> Member:
    return Member(member.connection, member.key, name)


@pytest.mark.parametrize("version", [1, 2])
async def test_records_go_to_one_member_and_are_done_with_once_accepted(
    cluster: Cluster, member: Member, version: int
) -> None:
    member.version = version
    produce(cluster, 10)
    assert taken(await member.fetch()) == [(0, 9, 1)]
    second = other(member)
    assert taken(await second.fetch()) == []
    answer = await member.acknowledge((0, 4, [ACCEPT]), (5, 9, [ACCEPT, RELEASE, REJECT, ACCEPT, RELEASE]))
    assert refusal(answer) == 0
    assert answer.acquisition_lock_timeout_ms == (LOCK_MS if version >= 2 else 0)
    assert taken(await second.fetch()) == [(6, 6, 2), (9, 9, 2)]
    assert refusal(await second.fetch(acknowledge=[(6, 6, [ACCEPT]), (9, 9, [ACCEPT])])) == 0
    produce(cluster, 3)
    assert taken(await member.fetch()) == [(10, 12, 1)]


async def test_a_strict_limit_of_records(cluster: Cluster, member: Member) -> None:
    produce(cluster, 10)
    assert taken(await member.fetch(max_records=3, mode=1)) == [(0, 2, 1)]
    assert taken(await member.fetch(max_records=3, mode=1)) == [(3, 5, 1)]
    assert taken(await member.fetch(max_records=3)) == [(6, 9, 1)]


async def test_a_fetch_waits_for_records_and_for_releases(cluster: Cluster, member: Member) -> None:
    second = other(member)
    waiting = asyncio.ensure_future(member.fetch(wait_ms=20_000))
    await asyncio.to_thread(produce, cluster, 4)
    got = taken(await waiting)
    assert got[0][0] == 0
    last = got[-1][1]
    rest = taken(await member.fetch()) if last < 3 else []
    assert (rest[-1][1] if rest else last) == 3
    connection, _ = await leader_of(cluster.bootstrap_servers, "t")
    async with connection:
        second.connection = connection  # replies on one connection leave in order
        waiting = asyncio.ensure_future(second.fetch(wait_ms=20_000))
        await member.acknowledge((2, 3, [RELEASE]))
        assert taken(await waiting) == [(2, 3, 2)]


async def test_a_lock_runs_out_unless_it_is_renewed(cluster: Cluster, member: Member) -> None:
    produce(cluster, 2)
    locks_last(cluster, 100)
    assert taken(await member.fetch()) == [(0, 1, 1)]
    locks_last(cluster, LOCK_MS)
    second = other(member)
    assert taken(await second.fetch(wait_ms=20_000)) == [(0, 1, 2)]
    assert refusal(await member.acknowledge((0, 0, [ACCEPT]))) == ErrorCode.INVALID_RECORD_STATE
    assert refusal(await second.acknowledge((0, 1, [RENEW]), renew=True)) == 0
    assert (await second.acknowledge((0, 1, [RENEW]))).error_code == ErrorCode.INVALID_REQUEST
    assert refusal(await second.acknowledge((0, 1, [ACCEPT]))) == 0


async def test_the_end_of_a_session_releases_what_its_member_holds(cluster: Cluster, member: Member) -> None:
    produce(cluster, 3)
    assert taken(await member.fetch()) == [(0, 2, 1)]
    closing = await member.fetch(acknowledge=[(0, 0, [ACCEPT])], epoch=-1)
    assert refusal(closing) == 0
    second = other(member)
    assert taken(await second.fetch(wait_ms=20_000)) == [(1, 2, 2)]
    assert (await member.fetch()).error_code == ErrorCode.SHARE_SESSION_NOT_FOUND
    assert (await second.acknowledge((1, 1, [ACCEPT]), epoch=7)).error_code == ErrorCode.INVALID_SHARE_SESSION_EPOCH
    assert (await second.acknowledge((1, 2, [ACCEPT]), epoch=-1)).error_code == 0
    assert (await second.acknowledge((1, 1, [ACCEPT]))).error_code == ErrorCode.SHARE_SESSION_NOT_FOUND


async def test_a_restart_keeps_what_was_accepted_and_gives_the_rest_again(cluster: Cluster, member: Member) -> None:
    produce(cluster, 10)
    assert taken(await member.fetch(max_records=8, mode=1)) == [(0, 7, 1)]
    assert refusal(await member.acknowledge((2, 5, [ACCEPT, RELEASE, ACCEPT, REJECT]))) == 0
    await asyncio.to_thread(cluster.restart)
    let_everybody_in(cluster)
    connection, _ = await leader_of(cluster.bootstrap_servers, "t")
    async with connection:
        again = Member(connection, member.key, "again")
        assert taken(await again.fetch()) == [(0, 1, 1), (3, 3, 2), (6, 9, 1)]
        assert refusal(await again.acknowledge((0, 1, [ACCEPT]), (3, 3, [ACCEPT]), (6, 9, [ACCEPT]))) == 0


async def test_what_is_refused(cluster: Cluster, member: Member) -> None:
    produce(cluster, 2)
    unbegun = Member(member.connection, ShareKey("unbegun", member.key.topic_id, 0))
    (topic,) = (await unbegun.fetch()).responses
    assert topic.partitions[0].error_code == ErrorCode.INVALID_REQUEST
    elsewhere = Member(member.connection, ShareKey("g", member.key.topic_id, 9), "b")
    (topic,) = (await elsewhere.fetch()).responses
    assert topic.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for nameless in (Member(member.connection, member.key, ""), Member(member.connection, member.key, "x" * 37)):
        assert (await nameless.fetch()).error_code == ErrorCode.INVALID_REQUEST
    for broker in cluster._brokers.values():
        assert broker.services is not None
        broker.services.queues.is_member = lambda _group, name: name == "m"
    assert (await other(member).fetch()).error_code == ErrorCode.UNKNOWN_MEMBER_ID
    assert taken(await member.fetch()) == [(0, 1, 1)]
    assert refusal(await member.acknowledge((0, 5, [ACCEPT]))) == ErrorCode.INVALID_REQUEST


async def test_no_client_is_told_of_it_yet() -> None:
    with Cluster() as running:
        running.create_topic("t")
        async with await connect(running.bootstrap_servers) as connection:
            offered = {each.api_key for each in (await connection.request(ApiVersionsRequest(), 3)).api_keys}
            assert not offered & {ApiKey.SHARE_FETCH, ApiKey.SHARE_ACKNOWLEDGE, ApiKey.SHARE_GROUP_HEARTBEAT}
        connection, topic_id = await leader_of(running.bootstrap_servers, "t")
        async with connection:
            refused = await Member(connection, ShareKey("g", topic_id, 0)).fetch()
            assert refused.error_code == ErrorCode.UNKNOWN_MEMBER_ID


async def test_another_leader_goes_on_where_the_last_one_stopped() -> None:
    with Cluster(brokers=3, settings=SETTINGS) as running:
        running.create_topic("t")
        let_everybody_in(running)
        address = running.bootstrap_servers.split(",")[0]
        connection, topic_id = await leader_of(address, "t")
        key = ShareKey("g", topic_id, 0)
        await begin(address, key, 0)
        await asyncio.to_thread(produce, running, 20)
        async with connection:
            member = Member(connection, key)
            assert taken(await member.fetch(max_records=10, mode=1)) == [(0, 9, 1)]
            assert refusal(await member.acknowledge((0, 6, [ACCEPT]), (7, 7, [RELEASE]))) == 0
            leader = next(number for number, broker in running._brokers.items() if broker.port == connection.port)
        await asyncio.to_thread(running.stop_broker, leader)
        address = f"127.0.0.1:{next(broker.port for broker in running._brokers.values())}"
        connection, _ = await leader_of(address, "t")
        async with connection:
            again = Member(connection, key, "again")
            assert taken(await again.fetch(wait_ms=20_000)) == [(7, 7, 2), (8, 19, 1)]
            assert refusal(await again.acknowledge((7, 19, [ACCEPT]))) == 0


async def test_the_coordinator_is_another_broker_and_then_a_third_one() -> None:
    with Cluster(brokers=3, settings=SETTINGS) as running:
        running.create_topic("t")
        let_everybody_in(running)
        address = running.bootstrap_servers.split(",")[0]
        connection, topic_id = await leader_of(address, "t")
        async with connection:
            for number in range(100):
                key = ShareKey(f"g{number}", topic_id, 0)
                async with await coordinator_of(address, key) as coordinator:
                    port = coordinator.port
                if port != connection.port:
                    break
            else:
                pytest.fail("one broker coordinates everything")
            await begin(address, key, 0)
            await asyncio.to_thread(produce, running, 9)
            member = Member(connection, key)
            assert taken(await member.fetch(max_records=6, mode=1)) == [(0, 5, 1)]
            assert refusal(await member.acknowledge((0, 2, [ACCEPT]))) == 0
            second = next(number for number, broker in running._brokers.items() if broker.port == port)
            stopping = asyncio.ensure_future(asyncio.to_thread(running.stop_broker, second))
            assert refusal(await member.acknowledge((3, 3, [ACCEPT]))) == 0
            await stopping
            assert refusal(await member.acknowledge((4, 5, [ACCEPT]))) == 0
            leader = next(number for number, broker in running._brokers.items() if broker.port == connection.port)
        await asyncio.to_thread(running.start_broker, second)
        let_everybody_in(running)
        await asyncio.to_thread(running.stop_broker, leader)
        address = f"127.0.0.1:{next(broker.port for broker in running._brokers.values())}"
        connection, _ = await leader_of(address, "t")
        async with connection:
            assert taken(await Member(connection, key, "b").fetch(wait_ms=20_000)) == [(6, 8, 1)]
