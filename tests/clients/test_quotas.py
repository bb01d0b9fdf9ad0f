"""Quotas as real clients feel them: how long something takes, what they are told, and who beside them does not wait.

Three windows instead of eleven, so that nobody has ten seconds' worth to begin with; margins are wide. Quotas are set
with `millrace quotas`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import kafka
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from clients.test_command_line import CommandLine
from millrace.errors import ErrorCode
from millrace.testing import Cluster
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.quotas import AlterClientQuotasRequest
from millrace.wire.messages.topics import CreateTopicsRequest
from support.raw import CLIENT_ID, PeerClosed, RawClient

WINDOWS = {"quota.window.num": "3", "controller.quota.window.num": "3"}
LOGINS = {
    "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN",
    "plain.sasl.jaas.config": 'PlainLoginModule required user_alice="alice" user_bob="bob";',
}
RATE = 100_000
RECORD = b"x" * 20_000
RECORDS = 30
FREE_S = 2.0
"""Two whole windows are assumed before the first, so much is there at once."""
LEAST_S = RECORDS * len(RECORD) / RATE - FREE_S
UNHURRIED_S = 60.0


@pytest.fixture(scope="module")
def limited() -> Iterator[Cluster]:
    with Cluster(settings={**WINDOWS, **LOGINS}) as running:
        yield running


@pytest.fixture
def run(limited: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(limited.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    name = fresh("quotas")
    run.text("topics", "create", name)
    return name


@pytest.fixture
def quota(run: CommandLine) -> Iterator[Callable[..., None]]:
    """Sets a quota and takes it back afterwards."""
    given: list[tuple[str, ...]] = []

    def set_quota(*entity: str, **values: str) -> None:
        given.append(entity)
        options = [word for key, value in values.items() for word in ("--" + key.replace("_", "-"), value)]
        run.text("quotas", "set", *entity, *options)

    yield set_quota
    for entity in given:
        run.text("quotas", "remove", *entity, "--yes")


def address(cluster: Cluster) -> tuple[str, int]:
    host, _, port = cluster.bootstrap_servers.rpartition(":")
    return host, int(port)


def produce_with_librdkafka(cluster: Cluster, topic: str, client_id: str, **settings: Any) -> tuple[float, list[int]]:
    """How long it took, and the throttle times that the client was told."""
    told: list[int] = []
    producer = Producer(
        {
            "bootstrap.servers": cluster.bootstrap_servers,
            "client.id": client_id,
            "batch.size": 25_000,
            "linger.ms": 0,
            "throttle_cb": lambda event: told.append(round(event.throttle_time * 1000)),
            **settings,
        }
    )
    failures: list[Any] = []
    began = time.monotonic()
    for _ in range(RECORDS):
        producer.produce(topic, RECORD, on_delivery=lambda error, _message: error and failures.append(error))
    assert producer.flush(UNHURRIED_S) == 0 and not failures
    took = time.monotonic() - began
    producer.poll(0)
    return took, told


def test_librdkafka_is_slowed_down_and_its_neighbour_is_not(
    limited: Cluster, topic: str, quota: Callable[..., None]
) -> None:
    quota("--client-id", "slow", producer_byte_rate=f"{RATE}B")
    with ThreadPoolExecutor() as pool:
        slow = pool.submit(produce_with_librdkafka, limited, topic, "slow")
        fast = pool.submit(produce_with_librdkafka, limited, topic, "fast")
        fast_s, fast_told = fast.result()
        slow_s, slow_told = slow.result()
    assert LEAST_S * 0.8 < slow_s < LEAST_S * 5
    assert max(slow_told) > 100
    assert fast_s < LEAST_S / 2 and not any(fast_told)


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_no_acknowledgement_gets_around_it(limited: Cluster, topic: str, quota: Callable[..., None], acks: str) -> None:
    name = f"acks-{acks}"
    quota("--client-id", name, producer_byte_rate="100kB")
    took, _ = produce_with_librdkafka(limited, topic, name, acks=acks)
    with RawClient(address(limited)) as client:  # with acks=0 the client does not know when they have arrived
        deadline = time.monotonic() + UNHURRIED_S
        began = time.monotonic()
        while client.fetch(topic, 0).high_watermark < RECORDS:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        took += time.monotonic() - began
    assert took > LEAST_S * 0.8


def test_kafka_python_is_slowed_down(limited: Cluster, topic: str, quota: Callable[..., None]) -> None:
    quota("--default-user", "--client-id", "python", producer_byte_rate="100kB")
    producer = kafka.KafkaProducer(
        bootstrap_servers=limited.bootstrap_servers, client_id="python", batch_size=25_000, linger_ms=0
    )
    began = time.monotonic()
    sent = [producer.send(topic, RECORD) for _ in range(RECORDS)]
    producer.flush(UNHURRIED_S)
    took = time.monotonic() - began
    assert [each.get(1).offset for each in sent] == list(range(RECORDS))
    producer.close()
    assert LEAST_S * 0.8 < took < LEAST_S * 5


def test_a_consumer_is_slowed_down_and_gets_everything(
    limited: Cluster, topic: str, quota: Callable[..., None]
) -> None:
    produce_with_librdkafka(limited, topic, "unlimited")
    quota("--user", "ANONYMOUS", "--default-client-id", consumer_byte_rate="100kB")
    told: list[float] = []
    consumer = Consumer(
        {
            "bootstrap.servers": limited.bootstrap_servers,
            "client.id": "reader",
            "group.id": topic,
            "fetch.message.max.bytes": 50_000,
            "throttle_cb": lambda event: told.append(event.throttle_time),
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    began = time.monotonic()
    offsets: list[int] = []
    while len(offsets) < RECORDS and time.monotonic() - began < UNHURRIED_S:
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is None
            offsets.append(message.offset())
    took = time.monotonic() - began
    consumer.close()
    assert offsets == list(range(RECORDS))
    assert took > LEAST_S * 0.8 and any(told)


def test_kafka_python_consumes_in_sessions_as_fast_as_it_may(
    limited: Cluster, topic: str, quota: Callable[..., None]
) -> None:
    produce_with_librdkafka(limited, topic, "unlimited")
    quota("--client-id", "python-reader", consumer_byte_rate="100kB")
    consumer = kafka.KafkaConsumer(
        topic,
        bootstrap_servers=limited.bootstrap_servers,
        client_id="python-reader",
        auto_offset_reset="earliest",
        max_partition_fetch_bytes=50_000,
        consumer_timeout_ms=UNHURRIED_S * 1000,
    )
    began = time.monotonic()
    offsets = [next(consumer).offset for _ in range(RECORDS)]
    took = time.monotonic() - began
    consumer.close()
    assert offsets == list(range(RECORDS)) and took > LEAST_S * 0.8


def test_a_client_that_takes_too_much_time_has_to_wait(limited: Cluster, quota: Callable[..., None]) -> None:
    quota("--client-id", CLIENT_ID, request_percentage="0.01")
    with RawClient(address(limited)) as client:
        first = client.call(MetadataRequest(topics=None), 12).throttle_time_ms
        assert 0 < first <= 1000, "two tenths of a millisecond in two seconds"
        began = time.monotonic()
        client.call(MetadataRequest(topics=None), 12)
        assert time.monotonic() - began > first / 1000 * 0.9


def creation(name: str, partitions: int) -> CreateTopicsRequest:
    return CreateTopicsRequest(
        topics=[CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)]
    )


def test_topics_beyond_the_quota_are_refused(
    limited: Cluster, fresh: Callable[[str], str], quota: Callable[..., None]
) -> None:
    quota("--client-id", CLIENT_ID, controller_mutation_rate="2")
    with RawClient(address(limited)) as client:
        assert client.call(creation(fresh("many"), 8), 7).topics[0].error_code == 0, "six are there at once"
        refused = client.call(creation(fresh("more"), 1), 7)
        assert refused.topics[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
        assert 0 < refused.throttle_time_ms <= 1000
        began = time.monotonic()
        assert client.call(creation(fresh("later"), 1), 7).topics[0].error_code == 0
        assert time.monotonic() - began > refused.throttle_time_ms / 1000 * 0.9


def test_an_older_request_is_not_refused_but_its_client_waits(
    limited: Cluster, fresh: Callable[[str], str], quota: Callable[..., None]
) -> None:
    quota("--client-id", "admin", controller_mutation_rate="2")
    admin = AdminClient({"bootstrap.servers": limited.bootstrap_servers, "client.id": "admin"})
    names = [fresh("made"), fresh("too")]
    created = admin.create_topics([NewTopic(name, 4, 1) for name in names])  # v4, of all versions
    for name in names:
        created[name].result(10)
    began = time.monotonic()
    admin.create_topics([NewTopic(fresh("later"), 1, 1)])
    assert all(future.result(10) is None for future in admin.create_topics([NewTopic(fresh("last"), 1, 1)]).values())
    assert time.monotonic() - began > 0.8, "eight of six: two are missing, at two a second"


def test_an_address_that_connects_too_often_is_turned_away(
    limited: Cluster, run: CommandLine, fresh: Callable[[str], str]
) -> None:
    run.text("quotas", "set", "--ip", "127.0.0.1", "--connection-creation-rate", "5")
    clients = [RawClient(address(limited)) for _ in range(14)]
    try:
        served = 0
        for client in clients:
            try:
                client.alive()
                served += 1
            except PeerClosed:
                pass
        assert 8 <= served < 14, "ten at once, less those of the command"
        began = time.monotonic()
        while True:  # held off, not shut out
            with RawClient(address(limited)) as client:
                try:
                    client.alive()
                    break
                except PeerClosed:
                    assert time.monotonic() - began < UNHURRIED_S
    finally:
        for client in clients:
            client.close()
        deadline = time.monotonic() + UNHURRIED_S
        while "127.0.0.1" in run.raw("quotas", "list", "--ip", "127.0.0.1", exit_code=0)[0].decode():
            run.text("quotas", "remove", "--ip", "127.0.0.1", "--yes")
            assert time.monotonic() < deadline


def test_above_the_brokers_rate_connections_are_served_later() -> None:
    with Cluster(settings={**WINDOWS, "max.connection.creation.rate": "10"}) as cluster:
        clients = [RawClient(address(cluster)) for _ in range(30)]
        began = time.monotonic()
        for client in clients:
            client.alive()
            client.close()
        assert time.monotonic() - began > 0.5, "two seconds' worth at once, and a third then"


def test_a_user_has_one_quota_however_its_clients_are_called(
    limited: Cluster, topic: str, quota: Callable[..., None]
) -> None:
    quota("--user", "alice", producer_byte_rate="100kB")

    def produce(user: str, client_id: str) -> float:
        login = {
            "bootstrap.servers": limited.bootstrap_servers_of("SASL_PLAINTEXT"),
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": user,
            "sasl.password": user,
        }
        return produce_with_librdkafka(limited, topic, client_id, **login)[0]

    with ThreadPoolExecutor() as pool:
        asked = [("alice", "one"), ("alice", "two"), ("bob", "one")]
        one, two, other = pool.map(lambda each: produce(*each), asked)
    assert max(one, two) > (2 * LEAST_S + FREE_S) * 0.8, "together they have what one would have alone"
    assert other < LEAST_S / 2


def test_any_broker_refuses_what_the_controller_has_counted(fresh: Callable[[str], str]) -> None:
    with Cluster(3, settings=WINDOWS) as cluster:
        addresses = [(host, int(port)) for host, _, port in map(_parted, cluster.bootstrap_servers.split(","))]
        with ExitStack() as stack:
            clients = [stack.enter_context(RawClient(each)) for each in addresses]
            alter = AlterClientQuotasRequest.EntryData(
                entity=[AlterClientQuotasRequest.EntityData(entity_type="client-id", entity_name=CLIENT_ID)],
                ops=[AlterClientQuotasRequest.OpData(key="controller_mutation_rate", value=1.0)],
            )
            assert clients[0].call(AlterClientQuotasRequest(entries=[alter]), 1).entries[0].error_code == 0
            assert clients[0].call(creation(fresh("many"), 5), 7).topics[0].error_code == 0, "three at once"
            for client in clients:
                refused = client.call(creation(fresh("more"), 1), 7)
                assert refused.topics[0].error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
                assert 0 < refused.throttle_time_ms <= 2000
            began = time.monotonic()
            clients[-1].alive()
            assert time.monotonic() - began > refused.throttle_time_ms / 1000 * 0.9, "quiet where it asked"


def _parted(each: str) -> tuple[str, str, str]:
    return each.rpartition(":")


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_sets_lists_and_removes(run: CommandLine) -> None:
    of = ("--user", "alice", "--default-client-id")
    assert run.text("quotas", "set", *of, "--producer-byte-rate", "1.5MiB", "--request-percentage", "12.5") == (
        "set producer_byte_rate=1.6 MB/s, request_percentage=12.5 for user 'alice', default client-id\n"
    )
    run.text("quotas", "set", "--default-ip", "--connection-creation-rate", "1000")
    run.text("quotas", "set", "--user", "alice", "--controller-mutation-rate", "3")
    assert run.json("quotas", "list", "--user", "alice") == [
        {
            "entity": {"client-id": None, "user": "alice"},
            "quotas": {"producer_byte_rate": 1572864.0, "request_percentage": 12.5},
        },
        {"entity": {"user": "alice"}, "quotas": {"controller_mutation_rate": 3.0}},
    ]
    assert len(run.json("quotas", "list")) == 3
    table = run.text("quotas", "list").splitlines()
    assert table[0].split()[:3] == ["USER", "CLIENT-ID", "IP"]
    assert any("alice" in line and "(default)" in line and "1.6 MB/s" in line for line in table)
    assert run.text("quotas", "remove", *of, "--key", "request-percentage", "--yes") == (
        "removed request_percentage for user 'alice', default client-id\n"
    )
    assert "has no request_percentage" in run.error("quotas", "remove", *of, "--key", "request_percentage", "--yes")
    run.text("quotas", "remove", *of, "--yes")
    run.text("quotas", "remove", "--user", "alice", "--yes")
    run.text("quotas", "remove", "--default-ip", "--yes")
    assert run.json("quotas", "list") == []


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("set", "--user", "a"), "say what to set"),
        (("set", "--producer-byte-rate", "1MB"), "say for whom"),
        (("set", "--user", "a", "--default-user", "--producer-byte-rate", "1MB"), "either --user or --default-user"),
        (("set", "--user", "a", "--ip", "1.2.3.4", "--producer-byte-rate", "1MB"), "cannot be combined"),
        (("set", "--user", "a", "--producer-byte-rate", "lots"), "is no size"),
        (("remove", "--user", "a", "--key", "colour", "--yes"), "--key is one of"),
    ],
)
def test_the_command_says_what_is_wrong(run: CommandLine, words: tuple[str, ...], reason: str) -> None:
    assert reason in run.error("quotas", *words, exit_code=2)


def test_the_brokers_reason_is_shown(run: CommandLine) -> None:
    assert "not an IP address" in run.error("quotas", "set", "--ip", "here", "--connection-creation-rate", "1")
    assert "greater than 0" in run.error("quotas", "set", "--user", "a", "--request-percentage", "-3")
    assert "has no quota" in run.error("quotas", "remove", "--user", "nobody", "--yes")
