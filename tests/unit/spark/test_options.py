"""Options of the source and the sink: what parses, what is refused and in which words."""

from __future__ import annotations

import pickle

import pytest

from millrace.errors import ConfigError
from millrace.model import TopicPartition
from millrace.records.compression import Codec
from millrace.spark.offsets import AtOffsets, AtTime, AtTimes, Edge
from millrace.spark.options import (
    STREAM_DELIVERY,
    Delivery,
    SinkOptions,
    SourceOptions,
    Subscription,
    TimestampStrategy,
    ValueFormat,
    ValueMode,
    ValueOptions,
)

BROKER = {"kafka.bootstrap.servers": "one:9092,two:9093"}
TOPIC = {**BROKER, "subscribe": "t"}
A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


def source(**options: str) -> SourceOptions:
    return SourceOptions.parse({**TOPIC, **options})


def refused(options: dict[str, str]) -> str:
    with pytest.raises(ConfigError) as caught:
        SourceOptions.parse(options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_defaults() -> None:
    options = source()
    assert options.client.bootstrap_servers == (("one", 9092), ("two", 9093))
    assert options.subscription == Subscription(topics=("t",))
    assert options.fail_on_data_loss and not options.include_headers and not options.read_committed
    assert options.max_trigger_delay_ms == 15 * 60 * 1000
    assert options.value == ValueOptions()
    batch, stream = options.for_batch(), options.for_stream()
    assert (batch.starting, batch.ending) == (Edge.EARLIEST, Edge.LATEST)
    assert (stream.starting, stream.ending) == (Edge.LATEST, None)


def test_everything_that_can_be_set() -> None:
    options = SourceOptions.parse(
        {
            "KAFKA.Bootstrap.Servers": "one:1",
            "kafka.client.rack": "r1",
            "kafka.isolation.level": "read_committed",
            "kafka.max.partition.fetch.bytes": "1000000",
            "kafka.check.crcs": "false",
            "kafka.group.id": "g",
            "ASSIGN": '{"a": [1, 0]}',
            "startingOffsets": '{"a": {"0": 5, "1": -2}}',
            "endingoffsets": '{"a": {"0": 9, "1": -1}}',
            "startingOffsetsByTimestampStrategy": "LATEST",
            "maxOffsetsPerTrigger": "1000",
            "minOffsetsPerTrigger": "10",
            "maxTriggerDelay": "30s",
            "minPartitions": "4",
            "maxRecordsPerPartition": "100",
            "failOnDataLoss": "False",
            "includeHeaders": "TRUE",
            "kafkaConsumer.pollTimeoutMs": "500",
            "groupIdForLag": "lag",
            "groupIdPrefix": "x",
            "fetchOffset.numRetries": "3",
            "fetchOffset.retryIntervalMs": "10",
            "value.format": "json",
            "value.schema": "id BIGINT",
            "value.mode": "failfast",
        }
    )
    assert options.client.client_rack == "r1"
    assert options.read_committed and not options.check_crcs and not options.fail_on_data_loss
    assert options.fetch_max_bytes == 1_000_000
    assert options.subscription == Subscription(assigned=(A0, A1))
    assert options.starting == AtOffsets({A0: 5, A1: -2})
    assert options.ending == AtOffsets({A0: 9, A1: -1})
    assert options.timestamp_strategy is TimestampStrategy.LATEST
    assert (options.max_offsets_per_trigger, options.min_offsets_per_trigger) == (1000, 10)
    assert options.max_trigger_delay_ms == 30_000
    assert (options.min_partitions, options.max_records_per_partition) == (4, 100)
    assert options.include_headers
    assert options.poll_timeout_ms == 500
    assert options.group_id_for_lag == "lag"
    assert options.value == ValueOptions(ValueFormat.JSON, "id BIGINT", ValueMode.FAILFAST)
    assert pickle.loads(pickle.dumps(options)) == options
    assert len(pickle.dumps(options)) < 3000


def test_times_go_before_offsets() -> None:
    by_partition = '{"a": {"0": 1000}}'
    assert source(startingTimestamp="5", startingOffsetsByTimestamp=by_partition).starting == AtTime(5)
    assert source(startingOffsetsByTimestamp=by_partition, startingOffsets="latest").starting == AtTimes({A0: 1000})
    assert source(endingTimestamp="7", endingOffsets="latest").ending == AtTime(7)


def test_subscriptions() -> None:
    assert SourceOptions.parse({**BROKER, "subscribe": " a, b ,a,"}).subscription.topics == ("a", "b")
    assert SourceOptions.parse({**BROKER, "subscribePattern": "a.*"}).subscription.pattern == "a.*"


@pytest.mark.parametrize(
    ("text", "wanted_ms"), [("250", 250), ("250ms", 250), ("2 s", 2000), ("3min", 180_000), ("1h", 3_600_000)]
)
def test_durations(text: str, wanted_ms: int) -> None:
    assert source(maxTriggerDelay=text).max_trigger_delay_ms == wanted_ms


def test_brokers_are_required() -> None:
    assert "'kafka.bootstrap.servers' is missing" in refused({"subscribe": "t"})
    assert "host:port" in refused({"subscribe": "t", "kafka.bootstrap.servers": "nowhere"})


def test_exactly_one_way_to_subscribe() -> None:
    assert "is missing: set exactly one of" in refused(dict(BROKER))
    assert "more than once" in refused({**TOPIC, "assign": '{"t": [0]}'})
    assert "names no topic" in refused({**BROKER, "subscribe": " , "})
    assert "use subscribePattern" in refused({**BROKER, "subscribe": "a.*"})
    assert "not a regular expression" in refused({**BROKER, "subscribePattern": "a["})
    assert "is empty" in refused({**BROKER, "subscribePattern": ""})


def test_unknown_options_have_a_suggestion() -> None:
    assert "did you mean startingOffsets" in refused({**TOPIC, "startingOffset": "earliest"})
    assert "did you mean maxOffsetsPerTrigger" in refused({**TOPIC, "maxOffsetPerTrigger": "1"})
    assert "starts with kafka." in refused({**TOPIC, "security.protocol": "SSL"})
    assert "unknown option 'qqq'" in refused({**TOPIC, "qqq": "1"})


def test_options_of_spark_itself_are_left_alone() -> None:
    assert source(path="/x", **{"spark.x": "1", "_internal": "2"}) == source()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("auto.offset.reset", "startingOffsets"),
        ("key.deserializer", "keys are read as bytes"),
        ("value.deserializer", "value.format"),
        ("enable.auto.commit", "groupIdForLag"),
        ("interceptor.classes", "as they are"),
    ],
)
def test_consumer_settings_that_cannot_hold_are_refused(name: str, words: str) -> None:
    message = refused({**TOPIC, f"kafka.{name}": "x"})
    assert f"option 'kafka.{name}' is not supported" in message
    assert words in message


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("startingOffsets", "middle", "earliest, latest or JSON"),
        ("startingOffsets", '{"a": {"0": -3}}', "below -2"),
        ("startingTimestamp", "yesterday", "milliseconds since 1970"),
        ("startingOffsetsByTimestamp", '{"a": {"0": -1}}', "negative time"),
        ("startingOffsetsByTimestampStrategy", "guess", "one of error, latest"),
        ("maxOffsetsPerTrigger", "0", "a whole number above 0"),
        ("maxOffsetsPerTrigger", "1e3", "a whole number above 0"),
        ("minPartitions", "-1", "a whole number above 0"),
        ("maxTriggerDelay", "soon", "a time such as 30s or 15m"),
        ("failOnDataLoss", "yes", "true or false"),
        ("includeHeaders", "", "true or false"),
        ("kafka.isolation.level", "serializable", "read_uncommitted or read_committed"),
        ("kafka.request.timeout.ms", "never", "request.timeout.ms"),
        ("value.format", "xml", "one of binary, json"),
        ("value.format", "json", "'value.schema' is missing"),
        ("value.schema", "a INT", "need value.format=json"),
        ("value.mode", "failfast", "need value.format=json"),
    ],
)
def test_values_that_cannot_be_used(name: str, value: str, words: str) -> None:
    assert words in refused({**TOPIC, name: value})


