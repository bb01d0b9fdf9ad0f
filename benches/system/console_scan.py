"""Scans of ten million records, against their bars: `PYTHONPATH=tests python -m benches.system.console_scan`.

    resident memory of the process that scans    < 300 MB
    how late its event loop is meanwhile         < 100 ms at the 99th percentile

The records are small JSON values in batches of a thousand, of which a few are looked for in different ways. A scan runs
in a thread of a process of its own beside an event loop that should turn every 5 ms, as the console's web server would.
At the end the same is asked of a console itself, by the page and the events that a browser would ask for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import resource
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

from rich.console import Console
from rich.table import Table

from benches.system import workloads
from millrace.client.cluster import ClusterClient
from millrace.client.producing import BatchProducer
from millrace.client.settings import ClientSettings
from millrace.console.records.plan import Limits, ScanRequest, Start, StartKind
from millrace.console.records.scan import Scan
from millrace.model import TopicPartition
from millrace.records.decode import Record
from millrace.records.encode import encode_batch
from support.servers import MillraceServer

TOPIC: Final = "scanned"
PARTITIONS: Final = 4
BATCH: Final = 1_000
RARE_EVERY: Final = 1_000
"""Batches between two that hold the record that is looked for."""
MEMORY_BAR_MB: Final = 300.0
LATE_BAR_MS: Final = 100.0
TICK_S: Final = 0.005
FILTERS: Final = {
    "bytes": 'value contains "needle"',
    "field of few": 'value.rare == "needle"',
    "field of all": "value.amount > 999999",
    "expression": 'value matches "ne+dle"',
}


def settings_for(bootstrap: str) -> ClientSettings:
    return ClientSettings.from_properties({"bootstrap.servers": bootstrap})


def fill(bootstrap: str, records: int) -> None:
    """The same two batches over and over: to make ten million different records would take longer than to read them."""
    workloads.create_topic(bootstrap, TOPIC, {}, PARTITIONS)
    now_ms = time.time_ns() // 1_000_000
    usual = encode_batch([_record(number, now_ms) for number in range(BATCH)])
    rare = encode_batch(
        [*(_record(number, now_ms) for number in range(BATCH - 1)), _record(BATCH - 1, now_ms, rare=True)]
    )
    with ClusterClient(settings_for(bootstrap)) as client:
        producer = BatchProducer(client, idempotent=False)
        for number in range(records // BATCH):
            batch = rare if number % RARE_EVERY == RARE_EVERY - 1 else usual
            producer.add(TopicPartition(TOPIC, number % PARTITIONS), batch, BATCH)
        producer.flush()


def _record(number: int, now_ms: int, *, rare: bool = False) -> Record:
    value: dict[str, Any] = {"id": number, "user": f"user-{number % 97}", "amount": number * 7 % 1_000_000}
    if rare:
        value |= {"rare": "needle", "amount": 1_000_000}
    return Record(number, now_ms, b"k%d" % number, json.dumps(value, separators=(",", ":")).encode())


async def scan(bootstrap: str, text: str) -> dict[str, Any]:
    """Scan in a thread, and see how late this loop is meanwhile."""
    limits = Limits(matches=None, records=None, seconds=None)
    one = Scan(settings_for(bootstrap), ScanRequest(TOPIC, Start(StartKind.BEGINNING), filter_text=text, limits=limits))
    thread = threading.Thread(target=one.run)
    late_ms: list[float] = []
    thread.start()
    while thread.is_alive():
        due = time.monotonic() + TICK_S
        await asyncio.sleep(TICK_S)
        late_ms.append((time.monotonic() - due) * 1000)
    late_ms.sort()
    return {
        "state": one.progress.state,
        "records": one.progress.records,
        "matched": one.progress.matched,
        "seconds": one.progress.elapsed_s,
        "cpu_seconds": time.process_time(),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
        "late_p99_ms": late_ms[len(late_ms) * 99 // 100],
        "late_max_ms": late_ms[-1],
    }


def measured(bootstrap: str, text: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benches.system.console_scan", "--scan", bootstrap, text]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    outcome: dict[str, Any] = json.loads(done.stdout)
    return outcome


@dataclass(frozen=True, slots=True)
class Visit:
    """What somebody saw who scanned through the console."""

    told: int
    """How often the page was told how far it is."""
    last: dict[str, Any]
    seconds: float
    peak_mb: float
    slowest_page_ms: float
    """Of the list of topics, opened now and then meanwhile."""


def through_console(bootstrap: str, text: str) -> Visit:
    command = [sys.executable, "-m", "millrace", "console", "--bootstrap", bootstrap, "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = next(found[0] for line in process.stdout if (found := re.search(r"http://\S+", line)))
            return _visit(address, text, process.pid)
        finally:
            process.terminate()


def _visit(address: str, text: str, pid: int) -> Visit:
    _get(f"{address}/topics")
    began = time.monotonic()
    page = _get(f"{address}/topics/{TOPIC}/records?{urlencode({'start': 'beginning', 'filter': text})}")
    events = re.search(r'data-scan="([^"]+)"', page)
    if events is None:
        raise RuntimeError("the scan was over before the page was there: take more records")
    over = threading.Event()
    pages_ms = [0.0]

    def look_around() -> None:
        while not over.wait(0.5):
            at = time.monotonic()
            _get(f"{address}/topics")
            pages_ms.append((time.monotonic() - at) * 1000)

    looking = threading.Thread(target=look_around)
    looking.start()
    told, last = 0, {}
    with urlopen(address + unescape(events[1])) as stream:
        for line in stream:
            if line.startswith(b"data: {") and (values := json.loads(line[6:])):
                told, last = told + 1, values
    over.set()
    looking.join()
    status = Path(f"/proc/{pid}/status").read_text()
    peak_kib = int(re.findall(r"VmHWM:\s+(\d+)", status)[0])
    return Visit(told, last, time.monotonic() - began, peak_kib * 1024 / 1e6, max(pages_ms))


def _get(address: str) -> str:
    with urlopen(address) as answer:
        text: str = answer.read().decode()
        return text


def main() -> int:
    parser = argparse.ArgumentParser(description="A scan of many records against its bars.")
    parser.add_argument("--records", type=int, default=10_000_000)
    parser.add_argument("--only", choices=list(FILTERS))
    parser.add_argument("--scan", nargs=2, metavar=("BOOTSTRAP", "FILTER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.scan:
        print(json.dumps(asyncio.run(scan(*options.scan))))
        return 0
    table = Table("filter", "records", "matches", "records/s", "CPU s", "peak MB", "loop late p99 ms", "max ms")
    met = True
    with MillraceServer() as server:
        fill(server.bootstrap, options.records)
        for name, text in FILTERS.items():
            if options.only in (None, name):
                outcome = measured(server.bootstrap, text)
                rate = outcome["records"] / outcome["seconds"]
                late = (f"{outcome['late_p99_ms']:.1f}", f"{outcome['late_max_ms']:.1f}")
                table.add_row(
                    name,
                    f"{outcome['records']:,}",
                    f"{outcome['matched']:,}",
                    f"{rate:,.0f}",
                    f"{outcome['cpu_seconds']:.1f}",
                    f"{outcome['peak_mb']:.0f}",
                    *late,
                )
                met = met and outcome["peak_mb"] < MEMORY_BAR_MB and outcome["late_p99_ms"] < LATE_BAR_MS
                met = met and outcome["state"] == "done" and outcome["records"] == options.records
        visit = through_console(server.bootstrap, FILTERS["field of all"])
    Console().print(table)
    print(
        f"through the console ({FILTERS['field of all']}): {visit.last['records']} records in {visit.seconds:.0f} s, "
        f"{visit.last['matched']} matches, told {visit.told} times how far it is, peak {visit.peak_mb:.0f} MB, "
        f"the slowest of other pages {visit.slowest_page_ms:.0f} ms"
    )
    met = met and visit.peak_mb < MEMORY_BAR_MB and visit.last["state"] == "done"
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
