"""The declared messages that kafka-python 3 also has, against kafka-python, over the full range of every value."""

from __future__ import annotations

import importlib
import pkgutil
import warnings
from typing import Any

import pytest

from millrace.wire.codec import decode, encode
from millrace.wire.keys import ApiKey
from millrace.wire.messages import DECLARATIONS
from millrace.wire.messages.api_versions import ApiVersionsResponse
from millrace.wire.schema import Array, Message, Nested, Struct
from support.values import Values, declared_messages, declared_versions

ROUNDS = 4

# kafka-python is a client: it has no messages that only brokers send each other, no share, streams or KIP-848 groups,
# no telemetry and no delegation tokens.
EXPECTED_MISSING_KEYS = {
    ApiKey.ENVELOPE,
    ApiKey.CREATE_DELEGATION_TOKEN,
    ApiKey.RENEW_DELEGATION_TOKEN,
    ApiKey.EXPIRE_DELEGATION_TOKEN,
    ApiKey.DESCRIBE_DELEGATION_TOKEN,
    ApiKey.ALTER_PARTITION,
    ApiKey.ENVELOPE,
    ApiKey.BROKER_HEARTBEAT,
    ApiKey.UNREGISTER_BROKER,
    ApiKey.ALLOCATE_PRODUCER_IDS,
    ApiKey.ASSIGN_REPLICAS_TO_DIRS,
    ApiKey.GET_REPLICA_LOG_INFO,
    ApiKey.CONSUMER_GROUP_HEARTBEAT,
    ApiKey.CONSUMER_GROUP_DESCRIBE,
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS,
    ApiKey.PUSH_TELEMETRY,
    ApiKey.SHARE_GROUP_HEARTBEAT,
    ApiKey.SHARE_GROUP_DESCRIBE,
    ApiKey.SHARE_FETCH,
    ApiKey.SHARE_ACKNOWLEDGE,
    ApiKey.INITIALIZE_SHARE_GROUP_STATE,
    ApiKey.READ_SHARE_GROUP_STATE,
    ApiKey.WRITE_SHARE_GROUP_STATE,
    ApiKey.DELETE_SHARE_GROUP_STATE,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    ApiKey.STREAMS_GROUP_HEARTBEAT,
    ApiKey.STREAMS_GROUP_DESCRIBE,
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
    ApiKey.ALTER_SHARE_GROUP_OFFSETS,
    ApiKey.DELETE_SHARE_GROUP_OFFSETS,
}
# And some of its messages stop at an older version.
EXPECTED_UNCOVERED_VERSIONS: set[tuple[str, int]] = set()


def kafka_python_classes() -> dict[str, Any]:
    import kafka.protocol
    from kafka.protocol.api_message import ApiMessage

    found: dict[str, Any] = {}
    for module in pkgutil.walk_packages(kafka.protocol.__path__, "kafka.protocol."):
        if ".old" in module.name or "generate" in module.name:
            continue
        for name, value in vars(importlib.import_module(module.name)).items():
            if isinstance(value, type) and issubclass(value, ApiMessage) and value is not ApiMessage:
                found[name] = value
    return found


with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # it reads its schemas with an old function of importlib
    CLASSES = kafka_python_classes()


def from_kafka_python(cls: type[Struct], version: int, theirs: Any) -> Struct:
    values: dict[str, Any] = {}
    for field in cls.declaration.fields:
        if not field.versions.include(version):
            continue
        value = their_value(theirs, field.name)
        kind = field.type.element if isinstance(field.type, Array) else field.type
        if isinstance(kind, Nested) and value is not None:
            inner = kind.resolved()
            if isinstance(field.type, Array):
                value = [from_kafka_python(inner, version, item) for item in value]
            else:
                value = from_kafka_python(inner, version, value)
        elif isinstance(value, tuple):
            value = list(value)
        if value is None and not field.nullable.include(version):
            value = field.new_default()  # a tagged structure that was not sent
        values[field.name] = value
    return cls(**values)


def their_value(theirs: Any, name: str) -> Any:
    if not name.endswith("authorized_operations"):
        return getattr(theirs, name)
    # kafka-python shortens this name in some messages and shows the number as the set of its bits.
    value = theirs.authorized_operations if "authorized_operations" in theirs.fields else getattr(theirs, name)
    if not isinstance(value, set | frozenset):
        return value
    number = sum(1 << bit for bit in value)
    return number - (1 << 32) if number >> 31 else number


def hints(cls: type[Message]) -> dict[str, Any]:
    # It reads an ApiVersions response with an error as version 0, which is what brokers send then.
    return {"error_code": [0]} if cls is ApiVersionsResponse else {}


def covered(cls: type[Message], version: int) -> bool:
    theirs = CLASSES.get(cls.__name__)
    return theirs is not None and version <= theirs.max_version


@pytest.mark.parametrize(
    "cls", [cls for cls in declared_messages() if cls.__name__ in CLASSES], ids=lambda cls: cls.__name__
)
def test_message_agrees_with_kafka_python_at_every_version(cls: type[Message]) -> None:
    theirs = CLASSES[cls.__name__]
    for version in range(cls.min_version, cls.max_version + 1):
        if not covered(cls, version):
            continue
        values = Values(f"kafka-python {cls.__name__} {version}")
        for _ in range(ROUNDS):
            message = values.message(cls, version, hints(cls))
            raw = encode(message, version)
            read = theirs.decode(raw, version=version)
            assert from_kafka_python(cls, version, read) == message, version
            read._header = None
            written = bytes(read.encode())
            assert written == raw, version
            assert decode(cls, version, written) == (message, len(raw))


def test_what_kafka_python_lacks_is_known() -> None:
    missing_keys = {key for key, place in DECLARATIONS.items() if f"{place.name}Request" not in CLASSES}
    assert missing_keys == EXPECTED_MISSING_KEYS
    uncovered = {
        (cls.__name__, version)
        for cls, version in declared_versions()
        if cls.api_key not in missing_keys and not covered(cls, version)
    }
    assert uncovered == EXPECTED_UNCOVERED_VERSIONS
