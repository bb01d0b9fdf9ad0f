"""The sink's work on an executor, without Spark: Arrow batches in, topics read back with librdkafka."""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
    TimestampType,
)

from millrace.client.cluster import ClusterClient
from millrace.client.producing import Written
from millrace.client.settings import ClientSettings
from millrace.clock import SystemClock
from millrace.errors import ApiError, ConfigError, ErrorCode, MillraceError
from millrace.model import TopicPartition
from millrace.records.batch import split
from millrace.spark.decisions import Series
from millrace.spark.exactly_once import BatchFence
from millrace.spark.options import SinkOptions
from millrace.spark.writer import (
    BatchWriter,
    RowsWritten,
    SinkColumns,
    StreamWriter,
    close_kept_producers,
    gather,
)
from millrace.testing import Cluster
from support.read_back import read_back
from support.topics import Sent, Topics

CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
KINDS = {
    "key": pa.binary(),
    "value": pa.binary(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": HEADERS,
}
SPARK_KINDS: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "timestamp": TimestampType(),
    "headers": ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())])),
}


@pytest.fixture(autouse=True)
def nothing_stays_open() -> Iterator[None]:
    yield
    close_kept_producers()


def schema_of(**kinds: DataType) -> StructType:
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def write(bootstrap: str, *batches: pa.RecordBatch, **options: str) -> RowsWritten:
    named = {name.replace("_", "."): value for name, value in options.items()}
    parsed = SinkOptions.parse({"kafka.bootstrap.servers": bootstrap, **named})
    schema = schema_of(**{name: SPARK_KINDS[name] for name in batches[0].schema.names})
    return BatchWriter(parsed.for_batch(), schema, overwrite=False).write(iter(batches))


def rows(**columns: list[Any]) -> pa.RecordBatch:
    return pa.record_batch({name: pa.array(values, KINDS[name]) for name, values in columns.items()})


# --- contents ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", CODECS)
def test_every_codec(bootstrap: str, topics: Topics, codec: str) -> None:
    topic = topics.create(partitions=3)
    keys = [b"k%d" % number for number in range(2_000)]
    values = [b"%d " % number * (number % 40) for number in range(2_000)]
    written = write(bootstrap, rows(key=keys, value=values), topic=topic, kafka_compression_type=codec)
    found = read_back(bootstrap, topic)
    assert sorted((each.key, each.value) for each in found) == sorted(zip(keys, values, strict=True))
    for index in range(3):  # within a partition the order of the rows
        numbers = [int(each.key[1:]) for each in found if each.partition == index]
        assert numbers == sorted(numbers)
        told = written.partitions[TopicPartition(topic, index)]
        assert (told.records, told.first_offset, told.next_offset) == (len(numbers), 0, len(numbers))
    assert written.records == 2_000


