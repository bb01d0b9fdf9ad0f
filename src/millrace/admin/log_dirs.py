"""How large logs are on disk: asked of every broker, for each of its log directories.

A broker that does not answer, or a directory that failed, is told as such and never taken for an empty one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from millrace.admin.asking import ask_broker
from millrace.client.cluster import ClusterClient
from millrace.client.versions import known_code
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError
from millrace.model import TopicPartition
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse


@dataclass(frozen=True, slots=True)
class ReplicaLog:
    """The log of one replica; one that moves between directories has two, of which the new one is `future`."""

    place: TopicPartition
    size_bytes: int
    lag: int
    future: bool


@dataclass(frozen=True, slots=True)
class LogDirectory:
    """A directory of a broker; without a path it stands for all those of a broker that cannot be asked."""

    broker: int
    path: str | None
    problem: str | None = None
    logs: tuple[ReplicaLog, ...] = ()
    disk_bytes: int | None = None
    free_bytes: int | None = None

    @property
    def size_bytes(self) -> int | None:
        return None if self.problem else sum(log.size_bytes for log in self.logs)

    def as_json(self) -> dict[str, Any]:
        """Without the logs."""
        return {
            "broker": self.broker,
            "directory": self.path,
            "replicas": None if self.problem else len(self.logs),
            "bytes": self.size_bytes,
            "disk_bytes": self.disk_bytes,
            "free_bytes": self.free_bytes,
            "problem": self.problem,
        }


def read_log_dirs(cluster: ClusterClient, image: ClusterImage) -> list[LogDirectory]:
    """Every directory of every broker, in their order."""
    found: list[LogDirectory] = []
    for broker_id in sorted(image.brokers):
        if not image.is_live(broker_id):
            found.append(LogDirectory(broker_id, None, "not running"))
            continue
        try:
            answer: DescribeLogDirsResponse = ask_broker(cluster, broker_id, DescribeLogDirsRequest(topics=None))
        except ApiError as error:
            found.append(LogDirectory(broker_id, None, f"does not answer: {error.message or error.code.name}"))
            continue
        if answer.error_code:
            found.append(LogDirectory(broker_id, None, known_code(answer.error_code).name))
        found += [_directory(broker_id, each) for each in answer.results]
    return found


def _directory(broker_id: int, told: DescribeLogDirsResponse.DescribeLogDirsResult) -> LogDirectory:
    if told.error_code:
        return LogDirectory(broker_id, told.log_dir, known_code(told.error_code).name)
    logs = tuple(
        ReplicaLog(
            TopicPartition(topic.name, each.partition_index), each.partition_size, each.offset_lag, each.is_future_key
        )
        for topic in told.topics
        for each in topic.partitions
    )
    disk, free = (None if size < 0 else size for size in (told.total_bytes, told.usable_bytes))
    return LogDirectory(broker_id, told.log_dir, None, logs, disk, free)


def largest_replicas(directories: Iterable[LogDirectory]) -> dict[TopicPartition, int]:
    """How large each partition is, as the largest of its replicas; what cannot be told is left out."""
    sizes: dict[TopicPartition, int] = {}
    for log in (log for directory in directories for log in directory.logs):
        sizes[log.place] = max(sizes.get(log.place, 0), log.size_bytes)
    return sizes


def replica_sizes(directories: Iterable[LogDirectory]) -> dict[tuple[TopicPartition, int], int]:
    """Bytes of each replica, by partition and broker, in all directories together; those that are known."""
    sizes: dict[tuple[TopicPartition, int], int] = {}
    for directory in directories:
        for log in directory.logs:
            key = (log.place, directory.broker)
            sizes[key] = sizes.get(key, 0) + log.size_bytes
    return sizes
