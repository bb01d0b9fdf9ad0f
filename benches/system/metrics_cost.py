"""What metrics cost: a scrape of a broker with many partitions, and CPU per gigabyte produced, beside a tree without.

    python -m benches.system.metrics_cost scrape [--partitions 2000] [--rounds 9]
    python -m benches.system.metrics_cost request --baseline OTHER/src [--flush-mode group]
    python -m benches.system.metrics_cost produce --baseline OTHER/src [--megabytes 400] [--rounds 7]

`scrape`: how long an answer of /metrics takes, how many lines and bytes it has, and for how long the loop is held at a
time, at default and with every detail of partitions; and what producing sees of it, one record at a time with acks=all,
while nobody asks and while somebody asks all the time.

`request`: both trees at once, each with a broker of its own, which gets the same Produce requests (a batch of 16 KB,
acks=all, `flush.mode=os` so that the disk has no part in it, five at a time) in short turns; CPU time per request by
the scheduler's own account. This is what tells small differences on a machine that does other things, too.

`produce`: both trees in turn, a broker process of their own each round; a producer of librdkafka with batches as the
Java client's default (16,384 bytes, acks=all), records of 1,000 bytes. Told is the broker's CPU time per gigabyte, the
median of the rounds. With `--scrape-every` the second tree is asked for its metrics so often meanwhile.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from benches.system.process import cpu_use
from benches.system.workloads import QUIET, create_topic
from millrace.wire.frame import RequestHeader, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages.produce import ProduceRequest
from support.batches import batch

RECORD = bytes(1000)
IN_FLIGHT = 5
HERE = Path(__file__).parents[2] / "src"


@contextmanager
def broker(tree: Path, *settings: str) -> Iterator[tuple[int, str, str]]:
    """A broker of a source tree: its process, where clients connect, and where its metrics are (empty: nowhere)."""
    words = [word for setting in settings for word in ("--set", setting)]
    with tempfile.TemporaryDirectory(prefix="metrics-cost-", ignore_cleanup_errors=True) as data:
        process = subprocess.Popen(
            [sys.executable, "-m", "millrace", "up", "--port", "0", "--data", data, *words],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(tree)},
        )
        try:
            assert process.stdout is not None
            bootstrap = process.stdout.readline().strip().removeprefix("ready bootstrap=")
            url = process.stdout.readline().strip().removeprefix("metrics=") if tree == HERE else ""
            yield process.pid, bootstrap, url
        finally:
            process.terminate()
            process.wait(60)


def produce(bootstrap: str, topic: str, megabytes: int) -> None:
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap, "acks": "all", "batch.size": 16384})
    for _ in range(megabytes * 1000):
        while True:
            try:
                producer.produce(topic, RECORD)
                break
            except BufferError:
                producer.poll(0.05)
    if producer.flush(120):
        raise RuntimeError("the broker did not take every record")


@contextmanager
def asked(url: str, every_s: float) -> Iterator[list[float]]:
    """Somebody asks for metrics all the time, meanwhile; how long each answer took."""
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(every_s):
            took.append(scraped(url)[0])

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield took
    finally:
        over.set()
        asking.join()


def scraped(url: str) -> tuple[float, bytes]:
    """How many milliseconds an answer takes, and the answer."""
    begun = time.perf_counter()
    with urlopen(url, timeout=60) as answer:
        text: bytes = answer.read()
    return (time.perf_counter() - begun) * 1000, text


def told(text: bytes, name: str) -> float:
    (line,) = (line for line in text.decode().splitlines() if line.startswith(f"{name} "))
    return float(line.rpartition(" ")[2])


def latencies_ms(bootstrap: str, topic: str, records: int) -> list[float]:
    """Of one record after the other."""
    producer = Producer({**QUIET, "bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0})
    took = []
    for _ in range(records):
        begun = time.perf_counter()
        producer.produce(topic, RECORD)
        producer.flush(30)
        took.append((time.perf_counter() - begun) * 1000)
    return took


def cost_of_scrapes(partitions: int, rounds: int, records: int) -> Table:
    table = Table("what", "median", "worst", "lines", "bytes", "loop held at most", title=f"{partitions} partitions")
    with broker(HERE) as (_, bootstrap, url):
        for number in range(0, partitions, 500):
            create_topic(bootstrap, f"many-{number}", {}, min(500, partitions - number))
        create_topic(bootstrap, "latency", {})
        latencies_ms(bootstrap, "latency", 200)
        for name, query in (("default", ""), ("detail=partitions", "?detail=partitions")):
            scraped(url + query)  # logs that nobody has used are measured once
            answers = [scraped(url + query) for _ in range(rounds)]
            took = [each for each, _ in answers]
            text = answers[-1][1]
            lines = text.count(b"\n")
            held_ms = max(told(each, "millrace_scrape_loop_held_seconds") for _, each in answers) * 1000
            table.add_row(
                f"scrape, {name}", f"{statistics.median(took):.1f} ms", f"{max(took):.1f} ms", f"{lines:,}",
                f"{len(text):,}", f"{held_ms:.2f} ms",
            )  # fmt: skip
        for name, every_s in (("nobody asks", None), ("detail=partitions every 0.2 s", 0.2), ("nobody asks", None)):
            if every_s is None:
                took = latencies_ms(bootstrap, "latency", records)
            else:
                with asked(f"{url}?detail=partitions", every_s):
                    took = latencies_ms(bootstrap, "latency", records)
            cuts = statistics.quantiles(took, n=100)
            table.add_row(f"produce, p50 and p99, {name}", f"{cuts[49]:.2f} ms", f"{cuts[98]:.2f} ms", "", "", "")
    return table


def run_ns(pid: int) -> int:
    """Time on a CPU of all threads of a process, in nanoseconds."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat"))


