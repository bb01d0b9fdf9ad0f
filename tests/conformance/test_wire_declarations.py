"""The declarations as a whole: complete, consistent, and compiled into what they say."""

from __future__ import annotations

import random
import sys
import typing
from collections.abc import Iterator
from uuid import UUID

import pytest

from millrace.wire.codec import decode, encode
from millrace.wire.keys import FLEXIBLE_FROM, ApiKey
from millrace.wire.messages import DECLARATIONS, request_class, response_class
from millrace.wire.schema import Array, Blob, Field, Fixed, Message, Nested, Request, Struct, StructMeta, Text
from support.values import Values, declared_messages, reference_encode

# Kafka 4.3's table, and key 93 of its development branch. A change here is a change of what is spoken on the wire.
VERSIONS = {
    0: (3, 13), 1: (4, 18), 2: (1, 11), 3: (0, 13), 8: (2, 10), 9: (1, 10), 10: (0, 6), 11: (0, 9), 12: (0, 4),
    13: (0, 5), 14: (0, 5), 15: (0, 6), 16: (0, 5), 17: (0, 1), 18: (0, 4), 19: (2, 7), 20: (1, 6), 21: (0, 2),
    22: (0, 6), 23: (2, 4), 24: (0, 5), 25: (0, 4), 26: (0, 5), 27: (1, 2), 28: (0, 5), 29: (1, 3), 30: (1, 3),
    31: (1, 3), 32: (1, 4), 33: (0, 2), 34: (1, 2), 35: (1, 5), 36: (0, 2), 37: (0, 3), 38: (1, 3), 39: (1, 2),
    40: (1, 2), 41: (1, 3), 42: (0, 2), 43: (0, 2), 44: (0, 1), 45: (0, 1), 46: (0, 0), 47: (0, 0), 48: (0, 1),
    49: (0, 1), 50: (0, 0), 51: (0, 0), 55: (0, 2), 56: (2, 3), 57: (0, 2), 58: (0, 0), 60: (0, 2), 61: (0, 0),
    63: (0, 2),
    64: (0, 0), 65: (0, 0), 66: (0, 2), 67: (0, 0), 68: (0, 1), 69: (0, 1), 71: (0, 0), 72: (0, 0), 73: (0, 0),
    74: (0, 1), 75: (0, 0), 76: (1, 1), 77: (1, 1), 78: (1, 2), 79: (1, 2), 83: (0, 0), 84: (0, 0), 85: (0, 1),
    86: (0, 0), 87: (0, 1), 88: (0, 0), 89: (0, 0), 90: (0, 1), 91: (0, 0), 92: (0, 0), 93: (0, 0),
}  # fmt: skip


def test_versions_are_kafka_4_3() -> None:
    declared = {int(key): (request_class(key).min_version, request_class(key).max_version) for key in DECLARATIONS}
    assert declared == VERSIONS
    for key in DECLARATIONS:
        response = response_class(key)
        assert (response.min_version, response.max_version) == VERSIONS[key]
        assert request_class(key).api_key is response.api_key is key


def test_header_table_agrees_with_the_declarations() -> None:
    for cls in declared_messages():
        assert cls.flexible_from == FLEXIBLE_FROM.get(cls.api_key)


def test_api_key_names_follow_the_messages() -> None:
    for key, place in DECLARATIONS.items():
        assert key.name.replace("_", "") == place.name.upper()
    assert ApiKey(18).name == "API_VERSIONS"


def structures(cls: type[Struct]) -> Iterator[type[Struct]]:
    yield cls
    for inner in vars(cls).values():
        if isinstance(inner, StructMeta):
            yield from structures(typing.cast("type[Struct]", inner))


@pytest.mark.parametrize("cls", list(declared_messages()), ids=lambda cls: cls.__name__)
def test_annotations_say_what_the_fields_are(cls: type[Message]) -> None:
    valid = range(cls.min_version, cls.max_version + 1)
    for structure in structures(cls):
        names = {**vars(sys.modules[cls.__module__]), **vars(cls)}
        annotations = vars(structure).get("__annotations__", {})
        hints = {name: eval(text, names) for name, text in annotations.items()}
        for field in structure.declaration.fields:
            nullable = any(field.nullable.include(version) for version in valid)
            expected = python_type(field)
            assert hints[field.name] == (expected | None if nullable else expected), (structure, field.name)
            assert any(field.versions.include(version) for version in valid), (structure, field.name)
            if field.default is None:
                assert nullable, (structure, field.name)


def python_type(field: Field) -> typing.Any:
    if isinstance(field.type, Array):
        return list[plain_type(field.type.element)]  # type: ignore[misc]
    return plain_type(field.type)


def plain_type(kind: object) -> typing.Any:
    if isinstance(kind, Nested):
        return kind.resolved()
    if isinstance(kind, Text):
        return str
    if isinstance(kind, Blob):
        return bytes | memoryview if kind.view else bytes
    assert isinstance(kind, Fixed)
    return {"?": bool, "d": float, "16s": UUID}.get(kind.code, int)


@pytest.mark.parametrize("cls", list(declared_messages()), ids=lambda cls: cls.__name__)
def test_compiled_codec_agrees_with_the_naive_one(cls: type[Message]) -> None:
    for version in range(cls.min_version, cls.max_version + 1):
        values = Values(f"reference {cls.__name__} {version}")
        unknown = random.Random(version)
        for _ in range(4):
            message = values.message(cls, version)
            raw = encode(message, version)
            assert raw == reference_encode(message, version)
            assert decode(cls, version, raw) == (message, len(raw))
            extended = reference_encode(message, version, unknown_tags=unknown)
            assert decode(cls, version, memoryview(extended)) == (message, len(extended))


@pytest.mark.parametrize("cls", list(declared_messages()), ids=lambda cls: cls.__name__)
def test_defaults_can_be_sent_at_every_version(cls: type[Message]) -> None:
    for version in range(cls.min_version, cls.max_version + 1):
        raw = encode(cls(), version)
        assert decode(cls, version, raw) == (cls(), len(raw))


def test_requests_are_requests() -> None:
    assert all(issubclass(request_class(key), Request) for key in DECLARATIONS)
    assert all(request_class(key).declaration.is_request for key in DECLARATIONS)
    assert not any(response_class(key).declaration.is_request for key in DECLARATIONS)
