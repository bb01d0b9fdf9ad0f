"""What a batch of a stream is to a sink: a DataFrame, a number, and the query it belongs to."""

from __future__ import annotations

from collections.abc import Callable

from pyspark.sql import DataFrame

from millrace.errors import ConfigError
from millrace.spark.exactly_once import QUERY_ID_PROPERTY

BatchWriter = Callable[[DataFrame, int], None]


def query_id_of(batch: DataFrame) -> str:
    """The id that a query keeps over restarts; it lies in its checkpoint."""
    query_id = batch.sparkSession.sparkContext.getLocalProperty(QUERY_ID_PROPERTY)
    if not query_id:
        raise ConfigError("this DataFrame belongs to no streaming query; outside foreachBatch, pass query_id=...")
    return query_id
