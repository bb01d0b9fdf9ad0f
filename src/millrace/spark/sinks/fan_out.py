"""One batch to several sinks, computed once."""

from __future__ import annotations

from pyspark.sql import DataFrame

from millrace.errors import ConfigError
from millrace.spark.sinks.batch import BatchWriter


def fan_out(*writers: BatchWriter) -> BatchWriter:
    """A batch writer that hands each batch to every one of `writers`, in order.

    When one fails, Spark repeats the whole batch: sinks that are exactly once skip it, the others see it again. So put
    those that may repeat last.
    """
    if not writers:
        raise ConfigError("fan_out() wants at least one sink")

    def write(batch: DataFrame, batch_id: int) -> None:
        batch.persist()
        try:
            for writer in writers:
                writer(batch, batch_id)
        finally:
            batch.unpersist()

    return write
