"""Start-up time and memory of `millrace up` against their bars: `make bench-check`. Exits with 1 when one is missed.

    start of the process to the first answered request    < 0.6 s    median of five starts, the first not counted
    resident memory of an idle broker                     < 70 MB
    resident memory after a million records of 1,000 B    < 150 MB   produced and consumed by librdkafka

The first start is left out because it compiles the sources; what an installed package does on every start is meant.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import dataclass

from confluent_kafka import Producer
from rich.console import Console
from rich.table import Table

from benches.system import workloads
from benches.system.process import resident_mb
from support.servers import MillraceServer


@dataclass(frozen=True, slots=True)
class Bar:
    """A measured value and what it must stay below."""

    what: str
    value: float
    limit: float
    unit: str

    @property
    def met(self) -> bool:
        return self.value < self.limit


def start_seconds(starts: int) -> float:
    seconds = []
    for _ in range(starts + 1):
        with MillraceServer() as server:
            seconds.append(server.start_s)
    return statistics.median(seconds[1:])


def fill(bootstrap: str, topic: str, records: int) -> None:
    """Produce and consume `records` of 1,000 bytes at librdkafka's defaults."""
    workloads.create_topic(bootstrap, topic, {})
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all"})
    value = bytes(1000)
    for _ in range(records):
        while True:
            try:
                producer.produce(topic, value)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(120):
        raise RuntimeError("the broker did not take every record")
    workloads.consume(bootstrap, topic, records)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="make bench-check", description="Start-up time and memory against their bars."
    )
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--records", type=int, default=1_000_000)
    options = parser.parse_args()
    bars = [Bar("start to first answered request", start_seconds(options.starts), 0.6, "s")]
    with MillraceServer() as server:
        bars.append(Bar("resident memory, idle", resident_mb(server.pid), 70, "MB"))
        fill(server.bootstrap, "footprint", options.records)
        bars.append(Bar(f"resident memory after {options.records:,} records", resident_mb(server.pid), 150, "MB"))
    table = Table("what", "measured", "bar", "")
    for bar in bars:
        met = "[green]met[/]" if bar.met else "[red]missed[/]"
        table.add_row(bar.what, f"{bar.value:.2f} {bar.unit}", f"< {bar.limit:g} {bar.unit}", met)
    Console().print(table)
    return 0 if all(bar.met for bar in bars) else 1


if __name__ == "__main__":
    sys.exit(main())
