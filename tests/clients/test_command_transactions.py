"""`millrace transactions` and `consume --isolation` with real producers: transactions open, ended, fenced, hanging."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

from clients.test_command_line import CommandLine
from millrace.client.cluster import ClusterClient, CoordinatorKind, raise_for
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from millrace.testing import Cluster
from millrace.wire.messages.produce import ProduceRequest
from millrace.wire.messages.producers import InitProducerIdRequest, InitProducerIdResponse

LIMIT_S = 30.0
_OLD_PRODUCE = 11  # of clients without transaction version 2, whose partitions nobody adds for them
_VERIFICATION = "transaction.partition.verification.enable"


@pytest.fixture
def run(cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    name = fresh("cli-ledger")
    run.text("topics", "create", name, "--partitions", "1")
    return name


@pytest.fixture
def producer(run: CommandLine, fresh: Callable[[str], str]) -> tuple[str, Producer]:
    """A transactional id and its producer."""
    name = fresh("cli-billing")
    made = Producer({"bootstrap.servers": run.bootstrap, "transactional.id": name, "linger.ms": 0})
    made.init_transactions(LIMIT_S)
    return name, made


def begin(producer: Producer, topic: str, *values: str) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(LIMIT_S) == 0


def read(run: CommandLine, topic: str, isolation: str | None) -> list[str]:
    chosen = () if isolation is None else ("--isolation", isolation)
    return run.text("consume", topic, "--from-beginning", *chosen).splitlines()


def test_an_open_transaction_is_shown_until_it_ends(
    run: CommandLine, topic: str, producer: tuple[str, Producer]
) -> None:
    name, sending = producer
    (listed,) = run.json("transactions", "list", name)
    assert listed["state"] == "empty"
    begin(sending, topic, "a", "b")
    (listed,) = run.json(
        "transactions", "list", name, "--state", "ongoing", "--producer-id", str(listed["producer_id"])
    )
    assert run.json("transactions", "list", name, "--older-than", "1h") == []
    (described,) = run.json("transactions", "describe", name)
    assert described["partitions"] == [{"topic": topic, "partition": 0}]
    assert 0 <= described["running_ms"] < LIMIT_S * 1000
    (writing,) = run.json("transactions", "describe-producers", topic, "--partition", "0")
    assert (writing["producer_id"], writing["start_offset"]) == (listed["producer_id"], 0)
    assert run.json("transactions", "find-hanging", topic, "--older-than", "0s") == [], "its coordinator will end it"
    sending.commit_transaction(LIMIT_S)
    (writing,) = run.json("transactions", "describe-producers", topic)
    assert writing["start_offset"] is None
    (described,) = run.json("transactions", "describe", name)
    assert (described["state"], described["partitions"]) == ("complete-commit", [])


def test_isolation_decides_what_is_printed(run: CommandLine, topic: str, producer: tuple[str, Producer]) -> None:
    _, sending = producer
    begin(sending, topic, "a", "b")
    sending.commit_transaction(LIMIT_S)
    begin(sending, topic, "aborted")
    sending.abort_transaction(LIMIT_S)
    begin(sending, topic, "open")
    assert read(run, topic, "read-uncommitted") == ["a", "b", "aborted", "open"]
    assert read(run, topic, "read-committed") == read(run, topic, None) == ["a", "b"]
    sending.commit_transaction(LIMIT_S)
    assert read(run, topic, "read-committed") == ["a", "b", "open"]


def test_terminate_aborts_and_fences(run: CommandLine, topic: str, producer: tuple[str, Producer]) -> None:
    name, sending = producer
    begin(sending, topic, "never")
    run.text("produce", topic, stdin=b"behind\n")
    assert read(run, topic, "read-committed") == []
    (done,) = run.json("transactions", "terminate", name, "--yes")
    assert done["result"] == "terminated"
    assert read(run, topic, "read-committed") == ["behind"]
    with pytest.raises(KafkaException):
        sending.commit_transaction(LIMIT_S)
    (described,) = run.json("transactions", "describe", name)
    assert described["started"] is None


def test_a_hanging_transaction_is_found_and_aborted(run: CommandLine, topic: str, fresh: Callable[[str], str]) -> None:
    with unverified(run):
        producer_id = write_and_vanish(run.bootstrap, TopicPartition(topic, 0), fresh("cli-gone"))
    run.text("produce", topic, stdin=b"behind\n")
    assert read(run, topic, "read-committed") == []
    (found,) = run.json("transactions", "find-hanging", topic, "--older-than", "0s")
    assert (found["producer_id"], found["start_offset"]) == (producer_id, 0)
    done = run.json("transactions", "abort", topic, "--partition", "0", "--start-offset", "0", "--yes")
    assert done["result"] == "aborted"
    assert read(run, topic, "read-committed") == ["behind"]
    assert run.json("transactions", "find-hanging", topic, "--older-than", "0s") == []


@contextmanager
def unverified(run: CommandLine) -> Iterator[None]:
    """Brokers that take a transactional batch without asking its coordinator, as those before Kafka 3.6 did."""
    run.text("configs", "set", f"{_VERIFICATION}=false", "--brokers")
    try:
        yield
    finally:
        run.text("configs", "unset", _VERIFICATION, "--brokers")


def write_and_vanish(bootstrap: str, partition: TopicPartition, name: str) -> int:
    """A record of a transaction to which its coordinator does not count the partition; its producer id."""

    def started(response: InitProducerIdResponse) -> tuple[int, int]:
        raise_for(response.error_code)
        return response.producer_id, response.producer_epoch

    with ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap})) as client:
        request = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
        producer_id, epoch = client.ask_coordinator(
            name, "a producer id", request, started, kind=CoordinatorKind.TRANSACTION, at_most=4
        )
        batch = encode_batch(
            [Record(0, SystemClock().wall_ms() - 1000, None, b"nobody's")],
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=0,
            transactional=True,
        )
        data = ProduceRequest.PartitionProduceData(index=partition.partition, records=batch)
        message = ProduceRequest(
            transactional_id=name,
            acks=-1,
            timeout_ms=30_000,
            topic_data=[ProduceRequest.TopicProduceData(name=partition.topic, partition_data=[data])],
        )
        client.topics([partition.topic])
        response = client.ask(client.connection(client.leader(partition)), message, at_most=_OLD_PRODUCE)
        raise_for(response.responses[0].partition_responses[0].error_code)
    return producer_id
