"""A stream made richer: joined with a table topic and with another stream, without duplicates, routed to topics.

Reads JSON events, for example orders: {"id": "o-1", "user": "u-7", "kind": "book", "ts": "2026-11-15T10:00:00Z"}.
Each is

- taken once: another event with the same `id` within the watermark is dropped;
- joined with the newest record under its `lookup` field in the topic `table` (users, keyed by user id, JSON values; a
  record without value deletes its key), which is read anew for every batch;
- joined with the events of the topic `other` (payments) whose field `other_id` is its `id` and whose time is at most
  `within` away. An event without partner is written when the watermark has passed it, with `other` null;
- written to the topic `output`-VALUE for the values of its field `route` that `routes` lists, and to `output`-other
  for the rest: {"event": {...}, "table": {...}, "other": {...}}. A value of the table topic that is not JSON is there
  as a JSON string, so that a result is always JSON.

A record that is not JSON, or lacks its id or its time, goes to the dead-letter topic with the reason in its headers; so
does an event that lies more than `future` after the time of its record, which would move the watermark there, and one
whose result is larger than a record may be.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millrace.spark import sinks
from millrace.spark.pipelines import fields

OPTIONS = [
    ("topic", "orders", "where events are read"),
    ("id", "id", "field that makes an event unique"),
    ("table", "users", "table topic: the newest record of each key counts; empty for none"),
    ("lookup", "user", "field of the event that is a key of the table topic"),
    ("other", "payments", "another stream to join with; empty for none"),
    ("other_id", "order", "field of the other stream that names the event"),
    ("within", "10 minutes", "how far apart the two may be in time"),
    ("watermark", "1 minute", "how late an event may be"),
    ("future", "10 minutes", "how far ahead of its record an event may lie; beyond it, it is a dead letter"),
    ("output", "enriched", "topics for the results begin with this"),
    ("route", "kind", "field that chooses the topic; empty: all into `output` itself"),
    ("routes", "", "values of that field with a topic of their own, separated by commas"),
    ("dead_letters", "orders-dead-letters", "topic for records that are no events; empty to drop them"),
    ("starting", "earliest", "where a first run begins: earliest or latest"),
    ("max_records", "1000000", "most records of one batch"),
    ("trigger", "2 seconds", "how often results are made"),
    ("delivery", "", "exactly-once or at-least-once, for topics; exactly-once unless given"),
]


def topics(options: Mapping[str, str]) -> list[str]:
    """The topics that have to exist."""
    inputs = [options[name] for name in ("topic", "table", "other", "dead_letters") if options[name]]
    if not options["route"]:
        return [*inputs, options["output"]]
    return [*inputs, *(f"{options['output']}-{one}" for one in (*routes(options), "other"))]


def start(spark: SparkSession, options: Mapping[str, str]) -> list[StreamingQuery]:
    events = parse(read(spark, options, options["topic"]), options["id"], options["future"])
    good = events.where("error IS NULL").select("id", "at", F.col("json").alias("event"))
    result = good.withWatermark("at", options["watermark"]).dropDuplicatesWithinWatermark(["id"])
    result = join_table(result, spark, options) if options["table"] else with_null(result, "table")
    letters = sinks.dead_letters(events)
    if options["other"]:
        partners = parse(read(spark, options, options["other"]), options["other_id"], options["future"])
        letters = letters.union(sinks.dead_letters(partners))
        result = join_stream(result, partners.where("error IS NULL"), options)
    else:
        result = with_null(result, "other")
    queries = [begin(to_topics(outgoing(result, options), options), "streams", options)]
    if options["dead_letters"]:
        letters = letters.withColumn("topic", F.lit(options["dead_letters"]))
        queries.append(begin(to_topics(letters, options), "streams-dead-letters", options))
    return queries


def read(spark: SparkSession, options: Mapping[str, str], topic: str) -> DataFrame:
    return (
        spark.readStream.format("millrace")
        .options(**connection(options))
        .option("subscribe", topic)
        .option("startingOffsets", options["starting"])
        .option("maxOffsetsPerTrigger", options["max_records"])
        .load()
    )


def parse(records: DataFrame, id_field: str, future: str) -> DataFrame:
    """The source's columns with id, at (its `ts`, or else the record's time) and json; `error` says what is wrong."""
    parsed = records.withColumn("json", F.col("value").cast("string"))
    parsed = parsed.withColumn("id", field("json", id_field)).withColumn("ts", field("json", "ts"))
    at = F.coalesce(fields.time_of(F.col("ts")), F.when(F.col("ts").isNull(), F.col("timestamp")))
    error = (
        F.when(F.col("value").isNull(), "no value")
        .when(~fields.is_json(F.col("json")), "not JSON")
        .when(F.col("id").isNull(), f"no field '{id_field}'")
        .when(F.col("at").isNull(), "field 'ts' is not a time")
        .otherwise(fields.time_error(F.col("at"), F.col("timestamp"), future))
    )
    return parsed.withColumn("at", at).withColumn("error", error)


def field(json: str, name: str) -> Column:
    return F.get_json_object(json, f"$.{name}")


def join_table(events: DataFrame, spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    """The newest value of the event's key in the table topic. The topic is read from its start for every batch."""
    records = spark.read.format("millrace").options(**connection(options)).option("subscribe", options["table"]).load()
    newest = records.groupBy(F.col("key").cast("string").alias("lookup")).agg(
        F.max_by("value", "offset").alias("table")
    )
    text = fields.text_of(F.col("table"))
    newest = newest.withColumn("table", F.when(fields.is_json(text), text).otherwise(fields.json_string(text)))
    return events.withColumn("lookup", field("event", options["lookup"])).join(newest, "lookup", "left").drop("lookup")


