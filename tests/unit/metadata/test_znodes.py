"""What is in the znodes, and what is made of what should not be there."""

from __future__ import annotations

import json
import random
import tracemalloc
import zlib
from collections.abc import Callable

import pytest

from millrace.errors import StorageError
from millrace.metadata import znodes
from millrace.metadata.store import BrokerRegistration
from support.metadata import ENDPOINT


@pytest.mark.parametrize("size", [0, 1, 1024, 1025, 100_000])
def test_what_is_packed_is_unpacked(size: int) -> None:
    for data in (bytes(size), random.Random(size).randbytes(size)):
        assert znodes.unpack(znodes.pack(data, 7), max(size, 1)) == data


def test_nothing_is_unpacked_beyond_its_bound() -> None:
    bomb = b"z\0\0\0\x07" + zlib.compress(bytes(200 * 1024 * 1024), 9)
    assert len(bomb) < 900 * 1024, "it fits into a znode"
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match="unpacks to more than 1000000"):
            znodes.unpack(bomb, 1_000_000)
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
    with pytest.raises(StorageError, match="unpacks to more than"):
        znodes.unpack(bomb)


def test_what_would_not_be_read_again_is_not_written() -> None:
    with pytest.raises(StorageError, match="more than are read again"):
        znodes.pack(bytes(2001), 1, 2000)


@pytest.mark.parametrize("value", [b"", b"z", b"?\0\0\0\x01", b"z\0\0\0\x01nonsense"])
def test_damaged_values(value: bytes) -> None:
    with pytest.raises(StorageError, match="damaged"):
        znodes.unpack(value)


def test_a_value_that_is_cut_off() -> None:
    packed = znodes.pack(random.Random(1).randbytes(5000), 1)
    for length in (6, 100, len(packed) - 1):
        with pytest.raises(StorageError, match="damaged"):
            znodes.unpack(packed[:length])


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"index": 1},
        {"index": 1, "chunks": 10**9},
        {"index": -1, "chunks": 1},
        {"index": 1, "chunks": -1},
        {"index": {}, "chunks": "x"},
    ],
)
def test_a_pointer_that_points_nowhere(fields: dict[str, object]) -> None:
    with pytest.raises(StorageError, match="damaged metadata in ZooKeeper: /metadata/snapshot"):
        znodes.read_pointer(json.dumps(fields).encode())


@pytest.mark.parametrize("read", [znodes.read_claim, lambda data: znodes.read_registration(1, data)])
@pytest.mark.parametrize("content", ["{}", "[]", "x", '{"endpoints": [[1]], "broker_id": "x"}', '{"endpoints": 3}'])
def test_what_lacks_its_fields(read: Callable[[bytes], object], content: str) -> None:
    with pytest.raises(StorageError, match="damaged"):
        read(content.encode())


def test_claims_and_registrations_are_read_as_written() -> None:
    claim = znodes.ControllerClaim(3, 9, "abc")
    assert znodes.read_claim(znodes.write_claim(claim)) == claim
    registration = BrokerRegistration(3, (ENDPOINT,), "r1", boot_id="b", clean_epoch=4)
    assert znodes.read_registration(3, znodes.write_registration(registration, "abc")) == registration
