r"""Log lines from many hosts, parsed; errors into a topic of their own, everything into the warehouse by day.

Lines come from `millrace produce logs --follow /var/log/*.log`, which sets the headers `host` and `file`; other
producers do as well, and a line may name its host itself. Formats that are known, tried in this order unless `pattern`
names one: `json` (level or severity, message or msg, ts or time or timestamp, host), `common` (the common and combined
log formats of web servers) and `syslog` (with a date as in RFC 3164, or ISO 8601). `pattern` may also be a regular
expression with named groups, of which `at`, `host`, `level` and `message` are known and the others become fields:

    --option 'pattern=^(?<at>\d{4}-\S+ \S+) (?<level>\w+) \[(?<thread>[^\]]+)\] (?<message>.*)'

The warehouse gets one row per line: at, host, file, level, message, fields, topic, partition, offset, day. Lines of
level error or fatal also go to the topic `errors`, as JSON. A line that no format fits goes to the dead-letter topic
with the reason in its headers, and so does one whose time lies before 1970 or more than `future` after the time of its
record. A line without a time, or with one that cannot be read, has the time of its record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from millrace.spark import sinks
from millrace.spark.pipelines import fields

OPTIONS = [
    ("topic", "logs", "where lines are read; several separated by commas"),
    ("errors", "logs-errors", "topic for lines of level error or fatal; empty for none"),
    ("dead_letters", "logs-dead-letters", "topic for lines that no format fits; empty to drop them"),
    ("warehouse", "warehouse/logs", "folder of the table"),
    ("format", "delta", "what the table is: delta or parquet"),
    ("pattern", "auto", "auto, json, common, syslog, or a regular expression with named groups"),
    # A day, because the local time that many lines have is read as UTC.
    ("future", "1 day", "how far ahead of its record a line may lie; beyond it, it is a dead letter"),
    ("starting", "earliest", "where a first run begins: earliest or latest"),
    ("max_records", "1000000", "most records of one batch"),
    ("trigger", "5 seconds", "how often lines are stored"),
    ("delivery", "", "exactly-once or at-least-once, for topics; exactly-once unless given"),
]

COMMON = r'^(\S+) \S+ (\S+) \[([^\]]+)\] "([^"]*)" (\d{3}) (\d+|-)(?: "([^"]*)" "([^"]*)")?\s*$'
SYSLOG = (
    r"^(?:<(\d{1,3})>1? ?)?([A-Z][a-z]{2} [ \d]\d \d{2}:\d{2}:\d{2}|\d{4}-\d{2}-\d{2}[T ]\S+) "
    r"(\S+) ([^\s:\[]+)(?:\[(\d+)\])?: (.*)$"
)
LEVEL_IN_TEXT = r"(?i)\b(fatal|critical|crit|error|err|warning|warn|notice|info|debug|trace)\b"
DAY_US = 86_400_000_000
LONGEST_ERROR_CHARACTERS = 10_000  # of a text in a record of the topic for errors that is too large otherwise
LINE = "at timestamp, host string, level string, message string, fields map<string,string>"


def topics(options: Mapping[str, str]) -> list[str]:
    """The topics that have to exist."""
    return [*options["topic"].split(","), *(options[name] for name in ("errors", "dead_letters") if options[name])]


def start(spark: SparkSession, options: Mapping[str, str]) -> list[StreamingQuery]:
    if options["format"] not in ("delta", "parquet"):
        raise ValueError(f"option format is delta or parquet, not '{options['format']}'")
    lines = parse(read(spark, options), options["pattern"], options["future"])
    send = sinks.topic(target(options))
    if options["format"] == "delta":
        keep = sinks.delta(options["warehouse"], partition_by=["day"])
        write = sinks.fan_out(
            lambda batch, batch_id: keep(stored(batch), batch_id),
            lambda batch, batch_id: send(outgoing(batch, options), batch_id),
        )
        return [begin(lines.writeStream.foreachBatch(write), "logs", options)]
    table = stored(lines).writeStream.format("parquet").option("path", options["warehouse"]).partitionBy("day")
    sent = lines.writeStream.foreachBatch(lambda batch, batch_id: send(outgoing(batch, options), batch_id))
    return [begin(table, "logs", options), begin(sent, "logs-topics", options)]


def read(spark: SparkSession, options: Mapping[str, str]) -> DataFrame:
    records = (
        spark.readStream.format("millrace")
        .options(**connection(options))
        .option("subscribe", options["topic"])
        .option("startingOffsets", options["starting"])
        .option("maxOffsetsPerTrigger", options["max_records"])
        .option("includeHeaders", "true")
        .load()
    )
    return records.where("value IS NULL OR trim(CAST(value AS STRING)) <> ''")  # an empty line says nothing


def parse(records: DataFrame, pattern: str, future: str) -> DataFrame:
    """The source's columns with `line`, a struct of what was found, `at`, and `error`, why there is nothing."""
    text = fields.text_of(F.col("value"))
    formats = {"json": json_line(text), "common": common_line(text), "syslog": syslog_line(text)}
    if pattern == "auto":
        line = F.coalesce(*formats.values())
    else:
        line = formats[pattern] if pattern in formats else pattern_line(text, pattern)
    error = (
        F.when(F.col("value").isNull(), "no value")
        .when(F.col("line").isNull(), f"no format fits the line (pattern {pattern})")
        .otherwise(fields.time_error(F.col("at"), F.col("timestamp"), future))
    )
    found = records.withColumn("line", line).withColumn("at", F.coalesce("line.at", "timestamp"))
    return found.withColumn("error", error)