def join_stream(events: DataFrame, partners: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """The event of the other stream that names this one."""
    other = partners.select(
        F.col("id").alias("other_id"), F.col("at").alias("other_at"), F.col("json").alias("other")
    ).withWatermark("other_at", options["watermark"])
    apart = F.expr(f"INTERVAL {options['within']}")
    close = (F.col("other_at") >= F.col("at") - apart) & (F.col("other_at") <= F.col("at") + apart)
    return events.join(other, (F.col("id") == F.col("other_id")) & close, "left")


def with_null(events: DataFrame, name: str) -> DataFrame:
    return events.withColumn(name, F.lit(None).cast("string"))


def as_json(*names: str) -> Column:
    """An object of columns that are JSON already."""
    parts = [F.concat(F.lit(f'"{name}":'), F.coalesce(F.col(name), F.lit("null"))) for name in names]
    return F.concat(F.lit("{"), F.concat_ws(",", *parts), F.lit("}"))


def outgoing(results: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """Key, value, headers and topic of what is written; of a result that is too large its event, as a dead letter."""
    whole = results.withColumn("value", as_json("event", "table", "other").cast("binary"))
    event = F.substring(F.col("event").cast("binary"), 1, sinks.LARGEST_BYTES)
    too_large = F.octet_length("id") + F.octet_length("value") > sinks.LARGEST_BYTES
    reason = F.lit(f"its result is larger than {sinks.LARGEST_BYTES} bytes")
    return whole.select(
        F.when(~too_large, F.col("id")).alias("key"),
        F.when(too_large, event).otherwise(F.col("value")).alias("value"),
        F.when(too_large, sinks.reason_headers(reason)).alias("headers"),
        F.when(too_large, F.lit(options["dead_letters"])).otherwise(route(options)).alias("topic"),
    ).where("topic <> ''")


def routes(options: Mapping[str, str]) -> list[str]:
    return [one.strip() for one in options["routes"].split(",") if one.strip()]


def route(options: Mapping[str, str]) -> Column:
    if not options["route"]:
        return F.lit(options["output"])
    value = field("event", options["route"])
    known = F.when(value.isin(routes(options)), value).otherwise("other")
    return F.concat(F.lit(f"{options['output']}-"), known)


def to_topics(records: DataFrame, options: Mapping[str, str]) -> DataStreamWriter:
    return records.writeStream.format("millrace").options(**target(options))


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
