"""Whatever a record holds, it never stops a pipeline: generated nonsense for what parses records, and a batch of it."""

from __future__ import annotations

import datetime as dt
import json
import math
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as fn

from millrace.spark import sinks
from millrace.spark.pipelines import fields, logs, metrics, streams
from millrace.spark.pipelines.contract import find

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(300)]

SPARK_SAYS = settings(max_examples=8, suppress_health_check=list(HealthCheck))
"""An example is a batch of many records: Spark takes as long for one."""

COLUMNS = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int, "
    "headers array<struct<key:string,value:binary>>"
)
NOW = dt.datetime.now(dt.UTC)
LATEST = NOW + dt.timedelta(days=2)

# What fields are made of: things that broke a pipeline once, and anything at all.

TIMES = st.sampled_from(
    [
        *(1e300, -1e300, -1e15, 1e15, 1e11, -1, 0, 2**63, -(2**63), 253402300799, 253402300800, 32503680000000),
        *("1e300", "NaN", "Infinity", "-Infinity", "12000-01-01T00:00:00Z", "+10000-01-01T00:00:00Z", "-0001-01-01"),
        *("9999-12-31T23:59:59Z", "9999-12-31T23:59:59.999999-18:00", "2099-01-01T00:00:00Z", "0001-01-01T00:00:00Z"),
        *("294247-01-10T04:00:54.775807Z", "1969-12-31T23:59:59Z", "1970-01-01", "10:30", "T10:30", "noon", "2026", ""),
        *("2024-11-15T10:00:00+18:00", "2024-11-15T10:00:00+99:99", "2024-02-30", "0000-00-00", "2024-11-15T10:00:00Z"),
        *(True, None, [], {}, [1], {"a": 1}),
    ]
)
SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=20)
    | st.sampled_from(["\0", "\ud7ff", "\ufffd", "é", "x" * 200_000, "\u2028", '"', "\\"])
)  # fmt: skip
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)
FIELDS = TIMES | ANYTHING


def spelled(value: object) -> bytes:
    """As JSON, with what Python adds to it (NaN, Infinity) and lone surrogates, as a careless producer would."""
    return json.dumps(value).encode("utf-8", "surrogatepass")


def events(*names: str) -> st.SearchStrategy[bytes]:
    """Objects with some of these fields, holding anything; and what is hardly an event at all."""
    objects = st.fixed_dictionaries({}, optional=dict.fromkeys(names, FIELDS))
    text = objects.map(spelled)
    spoiled = st.tuples(text, st.integers(0, 60), st.binary(max_size=3)).map(lambda it: it[0][: it[1]] + it[2])
    trailing = st.tuples(text, st.sampled_from([b" x", b",{}", b"]", b"}", b"] [", b"\xff", b"\0", b"\n\n"])).map(
        b"".join
    )
    return text | spoiled | trailing | st.binary(max_size=50) | ANYTHING.map(spelled)


def lines() -> st.SearchStrategy[bytes]:
    stamps = TIMES.map(str) | st.text(max_size=20)
    dates = st.sampled_from(["15/Nov/2024:10:00:00 +0000", "15/Nov/9999:23:59:59 -1800", "31/Feb/2024:10:00:00 +0000"])
    common = st.tuples(st.text(max_size=10), dates | stamps, st.text(max_size=30), st.integers(0, 999)).map(
        lambda it: f'{it[0]} - - [{it[1]}] "{it[2]}" {it[3]} 5'.encode("utf-8", "surrogatepass")
    )
    days = st.sampled_from(
        ["Nov 15 10:00:01", "Feb 29 00:00:00", "Dec 31 23:59:59", "Jan  1 00:00:00", "Xyz 99 99:99:99"]
    )
    syslog = st.tuples(st.integers(0, 999), days | stamps, st.text(max_size=10), st.binary(max_size=30)).map(
        lambda it: f"<{it[0]}>{it[1]} h {it[2]}: ".encode("utf-8", "surrogatepass") + it[3]
    )
    return common | syslog | events("ts", "time", "level", "severity", "message", "msg", "host", "more")


RECORD_TIMES = st.sampled_from([-62135596800000, -1, 0, 1_700_000_000_000, 253402300799000])


def batches(values: st.SearchStrategy[bytes]) -> st.SearchStrategy[list[tuple[Any, ...]]]:
    header = st.tuples(st.sampled_from(["host", "file", "", "x"]), st.none() | st.binary(max_size=20))
    one = st.tuples(
        st.none() | st.binary(max_size=5), st.none() | values, RECORD_TIMES, st.none() | st.lists(header, max_size=2)
    )
    return st.lists(one, min_size=30, max_size=120)


