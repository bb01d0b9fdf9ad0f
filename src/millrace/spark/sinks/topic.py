"""Batches to topics, through the sink `format("millrace")`, as often as its option `delivery` says.

For a stream whose only target is a topic, `writeStream.format("millrace")` needs no function. This one is for
`fan_out`, where a batch goes to a table as well.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame

from millrace.spark.options import STREAM_DELIVERY
from millrace.spark.sinks.batch import BatchWriter


def topic(
    connection: str | Mapping[str, str], name: str | None = None, *, columns: str | tuple[str, ...] = "*"
) -> BatchWriter:
    """A batch writer to topic `name`, or to the topic that the column `topic` names.

    `connection` is HOST:PORT,... or the options of the sink, such as `kafka.bootstrap.servers` and those for security.
    `columns` are SQL expressions that make the sink's columns, for batches that do not have them yet:
    `("page AS key", "to_json(struct(*)) AS value")`.

    With delivery=exactly-once a batch may be given once to this writer: the option `sinkName`, by which its writes are
    known, is made of the topic and the columns unless it is given.
    """
    chosen = (columns,) if isinstance(columns, str) else columns
    settings = {"kafka.bootstrap.servers": connection} if isinstance(connection, str) else dict(connection)
    if name is not None:
        settings["topic"] = name

    settings.setdefault("delivery", STREAM_DELIVERY)
    settings.setdefault("sinkName", f"{name or ''}({', '.join(chosen)})")

    def write(batch: DataFrame, _batch_id: int) -> None:
        batch.selectExpr(*chosen).write.format("millrace").options(**settings).mode("append").save()

    return write
