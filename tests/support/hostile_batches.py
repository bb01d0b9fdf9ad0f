"""Mutated record batches for the compiled decoder, between guard pages: a process of its own that may crash.

    python -m support.hostile_batches SEED COUNT

Input and output buffers end where a page begins that must not be touched, so that one byte read or written too far ends
the process by a signal. Each mutation goes to the kernels and to the Python twin; the process exits with 1 and says so
when one takes what the other refuses, or when they differ in what they read.
"""

from __future__ import annotations

import ctypes
import mmap
import random
import sys
from collections.abc import Iterator
from typing import Any, Final

import pyarrow as pa

from millrace.errors import ApiError
from millrace.model import TopicPartition
from millrace.records.aborted import AbortedTransactions
from millrace.records.batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, TimestampType, read_header, split, with_crc
from millrace.records.compression import Codec, compress
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch
from millrace.spark import columns
from millrace.spark.compiled import load_kernels
from support.batches import NOW_MS

PAGE: Final = mmap.PAGESIZE
MAX_BATCH_BYTES: Final = 1 << 20
EXTREMES: Final = (0, 1, 2, 3, 0x7E, 0x7F, 0x80, 0x81, 0xFE, 0xFF)

_libc: Final = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(size: int) -> memoryview:
    """`size` writable bytes, the last of them in front of a page that cannot be touched."""
    whole = (size + PAGE - 1) // PAGE * PAGE
    region = mmap.mmap(-1, whole + PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(region))
    if _libc.mprotect(address + whole, PAGE, 0) != 0:
        raise OSError(ctypes.get_errno(), "mprotect")
    return memoryview(region)[whole - size : whole]


def guarded_copy(data: bytes) -> memoryview:
    view = guarded(len(data))
    view[:] = data
    return view


def record_sets(rng: random.Random) -> Iterator[list[tuple[bytes, bytes]]]:
    """Sound record sets: headers of batches (61 bytes, uncompressed) and their records."""
    while True:
        made: list[bytes] = []
        offset = rng.choice((0, 5, 2**40))
        for _ in range(rng.choice((1, 1, 2, 4))):
            if rng.random() < 0.1:
                marker = EndMarker(rng.choice(list(MarkerType)), 1)
                control = encode_end_marker(marker, producer_id=1, producer_epoch=0, timestamp_ms=NOW_MS)
                made.append(stamped(control, offset))
                offset += 1
                continue
            records = [
                Record(
                    offset + i,
                    NOW_MS + rng.choice((0, 1, -70, 10**9)),
                    rng.choice((None, b"", b"key", b"k" * 70)),
                    rng.choice((None, b"", b"value", b"v" * rng.randrange(300))),
                    tuple(
                        Header(rng.choice(("", "a", "größe", "\U0001f600")), rng.choice((None, b"", b"123")))
                        for _ in range(rng.choice((0, 0, 0, 1, 3)))
                    ),
                )
                for i in range(rng.choice((1, 2, 5, 20)))
            ]
            kind = rng.choice(list(TimestampType))
            transactional = rng.random() < 0.3
            made.append(encode_batch(records, timestamp_type=kind, producer_id=1, transactional=transactional))
            offset += len(records)
        yield [(batch[:HEADER_BYTES], batch[HEADER_BYTES:]) for batch in made]


def stamped(batch: bytes, offset: int) -> bytes:
    return offset.to_bytes(8, "big") + batch[8:]


def mutate(rng: random.Random, data: bytes) -> bytes:
    """A few changes of single bytes, runs and lengths."""
    damaged = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        if not damaged:
            break
        where = rng.randrange(len(damaged))
        action = rng.randrange(7)
        if action == 0:
            damaged[where] ^= 1 << rng.randrange(8)
        elif action in (1, 2):
            damaged[where] = rng.choice(EXTREMES)
        elif action == 3:
            damaged[where] = (damaged[where] + rng.choice((-2, -1, 1, 2))) & 0xFF
        elif action == 4:
            del damaged[where:]
        elif action == 5:
            damaged[where:where] = rng.choice((b"\x80", b"\xff" * rng.randrange(1, 12), rng.randbytes(3)))
        else:
            del damaged[where : where + rng.randrange(1, 9)]
    return bytes(damaged)


