"""DescribeLogDirs and AlterReplicaLogDirs, at every version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from millrace.errors import ErrorCode, StorageError
from millrace.handlers.log_dirs import alter_replica_log_dirs, describe_log_dirs
from millrace.model import TopicPartition
from millrace.storage.logdirs import DirectoryDescription
from millrace.storage.moves import LogDescription
from millrace.wire.messages.log_dirs import AlterReplicaLogDirsRequest, DescribeLogDirsRequest
from support.handling import handling

DIRECTORIES = [
    DirectoryDescription(
        Path("/data/one"), None, 1000, 400,
        (
            LogDescription(TopicPartition("a", 0), 10, 1),
            LogDescription(TopicPartition("a", 1), 20, 2),
            LogDescription(TopicPartition("b", 0), 30, 3),
        ),
    ),
    DirectoryDescription(Path("/data/two"), StorageError("worn out"), -1, -1, ()),
]  # fmt: skip


class Held:
    """Three partitions of topic a are held; the last was never written to. Two records of each are committed."""

    def __iter__(self) -> Iterator[SimpleNamespace]:
        return iter([SimpleNamespace(topic="a", index=index) for index in range(3)])

    def held(self, topic: str, index: int) -> SimpleNamespace | None:
        return SimpleNamespace(known_high_watermark=2) if topic == "a" and index < 3 else None


@pytest.mark.parametrize("version", range(1, 6))
async def test_describe(version: int) -> None:
    log_dirs = SimpleNamespace(describe=lambda: list(DIRECTORIES))
    async with handling(log_dirs=log_dirs, replicas=Held()) as on:
        response = await on.call(describe_log_dirs, DescribeLogDirsRequest(topics=None), version)
        one, two = response.results
        assert (one.log_dir, two.log_dir) == ("/data/one", "/data/two")
        assert (one.error_code, two.error_code) == (0, ErrorCode.KAFKA_STORAGE_ERROR)
        assert [
            (topic.name, [(p.partition_index, p.partition_size, p.offset_lag) for p in topic.partitions])
            for topic in one.topics
        ] == [("a", [(0, 10, 1), (1, 20, 0), (2, 0, 2)]), ("b", [(0, 30, -1)])]
        assert two.topics == []
        if version >= 4:
            assert (one.total_bytes, one.usable_bytes, two.total_bytes) == (1000, 400, -1)
        wanted = DescribeLogDirsRequest.DescribableLogDirTopic(topic="a", partitions=[1, 7])
        response = await on.call(describe_log_dirs, DescribeLogDirsRequest(topics=[wanted]), version)
        assert [(t.name, [p.partition_index for p in t.partitions]) for t in response.results[0].topics] == [("a", [1])]
        response = await on.call(describe_log_dirs, DescribeLogDirsRequest(topics=[]), version)
        assert response.results[0].topics == []


@pytest.mark.parametrize("version", [1, 2])
async def test_alter(version: int) -> None:
    other = DirectoryDescription(Path("/data/three"), None, 1000, 400, ())
    placed: list[tuple[TopicPartition, Path]] = []
    moves = SimpleNamespace(place=lambda *args: placed.append(args))
    log_dirs = SimpleNamespace(describe=lambda: [*DIRECTORIES, other], moves=moves)
    request = AlterReplicaLogDirsRequest(
        dirs=[
            AlterReplicaLogDirsRequest.AlterReplicaLogDir(
                path=path,
                topics=[AlterReplicaLogDirsRequest.AlterReplicaLogDirTopic(name=name, partitions=partitions)],
            )
            for path, name, partitions in (
                ("/data/one", "a", [0, 7]),
                ("/data/two", "a", [1]),
                ("/data/three", "a", [2]),
                ("/data/four", "b", [0]),
            )
        ]
    )
    async with handling(log_dirs=log_dirs, replicas=Held()) as on:
        response = await on.call(alter_replica_log_dirs, request, version)
    assert {
        (topic.topic_name, each.partition_index): each.error_code
        for topic in response.results
        for each in topic.partitions
    } == {
        ("a", 0): ErrorCode.NONE,
        ("a", 7): ErrorCode.REPLICA_NOT_AVAILABLE,
        ("a", 1): ErrorCode.KAFKA_STORAGE_ERROR,
        ("a", 2): ErrorCode.NONE,
        ("b", 0): ErrorCode.LOG_DIR_NOT_FOUND,
    }
    assert placed == [(TopicPartition("a", 0), Path("/data/one")), (TopicPartition("a", 2), Path("/data/three"))]


async def test_a_replica_on_the_move_is_in_both_directories() -> None:
    copy = LogDescription(TopicPartition("a", 1), 7, 1, is_future=True)
    log_dirs = SimpleNamespace(
        describe=lambda: [DIRECTORIES[0], DirectoryDescription(Path("/data/three"), None, 1000, 400, (copy,))]
    )
    async with handling(log_dirs=log_dirs, replicas=Held()) as on:
        response = await on.call(describe_log_dirs, DescribeLogDirsRequest(topics=None), 4)
    found = [
        (result.log_dir, each.partition_size, each.offset_lag, each.is_future_key)
        for result in response.results
        for topic in result.topics
        for each in topic.partitions
        if (topic.name, each.partition_index) == ("a", 1)
    ]
    assert found == [("/data/one", 20, 0, False), ("/data/three", 7, 1, True)]
