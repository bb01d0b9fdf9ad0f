"""Which clusters a measurement runs on, and what they cost together."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from benches.cluster.report import ClusterComparison
from benches.cluster.topics import Topics
from benches.system.process import CpuUse, cpu_seconds, resident_mb
from benches.system.report import describe_machine
from support.kafka_jars import kafka_jars
from support.servers import Cluster, KafkaCluster, MillraceCluster

SIDES = ("kafka", "millrace")
DELETES_SOON = {"log.segment.delete.delay.ms": "1000"}
"""Not less: Kafka looks for files to delete once in that time, busily if it is a millisecond."""
_DELETED_WITHIN_S = 60.0


def make_cluster(side: str) -> Cluster:
    """A cluster of three, not started, at its defaults but for one.

    Kafka keeps the files of a deleted topic for a minute, and every run of a bench deletes one: see `delete`.
    """
    return KafkaCluster(kafka_jars(), settings=DELETES_SOON) if side == "kafka" else MillraceCluster()


def delete(cluster: Cluster, admin: Topics, topic: str) -> None:
    """Delete a topic and return when its files are gone on every broker.

    To remove gigabytes takes time, and gives memory back: neither is to happen in the middle of the next run.
    """
    admin.delete(topic)
    deadline = time.monotonic() + _DELETED_WITHIN_S
    while any(cluster.home.rglob(f"{topic}-*")):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{cluster} still has files of {topic} {_DELETED_WITHIN_S:.0f} s after its deletion")
        time.sleep(0.05)


def cpu_of(cluster: Cluster) -> float:
    """CPU seconds of all processes so far: brokers, ZooKeeper or controller, and `millrace up` itself."""
    return sum(cpu_seconds(pid) for pid in cluster.pids)


def resident_mb_of(cluster: Cluster) -> float:
    return sum(resident_mb(pid) for pid in cluster.pids)


@contextmanager
def cpu_use(cluster: Cluster) -> Iterator[CpuUse]:
    used = CpuUse()
    before = cpu_of(cluster)
    yield used
    used.seconds = cpu_of(cluster) - before


def add_options(parser: argparse.ArgumentParser, *, name: str, sides: str, rounds: int) -> None:
    """What all measurements can be told."""
    parser.add_argument("--rounds", type=int, default=rounds, help=f"measured rounds on each side ({rounds})")
    parser.add_argument("--sides", type=_sides, default=_sides(sides), help=f"comma separated ({sides})")
    parser.add_argument("--name", default=name, help="the result goes to benches/results/NAME.json")
    parser.add_argument("--update", type=Path, help="a Markdown page whose table is replaced, docs/performance.md")


def new_result(section: str, arguments: list[str], rounds: int) -> ClusterComparison:
    words = shlex.join(arguments if section == "throughput" else [section, *arguments])
    command = "make bench-cluster" + (f' ARGS="{words}"' if words else "")
    result = ClusterComparison(command, describe_machine(), rounds, section=section)
    cores, load = psutil.cpu_count() or 1, psutil.getloadavg()[0]
    if load > cores / 2:
        result.notes.append(f"the machine was busy before it began, load {load:.1f} on {cores} cores")
        print(f"note: {result.notes[-1]}", file=sys.stderr)
    return result


def _sides(text: str) -> tuple[str, ...]:
    sides = tuple(text.split(","))
    if not set(sides) <= set(SIDES):
        raise argparse.ArgumentTypeError(f"sides are {' and '.join(SIDES)}, not {text}")
    return sides
