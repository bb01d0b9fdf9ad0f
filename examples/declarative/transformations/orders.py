"""A streaming table fed by the topic `web-orders`, and a sink that is the topic `large-web-orders`.

MILLRACE_BOOTSTRAP says where the brokers are.
"""

from __future__ import annotations

import os

from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

BROKERS = {"kafka.bootstrap.servers": os.environ.get("MILLRACE_BOOTSTRAP", "localhost:9092")}


@dp.table
def orders() -> DataFrame:
    """Every order, parsed."""
    spark = SparkSession.active()
    return (
        spark.readStream.format("millrace")
        .options(**BROKERS)
        .option("subscribe", "web-orders")
        .option("startingOffsets", "earliest")
        .load()
        .select(F.from_json(F.col("value").cast("string"), "id string, amount double").alias("order"), "timestamp")
        .select("order.*", "timestamp")
    )


dp.create_sink("large_orders", "millrace", {**BROKERS, "topic": "large-web-orders"})


@dp.append_flow(target="large_orders")
def large() -> DataFrame:
    """Those of at least 100, by id."""
    spark = SparkSession.active()
    return (
        spark.readStream.table("orders")
        .where("amount >= 100")
        .select(F.col("id").alias("key"), F.to_json(F.struct("id", "amount")).alias("value"))
    )
