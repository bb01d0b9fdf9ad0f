"""A topic read as a queue, over sockets: records go to one member at a time, and what was accepted stays so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millrace.errors import ApiError, ErrorCode
from millrace.queues.acquisition import Limits
from millrace.queues.batches import RecordState
from millrace.queues.records import ShareKey, Snapshot
from millrace.queues.settings import QueueSettings
from millrace.queues.state import Write
from millrace.testing import Cluster
from millrace.wire.messages.configs import IncrementalAlterConfigsRequest
from support.queues import Member, begin, connect, coordinator_of, leader_of, refusal, taken

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
LOCK_MS = 30_000
GROUP_RESOURCE = 32
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


async def test_the_end_of_a_connection_is_the_end_of_its_sessions(cluster: Cluster, member: Member) -> None:
    produce(cluster, 6)
    connection, _ = await leader_of(cluster.bootstrap_servers, "t")
    gone = Member(connection, member.key, "gone")
    assert taken(await gone.fetch(max_records=4, mode=1)) == [(0, 3, 1)]
    assert taken(await member.fetch()) == [(4, 5, 1)]
    waiting = asyncio.ensure_future(member.fetch(wait_ms=20_000))
    await connection.close()
    assert taken(await waiting) == [(0, 3, 2)]
    assert refusal(await member.acknowledge((0, 5, [ACCEPT]))) == 0
    connection, _ = await leader_of(cluster.bootstrap_servers, "t")
    async with connection:
        gone.connection = connection
        assert (await gone.fetch()).error_code == ErrorCode.SHARE_SESSION_NOT_FOUND


async def test_a_session_that_moved_to_another_connection_outlives_the_first(cluster: Cluster, member: Member) -> None:
    produce(cluster, 2)
    connection, _ = await leader_of(cluster.bootstrap_servers, "t")
    first = Member(connection, member.key)
    assert taken(await first.fetch()) == [(0, 1, 1)]
    assert taken(await member.fetch()) == []  # the same member, which begins a session anew
    await connection.close()
    assert refusal(await member.acknowledge((0, 1, [ACCEPT]))) == 0


async def test_a_group_that_was_reset_while_it_had_no_members_begins_there(cluster: Cluster, member: Member) -> None:
    produce(cluster, 9)
    assert taken(await member.fetch()) == [(0, 8, 1)]
    assert refusal(await member.fetch(acknowledge=[(0, 6, [ACCEPT])], epoch=-1)) == 0
    await begin(cluster.bootstrap_servers, member.key, 3, state_epoch=1)
    assert taken(await other(member).fetch(wait_ms=20_000)) == [(3, 8, 1)]


async def test_a_fetch_waits_for_as_many_bytes_as_it_wants(cluster: Cluster, member: Member) -> None:
    assert taken(await member.fetch()) == []
    waiting = asyncio.ensure_future(member.fetch(wait_ms=20_000, min_bytes=1_000))
    await asyncio.to_thread(produce, cluster, 2)
    await asyncio.to_thread(produce, cluster, 200)
    got = taken(await waiting)
    assert got[0][0] == 0
    assert got[-1][1] > 2, "two records were enough"
    rest = taken(await member.fetch(wait_ms=50, min_bytes=1_000_000))
    assert (rest or got)[-1][1] == 201


async def test_a_coordinator_that_does_not_answer_is_no_reason_to_give_up(cluster: Cluster, member: Member) -> None:
    class Silent:
        async def read(self, _key: ShareKey, _leader_epoch: int) -> Snapshot:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)

        async def write(self, _key: ShareKey, _write: Write) -> None:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    (broker,) = cluster._brokers.values()
    assert broker.services is not None
    queues = broker.services.queues
    persister, queues._persister = queues._persister, Silent()
    produce(cluster, 2)
    assert taken(await member.fetch()) == []
    assert taken(await member.fetch(wait_ms=50)) == []
    queues._persister = persister
    assert taken(await member.fetch(wait_ms=20_000)) == [(0, 1, 1)]


async def test_a_restart_keeps_what_was_accepted_and_gives_the_rest_again(cluster: Cluster, member: Member) -> None:
    produce(cluster, 10)
    assert taken(await member.fetch(max_records=8, mode=1)) == [(0, 7, 1)]
    assert refusal(await member.acknowledge((2, 5, [ACCEPT, RELEASE, ACCEPT, REJECT]))) == 0
    await asyncio.to_thread(cluster.restart)
    connection, _ = await leader_of(cluster.bootstrap_servers, "t")
    async with connection:
        again = Member(connection, member.key, "again")
        assert taken(await again.fetch()) == [(0, 1, 1), (3, 3, 2), (6, 9, 1)]
        assert refusal(await again.acknowledge((0, 1, [ACCEPT]), (3, 3, [ACCEPT]), (6, 9, [ACCEPT]))) == 0


async def test_what_is_refused(cluster: Cluster, member: Member) -> None:
    produce(cluster, 2)
    unbegun = Member(member.connection, ShareKey("unbegun", member.key.topic_id, 0))
    (topic,) = (await unbegun.fetch()).responses
    assert topic.partitions[0].error_code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert topic.partitions[0].error_message == "the share-partition was not initialized"
    elsewhere = Member(member.connection, ShareKey("g", member.key.topic_id, 9), "b")
    (topic,) = (await elsewhere.fetch()).responses
    assert topic.partitions[0].error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    for nameless in (Member(member.connection, member.key, ""), Member(member.connection, member.key, "x" * 37)):
        assert (await nameless.fetch()).error_code == ErrorCode.INVALID_REQUEST
    assert taken(await member.fetch()) == [(0, 1, 1)]
    assert refusal(await member.acknowledge((0, 5, [ACCEPT]))) == ErrorCode.INVALID_REQUEST


async def test_another_leader_goes_on_where_the_last_one_stopped() -> None:
    with Cluster(brokers=3, settings=SETTINGS) as running:
        running.create_topic("t")
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
        await asyncio.to_thread(running.stop_broker, leader)
        address = f"127.0.0.1:{next(broker.port for broker in running._brokers.values())}"
        connection, _ = await leader_of(address, "t")
        async with connection:
            assert taken(await Member(connection, key, "b").fetch(wait_ms=20_000)) == [(6, 8, 1)]


# --- dead letters -----------------------------------------------------------------------------------------------------


def letters_of(cluster: Cluster, topic: str, count: int) -> list[tuple[bytes | None, dict[str, bytes]]]:
    """The values of a topic's first records, and their headers."""
    consumer = Consumer({
        "bootstrap.servers": cluster.bootstrap_servers,
        "group.id": "reader",
        "auto.offset.reset": "earliest",
        "log_level": 0,
    })  # fmt: skip
    consumer.assign([TopicPartition(topic, 0, 0)])
    found = []
    while len(found) < count:
        (message,) = consumer.consume(1, 30)
        found.append((message.value(), dict(message.headers() or [])))
    consumer.close()
    return found


