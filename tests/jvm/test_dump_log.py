"""kafka-dump-log reads our files: segments with CRCs, offset and time indexes, producer snapshots, group offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from support.kafka_jars import DUMP_LOG, PRODUCER_PERFORMANCE, Finished, KafkaJars
from support.kafka_tools import KafkaTools
from support.servers import KafkaServer, MillraceServer, Server

RECORDS = 30_000


def complaints(stderr: str) -> list[str]:
    """What the tool found wrong: all of it goes to stderr. It also reports the first offset of every segment but 0."""
    ordinary = re.compile(r"Non-consecutive offsets in \S+$|  -1 is followed by \d+$")
    return [line for line in stderr.splitlines() if not ordinary.match(line)]


@dataclass(frozen=True, slots=True)
class Dump:
    """Partition directories, read while the broker runs or after it has stopped."""

    jars: KafkaJars
    directory: Path
    group_directories: tuple[Path, ...]
    running: bool

    def sanity(self, suffix: str) -> None:
        """The check a start-up makes. A running Kafka preallocates the active index: there, only the closed ones."""
        files = sorted(self.directory.glob(f"*{suffix}"))[: -1 if self.running else None]
        text = self._run("--index-sanity-check", files=files).stdout
        assert text.count("passed sanity check") + text.count("is empty") == len(files)

    def __call__(self, *options: str, suffix: str, directory: Path | None = None) -> Finished:
        files = sorted((directory or self.directory).glob(f"*{suffix}"))
        assert files, f"no {suffix} in {directory or self.directory}"
        return self._run(*options, files=files)

    def _run(self, *options: str, files: list[Path]) -> Finished:
        done = self.jars.run(DUMP_LOG, *options, "--files", ",".join(map(str, files)))
        assert done.status == 0, done.stderr
        assert complaints(done.stderr) == []
        return done


@pytest.fixture(scope="module")
def filled(target: str, jars: KafkaJars) -> Iterator[Server]:
    """A broker with a topic of several segments (every codec in it) and a group that committed offsets."""
    server: Server = KafkaServer(jars, heap="512m") if target == "kafka" else MillraceServer()
    with server:
        tools = KafkaTools(jars, server)
        tools.create_topic("dumped", segment_bytes="1048576", index_interval_bytes="1024")
        codecs = ("none", "gzip", "snappy", "lz4", "zstd", "none")
        for codec in codecs:
            load = ("--topic", "dumped", "--num-records", str(RECORDS // len(codecs)), "--record-size", "300")
            props = ("--command-property", f"compression.type={codec}", "batch.size=4096")
            tools.run(PRODUCER_PERFORMANCE, *load, "--throughput", "-1", *props)
        tools.consume("dumped", 100, "--group", "dumped-group", "--from-beginning")
        yield server


@pytest.fixture(scope="module", params=["running", "stopped"])
def dump(request: pytest.FixtureRequest, filled: Server, jars: KafkaJars) -> Dump:
    if request.param == "stopped":
        filled.stop()
    groups = sorted(each for each in filled.home.rglob("__consumer_offsets-*") if each.is_dir())
    return Dump(jars, filled.partition_dir("dumped", 0), tuple(groups), request.param == "running")


def test_segments_by_deep_iteration(dump: Dump) -> None:
    text = dump("--deep-iteration", suffix=".log").stdout
    assert "isvalid: false" not in text.lower()
    assert "invalid bytes at the end" not in text
    offsets = [int(found) for found in re.findall(r"^\| offset: (\d+) ", text, re.MULTILINE)]
    assert offsets == list(range(RECORDS))
    assert len(re.findall(r"^Dumping ", text, re.MULTILINE)) > 3
    codecs = set(re.findall(r"compresscodec: (\w+)", text))
    assert codecs == {"none", "gzip", "snappy", "lz4", "zstd"}


def test_offset_indexes(dump: Dump) -> None:
    text = dump(suffix=".index").stdout
    assert len(re.findall(r"^offset: \d+ position: \d+", text, re.MULTILINE)) > 1000
    dump("--verify-index-only", suffix=".index")
    dump.sanity(".index")


def test_time_indexes(dump: Dump) -> None:
    text = dump(suffix=".timeindex").stdout
    assert re.search(r"^timestamp: \d+ offset: \d+", text, re.MULTILINE)
    dump("--verify-index-only", suffix=".timeindex")
    dump.sanity(".timeindex")


def test_producer_snapshots(dump: Dump) -> None:
    text = dump(suffix=".snapshot").stdout
    entries = re.findall(
        r"^producerId: (\d+) producerEpoch: 0 .* lastSequence: (\d+) lastOffset: (\d+)", text, re.MULTILINE
    )
    assert entries
    assert all(int(offset) >= int(sequence) for _, sequence, offset in entries)


def test_committed_offsets_are_in_kafkas_record_format(dump: Dump) -> None:
    found = [
        dump("--offsets-decoder", suffix=".log", directory=each).stdout
        for each in dump.group_directories
        if any(segment.stat().st_size for segment in each.glob("*.log"))
    ]
    assert len(found) == 1  # one group lives in one partition
    assert '"group":"dumped-group"' in found[0]
    assert re.search(r'"topic":"dumped","partition":0.*"offset":100', found[0])
