"""A record that cannot be processed becomes a dead letter: itself, with the reason and its origin in headers.

Not here: deciding which records are bad; a pipeline does that, in a column of its own. The key and the value of a dead
letter are the original bytes, so that it can be sent again once the cause is gone.

Headers, after those the record had: `millrace.error` (the reason), `millrace.topic`, `millrace.partition` and
`millrace.offset` (where it was read), all UTF-8 text.

Invariant: a letter fits a topic that takes records of one MiB, Kafka's default, or it would stop the pipeline that it
is there to keep going. What is longer is cut, which the header `millrace.cut` says: the whole is where it was read.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"
LARGEST_BYTES: Final = 1_000_000
"""A value of this size, with a key and headers of some kilobytes, is below Kafka's default limit of a record."""
_LARGEST_KEY_BYTES: Final = 16_384
_LARGEST_HEADERS_BYTES: Final = 16_384


def dead_letters(records: DataFrame, error: str = "error") -> DataFrame:
    """Key, value and headers of a dead letter for each of `records`, whose column `error` holds the reason.

    `records` has the columns of the source (key, value, topic, partition, offset, and headers if they were asked for).
    Rows whose reason is NULL are no dead letters and are left out.
    """
    none = sql.array().cast(HEADERS_TYPE)
    before, before_bytes = none, sql.lit(0)
    if "headers" in records.columns:
        before = sql.coalesce(sql.col("headers").cast(HEADERS_TYPE), none)
        before_bytes = sql.aggregate(before, sql.lit(0), lambda total, one: total + _size_of(one["key"], one["value"]))
    is_cut = (
        (_size_of(sql.col("value")) > LARGEST_BYTES)
        | (_size_of(sql.col("key")) > _LARGEST_KEY_BYTES)
        | (before_bytes > _LARGEST_HEADERS_BYTES)
    )
    was = sql.format_string(
        "key %d, value %d, headers %d bytes", _size_of(sql.col("key")), _size_of(sql.col("value")), before_bytes
    )
    headers = sql.concat(
        sql.when(before_bytes > _LARGEST_HEADERS_BYTES, none).otherwise(before),
        reason_headers(sql.col(error)),
        sql.array(
            _header("millrace.topic", sql.col("topic")),
            _header("millrace.partition", sql.col("partition").cast("string")),
            _header("millrace.offset", sql.col("offset").cast("string")),
        ).cast(HEADERS_TYPE),
        sql.when(is_cut, sql.array(_header("millrace.cut", was)).cast(HEADERS_TYPE)).otherwise(none),
    )
    return records.where(sql.col(error).isNotNull()).select(
        sql.substring("key", 1, _LARGEST_KEY_BYTES).alias("key"),
        sql.substring("value", 1, LARGEST_BYTES).alias("value"),
        headers.alias("headers"),
    )


def reason_headers(reason: Column) -> Column:
    """The header that says why, for letters that are no longer the record that was read."""
    return sql.array(_header("millrace.error", reason)).cast(HEADERS_TYPE)


def _header(name: str, value: Column) -> Column:
    return sql.struct(sql.lit(name).alias("key"), sql.encode(value, "UTF-8").alias("value"))


def _size_of(*parts: Column) -> Column:
    size = sql.lit(0)
    for part in parts:
        size = size + sql.coalesce(sql.octet_length(part), sql.lit(0))
    return size
