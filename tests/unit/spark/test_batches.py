"""Arrow to record batches: both ways byte for byte, and key hashes that equal those of the Java client."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from aiokafka.partitioner import murmur2 as reference
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import ProduceLimits, read_header, validate_produced
from millrace.records.compression import Codec
from millrace.records.decode import check_records, decode_records
from millrace.records.hashing import murmur2
from millrace.spark import batches
from millrace.spark.batches import (
    BatchSettings,
    Rows,
    encode,
    encode_in_python,
    encode_rows,
    partition_for_keys,
    partition_for_keys_in_python,
)
from millrace.spark.columns import HEADERS
from support.batches import NOW_MS

BOTH = pytest.mark.parametrize("way", [encode, encode_in_python])
BINARY_TYPES = [pa.binary(), pa.large_binary(), pa.string(), pa.large_string(), pa.binary_view(), pa.string_view()]
LARGE_HEADERS = pa.large_list(
    pa.struct([pa.field("value", pa.large_binary()), pa.field("key", pa.large_string())])
)  # fmt: skip

texts = st.none() | st.text(max_size=30) | st.sampled_from(["", "x" * 63, "x" * 64, "y" * 9000])
header_lists = st.none() | st.lists(
    st.fixed_dictionaries({"key": st.text(max_size=5), "value": st.none() | st.binary(max_size=6)}), max_size=3
)
timestamps = st.integers(-1, 2**42) | st.sampled_from([-1, 0, NOW_MS, 2**53, -(2**53)])
Way = Callable[..., Any]


def column(values: list[Any], kind: pa.DataType, before: int) -> pa.Array:
    """An array that is a slice of a longer one, with `before` rows in front and one behind."""
    return pa.array([*values[:1] * before, *values, *values[:1]], kind).slice(before, len(values))


def as_bytes(value: str | None) -> bytes | None:
    return None if value is None else value.encode()


@st.composite
def inputs(draw: st.DrawFn) -> tuple[list[Any], dict[str, Any], list[int]]:
    count = draw(st.integers(1, 12))

    def several(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=count, max_size=count))

    before = draw(st.sampled_from([0, 1, 9]))
    kinds = st.sampled_from(BINARY_TYPES)
    key = column(several(texts), draw(kinds), before) if draw(st.booleans()) else None
    value = column(several(texts), draw(kinds), draw(st.sampled_from([0, 3])))
    headers = None
    if draw(st.booleans()):
        headers = column(several(header_lists), draw(st.sampled_from([HEADERS, LARGE_HEADERS])), before)
    rows = draw(st.lists(st.integers(0, count - 1), max_size=20))
    options = {
        "codec": draw(st.sampled_from(Codec)),
        "max_batch_bytes": draw(st.sampled_from([1, 61, 90, 150, 1000, 10_000, 1_000_000])),
        "producer_id": draw(st.sampled_from([-1, 5])),
        "transactional": draw(st.booleans()),
    }
    if options["producer_id"] >= 0:
        options |= {"producer_epoch": 2, "base_sequence": draw(st.sampled_from([0, 7, 2**31 - 3]))}
    stamps = np.array(several(timestamps), np.int64)
    return [key, value, headers, stamps, np.array(rows, np.int64)], options, rows


@settings(max_examples=300, deadline=None)
@given(inputs())
def test_both_ways_write_the_same_sound_batches(made: tuple[list[Any], dict[str, Any], list[int]]) -> None:
    arguments, options, rows = made
    key, value, headers, stamps, _ = arguments
    found = list(encode(*arguments, **options))
    assert found == list(encode_in_python(*arguments, **options))

    keys, values = key.to_pylist() if key is not None else [None] * len(value), value.to_pylist()
    lists = headers.to_pylist() if headers is not None else [None] * len(value)
    expected = [
        (
            int(stamps[row]),
            as_bytes(keys[row]) if isinstance(keys[row], str) else keys[row],
            as_bytes(values[row]) if isinstance(values[row], str) else values[row],
            [(pair["key"], pair["value"]) for pair in lists[row] or []],
        )
        for row in rows
    ]
    records = [record for batch in found for record in decode_records(batch.data)]
    assert [(r.timestamp_ms, r.key, r.value, [(h.key, h.value) for h in r.headers]) for r in records] == expected

    place, sequence = 0, options.get("base_sequence", -1)
    for batch in found:
        header = check_records(batch.data)
        assert (batch.first_row, batch.count, header.base_sequence) == (place, header.count, sequence)
        assert header.is_transactional == options["transactional"]
        assert header.max_timestamp_ms == max(-1, *(int(stamps[row]) for row in rows[place : place + batch.count]))
        plain = batch.data if options["codec"] is Codec.NONE else None
        assert plain is None or len(plain) <= options["max_batch_bytes"] or batch.count == 1
        place += batch.count
        sequence = (sequence + batch.count) % 2**31 if sequence >= 0 else -1
    assert place == len(rows)


@BOTH
@pytest.mark.parametrize("codec", Codec)
def test_a_broker_takes_them(way: Way, codec: Codec) -> None:
    value = pa.array([b"v" * (i % 700) for i in range(2000)])
    stamps = np.full(2000, NOW_MS)
    made = list(way(None, value, None, stamps, np.arange(2000), codec=codec, max_batch_bytes=20_000))
    assert sum(validate_produced(batch.data, ProduceLimits(), NOW_MS).count for batch in made) == 2000
    assert len(made) > 30


@BOTH
def test_batches_are_filled_to_the_last_byte(way: Way) -> None:
    value = pa.array([b"v" * 50] * 8)
    whole = next(
        iter(way(None, value, None, np.zeros(8, np.int64), np.arange(8), codec=Codec.NONE, max_batch_bytes=9999))
    )
    sizes = []
    for limit in (len(whole.data), len(whole.data) - 1):
        made = way(None, value, None, np.zeros(8, np.int64), np.arange(8), codec=Codec.NONE, max_batch_bytes=limit)
        sizes.append([batch.count for batch in made])
    assert sizes == [[8], [7, 1]]


@BOTH
def test_a_record_larger_than_a_batch_travels_alone(way: Way) -> None:
    value = pa.array([b"a", b"b" * 5000, b"c", b"d"])
    made = list(way(None, value, None, np.zeros(4, np.int64), np.arange(4), codec=Codec.NONE, max_batch_bytes=500))
    assert [(batch.first_row, batch.count) for batch in made] == [(0, 1), (1, 1), (2, 2)]
    assert decode_records(made[1].data)[0].value == b"b" * 5000


@BOTH
def test_no_rows_no_batches(way: Way) -> None:
    nothing = np.empty(0, np.int64)
    for value in (pa.array([], pa.binary()), pa.array([b"x"]), pa.nulls(0)):
        stamps = np.zeros(len(value), np.int64)
        assert list(way(None, value, None, stamps, nothing, codec=Codec.ZSTD, max_batch_bytes=100)) == []


@BOTH
def test_columns_of_nothing_but_nulls(way: Way) -> None:
    rows = np.arange(3)
    made = way(
        pa.nulls(3), pa.nulls(3), pa.nulls(3), np.zeros(3, np.int64), rows, codec=Codec.NONE, max_batch_bytes=999
    )
    records = [record for batch in made for record in decode_records(batch.data)]
    assert [(r.key, r.value, r.headers) for r in records] == [(None, None, ())] * 3


def test_buffers_may_lie_at_any_address() -> None:
    values = [b"a", b"bb", b"", b"cccc"]
    for kind in (pa.binary(), pa.large_binary()):
        _, ends, data = pa.array(values, kind).buffers()
        moved = pa.py_buffer(b"!" + ends.to_pybytes()).slice(1)
        value = pa.Array.from_buffers(kind, 4, [None, moved, data])
        stamps = np.frombuffer(b"!" + np.arange(4).tobytes(), np.int64, 4, 1)
        made = list(encode(value, value, None, stamps, stamps, codec=Codec.NONE, max_batch_bytes=999))
        assert [(r.timestamp_ms, r.key, r.value) for r in decode_records(made[0].data)] == [
            (i, value, value) for i, value in enumerate(values)
        ]
        assert partition_for_keys(value, 7).tolist() == [(murmur2(value) & 0x7FFFFFFF) % 7 for value in values]


def test_chunked_columns_are_put_together() -> None:
    value = pa.chunked_array([[b"a"], [], [b"b", b"c"]])
    made = list(encode(None, value, None, np.zeros(3, np.int64), np.arange(3), codec=Codec.NONE, max_batch_bytes=999))
    assert [record.value for record in decode_records(made[0].data)] == [b"a", b"b", b"c"]


def test_one_set_of_columns_serves_many_selections() -> None:
    columns = Rows.of(pa.array(["a", "b", "c"]), pa.array([b"1", None, b"3"]), None, np.array([5, 6, 7]))
    for rows in ([0, 2], [1], [2, 1, 0]):
        made = list(encode_rows(columns, np.array(rows), BatchSettings(codec=Codec.LZ4)))
        assert [record.key for record in decode_records(made[0].data)] == [b"abc"[row : row + 1] for row in rows]


def test_headers_without_a_key_are_refused() -> None:
    for pairs in ([{"key": None, "value": b"v"}], [None]):
        headers = pa.array([None, pairs], HEADERS)
        with pytest.raises(ApiError, match="header") as raised:
            Rows.of(None, pa.array([b"", b""]), headers, np.zeros(2, np.int64))
        assert raised.value.code is ErrorCode.INVALID_RECORD
        # A slice that leaves the bad one out is sound.
        assert Rows.of(None, pa.array([b""]), headers.slice(0, 1), np.zeros(1, np.int64)).count == 1


def test_columns_that_do_not_fit_are_refused() -> None:
    one = np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="the key column has 2 rows, the value column 1"):
        Rows.of(pa.array([b"", b""]), pa.array([b""]), None, one)
    with pytest.raises(TypeError, match="int64"):
        Rows.of(None, pa.array([1]), None, one)
    for headers in (pa.array([5]), pa.array([[5]]), pa.array([[{"key": "a"}]])):
        with pytest.raises(TypeError, match="headers"):
            Rows.of(None, pa.array([b""]), headers, one)
    for rows in ([1], [-1]):
        for way in (encode, encode_in_python):
            with pytest.raises(IndexError):
                way(None, pa.array([b""]), None, one, np.array(rows), codec=Codec.NONE, max_batch_bytes=100)


@BOTH
def test_a_record_beyond_what_a_length_can_say_is_refused(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "_MAX_RECORD_BYTES", 1000)
    value = pa.array([b"x" * 2000])
    with pytest.raises(ApiError) as raised:
        list(way(None, value, None, np.zeros(1, np.int64), np.arange(1), codec=Codec.NONE, max_batch_bytes=500))
    assert raised.value.code is ErrorCode.MESSAGE_TOO_LARGE


def test_sequences_go_on_over_their_largest() -> None:
    value = pa.array([b"v" * 10] * 6)
    made = encode(
        None, value, None, np.zeros(6, np.int64), np.arange(6), codec=Codec.NONE, max_batch_bytes=100,
        producer_id=1, producer_epoch=0, base_sequence=2**31 - 2,
    )  # fmt: skip
    assert [read_header(batch.data).base_sequence for batch in made] == [2**31 - 2, 0, 2]


# --- partitions -------------------------------------------------------------------------------------------------------

KAFKA_VECTORS = {
    # The cases of Kafka's own test of its hash.
    b"21": -973932308,
    b"foobar": -790332482,
    b"a-little-bit-long-string": -985981536,
    b"a-little-bit-longer-string": -1486304829,
    b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8": -58897971,
    b"abc": 479470107,
}


@pytest.mark.parametrize(("key", "hashed"), KAFKA_VECTORS.items())
def test_murmur2_is_that_of_the_java_client(key: bytes, hashed: int) -> None:
    assert murmur2(key) == hashed & 0xFFFFFFFF
    # A prime larger than any hash shows all bits of it.
    assert int(partition_for_keys(pa.array([key]), 2**31 - 1)[0]) == (hashed & 0x7FFFFFFF) % (2**31 - 1)


@settings(max_examples=200, deadline=None)
@given(
    keys=st.lists(st.none() | st.binary(max_size=70), max_size=20),
    count=st.integers(1, 300) | st.just(2**31 - 1),
    before=st.integers(0, 3),
    kind=st.sampled_from([pa.binary(), pa.large_binary(), pa.binary_view()]),
)
def test_partitions_are_equal_both_ways_and_as_aiokafka_has_them(
    keys: list[bytes | None], count: int, before: int, kind: pa.DataType
) -> None:
    array = column(keys, kind, before)
    expected = [-1 if key is None else (reference(key) & 0x7FFFFFFF) % count for key in keys]
    assert partition_for_keys(array, count).tolist() == expected
    assert partition_for_keys_in_python(array, count).tolist() == expected


def test_strings_hash_as_their_bytes_and_nulls_have_no_partition() -> None:
    keys = ["21", None, "foobar"]
    for kind in (pa.string(), pa.large_string()):
        assert partition_for_keys(pa.array(keys, kind), 12).tolist() == [0, -1, 6]
    assert partition_for_keys(pa.nulls(2), 12).tolist() == [-1, -1]
    assert partition_for_keys(pa.array([], pa.binary()), 12).tolist() == []
    with pytest.raises(ValueError, match="0 partitions"):
        partition_for_keys(pa.array(keys), 0)
