"""Every declared message at every version against kio, an independent implementation of the protocol, in both ways."""

from __future__ import annotations

import dataclasses
import datetime as dt
import io
import types
import typing
from typing import Any
from uuid import UUID

import pytest
from kio.index import UnknownAPIKey, UnknownEntity, load_entity_schema, load_request_schema, load_response_schema
from kio.schema.errors import ErrorCode
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType

from millrace.wire.codec import decode, encode
from millrace.wire.messages.consumer_protocol import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from millrace.wire.schema import Array, Data, Message, Nested, Request, Struct
from support.values import Values, declared_messages, declared_versions

ROUNDS = 6

# What kio 0.6 does not know. It carries all of Kafka 4.3, so nothing may be missing here unnoticed; key 93 is newer.
EXPECTED_UNCOVERED: set[tuple[str, int]] = {("GetReplicaLogInfoRequest", 0), ("GetReplicaLogInfoResponse", 0)}

EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)

# kio gives some numbers a meaning, and with it a narrower range; kafka-python's test covers the full range.
_RESTRICTED = {
    "error_code": [code.value for code in ErrorCode],
    "timedelta_i32": [0, 1, 30_000, (1 << 31) - 1, -1],
    "timedelta_i64": [0, 1, 30_000, 86_400_000 * 365],
    "datetime_i64": [0, 1, 1_700_000_000_123, 4_102_444_800_000],
}


def kio_class(cls: type[Message], version: int) -> Any:
    load = load_request_schema if issubclass(cls, Request) else load_response_schema
    return load(cls.api_key, version)


def fields_of(cls: type[Struct], version: int, kio: Any) -> list[tuple[Any, Any, Any]]:
    """Our fields beside kio's, which come in the same order: (ours, kio's, kio's type)."""
    ours = [field for field in cls.declaration.fields if field.versions.include(version)]
    theirs = dataclasses.fields(kio)
    types_ = typing.get_type_hints(kio)
    assert len(ours) == len(theirs), (cls, version)
    for our, their in zip(ours, theirs, strict=True):
        assert our.name.startswith(their.name), (cls, version, our.name, their.name)
        assert our.tag == their.metadata.get("tag"), (cls, version, our.name)
    return [(our, their, types_[their.name]) for our, their in zip(ours, theirs, strict=True)]


def inner_type(annotation: Any) -> Any:
    """The class inside `X`, `X | None`, `tuple[X, ...]` and combinations."""
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return inner_type(next(part for part in typing.get_args(annotation) if part is not type(None)))
    if typing.get_origin(annotation) is tuple:
        return inner_type(typing.get_args(annotation)[0])
    return annotation


def structure(field: Any) -> type[Struct] | None:
    kind = field.type.element if isinstance(field.type, Array) else field.type
    return kind.resolved() if isinstance(kind, Nested) else None


def hints(cls: type[Struct], version: int, kio: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for our, their, annotation in fields_of(cls, version, kio):
        inner = structure(our)
        if inner is not None:
            found[our.name] = hints(inner, version, inner_type(annotation))
        else:
            restricted = _RESTRICTED.get(their.metadata.get("kafka_type"))
            if restricted:
                found[our.name] = restricted
    return found


def from_kio(cls: type[Struct], version: int, entity: Any) -> Struct:
    values = {}
    for our, their, _ in fields_of(cls, version, type(entity)):
        values[our.name] = plain(getattr(entity, their.name), structure(our), version, our)
    return cls(**values)


def plain(value: Any, inner: type[Struct] | None, version: int, field: Any) -> Any:
    if isinstance(value, tuple):
        # Only ids have elements that kio reads as None: the one that is all zeros.
        return [UUID(int=0) if item is None else plain(item, inner, version, field) for item in value]
    if value is None and not field.nullable.include(version):
        return UUID(int=0) if field.default == UUID(int=0) else -1
    if value is not None and inner is not None:
        return from_kio(inner, version, value)
    if isinstance(value, dt.timedelta):
        return round(value / dt.timedelta(milliseconds=1))
    if isinstance(value, dt.datetime):
        return round((value - EPOCH) / dt.timedelta(milliseconds=1))
    if isinstance(value, ErrorCode):
        return value.value
    return value


def compare(cls: type[Struct], version: int, kio: Any) -> None:
    read, write = entity_reader(kio), entity_writer(kio)
    limits = hints(cls, version, kio)
    values = Values(f"kio {cls.__name__} {version}")
    for _ in range(ROUNDS):
        message = values.message(cls, version, limits)
        raw = encode(message, version)
        entity, size = read(raw, 0)
        assert size == len(raw)
        assert from_kio(cls, version, entity) == message
        buffer = io.BytesIO()
        write(buffer, entity)
        assert buffer.getvalue() == raw
        assert decode(cls, version, buffer.getvalue()) == (message, len(raw))
        assert decode(cls, version, memoryview(b"junk" + raw), 4) == (message, len(raw) + 4)


@pytest.mark.parametrize("cls", list(declared_messages()), ids=lambda cls: cls.__name__)
def test_message_agrees_with_kio_at_every_version(cls: type[Message]) -> None:
    for version in range(cls.min_version, cls.max_version + 1):
        if (cls.__name__, version) not in EXPECTED_UNCOVERED:
            compare(cls, version, kio_class(cls, version))


def test_nothing_is_left_out_unnoticed() -> None:
    uncovered = {}
    for cls, version in declared_versions():
        try:
            kio_class(cls, version)
        except (UnknownAPIKey, UnknownEntity) as reason:
            uncovered[cls.__name__, version] = str(reason)
    assert set(uncovered) == EXPECTED_UNCOVERED, uncovered


@pytest.mark.parametrize(
    "cls", [ConsumerProtocolSubscription, ConsumerProtocolAssignment], ids=lambda cls: cls.__name__
)
def test_consumer_protocol_agrees_with_kio(cls: type[Data]) -> None:
    name = "consumer_protocol_subscription" if cls is ConsumerProtocolSubscription else "consumer_protocol_assignment"
    for version in range(cls.min_version, cls.max_version + 1):
        compare(cls, version, load_entity_schema(name, version, EntityType.data))
