"""How the directories of logs are called: a partition's own, and what is on its way in, out, or aside."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final

from millrace.model import TopicPartition, invalid_topic_name_reason

DELETE_SUFFIX: Final = "-delete"
STRAY_SUFFIX: Final = "-stray"
FUTURE_SUFFIX: Final = "-future"
_MAX_NAME_BYTES: Final = 255


def aside(parent: Path, partition: TopicPartition, suffix: str) -> Path:
    """A name of its own for a log that is not, or no longer, the partition's."""
    ending = f".{uuid.uuid4().hex}{suffix}"
    return parent / (str(partition)[: _MAX_NAME_BYTES - len(ending)] + ending)


def partition_named(name: str) -> TopicPartition | None:
    """The partition that a directory belongs to; None for every other name."""
    topic, dash, number = name.rpartition("-")
    if not dash or not number.isascii() or not number.isdigit() or invalid_topic_name_reason(topic) is not None:
        return None
    if number != str(int(number)):
        return None
    return TopicPartition(topic, int(number))
