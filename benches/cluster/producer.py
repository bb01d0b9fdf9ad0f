"""The producer of a turn: Kafka's ProducerPerformance, all runs in one JVM.

A fresh JVM per run would compile itself for seconds on the cores that the brokers need, as long as the run itself
lasts, and so tell more of the client than of the cluster.
"""

from __future__ import annotations

import re
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benches.system.workloads import CLIENT_FLAGS
from support.kafka_jars import KafkaJars

RECORD_BYTES = 1000
SOURCE = Path(__file__).with_name("RepeatedProducer.java")
RUN_TIMEOUT_S = 900.0
ENDED, FAILED = "run ended", "run failed"
STEADY = re.compile(r"^(\d+) steady state records sent, ([\d.]+) records/sec ", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Amount:
    """How many records a run sends."""

    counted: int
    before: int
    """Sent first and not counted."""

    @property
    def total(self) -> int:
        return self.before + self.counted

    @property
    def gigabytes(self) -> float:
        return self.total * RECORD_BYTES / 1e9


class Producer:
    """One JVM that produces when it is told to. A context manager."""

    def __init__(self, jars: KafkaJars, bootstrap: str) -> None:
        self._command = jars.command(str(SOURCE), flags=CLIENT_FLAGS)
        self._bootstrap = bootstrap
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        # Its standard input is a pipe from here: it ends with this process, however that ends.
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, bufsize=1
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def produce(self, topic: str, amount: Amount, settings: tuple[str, ...]) -> float:
        """Records per second with acks=all and these client settings."""
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise RuntimeError("the producer is not running")
        records = ("--num-records", str(amount.total), "--warmup-records", str(amount.before))
        load = ("--topic", topic, *records, "--record-size", str(RECORD_BYTES), "--throughput", "-1")
        # In one: of a repeated option the tool keeps the last.
        options = ("--bootstrap-server", self._bootstrap, *load, "--command-property", "acks=all", *settings)
        said: list[str] = []
        limit = threading.Timer(RUN_TIMEOUT_S, process.kill)
        limit.start()
        try:
            process.stdin.write("\t".join(options) + "\n")
            for line in process.stdout:
                said.append(line)
                if line.rstrip() in {ENDED, FAILED}:
                    break
        finally:
            limit.cancel()
        summaries = STEADY.findall("".join(said))
        if not said or said[-1].rstrip() != ENDED or not summaries or int(summaries[-1][0]) != amount.counted:
            raise RuntimeError(f"ProducerPerformance failed:\n{''.join(said)[-4000:]}")
        return float(summaries[-1][1])
