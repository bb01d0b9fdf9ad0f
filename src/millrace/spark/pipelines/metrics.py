"""Events or counters from many producers, aggregated per key in event-time windows, into a topic and a table.

Reads JSON records such as

    {"name": "http.requests", "value": 12.5, "ts": "2026-11-15T10:00:00Z", "tags": {"host": "web-1"}}

`value` may be missing (an occurrence counts 1), `ts` may be ISO 8601 or a number (seconds or milliseconds since 1970),
or missing (then the time of the record counts). Per window and key it gives count, sum, min, max, avg and p95.

A window that changed is written again under the same key (`emit=update`), so a reader of the topic or the table always
finds its newest state; or it is written once, when the watermark has passed it (`emit=final`). Events that come later
than the watermark allows are dropped and counted: `late` in the progress of the query. A record that is no such event
goes to the dead-letter topic with the reason in its headers. So does an event from the future: one that lies more than
`future` after the time of its record would move the watermark there, and everybody else's events would be late.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millrace.spark import sinks
from millrace.spark.pipelines import fields

OPTIONS = [
    ("topic", "metrics", "where events are read"),
    ("output", "metrics-summary", "topic for the results; empty for none"),
    ("table", "", "table for the results: sqlite:///FILE, postgresql://..., or a folder for a Delta table"),
    ("table_name", "metrics", "name of the table in a database"),
    ("dead_letters", "metrics-dead-letters", "topic for records that are no events; empty to drop them"),
    ("by", "name", "what a key is: fields of the event, separated by commas; tags as tags.host"),
    ("window", "1 minute", "length of a window"),
    ("slide", "", "how often a window begins; empty: one after the other"),
    ("watermark", "2 minutes", "how late an event may be"),
    ("future", "10 minutes", "how far ahead of its record an event may lie; beyond it, it is a dead letter"),
    ("emit", "update", "update: a window whenever it changes; final: once, when it is closed"),
    ("starting", "earliest", "where a first run begins: earliest or latest"),
    ("max_records", "1000000", "most records of one batch"),
    ("trigger", "2 seconds", "how often results are made"),
    ("delivery", "", "exactly-once or at-least-once, for topics; exactly-once unless given"),
]

EVENT = "name string, value double, ts string, tags map<string,string>, _damaged string"
LONGEST_KEY_BYTES = 100_000  # a result has its key twice, and has to fit into a record


def topics(options: Mapping[str, str]) -> list[str]:
    """The topics that have to exist."""
    return [options[name] for name in ("topic", "output", "dead_letters") if options[name]]


def start(spark: SparkSession, options: Mapping[str, str]) -> list[StreamingQuery]:
    events = parse(read(spark, options), options)
    results = aggregate(events.where("error IS NULL"), options)
    queries = [
        begin(results.writeStream.outputMode(output_mode(options)).foreachBatch(writer(options)), "metrics", options)
    ]
    if options["dead_letters"]:
        letters = sinks.dead_letters(events).writeStream.format("millrace").option("topic", options["dead_letters"])
        queries.append(begin(letters.options(**target(options)), "metrics-dead-letters", options))
    return queries


def read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    return (
        spark.readStream.format("millrace")
        .options(**connection(options))
        .option("subscribe", options["topic"])
        .option("startingOffsets", options["starting"])
        .option("maxOffsetsPerTrigger", options["max_records"])
        .load()
    )


def parse(records: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """The source's columns with name, amount, at and tags; `error` says why a record is no event."""
    event = F.from_json(fields.text_of(F.col("value")), EVENT, {"columnNameOfCorruptRecord": "_damaged"})
    at = F.coalesce(fields.time_of(F.col("event.ts")), F.when(F.col("event.ts").isNull(), F.col("timestamp")))
    parsed = records.withColumn("event", event).select(
        *records.columns,
        "event",
        F.col("event.name").alias("name"),
        F.coalesce("event.value", F.lit(1.0)).alias("amount"),
        at.alias("at"),
        F.col("event.tags").alias("tags"),
    )
    amount = F.col("amount")
    key_bytes = F.octet_length(F.concat_ws("", *[F.col(key).cast("string") for key in keys(options)]))
    error = (
        F.when(F.col("value").isNull(), "no value")
        .when(F.col("event").isNull() | F.col("event._damaged").isNotNull(), "not a JSON event")
        .when(F.col("name").isNull(), "no field 'name'")
        .when(F.isnan(amount) | (F.abs(amount) == float("inf")), "field 'value' is not a number")
        .when(F.col("at").isNull(), "field 'ts' is not a time")
        .when(key_bytes > LONGEST_KEY_BYTES, f"its key ({options['by']}) is longer than {LONGEST_KEY_BYTES} bytes")
        .otherwise(fields.time_error(F.col("at"), F.col("timestamp"), options["future"]))
    )
    return parsed.withColumn("error", error).drop("event")


