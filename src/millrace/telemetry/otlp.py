"""OpenTelemetry's metrics (OTLP, a MetricsData message) as bytes: said whose they are, and written as JSON.

Protocol buffers are read here by hand, as far as that takes: a message is a row of fields, each with a number and one
of four kinds of value. `stamped` looks only into the resources; everything else is copied as it came. `as_json` reads
all of it, for files, into OTLP's JSON form: fields that are not known are left out.

Invariants: no more than `MAX_FIELDS` fields are looked at, nothing deeper than `MAX_DEPTH`, and what `stamped` returns
has at most the bytes that were allowed, so that a small push costs little whatever it says. Damage is ApiError
INVALID_RECORD; too much is TELEMETRY_TOO_LARGE, after which a client goes on with its next push.
"""

from __future__ import annotations

import math
import struct
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

from millrace.errors import ApiError, ErrorCode

MAX_FIELDS: Final = 100_000
MAX_DEPTH: Final = 24
"""Of messages in messages; the metrics of a client without values of lists of lists have nine."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_RESOURCE_METRICS: Final = 1
_RESOURCE: Final = 1
_ATTRIBUTE: Final = 1
_KEY, _VALUE, _STRING_VALUE = 1, 2, 1

Value: TypeAlias = "int | memoryview"
Field: TypeAlias = "tuple[int, int, Value, memoryview]"
"""Its number, its wire type, its value (for everything but a varint the bytes), and all of it as it came."""


class _Reader:
    """Reads fields, and no more than there may be."""

    def __init__(self, data: bytes | bytearray | memoryview) -> None:
        self.data = memoryview(data)
        self._left = MAX_FIELDS

    def fields(self, message: memoryview) -> Iterator[Field]:
        """The fields of a message in their order."""
        pos, end = 0, len(message)
        while pos < end:
            self._count()
            start = pos
            tag, pos = _varint(message, pos)
            number, wire_type = tag >> 3, tag & 7
            if not number:
                raise _damaged("a field has no number")
            value: Value
            if wire_type == _VARINT:
                value, pos = _varint(message, pos)
            else:
                if wire_type == _LENGTH:
                    length, pos = _varint(message, pos)
                elif wire_type in (_FIXED64, _FIXED32):
                    length = 8 if wire_type == _FIXED64 else 4
                else:
                    raise _damaged("a field is of no known kind")
                if length > end - pos:
                    raise _damaged("a field is cut short")
                value = message[pos : pos + length]
                pos += length
            yield number, wire_type, value, message[start:pos]

    def packed(self, wire_type: int, values: Value) -> Iterator[Value]:
        """The numbers of a field that has them in a row."""
        row, pos = values if isinstance(values, memoryview) else memoryview(b""), 0
        while pos < len(row):
            self._count()
            value: Value
            if wire_type == _VARINT:
                value, pos = _varint(row, pos)
            elif len(row) - pos >= 8:
                value, pos = row[pos : pos + 8], pos + 8
            else:
                raise _damaged("a row of numbers is cut short")
            yield value

    def _count(self) -> None:
        self._left -= 1
        if self._left < 0:
            raise ApiError(ErrorCode.TELEMETRY_TOO_LARGE, f"the metrics have more than {MAX_FIELDS} fields")


def _damaged(reason: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_RECORD, f"the metrics are no OTLP: {reason}")


def _varint(data: memoryview, pos: int) -> tuple[int, int]:
    value = shift = 0
    for place in range(pos, min(pos + 10, len(data))):
        byte = data[place]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place + 1
        shift += 7
    raise _damaged("a number does not end")


# --- whose they are ---------------------------------------------------------------------------------------------------


def stamped(metrics: bytes | bytearray | memoryview, attributes: Mapping[str, str], max_bytes: int) -> bytes:
    """The metrics, each of their resources with these attributes first, and none of these names by the client."""
    reader = _Reader(metrics)
    own = b"".join(_written(_ATTRIBUTE, _attribute(name, text)) for name, text in attributes.items())
    names = frozenset(name.encode() for name in attributes)
    parts: list[bytes | memoryview] = []
    size_bytes = 0
    for number, wire_type, value, whole in reader.fields(reader.data):
        part: bytes | memoryview = whole
        if number == _RESOURCE_METRICS and wire_type == _LENGTH and isinstance(value, memoryview):
            part = _written(_RESOURCE_METRICS, _resource_metrics(reader, value, own, names))
        parts.append(part)
        size_bytes += len(part)
        if size_bytes > max_bytes:
            raise ApiError(
                ErrorCode.TELEMETRY_TOO_LARGE, f"the metrics are more than telemetry.max.decompressed.bytes={max_bytes}"
            )
    return b"".join(parts)


def _resource_metrics(reader: _Reader, message: memoryview, own: bytes, names: frozenset[bytes]) -> bytes:
    resource: list[bytes | memoryview] = [own]
    rest: list[bytes | memoryview] = []
    for number, wire_type, value, whole in reader.fields(message):
        if number == _RESOURCE and wire_type == _LENGTH and isinstance(value, memoryview):
            resource += (
                field
                for inner, kind, attribute, field in reader.fields(value)
                if not (
                    inner == _ATTRIBUTE
                    and kind == _LENGTH
                    and isinstance(attribute, memoryview)
                    and _key_of(reader, attribute) in names
                )
            )
        else:
            rest.append(whole)
    return b"".join([_written(_RESOURCE, b"".join(resource)), *rest])


def _key_of(reader: _Reader, attribute: memoryview) -> bytes:
    key = b""
    for number, wire_type, value, _ in reader.fields(attribute):
        if number == _KEY and wire_type == _LENGTH and isinstance(value, memoryview):
            key = bytes(value)
    return key


def _attribute(name: str, text: str) -> bytes:
    return _written(_KEY, name.encode()) + _written(_VALUE, _written(_STRING_VALUE, text.encode(errors="replace")))


def _written(number: int, message: bytes) -> bytes:
    length = len(message)
    head = bytearray((number << 3 | _LENGTH,))
    while length > 0x7F:
        head.append(length & 0x7F | 0x80)
        length >>= 7
    head.append(length)
    return bytes(head) + message


# --- as JSON ----------------------------------------------------------------------------------------------------------

_TIMES: Final = {2: ("startTimeUnixNano", "fixed64"), 3: ("timeUnixNano", "fixed64")}
_MESSAGES: Final[Mapping[str, Mapping[int, tuple[str, str]]]] = {
    "MetricsData": {1: ("resourceMetrics", "ResourceMetrics*")},
    "ResourceMetrics": {
        1: ("resource", "Resource"), 2: ("scopeMetrics", "ScopeMetrics*"), 3: ("schemaUrl", "string"),
    },
    "Resource": {1: ("attributes", "KeyValue*"), 2: ("droppedAttributesCount", "number")},
    "ScopeMetrics": {1: ("scope", "Scope"), 2: ("metrics", "Metric*"), 3: ("schemaUrl", "string")},
    "Scope": {
        1: ("name", "string"), 2: ("version", "string"), 3: ("attributes", "KeyValue*"),
        4: ("droppedAttributesCount", "number"),
    },
    "Metric": {
        1: ("name", "string"), 2: ("description", "string"), 3: ("unit", "string"), 5: ("gauge", "Gauge"),
        7: ("sum", "Sum"), 9: ("histogram", "Histogram"), 10: ("exponentialHistogram", "ExponentialHistogram"),
        11: ("summary", "Summary"), 12: ("metadata", "KeyValue*"),
    },
    "Gauge": {1: ("dataPoints", "Number*")},
    "Sum": {
        1: ("dataPoints", "Number*"), 2: ("aggregationTemporality", "number"), 3: ("isMonotonic", "bool"),
    },
    "Histogram": {1: ("dataPoints", "HistogramPoint*"), 2: ("aggregationTemporality", "number")},
    "ExponentialHistogram": {1: ("dataPoints", "ExponentialPoint*"), 2: ("aggregationTemporality", "number")},
    "Summary": {1: ("dataPoints", "SummaryPoint*")},
    "Number": {
        **_TIMES, 4: ("asDouble", "double"), 5: ("exemplars", "Exemplar*"), 6: ("asInt", "sfixed64"),
        7: ("attributes", "KeyValue*"), 8: ("flags", "number"),
    },
    "HistogramPoint": {
        **_TIMES, 4: ("count", "fixed64"), 5: ("sum", "double"), 6: ("bucketCounts", "fixed64*"),
        7: ("explicitBounds", "double*"), 8: ("exemplars", "Exemplar*"), 9: ("attributes", "KeyValue*"),
        10: ("flags", "number"), 11: ("min", "double"), 12: ("max", "double"),
    },
    "ExponentialPoint": {
        **_TIMES, 1: ("attributes", "KeyValue*"), 4: ("count", "fixed64"), 5: ("sum", "double"), 6: ("scale", "zigzag"),
        7: ("zeroCount", "fixed64"), 8: ("positive", "Buckets"), 9: ("negative", "Buckets"), 10: ("flags", "number"),
        11: ("exemplars", "Exemplar*"), 12: ("min", "double"), 13: ("max", "double"), 14: ("zeroThreshold", "double"),
    },
    "Buckets": {1: ("offset", "zigzag"), 2: ("bucketCounts", "uint64*")},
    "SummaryPoint": {
        **_TIMES, 4: ("count", "fixed64"), 5: ("sum", "double"), 6: ("quantileValues", "Quantile*"),
        7: ("attributes", "KeyValue*"), 8: ("flags", "number"),
    },
    "Quantile": {1: ("quantile", "double"), 2: ("value", "double")},
    "Exemplar": {
        2: ("timeUnixNano", "fixed64"), 3: ("asDouble", "double"), 4: ("spanId", "hex"), 5: ("traceId", "hex"),
        6: ("asInt", "sfixed64"), 7: ("filteredAttributes", "KeyValue*"),
    },
    "KeyValue": {1: ("key", "string"), 2: ("value", "AnyValue")},
    "AnyValue": {
        1: ("stringValue", "string"), 2: ("boolValue", "bool"), 3: ("intValue", "int64"), 4: ("doubleValue", "double"),
        5: ("arrayValue", "AnyValues"), 6: ("kvlistValue", "KeyValues"), 7: ("bytesValue", "bytes"),
    },
    "AnyValues": {1: ("values", "AnyValue*")},
    "KeyValues": {1: ("values", "KeyValue*")},
}  # fmt: skip
"""By number: the name in JSON, and what it is; `*`: any number of them."""


def _double(data: memoryview) -> float | str:
    (number,) = struct.unpack("<d", data)
    if math.isfinite(number):
        return float(number)
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


_SCALARS: Final[Mapping[str, tuple[int, Callable[[Any], Any]]]] = {
    # Numbers of 64 bits are strings in JSON, whose readers may have doubles only.
    "string": (_LENGTH, lambda value: bytes(value).decode(errors="replace")),
    "bytes": (_LENGTH, lambda value: b64encode(value).decode()),
    "hex": (_LENGTH, lambda value: bytes(value).hex()),
    "bool": (_VARINT, bool),
    "number": (_VARINT, lambda value: value & 0xFFFFFFFF),
    "zigzag": (_VARINT, lambda value: (value >> 1) ^ -(value & 1)),
    "uint64": (_VARINT, lambda value: str(value & (1 << 64) - 1)),
    "int64": (_VARINT, lambda value: str((value & (1 << 63) - 1) - (value & 1 << 63))),
    "double": (_FIXED64, _double),
    "fixed64": (_FIXED64, lambda value: str(int.from_bytes(value, "little"))),
    "sfixed64": (_FIXED64, lambda value: str(int.from_bytes(value, "little", signed=True))),
}


def as_json(metrics: bytes) -> dict[str, Any]:
    """The metrics in OTLP's JSON form, as Python has it."""
    reader = _Reader(metrics)
    made: dict[str, Any] = {}
    _read_into(made, reader, "MetricsData", reader.data, MAX_DEPTH)
    return made


def _read_into(made: dict[str, Any], reader: _Reader, kind: str, message: memoryview, depth: int) -> None:
    """Add what a message says; one that comes in several parts is one message."""
    if not depth:
        raise ApiError(ErrorCode.TELEMETRY_TOO_LARGE, f"the metrics are nested deeper than {MAX_DEPTH}")
    for number, wire_type, value, _ in reader.fields(message):
        name, what = _MESSAGES[kind].get(number, ("", ""))
        if not name:
            continue
        of, is_repeated = what.rstrip("*"), what.endswith("*")
        if of in _MESSAGES:
            if wire_type == _LENGTH and isinstance(value, memoryview):
                inner: dict[str, Any] = {} if is_repeated else made.setdefault(name, {})
                _read_into(inner, reader, of, value, depth - 1)
                if is_repeated:
                    made.setdefault(name, []).append(inner)
            continue
        expected, read = _SCALARS[of]
        if is_repeated:
            values = [value] if wire_type == expected else reader.packed(expected, value)
            made.setdefault(name, []).extend(map(read, values))
        elif wire_type == expected:
            made[name] = read(value)
