"""DescribeLogDirs: what lies in this broker's data directories."""

from __future__ import annotations

from dataclasses import replace

from millrace.errors import ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.registry import api
from millrace.model import TopicPartition
from millrace.storage.logdirs import DirectoryDescription, LogDescription
from millrace.wire.keys import ApiKey
from millrace.wire.messages.log_dirs import DescribeLogDirsRequest, DescribeLogDirsResponse

_Topic = DescribeLogDirsResponse.DescribeLogDirsTopic
_Partition = DescribeLogDirsResponse.DescribeLogDirsPartition


@api(ApiKey.DESCRIBE_LOG_DIRS, DescribeLogDirsRequest, "1-5")
def describe_log_dirs(context: RequestContext, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    """The size of each partition in each data directory, of all partitions or of those asked for.

    A directory that failed is answered with KAFKA_STORAGE_ERROR and nothing in it. A partition that this broker does
    not hold is left out, as in Kafka.

    Versions: v3 has an error for the whole answer, v4 the size of the disk and what is free on it, v5 cordoned
    directories.

    Not done: authorization; replicas on the move between directories, and cordoned directories, of which there are
    none.
    """
    wanted: set[tuple[str, int]] | None = None
    if request.topics is not None:
        wanted = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
    directories = _with_unwritten(context, context.broker.log_dirs.describe())
    return DescribeLogDirsResponse(results=[_directory(context, directory, wanted) for directory in directories])


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
    context: RequestContext, directory: DirectoryDescription, wanted: set[tuple[str, int]] | None
) -> DescribeLogDirsResponse.DescribeLogDirsResult:
    path = str(directory.path.absolute())
    if directory.failure is not None:
        return DescribeLogDirsResponse.DescribeLogDirsResult(error_code=ErrorCode.KAFKA_STORAGE_ERROR, log_dir=path)
    topics: dict[str, _Topic] = {}
    for log in directory.logs:
        name, index = log.partition
        if wanted is None or (name, index) in wanted:
            topic = topics.setdefault(name, _Topic(name=name))
            topic.partitions.append(_partition(context, log))
    return DescribeLogDirsResponse.DescribeLogDirsResult(
        log_dir=path,
        topics=list(topics.values()),
        total_bytes=directory.total_bytes,
        usable_bytes=directory.usable_bytes,
    )


def _partition(context: RequestContext, log: LogDescription) -> _Partition:
    name, index = log.partition
    # How far the log is behind the high watermark: not at all for a leader, unknown for what nobody serves.
    served = context.broker.replicas.get(name, index) is not None
    return _Partition(partition_index=index, partition_size=log.size_bytes, offset_lag=0 if served else -1)