def keys(options: Mapping[str, str]) -> list[str]:
    return [name.strip() for name in options["by"].split(",") if name.strip()]


def aggregate(events: DataFrame, options: Mapping[str, str]) -> DataFrame:
    names = {key: key.rpartition(".")[2] for key in keys(options)}
    windows = F.window("at", options["window"], options["slide"] or None)
    grouped = events.withWatermark("at", options["watermark"]).groupBy(
        windows, *[F.coalesce(F.col(key), F.lit("")).alias(name) for key, name in names.items()]
    )
    return grouped.agg(
        F.count("*").alias("count"),
        F.sum("amount").alias("sum"),
        F.min("amount").alias("min"),
        F.max("amount").alias("max"),
        F.avg("amount").alias("avg"),
        F.percentile_approx("amount", 0.95).alias("p95"),
    ).select(
        F.col("window.start").alias("window_start"),
        F.col("window.end").alias("window_end"),
        *names.values(),
        *["count", "sum", "min", "max", "avg", "p95"],
    )


def output_mode(options: Mapping[str, str]) -> str:
    if options["emit"] not in ("update", "final"):
        raise ValueError(f"option emit is update or final, not '{options['emit']}'")
    if options["emit"] == "update" and options["table"] and "://" not in options["table"]:
        raise ValueError("a Delta table keeps every row it is given: say emit=final, or give a database as table")
    return "update" if options["emit"] == "update" else "append"


def writer(options: Mapping[str, str]) -> sinks.BatchWriter:
    """To the table, exactly once, and then to the topic."""
    unique = ["window_start", *[key.rpartition(".")[2] for key in keys(options)]]
    writers = []
    if "://" in options["table"]:
        writers.append(sinks.sql(options["table"], options["table_name"], keys=unique))
    elif options["table"]:
        writers.append(sinks.delta(options["table"]))
    if options["output"]:
        named = ", ".join(f"`{key}`" for key in unique)
        columns = (f"to_json(struct({named})) AS key", "to_json(struct(*)) AS value")
        writers.append(sinks.topic(target(options), options["output"], columns=columns))
    return sinks.fan_out(*writers)


def connection(options: Mapping[str, str]) -> dict[str, str]:
    """How to reach the brokers: `kafka.bootstrap.servers`, and whatever was given for security."""
    return {name: value for name, value in options.items() if name.startswith("kafka.")}


def target(options: Mapping[str, str]) -> dict[str, str]:
    """Where and how topics are written."""
    return {**connection(options), **({"delivery": options["delivery"]} if options["delivery"] else {})}


def begin(stream: DataStreamWriter, name: str, options: Mapping[str, str]) -> StreamingQuery:
    trigger = {"availableNow": True} if options["once"] == "true" else {"processingTime": options["trigger"]}
    return (
        stream.queryName(name)
        .option("checkpointLocation", f"{options['checkpoint']}/{name}")
        .trigger(**trigger)
        .start()
    )