def hostile(rng: random.Random, batches: list[tuple[bytes, bytes]]) -> bytes:
    """A record set with something wrong in it, mostly behind sound lengths and CRCs so that the change is looked at."""
    chosen = rng.randrange(len(batches))
    parts: list[bytes] = []
    for index, (head, records) in enumerate(batches):
        header = read_header(head)
        if index == chosen and rng.random() < 0.7:
            records = mutate(rng, records)  # noqa: PLW2901
        codec = rng.choice(list(Codec)) if not header.is_control else Codec.NONE
        payload = compress(codec, records)
        length = HEADER_BYTES - LOG_OVERHEAD_BYTES + len(payload)
        header = header._replace(attributes=header.attributes | codec, batch_length=length)
        if index == chosen and rng.random() < 0.3:
            packed = mutate(rng, header.pack())[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0")
            header = read_header(packed)
            if rng.random() < 0.8:
                header = header._replace(batch_length=length, magic=2)
        if rng.random() < 0.9:
            header = with_crc(header, payload)
        parts.append(header.pack() + payload)
    data = b"".join(parts)
    return mutate(rng, data) if rng.random() < 0.15 else data


def read(way: Any, data: bytes, **options: Any) -> Any:
    """What `way` makes of the bytes; None for a refusal."""
    try:
        chunks, next_offset = way(data, **options)
    except (ApiError, columns._Damaged):
        return None
    for chunk in chunks:
        for name in ("key", "value", "headers"):
            array = getattr(chunk, name)
            if array is not None:
                array.validate(full=True)
    place = columns.PlaceColumns(TopicPartition("t", 0))
    tables = [pa.table(chunk.by_name(place, include_headers=options["include_headers"])) for chunk in chunks]
    return pa.concat_tables(tables) if tables else None, next_offset


def compiled(data: bytes, *, aborted: Any, read_committed: bool, **options: Any) -> Any:
    """`decode` without its way out."""
    wanted = columns._Wanted(**options)
    hidden = AbortedTransactions(aborted) if read_committed else None
    kernels = load_kernels()
    assert kernels is not None
    return columns._decode_compiled(kernels, guarded_copy(data), wanted, hidden)


def run(seed: int, count: int) -> str:
    """Compare `count` mutations; the summary, or AssertionError at the first difference."""
    rng = random.Random(seed)
    sets = record_sets(rng)
    refused = 0
    for number in range(count):
        batches = next(sets)
        data = hostile(rng, batches)
        start = read_header(batches[0][0]).base_offset + rng.choice((0, 0, 0, 0, 3, 7))
        options: dict[str, Any] = {
            "start_offset": start,
            "end_offset": rng.choice((2**62, 2**62, start + 4)),
            "include_headers": rng.random() < 0.7,
            "check_crcs": rng.random() < 0.8,
            "max_batch_bytes": MAX_BATCH_BYTES,
            "chunk_bytes": rng.choice((1, 200, 1 << 20)),
            "read_committed": rng.random() < 0.3,
            "aborted": ((1, 0),),
        }
        found = read(compiled, data, **options)
        expected = read(columns.decode_in_python, data, **options)
        refused += expected is None
        assert found == expected, f"mutation {number} of seed {seed}: {data.hex()} {options}\n{found}\n{expected}"
    return f"{count} mutations, {refused} refused"


def main() -> None:
    seed, count = (int(argument) for argument in sys.argv[1:])
    pa.allocate_buffer = lambda size, *_arguments, **_options: pa.py_buffer(guarded(size))
    made = next(record_sets(random.Random(seed)))
    assert all(next(split(head + records)).header.count for head, records in made)
    print(run(seed, count))


if __name__ == "__main__":
    main()