def test_nulls_empty_values_headers_and_timestamps(bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    keys = [None, b"k", None, b"", b"\0\xff"]
    values = [None, None, b"v", b"", b"\xff\0"]
    headers = [None, [], [("a", b"1")], [("a", b"1"), ("a", b""), ("é", None)], [("b", b"\0")]]
    times = [1_700_000_000_123_999, None, 1_000, 0, 1_999]
    named = [None if each is None else [{"key": key, "value": value} for key, value in each] for each in headers]
    before_ms = SystemClock().wall_ms()
    write(bootstrap, rows(key=keys, value=values, headers=named, timestamp=times), topic=topic)
    found = read_back(bootstrap, topic)
    assert [each.key for each in found] == keys
    assert [each.value for each in found] == values
    assert [each.headers for each in found] == [tuple(each or ()) for each in headers]
    first, second, *others = (each.timestamp_ms for each in found)
    assert (first, others) == (1_700_000_000_123, [1, 0, 1])
    assert before_ms <= second <= SystemClock().wall_ms()


def test_large_records(bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=2)
    values = [bytes([number]) * size for number, size in enumerate([1_000_000, 10, 1_040_000, 0, 700_000, 700_000])]
    write(bootstrap, rows(value=values), topic=topic)
    assert sorted(each.value for each in read_back(bootstrap, topic)) == sorted(values)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_batches_larger_than_the_topic_takes_are_split(bootstrap: str, topics: Topics, codec: str) -> None:
    """With the default size of batches, as with the Java client: 512 KiB against a limit of 100,000 bytes."""
    topic = topics.create(partitions=2, config={"max.message.bytes": "100000"})
    keys = [b"%d" % number for number in range(3_000)]
    values = [random.Random(number).randbytes(1000) for number in range(3_000)]
    for _ in range(2):  # the second task knows already
        written = write(bootstrap, rows(key=keys, value=values), topic=topic, kafka_compression_type=codec)
        assert written.records == 3_000
    found = read_back(bootstrap, topic)
    by_partition = [[each.key for each in found if each.partition == index] for index in range(2)]
    for in_order in by_partition:
        once = in_order[: len(in_order) // 2]
        assert in_order == once * 2 and [int(key) for key in once] == sorted(int(key) for key in once)
    assert sorted(by_partition[0] + by_partition[1]) == sorted(keys * 2)


def test_a_missing_topic_is_created_where_brokers_create_topics(bootstrap: str, topics: Topics) -> None:
    """As Spark's Kafka sink: its Java producer asks for metadata in a way that creates the topic."""
    topic = f"{topics.create()}-new"
    assert write(bootstrap, rows(value=[b"a", b"b"]), topic=topic).records == 2
    assert sorted(each.value for each in read_back(bootstrap, topic)) == [b"a", b"b"]


@pytest.mark.usefixtures("our_broker")
def test_a_missing_topic_is_an_error_where_they_do_not() -> None:
    with Cluster(settings={"auto.create.topics.enable": "false"}) as cluster, pytest.raises(ApiError) as caught:
        write(cluster.bootstrap_servers, rows(value=[b"a"]), topic="missing")
    assert caught.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert "topic 'missing': it does not exist, and the brokers create none by themselves; create it first" in str(
        caught.value
    )


def test_strings_slices_and_wide_types(bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    batch = pa.record_batch(
        {
            "key": pa.array(["a", "b", "c", "é"], pa.string()),
            "value": pa.array(["1", None, "3", "4"], pa.large_string()),
        }
    )
    write(bootstrap, batch.slice(1), batch.slice(0, 0), batch.slice(0, 1), topic=topic)
    found = [(each.key, each.value) for each in read_back(bootstrap, topic)]
    assert found == [(b"b", None), (b"c", b"3"), ("é".encode(), b"4"), (b"a", b"1")]


def test_no_rows_need_no_broker() -> None:
    written = write("127.0.0.1:1", rows(value=[]), topic="t")
    assert (written.records, written.partitions) == (0, {})


@pytest.mark.parametrize("acks", ["1", "0"])
def test_fewer_acknowledgements(bootstrap: str, topics: Topics, acks: str) -> None:
    topic = topics.create()
    assert write(bootstrap, rows(value=[b"a", b"b"]), topic=topic, kafka_acks=acks).records == 2
    # acks=0: what comes later on is answered, and comes after it.
    write(bootstrap, rows(value=[b"c"]), topic=topic)
    assert {each.value for each in read_back(bootstrap, topic)} >= {b"c"}


# --- where rows go ----------------------------------------------------------------------------------------------------


def test_keys_hash_as_in_the_java_client(bootstrap: str, topics: Topics) -> None:
    # The hashes are those of the Java client's own tests; librdkafka's partitioner of the same name is asked too.
    hashes = {
        b"21": -973932308,
        b"foobar": -790332482,
        b"a-little-bit-long-string": -985981536,
        b"a-little-bit-longer-string": -1486304829,
        b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
        b"abc": 479470107,
    }
    ours, theirs = topics.create(partitions=7), topics.create(partitions=7)
    keys = [*hashes, *(b"key %d" % number * (number % 5 + 1) for number in range(300))]
    write(bootstrap, rows(key=keys, value=keys), topic=ours)
    topics.send(theirs, [Sent(key, key) for key in keys], partitioner="murmur2_random")
    placed = {each.key: each.partition for each in read_back(bootstrap, ours)}
    for key, number in hashes.items():
        assert placed[key] == (number & 0x7FFFFFFF) % 7
    assert placed == {each.key: each.partition for each in read_back(bootstrap, theirs)}


def test_a_topic_and_a_partition_per_row(bootstrap: str, topics: Topics) -> None:
    one, two = topics.create(partitions=3), topics.create(partitions=5)
    written = write(
        bootstrap,
        rows(
            topic=[one, two, one, two, one],
            partition=[2, 4, None, 0, 2],
            key=[None, b"k", b"foobar", None, b"x"],
            value=[b"a", b"b", b"c", b"d", b"e"],
        ),
    )
    by_hash = (-790332482 & 0x7FFFFFFF) % 3
    in_one = {(each.partition, each.value) for each in read_back(bootstrap, one)}
    assert in_one == {(2, b"a"), (by_hash, b"c"), (2, b"e")}
    assert {(each.partition, each.value) for each in read_back(bootstrap, two)} == {(4, b"b"), (0, b"d")}
    assert written.partitions[TopicPartition(one, 2)].records == 2


def test_the_topic_option_wins_over_the_column(bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    write(bootstrap, rows(topic=["nowhere", None], value=[b"a", b"b"]), topic=topic)
    assert [each.value for each in read_back(bootstrap, topic)] == [b"a", b"b"]


def test_rows_without_a_key_are_spread_in_whole_batches(bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=4)
    values = [b"%d" % number + b"." * 1000 for number in range(8_000)]
    write(bootstrap, *(rows(value=values[at : at + 1_000]) for at in range(0, 8_000, 1_000)), topic=topic,
          kafka_batch_size="100000")  # fmt: skip
    found = read_back(bootstrap, topic)
    assert sorted(each.value for each in found) == sorted(values)
    assert min(sum(each.partition == index for each in found) for index in range(4)) > 1_500
    numbers = [int(each.value.rstrip(b".")) for each in found]
    runs = sum(after != before + 1 for before, after in itertools.pairwise(numbers))
    assert runs < 120  # 80 batches; dealt out one by one there would be thousands


def test_two_hundred_partitions(bootstrap: str, topics: Topics) -> None:
    topic = topics.create(partitions=200)
    values = [b"%d" % number for number in range(20_000)]
    write(bootstrap, rows(key=values, value=values), topic=topic)
    found = read_back(bootstrap, topic)
    assert sorted(each.value for each in found) == sorted(values)
    assert {each.partition for each in found} == set(range(200))


def test_small_batches_are_gathered() -> None:
    small = [rows(value=[b"%d" % number * 10]) for number in range(10)]
    whole = small[0].nbytes * 3
    joined = list(gather([*small[:5], rows(value=[]), *small[5:]], whole))
    assert [batch.num_rows for batch in joined] == [3, 3, 3, 1]
    assert [value for batch in joined for value in batch.column(0).to_pylist()] == [
        b"%d" % number * 10 for number in range(10)
    ]
    assert list(gather([], 1)) == []


# --- from task to task ------------------------------------------------------------------------------------------------


def producer_ids(bootstrap: str, topic: str) -> list[int]:
    settings = ClientSettings.from_properties({"bootstrap.servers": bootstrap})
    with ClusterClient(settings) as client:
        fetched = client.fetch(TopicPartition(topic, 0), 0, max_bytes=1 << 20, max_wait_ms=100)
        return [batch.header.producer_id for batch in split(fetched.records)]


def test_one_producer_serves_task_after_task(bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    for value in (b"a", b"b", b"c"):
        assert write(bootstrap, rows(value=[value]), topic=topic).records == 1
    assert len(set(producer_ids(bootstrap, topic))) == 1
    with pytest.raises(ApiError):
        write(bootstrap, rows(value=[b"x" * 1_100_000]), topic=topic)
    write(bootstrap, rows(value=[b"d"]), topic=topic)
    first, *_, last = producer_ids(bootstrap, topic)
    assert first != last  # after a failure nobody knows which sequences were taken
    assert [each.value for each in read_back(bootstrap, topic)] == [b"a", b"b", b"c", b"d"]


def test_new_partitions_are_seen_by_the_next_task(bootstrap: str, topics: Topics) -> None:
    topic = topics.create()
    keys = [b"%d" % number for number in range(100)]
    write(bootstrap, rows(key=keys, value=keys), topic=topic)
    topics.add_partitions(topic, 2)
    write(bootstrap, rows(key=keys, value=keys), topic=topic)
    assert {each.partition for each in read_back(bootstrap, topic)} == {0, 1}


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "code", "said"),
    [
        ({"topic": ["t", None], "value": [b"a", b"b"]}, None, "a row has a null topic"),
        ({"topic": ["not / a name"], "value": [b"a"]}, ErrorCode.INVALID_TOPIC_EXCEPTION, "not / a name"),
        ({"partition": [0, 3], "value": [b"a", b"b"]}, None, "column 'partition' has 3, but topic"),
        ({"partition": [-1], "value": [b"a"]}, None, "column 'partition' has -1, but topic"),
        ({"value": [b"x" * 1_100_000]}, ErrorCode.MESSAGE_TOO_LARGE, "max.message.bytes"),
        ({"value": [b"a"], "headers": [[{"key": None, "value": b"v"}]]}, ErrorCode.INVALID_RECORD, "header"),
    ],
)
def test_rows_that_are_refused(
    bootstrap: str, topics: Topics, columns: dict[str, list[Any]], code: ErrorCode | None, said: str
) -> None:
    options = {} if "name" in said or "null" in said else {"topic": topics.create(partitions=3)}
    with pytest.raises(MillraceError) as caught:
        write(bootstrap, rows(**columns), **options)
    assert said in str(caught.value)
    assert (caught.value.code if isinstance(caught.value, ApiError) else None) is code


@pytest.mark.parametrize(
    ("schema", "topic", "said"),
    [
        (schema_of(key=StringType()), "t", "needs a column 'value'"),
        (schema_of(value=StringType()), None, "set option 'topic' or add a string column 'topic'"),
        (schema_of(value=IntegerType()), "t", "column 'value' must be string or binary, not int"),
        (schema_of(value=StringType(), key=LongType()), "t", "column 'key' must be string or binary, not bigint"),
        (schema_of(value=StringType(), topic=IntegerType()), None, "column 'topic' must be string, not int"),
        (schema_of(value=StringType(), partition=LongType()), "t", "column 'partition' must be int, not bigint"),
        (schema_of(value=StringType(), timestamp=LongType()), "t", "'timestamp' must be timestamp, not bigint"),
        (schema_of(value=StringType(), timestamp=TimestampNTZType()), "t", "not timestamp_ntz"),
        (schema_of(value=StringType(), headers=ArrayType(StringType())), "t", "must be array<struct<key:string"),
    ],
)
def test_schemas_that_are_refused(schema: StructType, topic: str | None, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SinkColumns.of(schema, topic)
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_columns_are_found_by_name() -> None:
    columns = SinkColumns.of(schema_of(other=LongType(), **SPARK_KINDS, offset=LongType()), None)
    assert columns == SinkColumns(key=1, value=2, topic=3, partition=4, timestamp=5, headers=6)
    assert SinkColumns.of(schema_of(**SPARK_KINDS), "t").topic is None


def test_a_topic_cannot_be_overwritten_but_complete_mode_appends() -> None:
    options = SinkOptions.parse({"kafka.bootstrap.servers": "h:1", "topic": "t"})
    schema = schema_of(value=StringType())
    with pytest.raises(ConfigError, match="append"):
        BatchWriter(options, schema, overwrite=True)
    for writer in (BatchWriter(options, schema, overwrite=False), StreamWriter(options, schema, overwrite=True)):
        assert pickle.loads(pickle.dumps(writer)) is not None


# --- what a repeated batch means --------------------------------------------------------------------------------------


def test_the_fence_names_a_piece_of_a_batch() -> None:
    run = "0b5a9e3c-5a3c-4ad5-8d2b-2f5d0f0f8f11"
    told = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "7", "spark.jobGroup.id": run}
    fence = BatchFence.of(told.get, 3)
    assert fence == BatchFence("q", 7, 3, run)
    assert BatchFence.of({**told, "spark.jobGroup.id": "mine"}.get, 3, other_run="r") == BatchFence("q", 7, 3, "r")
    assert BatchFence.of({}.get, 3) is None
    assert BatchFence.of({"sql.streaming.queryId": "q"}.get, 3) is None


def test_the_usual_id_is_that_of_a_task_in_a_series_and_a_single_one_is_nobodys() -> None:
    fence = BatchFence("q", 7, 3, "r")
    assert fence.usual_id(Series("r", 5)) == replace(fence, batch_id=8).usual_id(Series("r", 5))
    others = [replace(fence, task=4), replace(fence, sink_name="s"), replace(fence, query_id="p")]
    ids = {fence.usual_id(Series("r", 5)), fence.usual_id(Series("r", 6)), fence.single_id(Series("r", 5))}
    ids |= {fence.single_id(Series("r", 5)), *(other.usual_id(Series("r", 5)) for other in others)}
    assert len(ids) == 7


def test_a_commit_message_travels() -> None:
    message = RowsWritten(BatchFence("q", 1, 0), {TopicPartition("t", 0): Written(2, 100, 5, 7)})
    assert pickle.loads(pickle.dumps(message)) == message
    assert message.records == 2
