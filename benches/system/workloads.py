"""The work that is measured: each function drives one broker with a stock client and says what the client saw."""

from __future__ import annotations

import re
import statistics
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from benches.system import librdkafka
from support.kafka_jars import PRODUCER_PERFORMANCE, SERVER_FLAGS, KafkaJars

TRANSACTION_MS = 100
QUIET = {"log_level": 3}  # errors only: an admin client that closes early is no news
CLIENT_FLAGS = ("-Xmx256M", *SERVER_FLAGS)  # as Kafka's own script runs the tool
SUMMARY = re.compile(
    r"^(\d+) records sent, ([\d.]+) records/sec .* ([\d.]+) ms avg latency, .* (\d+) ms 99th", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Produced:
    """ProducerPerformance's own summary."""

    records_per_s: float
    average_ms: float
    p99_ms: float


def create_topic(bootstrap: str, topic: str, config: dict[str, str], partitions: int = 1) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})
    created = admin.create_topics([NewTopic(topic, num_partitions=partitions, replication_factor=1, config=config)])
    created[topic].result(timeout=30)


def delete_topic(bootstrap: str, topic: str) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": bootstrap})  # must outlive the call
    admin.delete_topics([topic])[topic].result(timeout=30)


def produce(
    jars: KafkaJars,
    bootstrap: str,
    topic: str,
    records: int,
    record_bytes: int,
    security: Mapping[str, str] | None = None,
) -> Produced:
    """Kafka's ProducerPerformance at client defaults with acks=all; `security` are settings of the Java client."""
    how = ["--command-property", "acks=all", *(f"{name}={value}" for name, value in (security or {}).items())]
    return _performance(jars, bootstrap, topic, records, record_bytes, tuple(how))


def produce_in_transactions(
    jars: KafkaJars, bootstrap: str, topic: str, records: int, record_bytes: int, producers: int
) -> float:
    """Records per second of so many ProducerPerformance at once, each committing every 100 ms.

    All records by the time of the slowest, as it tells that itself: the start of a JVM is not in it, and producers that
    did not run side by side all the time do not count twice.
    """

    def run(number: int) -> float:
        how = ("--transactional-id", f"{topic}-{number}", "--transaction-duration-ms", str(TRANSACTION_MS))
        return share / _performance(jars, bootstrap, topic, share, record_bytes, how).records_per_s

    share = records // producers
    with ThreadPoolExecutor(producers) as pool:
        return share * producers / max(pool.map(run, range(producers)))


def _performance(
    jars: KafkaJars, bootstrap: str, topic: str, records: int, record_bytes: int, how: tuple[str, ...]
) -> Produced:
    load = ("--topic", topic, "--num-records", str(records), "--record-size", str(record_bytes), "--throughput", "-1")
    options = ("--bootstrap-server", bootstrap, *load, *how)
    done = jars.run(PRODUCER_PERFORMANCE, *options, flags=CLIENT_FLAGS, timeout_s=900)
    summaries = SUMMARY.findall(done.stdout)
    if done.status != 0 or not summaries or int(summaries[-1][0]) != records:
        raise RuntimeError(f"ProducerPerformance failed ({done.status}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    _, rate, average, p99 = summaries[-1]
    return Produced(float(rate), float(average), float(p99))


def consume(bootstrap: str, topic: str, records: int, security: Mapping[str, str] | None = None) -> float:
    """Seconds from the first record to the last, by librdkafka itself; `security` are its settings."""
    return librdkafka.consume({**_consumer_settings(bootstrap), "log_level": "3", **(security or {})}, topic, records)


def consume_in_python(bootstrap: str, topic: str, records: int) -> float:
    """Seconds from the first record to the last, by librdkafka through confluent-kafka, in batches of 10,000."""
    consumer = Consumer({**QUIET, **_consumer_settings(bootstrap)})
    try:
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        seen, first, give_up = 0, 0.0, time.monotonic() + 300
        while seen < records:
            batch = consumer.consume(10_000, timeout=1.0)
            if batch and not seen:
                first = time.monotonic()
                skipped = len(batch)  # they came before the clock started
            seen += len(batch)
            failed = next((message.error() for message in batch if message.error()), None)
            if failed or time.monotonic() > give_up:
                raise RuntimeError(f"consumed {seen} of {records} records: {failed or 'too slow'}")
        return (time.monotonic() - first) * records / (records - skipped)
    finally:
        consumer.close()


def _consumer_settings(bootstrap: str) -> dict[str, str]:
    """At its default librdkafka stops fetching for a whole second whenever its queue is full, so that a broker which
    fills the queue sooner looks slower: for both sides that pause is a millisecond here."""
    return {
        "bootstrap.servers": bootstrap,
        "group.id": "bench",
        "enable.auto.commit": "false",
        "fetch.queue.backoff.ms": "1",
    }


def latency(bootstrap: str, topic: str, rate_per_s: int, seconds: float) -> tuple[float, float]:
    """End-to-end p50 and p99 in ms at a steady rate: librdkafka, acks=all, no linger; the first second is left out."""
    total = int(rate_per_s * seconds)
    delays_ms: list[float] = []
    ready = threading.Event()

    def receive() -> None:
        fast = {"fetch.wait.max.ms": 500, "enable.auto.commit": False, "auto.offset.reset": "earliest"}
        consumer = Consumer({**QUIET, "bootstrap.servers": bootstrap, "group.id": "bench", **fast})
        consumer.assign([TopicPartition(topic, 0, OFFSET_BEGINNING)])
        give_up = time.monotonic() + seconds + 30
        seen = 0
        while seen < total + 1 and time.monotonic() < give_up:
            message = consumer.poll(1.0)
            if message is None or message.error():
                continue
            now_ns = time.monotonic_ns()
            seen += 1
            if seen == 1:
                ready.set()  # the probe: the consumer is at the tail of the log
            else:
                delays_ms.append((now_ns - int(message.value() or b"0")) / 1e6)
        consumer.close()

    producer = Producer({**QUIET, "bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    receiver = threading.Thread(target=receive)
    receiver.start()
    producer.produce(topic, b"probe")
    producer.flush(30)
    if not ready.wait(30):
        raise RuntimeError("the latency probe did not come back within 30 s")
    start = time.monotonic()
    for number in range(total):
        wait = start + number / rate_per_s - time.monotonic()
        if wait > 0:
            time.sleep(wait)
        producer.produce(topic, str(time.monotonic_ns()).encode())
        producer.poll(0)
    producer.flush(30)
    receiver.join()
    if len(delays_ms) != total:
        raise RuntimeError(f"{len(delays_ms)} of {total} records came back")
    counted = delays_ms[rate_per_s:]
    centiles = statistics.quantiles(counted, n=100)
    return centiles[49], centiles[98]