async def configure(cluster: Cluster, group: str, **settings: str) -> None:
    operations = [
        IncrementalAlterConfigsRequest.AlterableConfig(name=name.replace("_", "."), config_operation=0, value=value)
        for name, value in settings.items()
    ]
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=GROUP_RESOURCE, resource_name=group, configs=operations
    )
    async with await connect(cluster.bootstrap_servers.split(",")[0]) as connection:
        answer = await connection.request(IncrementalAlterConfigsRequest(resources=[resource]), 1)
    assert answer.responses[0].error_code == 0, answer.responses[0].error_message


async def test_rejected_records_are_copied_to_the_dead_letter_topic() -> None:
    allowed = {**SETTINGS, "errors.deadletterqueue.auto.create.topics.enable": "true"}
    with Cluster(brokers=3, settings=allowed) as running:
        running.create_topic("t")
        address = running.bootstrap_servers.split(",")[0]
        await configure(
            running, "g", errors_deadletterqueue_topic_name="dlq.t", errors_deadletterqueue_copy_record_enable="true"
        )
        connection, topic_id = await leader_of(address, "t")
        key = ShareKey("g", topic_id, 0)
        await begin(address, key, 0)
        await asyncio.to_thread(produce, running, 6)
        async with connection:
            member = Member(connection, key)
            assert taken(await member.fetch()) == [(0, 5, 1)]
            kinds = [ACCEPT, REJECT, RELEASE, REJECT, ACCEPT, ACCEPT]
            assert refusal(await member.acknowledge((0, 5, kinds))) == 0
            found = await asyncio.to_thread(letters_of, running, "dlq.t", 2)
            assert [value for value, _ in found] == [b"1", b"3"]
            assert [headers["__dlq.errors.offset"] for _, headers in found] == [b"1", b"3"]
            assert {headers["__dlq.errors.topic"] for _, headers in found} == {b"t"}
            assert taken(await member.fetch()) == [(2, 2, 2)]


async def test_without_a_usable_topic_nothing_is_given_up(cluster: Cluster, member: Member) -> None:
    await configure(cluster, "g", errors_deadletterqueue_topic_name="dlq.t")
    produce(cluster, 2)
    assert taken(await member.fetch()) == [(0, 1, 1)]
    assert refusal(await member.acknowledge((0, 0, [REJECT]), (1, 1, [ACCEPT]))) == 0
    (broker,) = cluster._brokers.values()
    assert broker.services is not None
    share = await broker.services.queues.get(member.key)
    first = next(iter(share._window.runs()))
    assert (first.first, first.state) == (0, RecordState.ARCHIVING)
    cluster.create_topic("dlq.t", config={"errors.deadletterqueue.group.enable": "true"})
    found = await asyncio.to_thread(letters_of, cluster, "dlq.t", 1)
    assert found[0][0] is None
    assert found[0][1]["__dlq.errors.message"] == b"rejected by its consumer"


async def test_a_released_record_rests_before_it_is_given_out_again(cluster: Cluster, member: Member) -> None:
    await configure(cluster, "g", share_redelivery_backoff_ms="150", share_redelivery_backoff_max_ms="10000")
    produce(cluster, 1)
    assert taken(await member.fetch()) == [(0, 0, 1)]
    began_s = time.monotonic()
    assert refusal(await member.acknowledge((0, 0, [RELEASE]))) == 0
    assert taken(await member.fetch(wait_ms=20_000)) == [(0, 0, 2)]
    assert time.monotonic() - began_s >= 0.15
    began_s = time.monotonic()
    assert refusal(await member.acknowledge((0, 0, [RELEASE]))) == 0
    assert taken(await member.fetch(wait_ms=20_000)) == [(0, 0, 3)]
    assert time.monotonic() - began_s >= 0.3
