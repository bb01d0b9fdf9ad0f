"""Transactions with Apache Kafka's own tools: the copier, the command that lists and ends them, performance, files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, Producer

from support.kafka_jars import (
    DUMP_LOG,
    PRODUCER_PERFORMANCE,
    TRANSACTIONAL_COPIER,
    TRANSACTIONS,
    KafkaJars,
)
from support.kafka_tools import KafkaTools, LiveTool, table
from support.read_back import read_back
from support.servers import KafkaServer, MillraceServer, Server

LONG_S = 150
CALL_S = 20
EMPTY, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, COMPLETE_COMMIT, COMPLETE_ABORT = range(6)
"""States of a transaction, as the log of the coordinator has them."""


def transactional(server: Server, transactional_id: str, timeout_ms: int = 60_000) -> Producer:
    """librdkafka's producer, ready to begin."""
    settings = {"bootstrap.servers": server.bootstrap, "transaction.timeout.ms": timeout_ms, "log_level": 2}
    producer = Producer({**settings, "transactional.id": transactional_id})
    producer.init_transactions(CALL_S)
    return producer


def send(producer: Producer, topic: str, values: list[str]) -> None:
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value, partition=0)
    assert producer.flush(CALL_S) == 0


def copier(jars: KafkaJars, server: Server, source: str, *options: str) -> LiveTool:
    words = ("--broker-list", server.bootstrap, "--input-topic", source, "--output-topic", f"{source}-copy")
    return LiveTool(jars.command(TRANSACTIONAL_COPIER, *words, "--consumer-group", f"{source}-group", *options))


def fill(server: Server, topic: str, count: int, partitions: int) -> None:
    producer = Producer({"bootstrap.servers": server.bootstrap, "log_level": 2})
    for number in range(count):
        producer.produce(topic, str(number), str(number), partition=number % partitions)
    assert producer.flush(CALL_S) == 0


def values_by_partition(server: Server, topic: str, partitions: int) -> list[list[int]]:
    found = read_back(server.bootstrap, topic)
    return [[int(each.value) for each in found if each.partition == index] for index in range(partitions)]


def test_a_copier_with_random_aborts_that_is_killed(
    tools: KafkaTools, jars: KafkaJars, server: Server, topic: str
) -> None:
    tools.create_topic(topic)
    tools.create_topic(f"{topic}-copy")
    fill(server, topic, 3000, 1)
    # The tool asks for the group's offsets before its producer ends what the killed one left open: it waits for the
    # timeout of that transaction.
    how = ("--transaction-size", "60", "--transaction-timeout", "6000", "--enable-random-aborts")
    options = ("--input-partition", "0", "--transactional-id", f"{topic}-id", *how)
    with copier(jars, server, topic, *options) as first:
        first.wait_for(lambda event: event["totalProcessed"] >= 500, LONG_S)
        first.kill()
    with copier(jars, server, topic, *options) as second:
        ended = second.wait_for(lambda event: event["stage"] == "ShutdownComplete", LONG_S)
    assert 0 < ended["totalProcessed"] < 3000, "the second one goes on where the first one's last commit was"
    assert values_by_partition(server, f"{topic}-copy", 1) == [list(range(3000))]


def test_copiers_of_one_group(tools: KafkaTools, jars: KafkaJars, server: Server, topic: str) -> None:
    """The second one takes partitions away from the first, whose offsets of the old generation are refused."""
    tools.create_topic(topic, partitions=4)
    tools.create_topic(f"{topic}-copy", partitions=4)
    fill(server, topic, 4000, 4)
    options = ("--input-partition", "-1", "--group-mode", "--use-group-metadata", "--transaction-size", "40")
    with copier(jars, server, topic, *options, "--transactional-id", f"{topic}-1") as first:
        first.wait_for(lambda event: event["totalProcessed"] > 0, LONG_S)
        with copier(jars, server, topic, *options, "--transactional-id", f"{topic}-2") as second:
            for one in (first, second):
                one.wait_for(lambda event: event["stage"] == "ShutdownComplete", LONG_S)
    assert values_by_partition(server, f"{topic}-copy", 4) == [list(range(index, 4000, 4)) for index in range(4)]


