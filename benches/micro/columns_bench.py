"""What a record costs between a fetch and Arrow columns: decode, encode and key hashes, by record size and codec.

    python benches/micro/columns_bench.py [--seconds 1.0]

Decoding takes the answer to one fetch (16 MB of batches of 16 KB, or of 1 MB) and includes the CRC check. Figures are
of processor time, the best of five runs, on one core; MB are of records before compression. The Python twins are
measured on a small part, for comparison.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import numpy as np
import pyarrow as pa

from millrace.records.batch import HEADER_BYTES, STAMP, read_header
from millrace.records.compression import Codec
from millrace.spark.batches import encode, encode_in_python, partition_for_keys, partition_for_keys_in_python
from millrace.spark.columns import HEADERS, decode, decode_in_python

ROUNDS = 5
FETCH_BYTES = 16 * 1024 * 1024


def best_seconds(call: Callable[[], object], seconds: float) -> float:
    """The least processor time of one call."""
    call()
    best = float("inf")
    deadline = time.monotonic() + seconds
    rounds = 0
    while rounds < ROUNDS or time.monotonic() < deadline:
        start = time.process_time()
        call()
        best = min(best, time.process_time() - start)
        rounds += 1
    return best


def columns(count: int, size: int, *, headers: bool) -> tuple[pa.Array, pa.Array, pa.Array | None]:
    """Keys of 8 bytes, values that compress to about a half, and two headers where asked."""
    random = np.random.default_rng(1)
    letters = random.integers(97, 113, count * size, np.uint8).tobytes()
    key = pa.array([b"%08d" % (i % 10_000) for i in range(count)], pa.binary())
    value = pa.array([letters[i * size : (i + 1) * size] for i in range(count)], pa.binary())
    pairs = [{"key": "trace", "value": b"0123456789abcdef"}, {"key": "kind", "value": None}]
    return key, value, pa.array([pairs] * count, HEADERS) if headers else None


def fetched(data: Sequence[bytes]) -> bytes:
    """Produced batches as a log holds them: one offset after another."""
    stamped: list[bytes] = []
    offset = 0
    for batch in data:
        header = read_header(batch)
        stamped.append(STAMP.pack(offset, header.batch_length, 0) + batch[STAMP.size :])
        offset += header.count
    return b"".join(stamped)


def line(name: str, count: int, size_bytes: int, seconds: float) -> None:
    print(f"{name:52} {count / seconds / 1e6:>10.2f} {size_bytes / seconds / 1e6:>10.0f}")


def measure(size: int, codec: Codec, batch_bytes: int, seconds: float, *, headers: bool = False) -> None:
    count = FETCH_BYTES // (size + 20)
    key, value, header_column = columns(count, size, headers=headers)
    timestamps = np.full(count, 1_700_000_000_000, np.int64)
    rows = np.arange(count, dtype=np.int64)

    def encode_all() -> list[bytes]:
        made = encode(key, value, header_column, timestamps, rows, codec=codec, max_batch_bytes=batch_bytes)
        return [batch.data for batch in made]

    records = fetched(encode_all())
    plain_bytes = (
        len(records) if codec is Codec.NONE else count * (size + 20) + HEADER_BYTES * (FETCH_BYTES // batch_bytes)
    )
    name = f"{size} B, {codec.name.lower()}, batches of {batch_bytes // 1000} kB{', headers' if headers else ''}"

    def decode_all() -> object:
        return decode(records, start_offset=0, end_offset=count, include_headers=headers)

    line(f"decode {name}", count, plain_bytes, best_seconds(decode_all, seconds))
    line(f"encode {name}", count, plain_bytes, best_seconds(encode_all, seconds))


def measure_twins(size: int) -> None:
    count = 20_000
    key, value, _ = columns(count, size, headers=False)
    timestamps = np.full(count, 1_700_000_000_000, np.int64)
    rows = np.arange(count, dtype=np.int64)

    def encode_all() -> list[bytes]:
        made = encode_in_python(key, value, None, timestamps, rows, codec=Codec.NONE, max_batch_bytes=16_000)
        return [batch.data for batch in made]

    records = fetched(encode_all())

    def decode_all() -> object:
        return decode_in_python(records, start_offset=0, end_offset=count, include_headers=False)

    line(f"decode in Python {size} B", count, len(records), best_seconds(decode_all, 0))
    line(f"encode in Python {size} B", count, len(records), best_seconds(encode_all, 0))
    line(
        "partitions in Python", count, count * 8, best_seconds(lambda: partition_for_keys_in_python(key, 12), 0)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="time per figure")
    seconds = parser.parse_args().seconds
    print(f"{'':52} {'M rec/s':>10} {'MB/s':>10}")
    for batch_bytes in (16_000, 1_000_000):
        for size in (100, 1000):
            measure(size, Codec.NONE, batch_bytes, seconds)
    measure(100, Codec.NONE, 1_000_000, seconds, headers=True)
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        measure(1000, codec, 1_000_000, seconds)
    key, _, _ = columns(500_000, 1, headers=False)
    line("partitions", len(key), len(key) * 8, best_seconds(lambda: partition_for_keys(key, 12), seconds))
    measure_twins(100)


if __name__ == "__main__":
    main()
