"""One round of a fault test: load, fault, healing, and the judgement of what clients and disks show afterwards."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from cluster.workload import CLIENT, CONSUMER, FILLER, read_everything
from millrace.security.certificates import write_private
from support.checker import Anomaly, Report, check
from support.checker_metadata import check_log, read_log
from support.checker_replicas import compare, compare_compacted, vanished
from support.cluster_processes import ClusterProcesses, Layout, wait_for
from support.history import Event, read_histories
from support.maven import ROOT
from support.servers import ServerFailed

PARTITIONS: Final = 4
_ACKS_WITHIN_S: Final = 120.0
_SLOWEST_PER_S: Final = 1000
"""Records that a machine takes at least, however busy it is."""
_CREATED_WITHIN_S: Final = 30.0
_READ_WITHIN_S: Final = 60.0
_LOSSES: Final = (Anomaly.LOST, Anomaly.UNSEEN, Anomaly.MISSED, Anomaly.NOT_ACCEPTED)
"""Names for the same misfortune, of which a record may have several."""
TROUBLE: Final = (ServerFailed, KafkaException, OSError)


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a round is."""

    acked: int
    """Records acknowledged before a round ends."""
    bounces: int
    """How often a fault is repeated within a round."""
    rate: int
    """Records per second, of all producers together."""
    session_timeout_ms: int
    outage_s: float
    """How long a majority of ZooKeeper stays away."""
    producers: int = 2
    heals_within_s: float = 30.0
    """After healing every replica is in sync again, and every consumer has read everything, within this."""

    @property
    def session_s(self) -> float:
        return self.session_timeout_ms / 1000


SHORT: Final = Scale(acked=5_000, bounces=2, rate=1_500, session_timeout_ms=3000, outage_s=5)
FULL: Final = Scale(acked=30_000, bounces=10, rate=1_500, session_timeout_ms=6000, outage_s=30)


@dataclass(frozen=True, slots=True)
class Traffic:
    """What a round's records are like, and the settings of the topic that they go to."""

    settings: tuple[tuple[str, str], ...] = ()
    codecs: tuple[str, ...] = ("none",)
    """Of the producers, in turn."""
    batch_bytes: int | None = None
    """The largest batch, where segments are small: one that does not fit is refused."""
    keyed: bool = False
    """Every record has a key of its own."""
    fillers: bool = False
    """As many records again that compaction may remove, all of one key."""
    compacted: bool = False
    """Replicas may be compacted, each at its own time."""

    def options(self, producer: int) -> list[str]:
        flags = [name for name, wanted in (("--keyed", self.keyed), ("--fillers", self.fillers)) if wanted]
        size = [] if self.batch_bytes is None else ["--batch-bytes", str(self.batch_bytes)]
        return ["--compression", self.codecs[producer % len(self.codecs)], *size, *flags]


PLAIN: Final = Traffic()


