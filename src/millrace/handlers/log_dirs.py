"""DescribeLogDirs and AlterReplicaLogDirs: what lies in this broker's data directories, and where it should lie."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import cluster
from millrace.handlers.registry import api
from millrace.model import TopicPartition
from millrace.security.acls import Operation
from millrace.storage.logdirs import DirectoryDescription
from millrace.storage.moves import LogDescription
from millrace.wire.keys import ApiKey
from millrace.wire.messages.log_dirs import (
    AlterReplicaLogDirsRequest,
    AlterReplicaLogDirsResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
)

_Topic = DescribeLogDirsResponse.DescribeLogDirsTopic
_Partition = DescribeLogDirsResponse.DescribeLogDirsPartition
_Moved = AlterReplicaLogDirsResponse.AlterReplicaLogDirPartitionResult


def _refuse_description(
    context: RequestContext, _request: DescribeLogDirsRequest, error: ApiError
) -> DescribeLogDirsResponse:
    # Before v3 there is no place for an error: nothing is all that is said, as in Kafka.
    return DescribeLogDirsResponse(error_code=error.code if context.version >= 3 else ErrorCode.NONE)


@api(
    ApiKey.DESCRIBE_LOG_DIRS,
    DescribeLogDirsRequest,
    "1-5",
    needs=cluster(Operation.DESCRIBE),
    refuse=_refuse_description,
)
def describe_log_dirs(context: RequestContext, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """The size of each partition in each data directory, of all partitions or of those asked for.

    A directory that failed is answered with KAFKA_STORAGE_ERROR and nothing in it. A partition that this broker does
    not hold is left out, as in Kafka.

    The lag is what a replica misses of what is known to be committed. A replica that moves is in both directories, in
    the new one as a future replica, whose lag is what was not copied yet.

    Versions: v3 has an error for the whole answer (before, who may not ask is told nothing), v4 the size of the disk
    and what is free on it, v5 cordoned directories.

    Not done: cordoned directories, of which there are none.
    """
    wanted: set[tuple[str, int]] | None = None
    if request.topics is not None:
        wanted = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
    directories = _with_unwritten(context, context.broker.log_dirs.describe())
    ends = {log.partition: log.end_offset for each in directories for log in each.logs if not log.is_future}
    return DescribeLogDirsResponse(results=[_directory(context, directory, wanted, ends) for directory in directories])


def _with_unwritten(context: RequestContext, directories: list[DirectoryDescription]) -> list[DirectoryDescription]:
    """Partitions that nobody has written to have no files yet: they are listed empty, where the first will be made."""
    written = {log.partition for directory in directories for log in directory.logs}
    unwritten = [
        LogDescription(place, size_bytes=0, end_offset=0)
        for partition in context.broker.replicas
        if (place := TopicPartition(partition.topic, partition.index)) not in written
    ]
    for number, directory in enumerate(directories):
        if directory.failure is None:
            directories[number] = replace(directory, logs=(*directory.logs, *unwritten))
            break
    return directories


def _directory(
    context: RequestContext,
    directory: DirectoryDescription,
    wanted: set[tuple[str, int]] | None,
    ends: Mapping[TopicPartition, int],
) -> DescribeLogDirsResponse.DescribeLogDirsResult:
    path = str(directory.path.absolute())
    if directory.failure is not None:
        return DescribeLogDirsResponse.DescribeLogDirsResult(error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=path)
    topics: dict[str, _Topic] = {}
    for log in directory.logs:
        name, index = log.partition
        if wanted is None or (name, index) in wanted:
            topic = topics.setdefault(name, _Topic(name=name))
            topic.partitions.append(_partition(context, log, ends))
    return DescribeLogDirsResponse.DescribeLogDirsResult(
        log_dir=path,
        topics=list(topics.values()),
        total_bytes=directory.total_bytes,
        usable_bytes=directory.usable_bytes,
    )


def _partition(context: RequestContext, log: LogDescription, ends: Mapping[TopicPartition, int]) -> _Partition:
    name, index = log.partition
    if log.is_future:
        lag = max(0, ends.get(log.partition, 0) - log.end_offset)
        return _Partition(partition_index=index, partition_size=log.size_bytes, offset_lag=lag, is_future_key=True)
    replica = context.broker.replicas.held(name, index)
    lag = -1 if replica is None else max(0, replica.known_high_watermark - log.end_offset)
    return _Partition(partition_index=index, partition_size=log.size_bytes, offset_lag=lag)


def _refuse_moves(
    _context: RequestContext, request: AlterReplicaLogDirsRequest, error: ApiError
) -> AlterReplicaLogDirsResponse:
    return _moved(
        (topic.name, index, error.code)
        for wanted in request.dirs
        for topic in wanted.topics
        for index in topic.partitions
    )


@api(
    ApiKey.ALTER_REPLICA_LOG_DIRS,
    AlterReplicaLogDirsRequest,
    "1-2",
    needs=cluster(Operation.ALTER),
    refuse=_refuse_moves,
)
def alter_replica_log_dirs(context: RequestContext, request: AlterReplicaLogDirsRequest) -> AlterReplicaLogDirsResponse:
    """Say in which of this broker's data directories a replica should lie; each partition has its own outcome.

    A directory that is not one of this broker's is LOG_DIR_NOT_FOUND, one that failed KAFKA_STORAGE_ERROR, a partition
    that this broker does not hold REPLICA_NOT_AVAILABLE. A replica that lies there already is a success, and calls a
    move to elsewhere off. The answer comes at once; replicas move in the background, one after another, at most at
    `replica.alter.log.dirs.io.max.bytes.per.second`, and DescribeLogDirs shows them. A replica without a record has
    nothing to move: its log will be made there, unless the broker is started again before.

    A stop of the broker gives up what has not moved: ask again.
    """
    directories = {directory.path.absolute(): directory for directory in context.broker.log_dirs.describe()}
    return _moved(
        (topic.name, index, _placing(context, directories.get(Path(wanted.path)), TopicPartition(topic.name, index)))
        for wanted in request.dirs
        for topic in wanted.topics
        for index in topic.partitions
    )


def _moved(outcomes: Iterable[tuple[str, int, ErrorCode]]) -> AlterReplicaLogDirsResponse:
    topics: dict[str, list[_Moved]] = defaultdict(list)
    for name, index, code in outcomes:
        topics[name].append(_Moved(partition_index=index, error_code=code))
    return AlterReplicaLogDirsResponse(
        results=[
            AlterReplicaLogDirsResponse.AlterReplicaLogDirTopicResult(topic_name=name, partitions=partitions)
            for name, partitions in topics.items()
        ]
    )


def _placing(context: RequestContext, directory: DirectoryDescription | None, place: TopicPartition) -> ErrorCode:
    if directory is None:
        return ErrorCode.LOG_DIR_NOT_FOUND
    if directory.failure is not None:
        return ErrorCode.KAFKA_STORAGE_ERROR
    if context.broker.replicas.held(*place) is None:
        return ErrorCode.REPLICA_NOT_AVAILABLE
    context.broker.log_dirs.moves.place(place, directory.path)
    return ErrorCode.NONE