def stored(lines: DataFrame) -> DataFrame:
    """The rows of the warehouse."""
    return lines.where("error IS NULL").select(
        "at",
        F.coalesce(header("host"), F.col("line.host")).alias("host"),
        header("file").alias("file"),
        level_name(F.col("line.level")).alias("level"),
        F.col("line.message").alias("message"),
        F.col("line.fields").alias("fields"),
        "topic",
        "partition",
        "offset",
        F.to_date("at").alias("day"),
    )


def outgoing(lines: DataFrame, options: Mapping[str, str]) -> DataFrame:
    """What goes to topics: errors as JSON under the name of their host, and dead letters."""
    letters = sinks.dead_letters(lines).withColumn("topic", F.lit(options["dead_letters"]))
    failed = stored(lines).where(F.col("level").isin("error", "fatal"))
    whole = F.to_json(F.struct("*"))
    # The warehouse has the rest of a line that is too long for a record.
    short = [F.substring(name, 1, LONGEST_ERROR_CHARACTERS).alias(name) for name in ("host", "file", "message")]
    shortened = F.to_json(F.struct("at", *short, "level", "topic", "partition", "offset", "day"))
    errors = failed.select(
        F.substring("host", 1, LONGEST_ERROR_CHARACTERS).cast("binary").alias("key"),
        F.when(F.octet_length(whole) <= sinks.LARGEST_BYTES, whole).otherwise(shortened).cast("binary").alias("value"),
        F.lit(None).cast("array<struct<key:string,value:binary>>").alias("headers"),
        F.lit(options["errors"]).alias("topic"),
    )
    return errors.unionByName(letters).where("topic <> ''")


def header(name: str) -> Column:
    found = F.filter("headers", lambda one: one["key"] == name)
    return fields.text_of(F.try_element_at(found, F.lit(1))["value"])


def level_name(level: Column) -> Column:
    """The many spellings of a level as one of debug, info, warn, error, fatal."""
    word = F.lower(level)
    return (
        F.when(word.isin("err", "error", "severe"), "error")
        .when(word.isin("fatal", "critical", "crit", "alert", "emerg", "panic"), "fatal")
        .when(word.isin("warn", "warning"), "warn")
        .when(word.isin("debug", "trace"), "debug")
        .otherwise("info")
    )