def test_limits_must_not_cross() -> None:
    assert "is higher than" in refused({**TOPIC, "minOffsetsPerTrigger": "11", "maxOffsetsPerTrigger": "10"})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"startingOffsets": "latest"}, "cannot be latest in a batch query"),
        ({"startingOffsets": '{"a": {"0": -1}}'}, "cannot be latest in a batch query"),
        ({"endingOffsets": "earliest"}, "cannot be earliest in a batch query"),
        ({"startingOffsets": '{"a": {"0": 9}}', "endingOffsets": '{"a": {"0": 5}}'}, "after endingOffsets"),
    ],
)
def test_batch_queries_need_something_to_read(options: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        source(**options).for_batch()


@pytest.mark.parametrize("name", ["endingOffsets", "endingTimestamp"])
def test_streaming_queries_have_no_end(name: str) -> None:
    options = source(**{name: "latest" if name == "endingOffsets" else "5"})
    with pytest.raises(ConfigError, match="availableNow"):
        options.for_stream()


def test_sink_defaults() -> None:
    options = SinkOptions.parse({**BROKER, "checkpointLocation": "/x", "path": "y"})
    assert options.topic is None
    assert (options.acks, options.codec, options.max_batch_bytes) == (-1, Codec.NONE, 512 * 1024)
    assert (options.for_stream().delivery, options.for_batch().delivery) == (STREAM_DELIVERY, Delivery.AT_LEAST_ONCE)
    assert (options.decisions_topic, options.transaction_timeout_ms) == ("millrace-sink-decisions", 900_000)


def test_everything_that_can_be_set_of_the_sink() -> None:
    options = SinkOptions.parse(
        {
            **BROKER,
            "topic": "t",
            "includeHeaders": "true",
            "kafka.acks": "1",
            "kafka.compression.type": "ZSTD",
            "kafka.batch.size": "1000",
            "kafka.client.id": "me",
            "delivery": "At-Least-Once",
            "sinkName": "first",
            "decisionsTopic": "d",
            "kafka.transaction.timeout.ms": "5000",
        }
    )
    assert (options.topic, options.acks, options.codec, options.max_batch_bytes) == ("t", 1, Codec.ZSTD, 1000)
    assert options.client.client_id == "me"
    assert options.for_stream().delivery is options.for_batch().delivery is Delivery.AT_LEAST_ONCE
    assert (options.sink_name, options.decisions_topic, options.transaction_timeout_ms) == ("first", "d", 5000)


@pytest.mark.parametrize("acks", ["1", "0"])
def test_exactly_once_needs_every_acknowledgement(acks: str) -> None:
    options = SinkOptions.parse({**BROKER, "kafka.acks": acks, "delivery": "exactly-once"})
    for choose in (options.for_stream, options.for_batch):
        with pytest.raises(ConfigError, match=r"must be all.*set option delivery to at-least-once"):
            choose()


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("topics", "t", "did you mean topic"),
        ("topic", "a b", "option 'topic'"),
        ("kafka.acks", "2", "one of all, -1, 1, 0"),
        ("kafka.compression.type", "rar", "one of none, uncompressed"),
        ("kafka.batch.size", "0", "above 0"),
        ("kafka.key.serializer", "x", "not supported"),
        ("kafka.value.serializer", "x", "not supported"),
        ("kafka.partitioner.class", "x", "partition column"),
        ("kafka.transactional.id", "x", "see option delivery"),
        ("delivery", "sometimes", "one of exactly-once, at-least-once"),
        ("decisionsTopic", "a b", "option 'decisionsTopic'"),
        ("kafka.transaction.timeout.ms", "soon", "above 0"),
        ("kafka.bootstrap.servers", "", "is missing"),
    ],
)
def test_what_the_sink_refuses(name: str, value: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        SinkOptions.parse({**BROKER, name: value})
