"""Rounds of the exactly-once Spark sink: a stream copies a topic while driver, executors and brokers are killed.

The driver is a process (`spark_driver`), its executors are those of a standalone cluster, the brokers are three. Who is
killed, in which micro-batch and how far into it, is a plan that follows from the seed; the moment is as exact as a busy
machine lets it be. Whoever watches over a driver starts it again, from its checkpoint, whenever it has ended before its
time: killed, or because it has given up. A round is green when who reads committed records finds every row once, no
last stable offset stays behind, and the replicas are the same.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Final

import psutil
from confluent_kafka import Producer, TopicPartition

from cluster.faults import Row, Variant
from cluster.rounds import (
    PARTITIONS,
    TROUBLE,
    Clients,
    Fault,
    Result,
    Scale,
    Stage,
    check_metadata,
    create_topic,
    differences,
)
from cluster.transaction_member import ends_of, read_to_the_end
from cluster.transaction_rounds import SETTINGS, TRANSACTIONS_TOPIC
from cluster.workload import CLIENT
from millrace.spark.options import DEFAULT_DECISIONS_TOPIC
from millrace.spark.session import root_cause
from support.checker import Anomaly, Report
from support.cluster_processes import ClusterProcesses, wait_for
from support.maven import ROOT
from support.servers import ServerFailed
from support.spark_cluster import SparkCluster

_TRANSACTION_TIMEOUT_MS: Final = 300_000
"""More than the start of a driver takes on a machine with other work; who reads waits so long at most for what a driver
has left open."""
_STABLE_WITHIN_S: Final = 30.0
_HEALS_WITHIN_S: Final = 60.0
_BATCH_WITHIN_S: Final = 480.0
_READ_WITHIN_S: Final = 180.0
_TASK_S: Final = 1.0
"""Two tasks run at a time, of as many as the input has partitions. Without this the stream would be over too soon."""
_FIRST_BATCH_S: Final = 1.0
"""How long a batch takes, as far as nobody knows."""
_LONGEST_BATCH_S: Final = 6.0
_PAUSE_S: Final = 0.02
_TORN: Final = "BatchTorn"


@dataclass(frozen=True, slots=True)
class SparkScale(Scale):
    """How large a round is: `acked` rows, `bounces` kills."""

    batch_rows: int = 10_000


SHORT_SPARK: Final = SparkScale(
    acked=20_000, bounces=3, rate=0, session_timeout_ms=3000, outage_s=5, producers=0, batch_rows=1_000
)
FULL_SPARK: Final = SparkScale(acked=500_000, bounces=20, rate=0, session_timeout_ms=6000, outage_s=30, producers=0)


# --- the stream -------------------------------------------------------------------------------------------------------


class SparkJob(Clients):
    """The driver, as often as it is started, and what its checkpoint says of it."""

    def __init__(
        self,
        client: Mapping[str, str],
        source: str,
        topic: str,
        scale: SparkScale,
        directory: Path,
        spark: SparkCluster,
    ) -> None:
        super().__init__(client, topic, scale, directory, consumers=0)  # nobody: Spark reads and writes
        self.starts = 0
        self.gave_up: list[str] = []
        """The reasons of drivers that ended by themselves before their time."""
        self._batch_rows = scale.batch_rows
        self._source = source
        self._spark = spark
        self._driver = self._start_driver()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill_driver(everything=True)
        super().__exit__(kind, error, trace)

    @property
    def acked(self) -> int:
        """Rows in batches that Spark is done with."""
        return len(self._numbers("commits")) * self._batch_rows

    @property
    def batches(self) -> int:
        return len(self._numbers("commits"))

    @property
    def last_begun(self) -> int:
        return max(self._numbers("offsets"), default=-1)

    @property
    def in_batch(self) -> bool:
        return len(self._numbers("offsets")) > self.batches

    def usual_batch_s(self) -> float:
        """How long the last batches took, without what the first one after a start does only once."""
        begun, ended = self._times("offsets"), self._times("commits")
        took = [ended[number] - begun[number] for number in sorted(ended)[-5:] if number in begun]
        return min(median(took), _LONGEST_BATCH_S) if took else _FIRST_BATCH_S

    def longest_pause_s(self) -> float:
        """Between the ends of two batches."""
        return max((late - early for early, late in pairwise(sorted(self._times("commits").values()))), default=0.0)

    def look_after(self) -> bool:
        """Start the driver again if it has ended before its time; whether it is done."""
        status = self._driver.poll()
        if status is None:
            return False
        if status == 0:
            return True
        text = self._error_path().read_text(errors="replace")
        self.gave_up.append(f"batch {self.last_begun}: {root_cause(RuntimeError(text))}")
        self._driver = self._start_driver()
        return False

    def wait_begun(self, batch: int) -> bool:
        """Wait until a batch has begun; False when the stream is over before."""
        return self._wait(lambda: self.last_begun >= batch)

    def wait_done(self) -> None:
        self._wait(lambda: False)

    def _wait(self, reached: Callable[[], bool]) -> bool:
        """Wait for as long as there is progress; False when the stream is over."""
        batches, deadline = self.batches, time.monotonic() + _BATCH_WITHIN_S
        while not self.look_after():
            if reached():
                return True
            if self.batches > batches:
                batches, deadline = self.batches, time.monotonic() + _BATCH_WITHIN_S
            if time.monotonic() > deadline:
                raise ServerFailed(
                    f"no batch ended for {_BATCH_WITHIN_S:.0f} s after {batches}:\n{self.errors()[-4000:]}"
                )
            time.sleep(_PAUSE_S)
        return False

    def kill_driver(self, *, everything: bool) -> None:
        """kill -9 of its Python and its JVM; those of its own Python processes that it leaves go on for a moment."""
        try:
            python = psutil.Process(self._driver.pid)
            kill_all([python, *python.children(recursive=everything)])
        except psutil.NoSuchProcess:
            pass
        self._driver.wait()

    def restart_driver(self) -> None:
        self._driver = self._start_driver()

    def _start_driver(self) -> subprocess.Popen[bytes]:
        self.starts += 1
        names = {"--master": self._spark.url, "--client": str(self.client_path), "--input": self._source}
        names |= {"--output": self._topic, "--home": str(self.directory), "--batch-rows": str(self._batch_rows)}
        names |= {"--timeout-ms": str(_TRANSACTION_TIMEOUT_MS), "--task-s": str(_TASK_S)}
        paths = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        with self._error_path().open("wb") as errors:
            return subprocess.Popen(
                [sys.executable, "-m", "cluster.spark_driver", *(word for pair in names.items() for word in pair)],
                env={**os.environ, "PYTHONPATH": paths, "PYSPARK_PYTHON": str(self._spark.python)},
                cwd=self.directory,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                start_new_session=True,
            )

    def _error_path(self) -> Path:
        return self.directory / f"driver-{self.starts:03}.err"

    def _times(self, kind: str) -> dict[int, float]:
        """When each batch was noted in the checkpoint, as begun ('offsets') or as ended ('commits')."""
        found = (self.directory / "checkpoint" / kind).glob("[0-9]*")
        return {int(path.name): path.stat().st_mtime for path in found if path.name.isdigit()}

    def _numbers(self, kind: str) -> list[int]:
        return list(self._times(kind))


def kill_all(processes: Iterable[psutil.Process]) -> int:
    """kill -9 of those that are still there; how many."""
    killed = 0
    for process in processes:
        try:
            process.kill()
            killed += 1
        except psutil.NoSuchProcess:
            continue
    return killed


# --- what is killed ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class SparkStage(Stage):
    """What is killed."""

    job: SparkJob = field(kw_only=True)
    spark: SparkCluster = field(kw_only=True)


def kill_driver(stage: SparkStage) -> str:
    """What it leaves may still decide for its last batch, when its successor is at work."""
    stage.job.kill_driver(everything=False)
    stage.job.restart_driver()
    return "Python and JVM"


def kill_driver_and_its_processes(stage: SparkStage) -> str:
    stage.job.kill_driver(everything=True)
    stage.job.restart_driver()
    return "Python, JVM and what they have started"


def kill_executor(stage: SparkStage) -> str:
    executors = stage.spark.executors()
    if not executors:
        return "there is none"
    chosen = stage.rng.choice(executors)
    return f"JVM {chosen.pid}" if kill_all([chosen]) else "it was gone"


def kill_python_of_executor(stage: SparkStage) -> str:
    """The processes that run the tasks; the executor starts others."""
    executors = stage.spark.executors()
    if not executors:
        return "there is none"
    chosen = stage.rng.choice(executors)
    return f"{kill_all(chosen.children(recursive=True))} processes of JVM {chosen.pid}"


def kill_leader_of(topic: str | None = None) -> Callable[[SparkStage], str]:
    """Of one of its partitions; of the output, if no other topic is meant. It comes back after a while."""

    def kill(stage: SparkStage) -> str:
        named = topic or stage.topic
        leader = stage.cluster.leader(named, 0)
        stage.cluster.kill(leader)
        away_s = stage.rng.uniform(0, 1.5 * stage.scale.session_s)
        time.sleep(away_s)
        stage.cluster.start_brokers([leader])
        stage.cluster.wait_whole(stage.topic, _HEALS_WITHIN_S)
        return f"broker {leader}, leader of {named}, away for {away_s:.1f} s"

    return kill


KINDS: Final = (
    {"driver": kill_driver, "driver and all of its processes": kill_driver_and_its_processes},
    {"executor": kill_executor, "Python of an executor": kill_python_of_executor},
    {
        "leader of the output": kill_leader_of(),
        "coordinator of the transactions": kill_leader_of(TRANSACTIONS_TOPIC),
        "leader of the decisions": kill_leader_of(DEFAULT_DECISIONS_TOPIC),
    },
)


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill of a plan."""

    batch: int
    into: float
    """How far into the batch, where 1 is the time that the batches before it took."""
    victim: str

    def __str__(self) -> str:
        return f"{self.batch}+{self.into:.2f} {self.victim}"