def test_the_command_for_transactions(tools: KafkaTools, server: Server, topic: str) -> None:
    tools.create_topic(topic)
    transactional_id = f"{topic}-id"
    producer = transactional(server, transactional_id, timeout_ms=600_000)  # it outlives the tools on a busy machine
    send(producer, topic, ["never committed"])

    def rows(first_column: str, *words: str) -> list[dict[str, str]]:
        return table(tools.run(TRANSACTIONS, *words).stdout, first_column)

    def described() -> dict[str, str]:
        (row,) = rows("CoordinatorId", "describe", "--transactional-id", transactional_id)
        return row

    (listed,) = rows("TransactionalId", "list", "--transactional-id-pattern", f"{topic}-.*")
    assert (listed["TransactionalId"], listed["TransactionState"]) == (transactional_id, "Ongoing")
    open_one = described()
    assert (open_one["TransactionState"], open_one["TopicPartitions"]) == ("Ongoing", f"{topic}-0")
    assert (open_one["ProducerId"], open_one["TransactionTimeoutMs"]) == (listed["ProducerId"], "600000")
    place = ("--topic", topic, "--partition", "0")
    (active,) = rows("ProducerId", "describe-producers", *place)
    assert (active["ProducerId"], active["CurrentTransactionStartOffset"]) == (listed["ProducerId"], "0")
    assert rows("Topic", "find-hanging", *place, "--max-transaction-timeout", "0") == [], "its coordinator knows it"

    tools.run(TRANSACTIONS, "abort", *place, "--start-offset", "0")
    (aborted,) = rows("ProducerId", "describe-producers", *place)
    assert aborted["CurrentTransactionStartOffset"] == "None"
    twice = tools.attempt(TRANSACTIONS, "abort", *place, "--start-offset", "0")
    assert twice.status == 1
    assert "Could not find any open transactions" in twice.stderr

    tools.run(TRANSACTIONS, "forceTerminateTransaction", "--transactionalId", transactional_id)
    with pytest.raises(KafkaException, match="_FENCED"):
        producer.commit_transaction(CALL_S)
    ended = described()
    assert ended["TransactionState"] in ("Empty", "CompleteAbort")
    assert int(ended["ProducerEpoch"]) > int(open_one["ProducerEpoch"])
    assert read_back(server.bootstrap, topic) == []
    unknown = tools.attempt(TRANSACTIONS, "describe", "--transactional-id", f"{topic}-nobody")
    assert unknown.status == 1
    assert "could not be found" in unknown.stderr


def test_producer_performance_in_transactions(tools: KafkaTools, server: Server, topic: str) -> None:
    tools.create_topic(topic)
    load = ("--topic", topic, "--num-records", "20000", "--record-size", "100", "--throughput", "20000")
    how = ("--transactional-id", f"{topic}-id", "--transaction-duration-ms", "100")
    produced = tools.run(PRODUCER_PERFORMANCE, *load, *how, timeout_s=LONG_S)
    assert re.search(r"^20000 records sent, ", produced.lines[-1])
    assert len(read_back(server.bootstrap, topic)) == 20_000
    assert tools.offsets(topic)[0] > 20_000 + 5, "every transaction ends with a marker, which has an offset"


