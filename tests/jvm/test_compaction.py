"""kafka-dump-log reads what compaction leaves, and Kafka's consumer finds the last value of every key in it."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import ascii_letters

import pytest
from confluent_kafka import Producer

from support.kafka_jars import CONSOLE_CONSUMER, DUMP_LOG, KafkaJars
from support.kafka_tools import KafkaTools
from support.roles import wait_for
from support.servers import KafkaServer, MillraceServer, Server

TOPIC = "compacted"
KEYS = 200
ROUNDS = 40
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
GONE = 17
GONE_IN = 5
"""Every 17th key is deleted in the fifth round, and not written again."""


@dataclass(frozen=True, slots=True)
class Filled:
    tools: KafkaTools
    directory: Path
    last: dict[str, str | None]
    cleaned_offset: int


@pytest.fixture(scope="module")
def filled(target: str, jars: KafkaJars) -> Iterator[Filled]:
    """A broker that has compacted a topic of several segments with every codec in it, and tombstones."""
    settings = {"log.cleaner.backoff.ms": "200", "log.initial.task.delay.ms": "500"}
    server: Server = KafkaServer(jars, settings, heap="512m") if target == "kafka" else MillraceServer(settings)
    with server:
        tools = KafkaTools(jars, server)
        tools.create_topic(
            TOPIC,
            cleanup_policy="compact",
            segment_bytes="1048576",
            index_interval_bytes="1024",
            min_cleanable_dirty_ratio="0.01",
        )
        last = _produce(server.bootstrap)
        directory = server.partition_dir(TOPIC, 0)
        cleaned = wait_for(lambda: _cleaned_up_to(directory), "the topic was not compacted", within_s=60)
        yield Filled(tools, directory, last, cleaned)


def _produce(bootstrap: str) -> dict[str, str | None]:
    last: dict[str, str | None] = {}
    chosen = random.Random(1)
    for number in range(ROUNDS):
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "compression.type": CODECS[number % len(CODECS)],
                "enable.idempotence": number % 2 == 0,
                "linger.ms": 20,
                "batch.size": 16384,
            }
        )
        for key in range(KEYS):
            gone = number >= GONE_IN and key % GONE == 0
            # Random enough not to shrink: the segments are counted by their stored bytes.
            value = None if gone else f"{number}-{key}-" + "".join(chosen.choices(ascii_letters, k=700))
            if not gone or number == GONE_IN:
                producer.produce(TOPIC, key=f"key{key}", value=value)
                last[f"key{key}"] = value
        assert producer.flush(30) == 0
    return last


def _cleaned_up_to(directory: Path) -> int | None:
    """The cleaned offset, once everything but the active segment is clean."""
    bases = sorted(int(path.stem) for path in directory.glob("*.log"))
    written = directory.parent / "cleaner-offset-checkpoint"
    found = re.search(rf"^{TOPIC} 0 (\d+)$", written.read_text(), re.MULTILINE) if written.exists() else None
    if found is None or len(bases) < 2 or int(found[1]) < bases[-1]:
        return None
    return int(found[1])


def dump(filled: Filled, jars: KafkaJars, *options: str, suffix: str) -> str:
    files = sorted(filled.directory.glob(f"*{suffix}"))
    if suffix != ".log":
        files.pop()  # a running Kafka preallocates the active segment's, and only the others are compacted
    done = jars.run(DUMP_LOG, *options, "--files", ",".join(map(str, files)))
    assert done.status == 0, done.stderr
    ordinary = re.compile(r"Non-consecutive offsets in \S+$|  -?\d+ is followed by \d+$")
    assert [line for line in done.stderr.splitlines() if not ordinary.match(line)] == []
    return done.stdout


def test_segments_by_deep_iteration(filled: Filled, jars: KafkaJars) -> None:
    text = dump(filled, jars, "--deep-iteration", suffix=".log")
    assert "isvalid: false" not in text.lower()
    offsets = [int(found) for found in re.findall(r"^\| offset: (\d+) ", text, re.MULTILINE)]
    assert offsets == sorted(set(offsets))
    clean = [offset for offset in offsets if offset < filled.cleaned_offset]
    assert len(clean) <= KEYS
    assert filled.cleaned_offset > 5 * KEYS
    assert "deleteHorizonMs: OptionalLong[" in text


def test_indexes_fit_the_compacted_segments(filled: Filled, jars: KafkaJars, target: str) -> None:
    # Kafka puts batches without records into its time index, and then its own tool complains of them.
    for suffix in (".index",) if target == "kafka" else (".index", ".timeindex"):
        dump(filled, jars, suffix=suffix)
        dump(filled, jars, "--verify-index-only", suffix=suffix)


def test_a_consumer_finds_the_last_value_of_every_key(filled: Filled) -> None:
    # How many records are left depends on what is still in the active segment, so the tool ends by its timeout.
    formatted = ("--formatter-property", "print.key=true")
    done = filled.tools.attempt(
        CONSOLE_CONSUMER,
        *("--topic", TOPIC, "--partition", "0", "--offset", "earliest", "--timeout-ms", "5000"),
        *formatted,
    )
    found: dict[str, str | None] = {}
    for line in done.lines:
        key, _, value = line.partition("\t")
        found[key] = None if value == "null" else value
    assert found == filled.last
