"""What exactly-once costs the sink: a stream copies a topic in micro-batches, with each delivery in turn.

`python -m benches.spark.deliveries [--bootstrap HOST:PORT]`, by default on a millrace of its own. One Spark session and
one broker for both, who goes first changes every round, and the first rounds are thrown away. What is timed are the
micro-batches alone: the start of a query happens once.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import count
from statistics import median

from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql import SparkSession

from benches.spark.queries import Load, generated
from millrace.spark.options import Delivery
from millrace.spark.session import prepare_environment, use_installed_pyspark
from support.servers import MillraceServer
from support.spark_sessions import local_session

PARTITIONS = 4
DELIVERIES = tuple(Delivery)


def copy(spark: SparkSession, bootstrap: str, load: Load, target: str, delivery: Delivery) -> float:
    """The seconds that the micro-batches took."""
    limit = str(-(-load.records // load.stream_batches))
    brokers = {"kafka.bootstrap.servers": bootstrap}
    source = spark.readStream.format("millrace").options(**brokers, subscribe=load.topic, startingOffsets="earliest")
    rows = source.option("maxOffsetsPerTrigger", limit).load().select("key", "value")
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as checkpoint:
        sink = rows.writeStream.format("millrace").options(**brokers, topic=target, delivery=delivery.value)
        query = sink.option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        query.awaitTermination()
        progress = query.recentProgress
    copied = sum(each.numInputRows for each in progress)
    if copied != load.records:
        raise RuntimeError(f"{copied:,} rows copied, expected {load.records:,}")
    return sum(each.durationMs["triggerExecution"] for each in progress) / 1000


def new_topics(bootstrap: str) -> Iterator[str]:
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    with tempfile.TemporaryDirectory(prefix="bench-") as unique:
        for number in count(1):
            topic = f"{unique.rpartition('/')[2]}-{number}"
            admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(timeout=30)
            yield topic


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.spark.deliveries", description=__doc__.splitlines()[0])
    parser.add_argument("--bootstrap", help="brokers to use; a millrace of its own by default")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each delivery")
    parser.add_argument("--warmup-rounds", type=int, default=2, help="rounds before them that are not counted")
    parser.add_argument("--records", type=int, default=1_000_000, help="how many are copied in each round")
    parser.add_argument("--value-bytes", type=int, default=1000)
    parser.add_argument("--batches", type=int, default=10, help="micro-batches in which they are copied")
    options = parser.parse_args()
    rates: dict[Delivery, list[float]] = {each: [] for each in DELIVERIES}
    prepare_environment()
    use_installed_pyspark()
    with ExitStack() as stack:
        bootstrap = options.bootstrap or stack.enter_context(MillraceServer()).bootstrap
        spark = stack.enter_context(local_session())
        topics = new_topics(bootstrap)
        load = Load(next(topics), options.records, options.value_bytes, options.batches)
        target = generated(spark, load).write.format("millrace").mode("append")
        target.option("kafka.bootstrap.servers", bootstrap).option("topic", load.topic).save()
        for number in range(1 - options.warmup_rounds, options.rounds + 1):
            for delivery in DELIVERIES if number % 2 else reversed(DELIVERIES):
                rate = load.records / copy(spark, bootstrap, load, next(topics), delivery)
                print(f"{f'round {number}' if number > 0 else 'warm-up':8} {delivery:14} {rate:11,.0f} records/s")
                if number > 0:
                    rates[delivery].append(rate)
    once, least = (median(rates[each]) for each in (Delivery.EXACTLY_ONCE, Delivery.AT_LEAST_ONCE))
    print(f"exactly-once {once:,.0f} records/s, {once / least:.2f} of at-least-once")
    return 0


if __name__ == "__main__":
    sys.exit(main())