def test_the_consoles_isolation_level(tools: KafkaTools, server: Server, topic: str) -> None:
    tools.create_topic(topic)
    producer = transactional(server, f"{topic}-id")
    for value, end in (("kept", producer.commit_transaction), ("gone", producer.abort_transaction)):
        send(producer, topic, [value])
        end(CALL_S)
    send(producer, topic, ["last"])
    producer.commit_transaction(CALL_S)
    assert tools.consume(topic, 3, "--from-beginning") == ["kept", "gone", "last"]
    committed = ("--from-beginning", "--isolation-level", "read_committed")
    assert tools.consume(topic, 2, *committed) == ["kept", "last"]


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(target: str, jars: KafkaJars) -> Iterator[Server]:
    """A broker that was stopped after four transactions over several segments, and with a fifth still open."""
    settings = {"transaction.state.log.num.partitions": "1"}
    server: Server = KafkaServer(jars, settings, heap="512m") if target == "kafka" else MillraceServer(settings)
    with server:
        KafkaTools(jars, server).create_topic("dumped", segment_bytes="1048576")
        producer = transactional(server, "dumped-id")
        for end in (producer.commit_transaction, producer.abort_transaction) * 2:
            send(producer, "dumped", ["x" * 10_000] * 60)
            end(CALL_S)
        send(producer, "dumped", ["open"])
        server.stop()
        yield server


def dump(jars: KafkaJars, directory: Path, suffix: str, *options: str) -> str:
    """What the tool says of all files of a kind; it complains on stderr, and of each segment's first offset, too."""
    files = ",".join(str(each) for each in sorted(directory.glob(f"*{suffix}")))
    done = jars.run(DUMP_LOG, *options, "--files", files)
    ordinary = re.compile(r"Non-consecutive offsets in \S+$|  -1 is followed by \d+$")
    assert done.status == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if not ordinary.match(line)] == []
    return done.stdout


def test_dump_of_markers_and_of_the_transaction_index(stopped: Server, jars: KafkaJars) -> None:
    directory = stopped.partition_dir("dumped", 0)
    text = dump(jars, directory, ".log", "--deep-iteration")
    assert text.count("Dumping ") > 2
    assert "isvalid: false" not in text
    markers = re.findall(r"^\| offset: (\d+) .*endTxnMarker: (\w+)", text, re.MULTILINE)
    assert markers == [("60", "COMMIT"), ("121", "ABORT"), ("182", "COMMIT"), ("243", "ABORT")]
    transactional_batches = re.findall(r"^baseOffset: \d+ .*isTransactional: (\w+) ", text, re.MULTILINE)
    assert set(transactional_batches) == {"true"}

    index = dump(jars, directory, ".txnindex")
    aborted = re.findall(r"firstOffset: (\d+) lastOffset: (\d+) lastStableOffset: (\d+)", index)
    assert [(int(first), int(last)) for first, last, _ in aborted] == [(61, 121), (183, 243)]
    dump(jars, directory, ".index", "--index-sanity-check")


def test_dump_of_a_producer_snapshot_with_an_open_transaction(stopped: Server, jars: KafkaJars) -> None:
    text = dump(jars, stopped.partition_dir("dumped", 0), ".snapshot")
    open_ones = re.findall(r"currentTxnFirstOffset: (\S+)", text)
    assert open_ones[-1] == "OptionalLong[244]", text


def test_dump_of_the_transaction_log(stopped: Server, jars: KafkaJars) -> None:
    text = dump(jars, stopped.partition_dir("__transaction_state", 0), ".log", "--transaction-log-decoder")
    written = [json.loads(each) for each in re.findall(r"payload: (\{.*\})$", text, re.MULTILINE)]
    assert set(re.findall(r'"transactionalId":"([^"]+)"', text)) == {"dumped-id"}
    states = [each["data"]["transactionStatus"] for each in written]
    committed, aborted = [ONGOING, PREPARE_COMMIT, COMPLETE_COMMIT], [ONGOING, PREPARE_ABORT, COMPLETE_ABORT]
    assert states == [EMPTY, *committed, *aborted, *committed, *aborted, ONGOING]
    assert written[-1]["data"]["transactionPartitions"] == [{"topic": "dumped", "partitionIds": [0]}]
    assert written[-1]["data"]["transactionTimeoutMs"] == 60_000