class Pipeliner:
    """Sends the same Produce request again and again, a few at a time."""

    def __init__(self, bootstrap: str, topic: str) -> None:
        host, _, port = bootstrap.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._answers = self._socket.makefile("rb")
        request = ProduceRequest(
            acks=-1,
            timeout_ms=30_000,
            topic_data=[
                ProduceRequest.TopicProduceData(
                    name=topic,
                    partition_data=[ProduceRequest.PartitionProduceData(index=0, records=batch(16, size=1000))],
                )
            ],
        )
        self._frame = encode_request(RequestHeader(ApiKey.PRODUCE, 9, 1, "bench"), request)

    def send(self, requests: int) -> None:
        sent = answered = 0
        while answered < requests:
            while sent < requests and sent - answered < IN_FLIGHT:
                self._socket.sendall(self._frame)
                sent += 1
            self._answers.read(int.from_bytes(self._answers.read(4)))
            answered += 1


def cost_of_requests(baseline: Path, requests: int, rounds: int, flush_mode: str) -> Table:
    used: dict[str, list[float]] = {"without": [], "with": []}
    flush = f"flush.mode={flush_mode}"
    with broker(baseline, flush) as without, broker(HERE, flush) as with_:
        trees = {"without": without, "with": with_}
        clients = {}
        for name, (_, bootstrap, _) in trees.items():
            create_topic(bootstrap, "cost", {"retention.bytes": str(64 << 20), "segment.bytes": str(64 << 20)})
            clients[name] = Pipeliner(bootstrap, "cost")
            clients[name].send(requests)
        for number in range(rounds):
            for name in trees if number % 2 == 0 else reversed(trees):
                pid = trees[name][0]
                before = run_ns(pid)
                clients[name].send(requests)
                used[name].append((run_ns(pid) - before) / requests / 1000)
    table = Table("broker CPU per Produce request", "median", "lower quartile", "least")
    cuts = {name: (*reversed(statistics.quantiles(values, n=4)[:2]), min(values)) for name, values in used.items()}
    for name, values in cuts.items():
        table.add_row(name, *(f"{each:.2f} us" for each in values))
    table.add_row("difference", *(f"{b / a - 1:+.2%}" for a, b in zip(cuts["without"], cuts["with"], strict=True)))
    return table


def cost_of_counting(baseline: Path, megabytes: int, rounds: int, scrape_every_s: float) -> Table:
    used: dict[str, list[float]] = {"without": [], "with": []}
    for number in range(rounds):
        order = [("without", baseline), ("with", HERE)]
        for name, tree in order if number % 2 == 0 else reversed(order):
            with broker(tree) as (pid, bootstrap, url):
                create_topic(bootstrap, "cost", {}, 4)
                produce(bootstrap, "cost", 20)
                with cpu_use(pid) as cpu:
                    if scrape_every_s and url:
                        with asked(url, scrape_every_s):
                            produce(bootstrap, "cost", megabytes)
                    else:
                        produce(bootstrap, "cost", megabytes)
                used[name].append(cpu.seconds / megabytes * 1000)
        last = {name: f"{values[-1]:.2f} s/GB" for name, values in used.items()}
        print(f"round {number + 1}: {last}", flush=True)
    without, with_ = (statistics.median(used[name]) for name in ("without", "with"))
    ratios = [b / a - 1 for a, b in zip(used["without"], used["with"], strict=True)]
    table = Table("broker CPU per GB produced", "median", "least", title="16,384-byte batches, acks=all")
    for name, values in used.items():
        table.add_row(name, f"{statistics.median(values):.3f} s", f"{min(values):.3f} s")
    table.add_row("difference", f"{with_ / without - 1:+.1%}", f"{min(used['with']) / min(used['without']) - 1:+.1%}")
    table.add_row("difference, median of the rounds", f"{statistics.median(ratios):+.1%}", "")
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benches.system.metrics_cost", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    scrape = commands.add_parser("scrape")
    scrape.add_argument("--partitions", type=int, default=2000)
    scrape.add_argument("--rounds", type=int, default=9)
    scrape.add_argument("--records", type=int, default=2000)
    requests = commands.add_parser("request")
    requests.add_argument("--baseline", type=Path, required=True, help="The `src` of a tree without metrics.")
    requests.add_argument("--requests", type=int, default=3000)
    requests.add_argument("--rounds", type=int, default=40)
    requests.add_argument(
        "--flush-mode", default="os", help="`group` is the default of brokers; the disk is part of it."
    )
    counting = commands.add_parser("produce")
    counting.add_argument("--baseline", type=Path, required=True, help="The `src` of a tree without metrics.")
    counting.add_argument("--megabytes", type=int, default=400)
    counting.add_argument("--rounds", type=int, default=7)
    counting.add_argument("--scrape-every", type=float, default=0.0, metavar="SECONDS")
    options = parser.parse_args()
    if options.command == "scrape":
        table = cost_of_scrapes(options.partitions, options.rounds, options.records)
    elif options.command == "request":
        table = cost_of_requests(options.baseline, options.requests, options.rounds, options.flush_mode)
    else:
        table = cost_of_counting(options.baseline, options.megabytes, options.rounds, options.scrape_every)
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