def plan_kills(scale: SparkScale, rng: random.Random) -> list[Kill]:
    """Driver, executor and broker equally often, in any order, in any batches but the last ones.

    The stream goes on while a broker is away, so that a kill may come later than planned.
    """
    victims = []
    for number in range(scale.bounces):
        names = list(KINDS[number % len(KINDS)])
        victims.append(names[number // len(KINDS) % len(names)])
    rng.shuffle(victims)
    batches = sorted(rng.sample(range(scale.acked // scale.batch_rows * 4 // 5), scale.bounces))
    return [Kill(batch, rng.uniform(0, 1.2), victim) for batch, victim in zip(batches, victims, strict=True)]


def kill_by_plan(stage: SparkStage) -> None:
    assert isinstance(stage.scale, SparkScale)
    actions = {name: action for kinds in KINDS for name, action in kinds.items()}
    for kill in plan_kills(stage.scale, stage.rng):
        if not stage.job.wait_begun(kill.batch):
            raise ServerFailed(f"the stream was over before {kill}")
        time.sleep(kill.into * stage.job.usual_batch_s())
        place = f"{'in' if stage.job.in_batch else 'after'} batch {stage.job.last_begun}"
        stage.mark(f"{kill.victim}, {place}: {actions[kill.victim](stage)}")


# --- a round ----------------------------------------------------------------------------------------------------------


def run_spark_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    """One round on a running cluster, with topics of its own; everything that is wrong is in the result."""
    assert isinstance(scale, SparkScale)
    result = Result()
    result.notes.append(f"seed {seed}: {', '.join(map(str, plan_kills(scale, random.Random(seed))))}")
    started = time.monotonic()
    topic = f"round-{uuid.uuid4().hex[:8]}"
    source = f"{topic}-2"
    directory = cluster.home / "history" / topic
    directory.mkdir(parents=True)
    try:
        for each in (topic, source):
            create_topic(cluster, each)
        fill(cluster.client_settings, source, scale.acked)
        with (
            SparkCluster(workers=2) as spark,
            SparkJob(cluster.client_settings, source, topic, scale, directory, spark) as job,
        ):
            stage = SparkStage(cluster, job, topic, scale, random.Random(seed), result.marks, job=job, spark=spark)
            result.failures += _disturb(stage, fault, result)
        _judge(stage, result)
    except TROUBLE as error:
        result.failures.append(f"{type(error).__name__}: {error}")
    result.failures += [f"{broker} died by itself" for broker in cluster.brokers.values() if broker.died()]
    result.seconds = time.monotonic() - started
    return result


def fill(client: Mapping[str, str], topic: str, rows: int) -> None:
    """The numbers from 0 on."""
    producer = Producer({**client, **CLIENT, "linger.ms": 50, "acks": "all"})
    for number in range(rows):
        producer.produce(topic, str(number).encode(), partition=number % PARTITIONS)
        if number % 10_000 == 0:
            producer.flush()
    if producer.flush(60):
        raise ServerFailed(f"the {rows} rows of {topic} were not written")


def _disturb(stage: SparkStage, fault: Fault, result: Result) -> list[str]:
    """Kills, healing, and the rest of the stream; what went wrong."""
    problems, job = [], stage.job
    try:
        fault(stage)
        stage.mark("healing")
        stage.cluster.restore()
        result.whole_s = stage.cluster.wait_whole(stage.topic, stage.scale.heals_within_s)
        job.wait_done()
    except TROUBLE as error:
        problems.append(f"{type(error).__name__}: {error}")
    problems += [reason for reason in job.gave_up if _TORN in reason]
    inside = sum(", in batch" in mark for mark in stage.marks)
    result.notes.append(
        f"{job.batches} batches, {inside} of {stage.scale.bounces} kills within one; {job.starts} drivers, of which "
        f"{len(job.gave_up)} gave up"
    )
    result.notes += [f"gave up in {reason}" for reason in job.gave_up]
    result.report.longest_pause_s = job.longest_pause_s()
    return problems


def _judge(stage: SparkStage, result: Result) -> None:
    """Wait until everything is decided, read it, and look at it."""
    client, rows = stage.cluster.client_settings, stage.scale.acked
    places = [TopicPartition(stage.topic, index, 0) for index in range(PARTITIONS)]
    started = time.monotonic()

    def stable() -> list[int] | None:
        ends = ends_of(client, places)
        return ends if ends_of(client, places, "read_committed") == ends else None

    try:
        limit_s = _TRANSACTION_TIMEOUT_MS / 1000 + _STABLE_WITHIN_S
        wait_for(stable, limit_s, "a last stable offset is not at the high watermark", pause_s=0.5)
    except ServerFailed as error:
        result.report.note(Anomaly.HANGING, str(error))
    stable_s = time.monotonic() - started
    committed = read_to_the_end(client, places, _READ_WITHIN_S)
    result.report.acked = rows
    result.report.final = len(committed)
    check_rows(Counter(int(message.value() or b"-1") for message in committed), rows, result.report)
    everything = read_to_the_end(client, places, _READ_WITHIN_S, isolation="read_uncommitted")
    written = Counter(int(message.value() or b"-1") for message in everything)
    result.notes.append(
        f"committed: {len(committed):,} records of {rows:,} rows; written: {len(everything):,}, "
        f"{sum(count > 1 for count in written.values()):,} rows more than once; all decided after {stable_s:.1f} s"
    )
    check_metadata(stage, result)
    for index, end in enumerate(ends_of(client, places)):
        result.failures += differences(stage, index, end)


def check_rows(found: Counter[int], rows: int, report: Report) -> None:
    """Every number below `rows` once, and nothing else."""
    for number in range(rows):
        if number not in found:
            report.note(Anomaly.UNSEEN, f"row {number}")
    for number, count in found.items():
        if not 0 <= number < rows:
            report.note(Anomaly.PHANTOM, f"row {number}")
        elif count > 1:
            report.note(Anomaly.DUPLICATE, f"row {number}, {count} times")


def _of_spark(fault: Callable[[SparkStage], None]) -> Fault:
    """A fault of a stream, as one of a stage: these rounds have no other."""

    def checked(stage: Stage) -> None:
        assert isinstance(stage, SparkStage)
        fault(stage)

    return checked


SPARK_ROWS: Final = (
    Row(
        "spark sink: driver, executor, broker killed",
        (Variant("spark sink killed", _of_spark(kill_by_plan), settings=SETTINGS),),
        1,
        500_000,
        SHORT_SPARK,
        FULL_SPARK,
        run_spark_round,
    ),
)