def line_struct(at: Column, host: Column, level: Column, message: Column, fields: Column) -> Column:
    return F.struct(
        at.alias("at"), host.alias("host"), level.alias("level"), message.alias("message"), fields.alias("fields")
    ).cast(f"struct<{LINE.replace(' ', ':').replace(',:', ',')}>")


def json_line(text: Column) -> Column:
    found = F.from_json(text, "map<string,string>")

    def first(*names: str) -> Column:
        return F.coalesce(*[F.try_element_at(found, F.lit(name)) for name in names])

    known = ("ts", "time", "timestamp", "level", "severity", "message", "msg", "host")
    others = F.map_filter(found, lambda name, _: ~name.isin(*known))
    at = fields.time_of(first("ts", "time", "timestamp"))
    line = line_struct(at, first("host"), first("level", "severity"), first("message", "msg"), others)
    return F.when(text.startswith("{") & found.isNotNull(), line)


def common_line(text: Column) -> Column:
    def group(index: int) -> Column:
        return F.regexp_extract(text, COMMON, index)

    status = group(5)
    level = F.when(status.startswith("5"), "error").when(status.startswith("4"), "warn").otherwise("info")
    names = {"client": 1, "user": 2, "status": 5, "size": 6, "referer": 7, "agent": 8}
    at = F.try_to_timestamp(group(3), F.lit("dd/MMM/yyyy:HH:mm:ss Z"))
    line = line_struct(at, F.lit(None), level, group(4), present({name: group(index) for name, index in names.items()}))
    return F.when(text.rlike(COMMON), line)


def syslog_line(text: Column) -> Column:
    def group(index: int) -> Column:
        return F.regexp_extract(text, SYSLOG, index)

    # A date as in RFC 3164 has no year: the last one in which it is not after the record, give or take a time zone.
    def in_year(year: Column) -> Column:
        dated = F.concat_ws(" ", year.cast("string"), F.regexp_replace(group(2), r"\s+", " "))
        return F.try_to_timestamp(dated, F.lit("yyyy MMM d HH:mm:ss"))

    year = F.year("timestamp")
    not_after = F.unix_micros("timestamp") + DAY_US
    dated = F.when(F.unix_micros(in_year(year)) <= not_after, in_year(year)).otherwise(in_year(year - 1))
    at = F.coalesce(fields.time_of(group(2)), dated)
    severity = F.try_element_at(
        F.array(*map(F.lit, ["emerg", "alert", "crit", "err", "warning", "notice", "info", "debug"])),
        (group(1).try_cast("int") % 8 + 1),
    )
    level = F.coalesce(severity, F.nullif(F.regexp_extract(group(6), LEVEL_IN_TEXT, 1), F.lit("")))
    line = line_struct(at, group(3), level, group(6), present({"program": group(4), "pid": group(5)}))
    return F.when(text.rlike(SYSLOG), line)


def pattern_line(text: Column, pattern: str) -> Column:
    """A regular expression of the user's, with groups named as Java names them: (?<name>...)."""
    try:
        index_of = dict(re.compile(re.sub(r"\(\?<(?=[A-Za-z])", "(?P<", pattern)).groupindex)
    except re.error as error:
        raise ValueError(f"option pattern is not a regular expression: {error}") from None
    if not index_of:
        raise ValueError("option pattern is auto, json, common, syslog, or has named groups: (?<level>\\w+)")
    groups = {name: F.regexp_extract(text, pattern, index) for name, index in index_of.items()}
    known = {name: groups.pop(name, F.lit(None)) for name in ("at", "host", "level", "message")}
    at = fields.time_of(known["at"])
    message = F.coalesce(known["message"], text)
    return F.when(text.rlike(pattern), line_struct(at, known["host"], known["level"], message, present(groups)))


def present(groups: Mapping[str, Column]) -> Column:
    """A map of the groups that matched something."""
    if not groups:
        return F.lit(None)
    pairs = F.create_map(*[part for name, value in groups.items() for part in (F.lit(name), value)])
    return F.map_filter(pairs, lambda _, value: ~value.isin("", "-"))


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