class Clients:
    """The client processes of a round."""

    def __init__(
        self,
        client: Mapping[str, str],
        topic: str,
        scale: Scale,
        directory: Path,
        *,
        partitions: int = PARTITIONS,
        consumers: int = 1,
        client_defaults: bool = False,
        traffic: Traffic = PLAIN,
    ) -> None:
        self.directory = directory
        self._scale = scale
        self.client_path = directory / "client.json"
        self._topic = topic
        self.partitions = partitions
        self._counts: dict[str, int] = {}
        self._processes: dict[str, subprocess.Popen[str]] = {}
        self._readers: dict[str, threading.Thread] = {}
        self._consumers = consumers
        self._client_defaults = client_defaults
        self._traffic = traffic
        self._loads = 0
        """How often the load has been started."""
        self._start_load(client)

    def _start_load(self, client: Mapping[str, str]) -> None:
        self._client = client
        write_private(self.client_path, json.dumps(dict(client)).encode())
        scale, before, self._loads = self._scale, self._loads, self._loads + 1
        for number in range(before * scale.producers + 1, self._loads * scale.producers + 1):
            rate = ("--rate", str(scale.rate // scale.producers))
            more = [*self._traffic.options(number), *(["--client-defaults"] if self._client_defaults else [])]
            self._start("producer", number, *rate, *more)
        for number in range(before * self._consumers + 1, self._loads * self._consumers + 1):
            self._start("consumer", number)

    def replace(self, client: Mapping[str, str]) -> None:
        """The same load by other processes with these settings: when they are at work, the others end."""
        old = list(self._processes)
        self._start_load(client)
        new = [name for name in self._processes if name not in old]
        wait_for(lambda: all(self._counts[name] for name in new) or None, _ACKS_WITHIN_S, f"{new} do nothing")
        problems = self._end(old)
        if problems:
            raise ServerFailed("\n".join(problems))
        for name in old:
            self._forget(name)
            if name.startswith("consumer"):
                del self._counts[name]  # others read all of it again

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes.values():
            process.kill()
        self._reap()

    @property
    def acked(self) -> int:
        return sum(count for name, count in self._counts.items() if name.startswith("producer"))

    @property
    def polled(self) -> int:
        return sum(count for name, count in self._counts.items() if name.startswith("consumer"))

    def wait_acked(self, count: int, timeout_s: float = _ACKS_WITHIN_S) -> None:
        """Wait until so many records have been acknowledged since the beginning."""

        def enough() -> bool | None:
            dead = [name for name, process in self._processes.items() if process.poll() is not None]
            if dead:
                raise ServerFailed(f"{', '.join(dead)} ended early:\n{self.errors()}")
            return True if self.acked >= count else None

        try:
            wait_for(enough, timeout_s, f"{count} records were not acknowledged")
        except ServerFailed as error:
            raise ServerFailed(f"{error}: {self.acked} were") from None

    def wait_more_acked(self, count: int, timeout_s: float = _ACKS_WITHIN_S) -> None:
        self.wait_acked(self.acked + count, timeout_s)

    def stop(self) -> list[str]:
        """Let producers finish what is under way and consumers read it; what went wrong."""
        problems = self._stop("producer")
        if any(name.startswith("consumer") for name in self._processes):
            problems += self._wait_caught_up()
            problems += self._stop("consumer")
        self._reap()
        return problems

    def _wait_caught_up(self) -> list[str]:
        acked = self.acked
        try:
            limit_s = self._scale.heals_within_s
            wait_for(lambda: True if self.polled >= acked else None, limit_s, "the consumer is behind")
        except ServerFailed as error:
            return [f"{error}: {self.polled} of {acked} records"]
        return []

    def _stop(self, role: str) -> list[str]:
        return self._end([name for name in self._processes if name.startswith(role)])

    def _end(self, names: Iterable[str]) -> list[str]:
        ending = {name: self._processes[name] for name in names}
        for process in ending.values():
            assert process.stdin is not None
            process.stdin.close()
        problems = []
        for name, process in ending.items():
            try:
                status = process.wait(_ACKS_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                problems.append(f"{name} did not end")
                continue
            if status != 0:
                problems.append(f"{name} ended with {status}: {self.errors()}")
        return problems

    def errors(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.directory.glob("*.err")))

    def histories(self) -> list[Path]:
        return sorted(self.directory.glob("*.history"))

    def _start(self, role: str, number: int, *more: str, module: str = "cluster.workload") -> None:
        name = f"{role}-{number}"
        arguments = ["--client", str(self.client_path), "--topic", self._topic, "--partitions", str(self.partitions)]
        arguments += ["--number", str(number), "--history", str(self.directory / f"{name}.history"), *more]
        path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])
        with (self.directory / f"{name}.err").open("wb") as errors:
            process = subprocess.Popen(
                [sys.executable, "-m", module, role, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )
        self._processes[name] = process
        self._counts[name] = 0
        reader = threading.Thread(target=self._count, args=(name, process), name=f"count {name}")
        self._readers[name] = reader
        reader.start()

    def _count(self, name: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._counts[name] = int(line)

    def _reap(self) -> None:
        for name in list(self._processes):
            self._forget(name)

    def _forget(self, name: str) -> None:
        """A process that has ended, or is about to: wait for it, keep its count."""
        process = self._processes.pop(name)
        process.wait()
        self._readers.pop(name).join()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


@dataclass(frozen=True, slots=True)
class Limits:
    """What a fault may cost, where that is known."""

    controller_epoch: int
    """The last one that the round may end with."""
    pause_s: float
    """The longest time that a partition goes without an acknowledgement."""

    def exceeded(self, controller_epoch: int, pause_s: float) -> list[str]:
        problems = []
        if controller_epoch > self.controller_epoch:
            changes = controller_epoch - self.controller_epoch
            problems.append(f"the office of the controller changed hands {changes} times more than it may")
        if pause_s > self.pause_s:
            problems.append(f"a partition was not written for {pause_s:.1f} s; the limit is {self.pause_s:.1f} s")
        return problems


@dataclass(slots=True)
class Stage:
    """What a fault acts on."""

    cluster: ClusterProcesses
    clients: Clients
    topic: str
    scale: Scale
    rng: random.Random
    marks: list[str] = field(default_factory=list)
    """What was done, for the reader of a failure."""
    limits: Limits | None = None
    traffic: Traffic = PLAIN

    def leader(self, index: int = 0) -> int:
        return self.cluster.leader(self.topic, index)

    def follower(self, index: int = 0) -> int:
        return self.cluster.follower(self.topic, index)

    def controller(self) -> int:
        return self.cluster.controller()

    def log_directory(self, broker_id: int, index: int = 0) -> Path:
        """Where a broker has its replica of a partition."""
        found = self.cluster.brokers[broker_id].log_directory(self.topic, index)
        if found is None:
            raise ServerFailed(f"broker {broker_id} has no replica of {self.topic}-{index}")
        return found

    def mark(self, text: str) -> None:
        self.marks.append(f"{self.clients.acked:>7} acked: {text}")

    def goes_on(self, records: int = 200) -> None:
        """Wait until so many more records were acknowledged: the fault is overcome, or harmless."""
        self.clients.wait_more_acked(records)


Fault = Callable[[Stage], None]


@dataclass(slots=True)
class Result:
    """What a round showed."""

    report: Report = field(default_factory=Report)
    whole_s: float = float("nan")
    """From healing to every replica in sync."""
    failures: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is worth telling of a green round, too."""
    seconds: float = 0.0

    @property
    def green(self) -> bool:
        return not self.failures and self.report.clean

    @property
    def lost(self) -> int:
        return max(self.report.counts.get(kind, 0) for kind in _LOSSES)

    @property
    def duplicates(self) -> int:
        return self.report.counts.get(Anomaly.DUPLICATE, 0)

    @property
    def others(self) -> int:
        """Everything else that is wrong: order, phantoms, replicas that differ, waits that were too long."""
        told = {*_LOSSES, Anomaly.DUPLICATE}
        return len(self.failures) + sum(count for kind, count in self.report.counts.items() if kind not in told)

    def describe(self) -> str:
        report = self.report
        counts = f"{report.acked} acked, {report.unknown} unknown, {report.polled} polled, {report.final} read at last"
        details = [*self.notes, *(f"  {mark}" for mark in self.marks)]
        return "\n".join([counts, *report.lines(), *self.failures, *details])


def run_round(
    cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0, *, traffic: Traffic = PLAIN
) -> Result:
    """One round on a running cluster, with a topic of its own; everything that is wrong is in the result."""
    result = Result()
    started = time.monotonic()
    topic = f"round-{uuid.uuid4().hex[:8]}"
    directory = cluster.home / "history" / topic
    directory.mkdir(parents=True)
    try:
        create_topic(cluster, topic, settings=dict(traffic.settings))
        with Clients(cluster.client_settings, topic, scale, directory, traffic=traffic) as clients:
            stage = Stage(cluster, clients, topic, scale, random.Random(seed), result.marks, traffic=traffic)
            result.failures += disturb(stage, fault, result)
            result.failures += clients.stop()
            judge(stage, result)
    except TROUBLE as error:
        result.failures.append(f"{type(error).__name__}: {error}")
    result.failures += [f"{broker} died by itself" for broker in cluster.brokers.values() if broker.died()]
    result.seconds = time.monotonic() - started
    return result


def create_topic(
    cluster: ClusterProcesses, topic: str, partitions: int = PARTITIONS, *, settings: dict[str, str] | None = None
) -> None:
    admin = AdminClient({**cluster.admin_settings, **CLIENT})
    replicas = min(3, cluster.layout.brokers)
    new = NewTopic(topic, num_partitions=partitions, replication_factor=replicas, config=settings or {})
    admin.create_topics([new], operation_timeout=20)[topic].result(30)
    cluster.wait_whole(topic, _CREATED_WITHIN_S)


def disturb(stage: Stage, fault: Fault, result: Result, *, first: int = 500) -> list[str]:
    """Fault, healing, and enough records; what went wrong, because what clients have seen is judged all the same.

    The fault happens when the `first` records are acknowledged.
    """
    problems = []
    clients, cluster = stage.clients, stage.cluster
    try:
        clients.wait_acked(first)
        fault(stage)
    except TROUBLE as error:
        problems.append(f"{type(error).__name__}: {error}")
    stage.mark("healing")
    cluster.restore()
    try:
        result.whole_s = cluster.wait_whole(stage.topic, stage.scale.heals_within_s)
        stage.mark("whole")
        clients.wait_more_acked(200)
        clients.wait_acked(stage.scale.acked, _ACKS_WITHIN_S + stage.scale.acked / _SLOWEST_PER_S)
    except TROUBLE as error:
        problems.append(f"{type(error).__name__}: {error}")
    return problems


def judge(stage: Stage, result: Result) -> list[Event]:
    """Read everything and look at everything; what the clients did and saw, for who wants to look further."""
    cluster, topic, directory = stage.cluster, stage.topic, stage.clients.directory
    ends = high_watermarks(cluster.client_settings, topic, stage.clients.partitions)
    reached = read_everything(
        cluster.client_settings, topic, ends, directory / "final.history", timeout_s=_READ_WITHIN_S
    )
    result.failures += [
        f"the final read of {topic}-{index} ended at {reached[index]} of {end}"
        for index, end in ends.items()
        if reached[index] < end
    ]
    events = read_histories(stage.clients.histories())
    result.report = check(events)
    check_metadata(stage, result)
    for index, end in ends.items():
        result.failures += differences(stage, index, end)
    return events


def check_metadata(stage: Stage, result: Result) -> None:
    """Hold every change of the cluster's metadata against the rules, and the round against its limits."""
    if stage.cluster.zookeeper is not None:
        log = read_log(stage.cluster.zookeeper.hosts, stage.cluster.zookeeper_access)
        result.failures += check_log(log)
        if stage.limits is not None:
            result.failures += stage.limits.exceeded(log[-1].controller_epoch, result.report.longest_pause_s)


def differences(stage: Stage, index: int, high_watermark: int, *, topic: str | None = None) -> list[str]:
    """Where the replicas that the cluster names differ on disk; of the stage's topic, if no other is meant."""
    cluster, topic = stage.cluster, topic or stage.topic
    replicas = {each: cluster.brokers[each].log_directory(topic, index) for each in cluster.replicas(topic, index)}
    found = {broker_id: path for broker_id, path in replicas.items() if path is not None}
    missing = vanished(f"{topic}-{index}", replicas, high_watermark)
    if not found:
        return missing
    if stage.traffic.compacted:
        return missing + compare_compacted(found, high_watermark, FILLER)
    return missing + compare(found, high_watermark)


def high_watermarks(client: Mapping[str, str], topic: str, partitions: int = PARTITIONS) -> dict[int, int]:
    consumer = Consumer({**client, **CONSUMER})
    try:
        return {
            index: consumer.get_watermark_offsets(TopicPartition(topic, index), timeout=30)[1]
            for index in range(partitions)
        }
    finally:
        consumer.close()


class Clusters:
    """Running clusters by layout: one at a time, kept for the next round, thrown away after a red one."""

    def __init__(self) -> None:
        self._cluster: ClusterProcesses | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.discard()

    def get(self, layout: Layout) -> ClusterProcesses:
        if self._cluster is not None and self._cluster.layout != layout:
            self.discard()
        if self._cluster is None:
            self._cluster = ClusterProcesses(layout)
            try:
                self._cluster.start()
            except BaseException:
                self.discard()
                raise
        return self._cluster

    def discard(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()
