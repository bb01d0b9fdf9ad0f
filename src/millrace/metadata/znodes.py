"""The znodes of a cluster: their paths and what is in them. Pure; who writes them when is in `metadata.zookeeper`.

All paths are below the one in the address (`host:port,.../path`), which is made at the first start:

| znode | kind | content |
|---|---|---|
| `/controller` | ephemeral | `{"broker_id", "controller_epoch", "claim"}`: who is controller |
| `/controller_epoch` | | empty; its *version* is the controller epoch, raised with every election |
| `/brokers/ids/N` | ephemeral | `BrokerRegistration` as JSON, with a `claim`; its czxid is the broker epoch |
| `/metadata` | | `{"format": 1}` |
| `/metadata/deltas/d-NNNNNNNNNN` | | one delta, packed; the number is given by the writer |
| `/metadata/snapshot` | | `{"index", "chunks"}`: the newest snapshot; empty where there is none |
| `/metadata/snapshots/s-NNNNNNNNNN-K` | | a packed snapshot, cut into chunks of at most 512 KiB |

Packed: one byte (`=` plain, `z` zlib, used above 1 KiB), the controller epoch (4 bytes), the data. `claim` is a random
number of one call: after a lost connection it tells whether that call has happened.

What is in a znode is checked as what comes from outside is: nothing is unpacked beyond a bound, which is also that of
what is written, and what does not have its fields is StorageError.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from millrace.errors import StorageError
from millrace.metadata.deltas import Endpoint, read_directories, write_directories
from millrace.metadata.store import BrokerRegistration

FORMAT: Final = 1
METADATA: Final = "/metadata"
DELTAS: Final = "/metadata/deltas"
SNAPSHOT: Final = "/metadata/snapshot"
SNAPSHOTS: Final = "/metadata/snapshots"
BROKERS: Final = "/brokers"
BROKER_IDS: Final = "/brokers/ids"
CONTROLLER: Final = "/controller"
CONTROLLER_EPOCH: Final = "/controller_epoch"

MAX_DELTA_BYTES: Final = 64 * 1024 * 1024
MAX_SNAPSHOT_BYTES: Final = 512 * 1024 * 1024
"""Unpacked. A znode of 1 MiB could be made to hold a thousand times that."""
CHUNK_BYTES: Final = 512 * 1024
MAX_CHUNKS: Final = MAX_SNAPSHOT_BYTES // CHUNK_BYTES + 1  # what cannot be compressed is a little larger packed

_COMPRESS_ABOVE_BYTES: Final = 1024
_PLAIN, _ZLIB = b"=", b"z"
_HEADER: Final = struct.Struct(">cI")


@dataclass(frozen=True, slots=True)
class ControllerClaim:
    """Who is controller, under which epoch, and by which call."""

    broker_id: int
    controller_epoch: int
    claim: str


def broker_path(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def delta_path(number: int) -> str:
    return f"{DELTAS}/d-{number:010d}"


def chunk_path(index: int, number: int) -> str:
    return f"{SNAPSHOTS}/s-{index:010d}-{number}"


def snapshot_index(name: str) -> int:
    """Which snapshot the chunk called `name` is a part of."""
    return int(name.split("-")[1])


def pack(data: bytes, controller_epoch: int, max_bytes: int = MAX_DELTA_BYTES) -> bytes:
    """StorageError for what nobody would read again."""
    if len(data) > max_bytes:
        raise StorageError(f"{len(data)} bytes of metadata are more than are read again ({max_bytes}); ask for less")
    if len(data) > _COMPRESS_ABOVE_BYTES:
        return _HEADER.pack(_ZLIB, controller_epoch) + zlib.compress(data, 1)
    return _HEADER.pack(_PLAIN, controller_epoch) + data


def unpack(value: bytes, max_bytes: int = MAX_DELTA_BYTES) -> bytes:
    try:
        kind, _ = _HEADER.unpack_from(value)
        data = value[_HEADER.size :]
        if kind == _PLAIN:
            return data
        if kind == _ZLIB:
            unpacking = zlib.decompressobj()
            unpacked = unpacking.decompress(data, max_bytes + 1)
            if len(unpacked) > max_bytes:
                raise StorageError(f"metadata in ZooKeeper, {len(value)} bytes, unpacks to more than {max_bytes}")
            if not unpacking.eof:
                raise zlib.error("it is cut off")
            return unpacked
    except (struct.error, zlib.error) as error:
        raise StorageError(f"damaged metadata in ZooKeeper, {len(value)} bytes: {error}") from error
    raise StorageError(f"damaged metadata in ZooKeeper, {len(value)} bytes of an unknown kind")


def to_json(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":")).encode()


def from_json(data: bytes, path: str) -> dict[str, Any]:
    try:
        fields = json.loads(data)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise StorageError(f"damaged metadata in ZooKeeper: {path} cannot be read, {len(data)} bytes")
    return fields


@contextmanager
def _damage_said(path: str) -> Iterator[None]:
    try:
        yield
    except (LookupError, TypeError, ValueError) as error:
        raise StorageError(f"damaged metadata in ZooKeeper: {path} is not what it should be") from error


def read_pointer(data: bytes) -> tuple[int, int]:
    """Index and chunk count of the newest snapshot; 0, 0 where there is none."""
    if not data:
        return 0, 0
    fields = from_json(data, SNAPSHOT)
    with _damage_said(SNAPSHOT):
        index, chunks = int(fields["index"]), int(fields["chunks"])
        if not (index >= 0 and 0 <= chunks <= MAX_CHUNKS):
            raise ValueError
        return index, chunks


def write_registration(registration: BrokerRegistration, claim: str) -> bytes:
    endpoints = [
        [endpoint.listener, endpoint.host, endpoint.port, endpoint.security_protocol]
        for endpoint in registration.endpoints
    ]
    return to_json(
        {
            "endpoints": endpoints,
            "rack": registration.rack,
            "directories": write_directories(registration.directories),
            "boot_id": registration.boot_id,
            "clean_epoch": registration.clean_epoch,
            "claim": claim,
        }
    )


def read_registration(broker_id: int, data: bytes) -> BrokerRegistration:
    fields = from_json(data, broker_path(broker_id))
    with _damage_said(broker_path(broker_id)):
        endpoints = tuple(
            Endpoint(listener, host, port, protocol) for listener, host, port, protocol in fields["endpoints"]
        )
        return BrokerRegistration(
            broker_id,
            endpoints,
            fields["rack"],
            read_directories(fields.get("directories", [])),
            fields.get("boot_id", ""),
            fields.get("clean_epoch", -1),
        )


def write_claim(claim: ControllerClaim) -> bytes:
    fields = {"broker_id": claim.broker_id, "controller_epoch": claim.controller_epoch, "claim": claim.claim}
    return to_json(fields)


def read_claim(data: bytes) -> ControllerClaim:
    fields = from_json(data, CONTROLLER)
    with _damage_said(CONTROLLER):
        return ControllerClaim(int(fields["broker_id"]), int(fields["controller_epoch"]), str(fields["claim"]))