def frame_of(spark: SparkSession, records: list[tuple[Any, ...]]) -> DataFrame:
    """The source's columns. Times go over as numbers: Python knows fewer of them than a record may have."""
    rows = [(key, value, "t", 0, offset, ms, 0, headers) for offset, (key, value, ms, headers) in enumerate(records)]
    plain = spark.createDataFrame(rows, COLUMNS.replace("timestamp timestamp", "timestamp long"))
    return plain.withColumn("timestamp", fn.timestamp_millis("timestamp"))


def options_of(name: str, **given: str) -> Mapping[str, str]:
    return find(name).resolve({"kafka.bootstrap.servers": "h:1", **given})


def check_letters(parsed: DataFrame, count: int, good: int) -> None:
    """Every record is either good or a letter, and a letter fits a record."""
    letters = sinks.dead_letters(parsed).toArrow().to_pylist()
    assert len(letters) + good == count
    for letter in letters:
        assert len(letter["value"] or b"") + len(letter["key"] or b"") < sinks.LARGEST_BYTES + 20_000
        assert letter["headers"][-4]["key"] == "millrace.error" and letter["headers"][-4]["value"]


@SPARK_SAYS
@given(batches(events("name", "value", "ts", "tags")))
def test_metrics_takes_anything(spark: SparkSession, records: list[tuple[Any, ...]]) -> None:
    options = options_of("metrics", by="name,tags.a")
    parsed = metrics.parse(frame_of(spark, records), options).cache()
    good = parsed.where("error IS NULL")
    windows = metrics.aggregate(good, options)
    count = 0
    for row in windows.toArrow().to_pylist():
        assert dt.datetime(1970, 1, 1, tzinfo=dt.UTC) - dt.timedelta(minutes=1) < row["window_start"] < LATEST
        assert not math.isnan(row["sum"]) and not math.isinf(row["max"])
        count += row["count"]
    for (value,) in windows.selectExpr("to_json(struct(*))").collect():
        json.loads(value)
    check_letters(parsed, len(records), count)
    parsed.unpersist()


@SPARK_SAYS
@given(batches(lines()), st.sampled_from(["auto", "json", "syslog", r"^(?<at>\S+) (?<level>\w+)? ?(?<message>.*)"]))
def test_logs_takes_anything(spark: SparkSession, records: list[tuple[Any, ...]], pattern: str) -> None:
    options = options_of("logs", pattern=pattern)
    parsed = logs.parse(frame_of(spark, records), pattern, options["future"]).cache()
    stored = logs.stored(parsed).toArrow().to_pylist()
    for row in stored:
        assert dt.datetime(1970, 1, 1, tzinfo=dt.UTC) <= row["at"] < LATEST
    for row in logs.outgoing(parsed, options).toArrow().to_pylist():
        if row["topic"] == options["errors"]:
            json.loads(row["value"])
    check_letters(parsed, len(records), len(stored))
    parsed.unpersist()


@SPARK_SAYS
@given(batches(events("id", "ts", "user", "kind")))
def test_streams_takes_anything(spark: SparkSession, records: list[tuple[Any, ...]]) -> None:
    options = options_of("streams")
    parsed = streams.parse(frame_of(spark, records), "id", options["future"]).cache()
    good = parsed.where("error IS NULL")
    # As the table of the join: whatever the value is, with the value of another record as its event.
    text = fields.text_of(fn.col("value"))
    table = fn.when(fields.is_json(text), text).otherwise(fields.json_string(text))
    joined = good.select("id", fn.col("json").alias("event")).crossJoin(
        frame_of(spark, records).limit(10).select(table.alias("table"), fn.lit(None).cast("string").alias("other"))
    )
    for row in streams.outgoing(joined, options).toArrow().to_pylist():
        if not row["headers"]:
            assert json.loads(row["value"]).keys() == {"event", "table", "other"}
    check_letters(parsed, len(records), good.count())
    parsed.unpersist()


@SPARK_SAYS
@given(st.lists(events("a").map(lambda text: text.decode("utf-8", "replace")), min_size=30, max_size=200))
def test_what_is_json_is_what_python_takes_for_json(spark: SparkSession, texts: list[str]) -> None:
    frame = spark.createDataFrame([(text,) for text in texts], "text string")
    for text, found in frame.select("text", fields.is_json(fn.col("text"))).collect():
        if found:
            json.loads(text, parse_constant=pytest.fail)
    quoted = frame.select("text", fields.json_string(fn.col("text"))).collect()
    assert all(json.loads(string) == text for text, string in quoted)
