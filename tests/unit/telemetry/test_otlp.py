"""Metrics as bytes: what the broker says of whose they are, and the JSON of files."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode
from millrace.telemetry import otlp
from millrace.telemetry.otlp import as_json, stamped
from support.otlp import attribute, gauge, metric_names, part, resources, varint

MIB = 1024 * 1024
OWN = {"client_id": "app", "principal": "User:alice"}


def test_the_clients_attributes_stay_and_the_brokers_come_first() -> None:
    made = stamped(gauge("a", 1, client_rack="r1") + gauge("b", 2), OWN, MIB)
    assert resources(made) == [[*OWN.items(), ("client_rack", "r1")], list(OWN.items())]
    assert metric_names(made) == {"a", "b"}


def test_a_client_cannot_say_that_it_is_somebody_else() -> None:
    made = stamped(gauge("a", 1, principal="User:root", group_id="g"), OWN, MIB)
    assert resources(made) == [[*OWN.items(), ("group_id", "g")]]


def test_nor_with_a_resource_in_two_parts_or_a_key_that_is_said_twice() -> None:
    twice = part(1, part(1, "harmless") + part(1, "principal") + part(2, part(1, "User:root")))
    made = stamped(part(1, part(1, attribute("principal", "User:root")) + part(1, twice)), OWN, MIB)
    assert resources(made) == [list(OWN.items())]


def test_what_is_not_known_is_passed_on() -> None:
    unknown = part(9, b"later") + b"\x50\x07" + b"\x5d" + bytes(4)
    metrics = part(1, part(1, part(3, b"entity") + unknown) + unknown) + unknown
    assert stamped(metrics, {}, MIB) == metrics


@pytest.mark.parametrize(
    "bad",
    [b"\x0a", b"\x0a\x05abc", b"\x0b\x00", b"\x0c", b"\xff" * 11, b"\x09abc", part(1, b"\x0a\x7f"), b"\x02\x00"],
    ids=["no length", "cut short", "group", "end of group", "endless", "short number", "inside", "field 0"],
)
def test_what_is_no_otlp_is_refused(bad: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        stamped(bad, OWN, MIB)
    assert refused.value.code is ErrorCode.INVALID_RECORD


def test_what_grows_too_large_is_refused_before_it_has() -> None:
    """Two bytes are a resource, and each gets the attributes."""
    with pytest.raises(ApiError) as refused:
        stamped(b"\x0a\x00" * (otlp.MAX_FIELDS - 1), OWN, MIB)
    assert refused.value.code is ErrorCode.TELEMETRY_TOO_LARGE


@pytest.mark.parametrize("read", [lambda data: stamped(data, OWN, 64 * MIB), as_json], ids=["stamped", "as_json"])
def test_fields_are_counted(read: object) -> None:
    with pytest.raises(ApiError) as refused:
        read(b"\x50\x00" * (otlp.MAX_FIELDS + 1))  # type: ignore[operator]
    assert refused.value.code is ErrorCode.TELEMETRY_TOO_LARGE


def _number(tag: int, value: float) -> bytes:
    return varint(tag << 3 | 1) + struct.pack("<d", value)


def _fixed(tag: int, value: int) -> bytes:
    return varint(tag << 3 | 1) + value.to_bytes(8, "little", signed=value < 0)


def test_json_is_otlps() -> None:
    point = _fixed(2, 1) + _fixed(3, 2) + _fixed(6, -3) + part(7, part(1, "k") + part(2, b"\x18" + varint(2**64 - 1)))
    total = part(1, "sum") + part(7, part(1, point) + b"\x10\x01\x18\x01")
    bounds = b"".join(struct.pack("<d", each) for each in (0.5, float("inf")))
    counts = b"".join(each.to_bytes(8, "little") for each in (1, 2, 3))
    histogram = part(9, part(1, _fixed(4, 6) + _number(5, 1.5) + part(6, counts) + part(7, bounds)))
    exponential = part(10, part(1, b"\x30\x03" + part(8, b"\x08\x02" + part(2, b"\x01\x80\x01"))))
    spread = part(1, "spread") + histogram
    metrics = part(1, part(2, b"".join(part(2, each) for each in (total, spread, exponential))))
    made = as_json(metrics)
    assert json.loads(json.dumps(made)) == made == {
        "resourceMetrics": [{"scopeMetrics": [{"metrics": [
            {"name": "sum", "sum": {
                "aggregationTemporality": 1, "isMonotonic": True,
                "dataPoints": [{
                    "startTimeUnixNano": "1", "timeUnixNano": "2", "asInt": "-3",
                    "attributes": [{"key": "k", "value": {"intValue": "-1"}}],
                }],
            }},
            {"name": "spread", "histogram": {"dataPoints": [{
                "count": "6", "sum": 1.5, "bucketCounts": ["1", "2", "3"], "explicitBounds": [0.5, "Infinity"],
            }]}},
            {"exponentialHistogram": {"dataPoints": [{
                "scale": -2, "positive": {"offset": 1, "bucketCounts": ["1", "128"]},
            }]}},
        ]}]}]
    }  # fmt: skip


def test_json_has_a_bottom() -> None:
    value = b""
    for _ in range(otlp.MAX_DEPTH):
        value = part(5, part(1, value))
    with pytest.raises(ApiError) as refused:
        as_json(part(1, part(1, part(1, part(1, "k") + part(2, value)))))
    assert refused.value.code is ErrorCode.TELEMETRY_TOO_LARGE


def _code_of(read: Callable[[bytes], object], data: bytes) -> ErrorCode | None:
    try:
        read(data)
    except ApiError as error:
        return error.code
    return None


@given(st.binary(max_size=200), st.integers(0, 200))
def test_whatever_comes_is_read_or_refused(noise: bytes, at: int) -> None:
    damaged = bytearray(gauge("a.b", 5, client_rack="x") * 2)
    damaged[at % len(damaged) : at % len(damaged) + len(noise)] = noise
    for data in (noise, bytes(damaged)):
        for read in (lambda data: as_json(stamped(data, OWN, MIB)), as_json):
            assert _code_of(read, data) in (None, ErrorCode.INVALID_RECORD, ErrorCode.TELEMETRY_TOO_LARGE)
