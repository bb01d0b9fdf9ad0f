"""A record that cannot be processed becomes a dead letter: itself, with the reason and its origin in headers.

Not here: deciding which records are bad; a pipeline does that, in a column of its own. The key and the value of a dead
letter are the original bytes, so that it can be sent again once the cause is gone.

Headers, after those the record had: `millrace.error` (the reason), `millrace.topic`, `millrace.partition` and
`millrace.offset` (where it was read), all UTF-8 text.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as sql

HEADERS_TYPE: Final = "array<struct<key:string,value:binary>>"


def dead_letters(records: DataFrame, error: str = "error") -> DataFrame:
    """Key, value and headers of a dead letter for each of `records`, whose column `error` holds the reason.

    `records` has the columns of the source (key, value, topic, partition, offset, and headers if they were asked for).
    Rows whose reason is NULL are no dead letters and are left out.
    """
    added = sql.array(
        _header("millrace.error", sql.col(error)),
        _header("millrace.topic", sql.col("topic")),
        _header("millrace.partition", sql.col("partition").cast("string")),
        _header("millrace.offset", sql.col("offset").cast("string")),
    ).cast(HEADERS_TYPE)
    headers = added
    if "headers" in records.columns:
        none = sql.array().cast(HEADERS_TYPE)
        headers = sql.concat(sql.coalesce(sql.col("headers").cast(HEADERS_TYPE), none), added)
    return records.where(sql.col(error).isNotNull()).select("key", "value", headers.alias("headers"))


def _header(name: str, value: Column) -> Column:
    return sql.struct(sql.lit(name).alias("key"), sql.encode(value, "UTF-8").alias("value"))
