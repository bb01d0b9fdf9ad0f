"""Small frozen values that every layer shares: names, ids and numbers of the domain, with no rules but their own."""

from __future__ import annotations

import base64
import binascii
import re
import uuid
from typing import Final, NamedTuple, NewType

BrokerId = NewType("BrokerId", int)

NO_BROKER: Final = BrokerId(-1)
NO_EPOCH: Final = -1
NO_PRODUCER_ID: Final = -1
NO_PRODUCER_EPOCH: Final = -1
NO_SEQUENCE: Final = -1
NO_TIMESTAMP: Final = -1

ZERO_UUID: Final = uuid.UUID(int=0)

UNASSIGNED_DIRECTORY: Final = "A" * 22
"""The directory of a replica of which it is not known where it lies. Directory ids are texts, as in meta.properties."""
LOST_DIRECTORY: Final = "A" * 21 + "Q"
"""Where a replica lies that no longer has what it promised: its log is gone, damaged, or may have lost its end."""
FAILED_DIRECTORY: Final = "A" * 21 + "w"
"""Where a replica lies whose log cannot be used until its broker is started again."""

CONSUMER_OFFSETS_TOPIC: Final = "__consumer_offsets"
TRANSACTION_STATE_TOPIC: Final = "__transaction_state"
SHARE_STATE_TOPIC: Final = "__share_group_state"
AUDIT_LOG_TOPIC: Final = "__audit_log"
STATE_TOPICS: Final = frozenset({CONSUMER_OFFSETS_TOPIC, TRANSACTION_STATE_TOPIC, SHARE_STATE_TOPIC})
"""What coordinators keep their state in: what is written there comes first when a disk is nearly full."""
INTERNAL_TOPICS: Final = STATE_TOPICS | {AUDIT_LOG_TOPIC}
"""Written by brokers alone."""

MAX_TOPIC_NAME_LENGTH: Final = 249
_TOPIC_NAME: Final = re.compile(r"[a-zA-Z0-9._-]{1,249}\Z")


class TopicPartition(NamedTuple):
    """A partition by the name of its topic; `str()` is the name of its directory on disk."""

    topic: str
    partition: int

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}"


def invalid_topic_name_reason(name: str) -> str | None:
    """Why `name` cannot be a topic, or None where it can.

    The rule is Kafka's, and it is also what keeps a topic's directory inside the data directory.
    """
    if not name:
        return "the topic name is empty"
    if name in {".", ".."}:
        return "a topic cannot be named '.' or '..'"
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return f"the topic name is longer than {MAX_TOPIC_NAME_LENGTH} characters"
    if not _TOPIC_NAME.match(name):
        return "a topic name holds only ASCII letters, digits, '.', '_' and '-'"
    return None


def new_topic_id() -> uuid.UUID:
    """A random id, of a topic or anything else, that is none of those Kafka reserves (all zero, and one).

    As in Kafka its text does not begin with a dash: on a command line that would be an option.
    """
    while True:
        candidate = uuid.uuid4()
        if candidate.int > 1 and not encode_uuid(candidate).startswith("-"):
            return candidate


def encode_uuid(value: uuid.UUID) -> str:
    """Kafka's text form of an id: URL-safe base64 without padding."""
    return base64.urlsafe_b64encode(value.bytes).decode().rstrip("=")


def decode_uuid(text: str) -> uuid.UUID | None:
    """The id that `encode_uuid` wrote, or None where it is none."""
    try:
        raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        return None
    return uuid.UUID(bytes=raw) if len(raw) == 16 else None
