"""Where a stream's results go, as functions for `foreachBatch`.

    from millrace.spark import sinks

    stream.writeStream.foreachBatch(sinks.delta("/warehouse/logs", partition_by=["day"]))
    counts.writeStream.foreachBatch(sinks.sql("sqlite:///counts.db", "counts", keys=["page"])).outputMode("update")
    stream.writeStream.foreachBatch(sinks.fan_out(sinks.sql(...), sinks.topic(...)))

`delta` and `sql` write a batch exactly once however often Spark repeats it: each keeps, in the same transaction as the
rows, the number of the last batch of each query. `topic` may repeat the records of a batch that was repeated.
`dead_letters` makes the records of a dead-letter topic. Parquet needs nothing here: Spark's own file sink is exactly
once by its log of files.
"""

from millrace.spark.sinks.batch import BatchWriter
from millrace.spark.sinks.dead_letters import LARGEST_BYTES, dead_letters, reason_headers
from millrace.spark.sinks.delta import delta
from millrace.spark.sinks.fan_out import fan_out
from millrace.spark.sinks.sql import sql
from millrace.spark.sinks.topic import topic

__all__ = ["LARGEST_BYTES", "BatchWriter", "dead_letters", "delta", "fan_out", "reason_headers", "sql", "topic"]
