"""Small text files that survive a crash as a whole: Kafka's checkpoints, `partition.metadata`, the clean-stop marker.

    a checkpoint:        "0\\n" version | "<count>\\n" | one line per entry, fields separated by one space
      per directory:     topic partition offset   (recovery-point-, log-start-, replication-, cleaner-offset-checkpoint)
                         topic partition topic_id (logs)
      per partition:     epoch start_offset       (leader-epoch-checkpoint)
    partition.metadata:  "version: 0\\ntopic_id: <URL-safe base64 of the 16 bytes, unpadded>"
    .kafka_cleanshutdown: {"version":0,"brokerEpoch":N}: there only between a clean stop and the next start

Checkpoints are replaced, never edited (`Files.replace_bytes`). A damaged one reads as None and is logged: what it said
is rebuilt by its owner.
"""

from __future__ import annotations

import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Final

from millrace.model import TopicPartition, decode_uuid, encode_uuid
from millrace.storage.files import Files

logger = logging.getLogger(__name__)

RECOVERY_POINTS: Final = "recovery-point-offset-checkpoint"
LOG_STARTS: Final = "log-start-offset-checkpoint"
HIGH_WATERMARKS: Final = "replication-offset-checkpoint"
CLEANED_OFFSETS: Final = "cleaner-offset-checkpoint"
LOGS: Final = "logs-checkpoint"
LEADER_EPOCHS: Final = "leader-epoch-checkpoint"
PARTITION_METADATA: Final = "partition.metadata"
CLEAN_SHUTDOWN: Final = ".kafka_cleanshutdown"

_VERSION: Final = "0"


def render(lines: Iterable[str]) -> bytes:
    """A checkpoint file of `lines`."""
    entries = list(lines)
    return "".join(f"{line}\n" for line in (_VERSION, str(len(entries)), *entries)).encode()


def parse(data: bytes, fields: int) -> list[list[str]] | None:
    """The entries of a checkpoint file, each with so many fields, or None where it is damaged.

    A file that is whole ends in a line break: a cut in the middle of the last number must not read as a smaller one.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    if not text.endswith("\n"):
        return None
    version, *rest = text.split("\n")[:-1]
    if version != _VERSION or not rest or not rest[0].isdecimal():
        return None
    entries = [line.split(" ") for line in rest[1:]]
    if len(entries) != int(rest[0]) or any(len(entry) != fields for entry in entries):
        return None
    return entries


def read_offsets(files: Files, path: Path) -> dict[TopicPartition, int] | None:
    """An offset checkpoint; empty where there is no file, None (and a warning) where it is damaged."""
    data = files.read_bytes(path)
    if not data:
        return {}
    entries = parse(data, 3)
    try:
        if entries is not None:
            return {TopicPartition(topic, int(partition)): int(offset) for topic, partition, offset in entries}
    except ValueError:
        pass
    logger.warning("checkpoint %s is damaged and is ignored; what it held will be rebuilt", path)
    return None


def render_offsets(offsets: Mapping[TopicPartition, int]) -> bytes:
    return render(f"{topic} {partition} {offset}" for (topic, partition), offset in offsets.items())


def read_logs(files: Files, path: Path) -> dict[TopicPartition, uuid.UUID]:
    """Which logs a directory had, and for which topics; empty where there is no file or it is damaged."""
    entries = parse(files.read_bytes(path) or b"", 3) or ()
    logs: dict[TopicPartition, uuid.UUID] = {}
    for topic, partition, text in entries:
        topic_id = decode_uuid(text)
        if topic_id is not None and partition.isdecimal():
            logs[TopicPartition(topic, int(partition))] = topic_id
    return logs


def render_logs(logs: Mapping[TopicPartition, uuid.UUID]) -> bytes:
    return render(f"{topic} {partition} {encode_uuid(topic_id)}" for (topic, partition), topic_id in logs.items())


def read_epochs(files: Files, path: Path) -> list[tuple[int, int]] | None:
    """The (epoch, start offset) pairs of a leader-epoch checkpoint; None where there is none or it is damaged."""
    data = files.read_bytes(path)
    if data is None:
        return None
    entries = parse(data, 2)
    try:
        if entries is not None:
            pairs = [(int(epoch), int(offset)) for epoch, offset in entries]
            if all(a[0] < b[0] and a[1] < b[1] for a, b in pairwise(pairs)):
                return pairs
    except ValueError:
        pass
    logger.warning("checkpoint %s is damaged and will be rebuilt from the log", path)
    return None


def render_epochs(entries: Iterable[tuple[int, int]]) -> bytes:
    return render(f"{epoch} {offset}" for epoch, offset in entries)


def render_partition_metadata(topic_id: uuid.UUID) -> bytes:
    return f"version: 0\ntopic_id: {encode_uuid(topic_id)}".encode()


def read_partition_metadata(files: Files, path: Path) -> uuid.UUID | None:
    """The topic id that a partition's directory belongs to; None where the file is missing or damaged."""
    data = files.read_bytes(path)
    if data is None:
        return None
    fields: dict[str, str] = {}
    for line in data.decode(errors="replace").splitlines():
        name, _, value = line.partition(":")
        fields[name.strip()] = value.strip()
    topic_id = decode_uuid(fields.get("topic_id", "")) if fields.get("version") == _VERSION else None
    if topic_id is None:
        logger.warning("%s is damaged; the topic id will be written again", path)
    return topic_id


def read_clean_shutdown(data: bytes) -> int:
    """The incarnation that stopped cleanly; -1 where the marker does not say."""
    try:
        return int(json.loads(data)["brokerEpoch"])
    except (ValueError, KeyError, TypeError):
        return -1


def render_clean_shutdown(broker_epoch: int) -> bytes:
    return json.dumps({"version": 0, "brokerEpoch": broker_epoch}, separators=(",", ":")).encode()
