"""A topic read as a queue by five share consumers, millrace beside Apache Kafka in one run.

make bench-queues ARGS="[--rounds N] [--records N] [--sides kafka,millrace]"

Both brokers run all the time, take turns round by round, and each round reads a topic of its own that was filled
before. The client is Kafka's ShareConsumerPerformance with five threads, each a member: it polls, and accepts what it
polled with the next poll. How soon a member gets its partitions is another matter, which stands in the table for
itself; and the first records are not counted, because the client's JVM compiles while they come: of a broker that lets
it wait for seconds before, it would be warm. Both sides leave flushing to the operating system (`flush.mode=os`, which
is Kafka's default), also of what becomes of the records. Exits with 1 when millrace is slower.
"""

from __future__ import annotations

import argparse
import re
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from benches.system import workloads
from benches.system.process import cpu_use
from benches.system.report import Comparison, describe_machine
from benches.system.workloads import CLIENT_FLAGS, QUIET
from support.group_configs import set_group_configs
from support.kafka_jars import SHARE_CONSUMER_PERFORMANCE, KafkaJars, KafkaUnavailable, kafka_jars
from support.servers import KafkaServer, MillraceServer, Server

CONSUMERS = 5
PARTITIONS = 3
RECORD_BYTES = 1000
BAR = 1.0
CLIENT_WARMUP = 1 / 3
"""Of the records of a run, those that are not counted."""
_TIME = "%Y-%m-%d %H:%M:%S:%f"
_LINE = re.compile(
    r"^(\S+ \S+), (\S+ \S+), [\d.]+, [\d.]+, [\d.]+, (\d+), \d+(?: for share consumer (\d+))?$", re.MULTILINE
)


@dataclass(frozen=True, slots=True)
class Seen:
    """What the five saw."""

    records_per_s: float
    until_first_s: float


def fill(jars: KafkaJars, server: Server, topic: str, records: int) -> None:
    admin = AdminClient({**QUIET, "bootstrap.servers": server.bootstrap})
    made = admin.create_topics([NewTopic(topic, num_partitions=PARTITIONS, replication_factor=1)])
    made[topic].result(timeout=30)
    workloads.produce(jars, server.bootstrap, topic, records, RECORD_BYTES)


def read(jars: KafkaJars, bootstrap: str, topic: str, group: str, records: int) -> Seen:
    """Five consumers of one group read the whole topic."""
    set_group_configs(bootstrap, group, {"share.auto.offset.reset": "earliest"})
    amount = ("--num-records", str(records), "--threads", str(CONSUMERS), "--timeout", "60000", "--hide-header")
    progress = ("--show-detailed-stats", "--reporting-interval", "100")
    options = ("--bootstrap-server", bootstrap, "--topic", topic, "--group", group, *amount, *progress)
    done = jars.run(SHARE_CONSUMER_PERFORMANCE, *options, flags=CLIENT_FLAGS, timeout_s=300)
    lines = _LINE.findall(done.stdout)
    totals = [line for line in lines if not line[3]]
    if done.status != 0 or not totals or int(totals[-1][2]) < records:
        raise RuntimeError(f"ShareConsumerPerformance ({done.status}):\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    began, ended = _time(totals[-1][0]), _time(totals[-1][1])
    progress_lines = sorted((_time(at), int(count), consumer) for _, at, count, consumer in lines if consumer)
    counts: dict[str, int] = {}
    for at, count, consumer in progress_lines:
        counts[consumer] = count  # so far, of this consumer
        left = records - sum(counts.values())
        if left <= records * (1 - CLIENT_WARMUP):
            first = progress_lines[0][0]
            return Seen(left / (ended - at).total_seconds(), (first - began).total_seconds())
    raise RuntimeError(f"ShareConsumerPerformance told too little of its progress:\n{done.stdout[-2000:]}")


def _time(text: str) -> datetime:
    return datetime.strptime(text, _TIME)  # noqa: DTZ007 - only differences count


def measure(warmup_rounds: int, records: int, servers: dict[str, Server], jars: KafkaJars, result: Comparison) -> None:
    console = Console(stderr=True, width=120, log_path=False)
    work = f"queue, {CONSUMERS} consumers, {PARTITIONS} partitions, {RECORD_BYTES:,} B"
    for number in range(1 - warmup_rounds, result.rounds + 1):
        for side in servers if number % 2 else reversed(servers):
            keep = number > 0
            server, topic = servers[side], f"queue-{'round' if keep else 'warm-up'}-{abs(number)}"
            fill(jars, server, topic, records)
            with cpu_use(server.pid) as cpu:
                seen = read(jars, server.bootstrap, topic, f"workers-of-{topic}", records)
            workloads.delete_topic(server.bootstrap, topic)
            cpu_per_gb = cpu.seconds / (records * RECORD_BYTES / 1e9)
            console.log(
                f"{f'round {number}' if keep else 'warm-up':8} {side:9} {seen.records_per_s:,.0f} records/s, "
                f"{cpu_per_gb:.2f} CPU s per GB, first record after {seen.until_first_s:.1f} s"
            )
            if keep:
                result.add(side, work, "throughput", "records/s", "higher", seen.records_per_s)
                result.add(side, work, "broker CPU", "s per GB", "lower", cpu_per_gb)
                result.add(side, work, "time to the first record", "s", "lower", seen.until_first_s)


def main() -> int:
    parser = argparse.ArgumentParser(description="A queue with five consumers, millrace beside Apache Kafka.")
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds on each side")
    parser.add_argument("--warmup-rounds", type=int, default=4, help="rounds before: a JVM is slow at first")
    parser.add_argument("--records", type=int, default=300_000, help="records of 1,000 B in a round")
    parser.add_argument("--sides", default="kafka,millrace", help="kafka, millrace or both, comma separated")
    parser.add_argument("--name", default="queues", help="the result goes to benches/results/NAME.json")
    given = parser.parse_args()
    try:
        jars = kafka_jars()
    except KafkaUnavailable as unavailable:
        print(f"the comparison needs Apache Kafka's jars: {unavailable}", file=sys.stderr)
        return 1
    result = Comparison("make bench-queues", describe_machine(), given.rounds)
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        for side in given.sides.split(","):
            server: Server = KafkaServer(jars) if side == "kafka" else MillraceServer({"flush.mode": "os"})
            servers[side] = stack.enter_context(server)
        measure(given.warmup_rounds, given.records, servers, jars, result)
    Console(width=120).print(result.table())
    for drift in result.drifting():
        print(f"still drifting: {drift}")
    path = Path(__file__).parents[1] / "results" / f"{given.name}.json"
    result.save(path)
    print(f"written to {path}")
    ratio = result.rows[0].ratio
    return 0 if ratio is None or ratio >= BAR else 1


if __name__ == "__main__":
    sys.exit(main())
