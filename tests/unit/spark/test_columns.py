"""Record batches to Arrow: the compiled way and the Python way against the records that went in, and each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.records.batch import TimestampType, read_header
from millrace.records.compression import Codec
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.records.decode import Header, Record
from millrace.records.encode import encode_batch
from millrace.spark import columns
from millrace.spark.columns import PlaceColumns, RecordColumns, decode, decode_in_python
from millrace.spark.compiled import load_kernels
from support.batches import NOW_MS, batch, with_header, with_payload

Row = tuple[int, int, int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...] | None]

BOTH = pytest.mark.parametrize("way", [decode, decode_in_python])


def rows_of(chunks: Sequence[RecordColumns]) -> list[Row]:
    """What the columns say, record by record; every array is checked in full on the way."""
    rows: list[Row] = []
    for chunk in chunks:
        names = ("offset", "timestamp", "timestamp_type", "key", "value", "headers")
        arrays: list[Any] = [getattr(chunk, name) for name in names]
        for array in arrays:
            if array is not None:
                array.validate(full=True)
                assert len(array) == chunk.count
        headers = arrays[5].to_pylist() if arrays[5] is not None else [None] * chunk.count
        pairs = [tuple((h["key"], h["value"]) for h in row) if row is not None else None for row in headers]
        milliseconds = [us // 1000 for us in arrays[1].cast(pa.int64()).to_pylist()]
        rows += zip(arrays[0].to_pylist(), milliseconds, *(a.to_pylist() for a in arrays[2:5]), pairs, strict=True)
    return rows


def row(record: Record, kind: TimestampType = TimestampType.CREATE, append_ms: int = 0) -> Row:
    timestamp_ms = append_ms if kind is TimestampType.LOG_APPEND else record.timestamp_ms
    pairs = tuple((header.key, header.value) for header in record.headers) or None
    return record.offset, timestamp_ms, int(kind), record.key, record.value, pairs


# --- generated logs ---------------------------------------------------------------------------------------------------

fields = st.none() | st.binary(max_size=40) | st.sampled_from([b"", b"x" * 63, b"x" * 64, b"y" * 8191, b"z" * 70_000])
headers = st.lists(
    st.builds(Header, st.text(max_size=6), st.none() | st.binary(max_size=9)), max_size=4
) | st.just([])  # fmt: skip
timestamps = st.integers(-1, 2**42) | st.sampled_from([-1, 0, 2**53, -(2**53), NOW_MS])


@dataclass
class Log:
    """Bytes as a fetch answers them, with what a reader should see."""

    data: bytearray = field(default_factory=bytearray)
    batches: list[tuple[int, list[Row]]] = field(default_factory=list)
    next_offset: int = 0

    @property
    def rows(self) -> list[Row]:
        return [row for _, rows in self.batches for row in rows]


@st.composite
def logs(draw: st.DrawFn) -> Log:
    log = Log()
    offset = draw(st.integers(0, 3) | st.integers(0, 2**40))
    for _ in range(draw(st.integers(0, 6))):
        records: list[Record] = []
        base = offset
        for _ in range(draw(st.integers(1, 6))):
            offset += draw(st.sampled_from([0, 0, 0, 1, 5, 70, 20_000]))
            content = (draw(fields), draw(fields), tuple(draw(headers)))
            records.append(Record(offset, draw(timestamps), *content))
            offset += 1
        kind = draw(st.sampled_from(TimestampType))
        data = encode_batch(records, base_offset=base, compression=draw(st.sampled_from(Codec)), timestamp_type=kind)
        # Compaction keeps the last offset of a batch whose last records are gone, and a batch with no records left.
        offset += draw(st.sampled_from([0, 0, 3]))
        append_ms = read_header(data).max_timestamp_ms
        shown = [row(record, kind, append_ms) for record in records]
        if draw(st.integers(0, 9)) == 0:
            data, shown = with_payload(data, b"", count=0, attributes=0), []
        if draw(st.integers(0, 9)) == 0:
            data, shown = with_header(data, attributes=read_header(data).attributes | 0x20), []
        log.data += with_header(data, last_offset_delta=offset - base - 1)
        log.batches.append((base, shown))
        log.next_offset = offset
    return log


@settings(max_examples=300, deadline=None)
@given(log=logs(), data=st.data())
def test_both_ways_show_what_went_in(log: Log, data: st.DataObject) -> None:
    ends = st.integers(0, log.next_offset + 2)
    start, end = data.draw(ends), data.draw(ends | st.just(2**62))
    cut = data.draw(st.integers(0, len(log.data)) | st.just(len(log.data)))
    chunk_bytes = data.draw(st.sampled_from([1, 100, 10_000, 2**26]))
    include = data.draw(st.booleans())
    whole, seen = 0, start
    expected: list[Row] = []
    for base, rows in log.batches:
        header = read_header(log.data, whole)
        whole += header.size_bytes
        if whole > cut or base >= end:
            break
        seen = header.next_offset
        expected += [r if include else (*r[:5], None) for r in rows if start <= r[0] < end]
    options: dict[str, Any] = {"start_offset": start, "end_offset": end, "include_headers": include}
    for way in (decode, decode_in_python):
        chunks, next_offset = way(memoryview(log.data)[:cut], **options, chunk_bytes=chunk_bytes)
        assert rows_of(chunks) == expected
        assert next_offset == max(start, min(seen, end))
        assert all(chunk.count for chunk in chunks)


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_aborted_transactions_are_hidden_from_the_middle_of_them_too(data: st.DataObject) -> None:
    records: list[tuple[int, bytes]] = []  # first offset and bytes of each batch
    written: list[tuple[int, int]] = []  # offset and transaction of each record
    open_since: dict[int, int] = {}
    numbers: dict[int, int] = {}
    outcomes: dict[int, MarkerType] = {}
    spans: dict[int, tuple[int, int, int]] = {}  # producer, first offset and marker's offset
    offset, transactions = 0, 0
    for _ in range(data.draw(st.integers(1, 14))):
        producer = data.draw(st.integers(0, 2))
        if data.draw(st.integers(0, 3)) == 0 and producer in open_since:
            kind = data.draw(st.sampled_from(MarkerType))
            marker = encode_end_marker(EndMarker(kind, 1), producer_id=producer, producer_epoch=0, timestamp_ms=NOW_MS)
            records.append((offset, with_header(marker, base_offset=offset)))
            outcomes[numbers[producer]] = kind
            spans[numbers[producer]] = (producer, open_since.pop(producer), offset)
            offset += 1
            continue
        count = data.draw(st.integers(1, 3))
        transactional = data.draw(st.integers(0, 3)) != 0
        if transactional and producer not in open_since:
            open_since[producer] = offset
            transactions += 1
            numbers[producer] = transactions
        made = batch(
            count, base_offset=offset, producer_id=producer, producer_epoch=0, sequence=0, transactional=transactional,
            codec=data.draw(st.sampled_from(Codec)),
        )  # fmt: skip
        records.append((offset, made))
        written += [(offset + i, numbers[producer] if transactional else 0) for i in range(count)]
        offset += count
    # As a broker with a last stable offset: nothing from the first open transaction on.
    stable = min(open_since.values(), default=offset)
    start = data.draw(st.integers(0, max(stable - 1, 0)))
    first = max((base for base, _ in records if base <= start), default=0)
    fetched = b"".join(made for base, made in records if first <= base < stable)
    aborted = [
        (producer, begin)
        for number, (producer, begin, marker_offset) in spans.items()
        if outcomes[number] is MarkerType.ABORT and marker_offset >= first and begin < stable
    ]
    shown = [o for o, n in written if start <= o < stable and outcomes.get(n) is not MarkerType.ABORT]
    for way in (decode, decode_in_python):
        chunks, next_offset = way(
            fetched, start_offset=start, end_offset=2**62, include_headers=False,
            aborted=data.draw(st.permutations(aborted)), read_committed=True,
        )  # fmt: skip
        assert [r[0] for r in rows_of(chunks)] == shown
        assert next_offset == max(stable, start)
        chunks, _ = way(fetched, start_offset=start, end_offset=2**62, include_headers=False)
        assert [r[0] for r in rows_of(chunks)] == [o for o, _ in written if start <= o < stable]


# --- examples ---------------------------------------------------------------------------------------------------------


def test_the_kernels_are_there() -> None:
    """Or every comparison here would be of Python with itself."""
    assert load_kernels() is not None


@BOTH
def test_no_records(way: Any) -> None:
    assert way(b"", start_offset=7, end_offset=9, include_headers=True) == ([], 7)


@BOTH
@pytest.mark.parametrize("codec", Codec)
def test_a_record_of_a_megabyte_among_small_ones(way: Any, codec: Codec) -> None:
    records = [Record(0, NOW_MS, b"a", b"1"), Record(1, NOW_MS, None, b"m" * 2**20), Record(2, NOW_MS, b"", None)]
    data = encode_batch(records, compression=codec)
    chunks, next_offset = way(data, start_offset=0, end_offset=3, include_headers=True)
    assert rows_of(chunks) == [row(record) for record in records]
    assert next_offset == 3


@BOTH
def test_thousands_of_batches_become_one_chunk(way: Any) -> None:
    data = b"".join(batch(2, base_offset=2 * i, codec=Codec.LZ4 if i % 100 == 3 else Codec.NONE) for i in range(3000))
    chunks, next_offset = way(data, start_offset=1, end_offset=5999, include_headers=False)
    assert [chunk.count for chunk in chunks] == [5998]
    assert [r[0] for r in rows_of(chunks)] == list(range(1, 5999))
    assert next_offset == 5999


def test_chunks_are_closed_at_their_size() -> None:
    data = b"".join(batch(10, size=1000, base_offset=10 * i, codec=Codec(i % 5)) for i in range(40))
    chunks, next_offset = decode(data, start_offset=0, end_offset=400, include_headers=False, chunk_bytes=50_000)
    assert [r[0] for r in rows_of(chunks)] == list(range(400))
    assert next_offset == 400
    assert len(chunks) == 8
    assert all(chunk.value.nbytes < 60_000 for chunk in chunks)


def test_columns_do_not_refer_to_the_bytes_they_came_from() -> None:
    data = bytearray(batch(3))
    chunks, _ = decode(data, start_offset=0, end_offset=3, include_headers=False)
    before = rows_of(chunks)
    data[:] = bytes(len(data))
    assert rows_of(chunks) == before


def test_a_column_without_nulls_has_no_bitmap() -> None:
    chunks, _ = decode(batch(3), start_offset=0, end_offset=3, include_headers=False)
    assert chunks[0].key.buffers()[0] is None
    assert chunks[0].value.buffers()[0] is None
    assert chunks[0].headers is None


@pytest.mark.parametrize("include_headers", [False, True])
def test_the_batch_is_what_spark_expects_of_this_schema(include_headers: bool) -> None:
    from pyspark.sql.pandas.types import to_arrow_schema
    from pyspark.sql.types import ArrayType, BinaryType, IntegerType, LongType, StringType, StructType, TimestampType

    schema = StructType().add("key", BinaryType()).add("value", BinaryType()).add("topic", StringType())
    schema = schema.add("partition", IntegerType()).add("offset", LongType()).add("timestamp", TimestampType())
    schema = schema.add("timestampType", IntegerType())
    if include_headers:
        schema = schema.add("headers", ArrayType(StructType().add("key", StringType()).add("value", BinaryType())))
    expected = to_arrow_schema(schema, timezone="UTC")
    chunks, _ = decode(batch(3), start_offset=0, end_offset=3, include_headers=include_headers)
    place = PlaceColumns(TopicPartition("t", 4))
    made = pa.table(chunks[0].by_name(place, include_headers=include_headers))
    assert expected.equals(made.schema)
    assert str(expected) == str(made.schema)
    made.validate(full=True)
    assert made.column("topic").to_pylist() == ["t"] * 3
    assert made.column("partition").to_pylist() == [4] * 3


def test_headers_that_were_not_decoded_are_null_in_a_batch_that_has_them() -> None:
    chunks, _ = decode(batch(2), start_offset=0, end_offset=2, include_headers=False)
    place = PlaceColumns(TopicPartition("t", 0))
    assert chunks[0].by_name(place, include_headers=True)["headers"].to_pylist() == [None, None]


def test_the_columns_of_the_place_are_as_long_as_asked_in_whatever_order() -> None:
    place = PlaceColumns(TopicPartition("töpic", 7))
    for rows in (3, 0, 5000, 4096, 100_000, 1):
        topics, numbers = place.cut(rows)
        topics.validate(full=True)
        assert topics.to_pylist() == ["töpic"] * rows
        assert numbers.to_pylist() == [7] * rows


def test_what_is_sent_of_a_cut_column_is_the_cut() -> None:
    """A short batch must not carry the whole column that it was cut from to Spark."""
    topics, numbers = PlaceColumns(TopicPartition("t" * 200, 7)).cut(2)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("topic", pa.string()), ("partition", pa.int32())])) as writer:
        writer.write_batch(pa.RecordBatch.from_arrays([topics, numbers], ["topic", "partition"]))
    sent = sink.getvalue()
    assert len(sent) < 2000
    assert pa.ipc.open_stream(sent).read_all().to_pydict() == {"topic": ["t" * 200] * 2, "partition": [7, 7]}


# --- damage -----------------------------------------------------------------------------------------------------------


def damaged_sets() -> dict[str, tuple[bytes, ErrorCode]]:
    sound, second = batch(2), batch(2, base_offset=2)
    record = bytes.fromhex("0c 00 00 00 01 01 00")
    bad_utf8 = bytes.fromhex("12 00 00 00 01 01 02 02 ff 00")
    long_delta = bytes.fromhex("1e 00 ffffffffffffffffff7f 00 01 01 00")
    invalid, corrupt = ErrorCode.INVALID_RECORD, ErrorCode.CORRUPT_MESSAGE
    return {
        "a bit": (sound + second[:-1] + b"!", corrupt),
        "a CRC": (sound + with_header(second, crc=1), corrupt),
        "the length": (sound + with_header(second, batch_length=48), corrupt),
        "a negative length": (sound + with_header(second, batch_length=-5), corrupt),
        "a negative offset": (with_header(second, base_offset=-1), corrupt),
        "an offset beyond all": (with_header(second, base_offset=2**63 - 1), corrupt),
        "a last offset before the first": (sound + with_header(second, last_offset_delta=-1), corrupt),
        "the codec": (sound + with_header(second, attributes=5), ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        "the compressed stream": (sound + with_payload(second, b"rubbish", attributes=4), invalid),
        "more records than bytes": (sound + with_header(second, count=2**31 - 1), invalid),
        "a negative count": (sound + with_header(second, count=-1), invalid),
        "fewer records than bytes": (sound + with_header(second, count=1), invalid),
        "a record's length": (sound + with_payload(second, b"\x0e" + record[1:], count=1), invalid),
        "a key's length": (sound + with_payload(second, record[:4] + b"\x7e\x01\x00", count=1), invalid),
        "a key of length -2": (sound + with_payload(second, record[:4] + b"\x03\x01\x00", count=1), invalid),
        "a value of length -2": (sound + with_payload(second, record[:5] + b"\x03\x00", count=1), invalid),
        "a header count": (sound + with_payload(second, record[:6] + b"\x02", count=1), invalid),
        "a negative header count": (sound + with_payload(second, record[:6] + b"\x01", count=1), invalid),
        "a header's key": (sound + with_payload(second, bad_utf8, count=1), invalid),
        "a varint without end": (sound + with_payload(second, b"\xff" * 40, count=1), invalid),
        "a timestamp": (sound + with_payload(second, long_delta, count=1), invalid),
        "the first timestamp": (sound + with_header(second, base_timestamp_ms=2**60), invalid),
        "the append time": (sound + with_header(second, attributes=8, max_timestamp_ms=-(2**60)), invalid),
        "magic 1": (sound + second[:16] + b"\x01" + second[17:], ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        "magic 0, shorter than a header": (bytes(20), ErrorCode.UNSUPPORTED_FOR_MESSAGE_FORMAT),
        "magic 3": (sound + second[:16] + b"\x03" + second[17:], corrupt),
    }


@pytest.mark.parametrize("name", damaged_sets())
def test_damage_is_named_with_its_offset(name: str) -> None:
    data, code = damaged_sets()[name]
    texts = set()
    for way in (decode, decode_in_python):
        with pytest.raises(ApiError) as raised:
            way(data, start_offset=0, end_offset=2**62, include_headers=True)
        assert raised.value.code is code
        texts.add(str(raised.value))
    assert len(texts) == 1
    offset = int.from_bytes(data[:8], "big", signed=True) if name.endswith(("offset", "all", "header")) else 2
    assert f"the record batch at offset {offset}" in texts.pop()
    # The kernels find it by themselves: the twin only explains.
    wanted = columns._Wanted(0, 2**62, True, True, 2**20, 2**20)
    with pytest.raises((columns._Damaged, ApiError)):
        columns._decode_compiled(load_kernels(), data, wanted, None)  # type: ignore[arg-type]


def test_what_only_the_kernels_refuse_is_read_and_reported(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> None:
        raise columns._Damaged

    monkeypatch.setattr(columns, "_decode_compiled", refuse)
    chunks, _ = decode(batch(2), start_offset=0, end_offset=2, include_headers=False)
    assert [r[0] for r in rows_of(chunks)] == [0, 1]
    assert "refuses records from offset 0 on" in caplog.text


@BOTH
def test_batches_outside_the_range_are_not_looked_at(way: Any) -> None:
    rubbish = with_payload(batch(2), b"rubbish")
    data = rubbish + batch(2, base_offset=2) + with_header(rubbish, base_offset=4)
    chunks, next_offset = way(data, start_offset=2, end_offset=4, include_headers=False)
    assert [r[0] for r in rows_of(chunks)] == [2, 3]
    assert next_offset == 4


@BOTH
def test_crcs_are_checked_unless_asked_not_to(way: Any) -> None:
    data = with_header(batch(2), crc=5)
    chunks, _ = way(data, start_offset=0, end_offset=2, include_headers=False, check_crcs=False)
    assert [r[0] for r in rows_of(chunks)] == [0, 1]
    with pytest.raises(ApiError, match="CRC"):
        way(data, start_offset=0, end_offset=2, include_headers=False)


@BOTH
@pytest.mark.parametrize("codec", Codec)
def test_a_batch_that_decompresses_to_too_much_is_refused(way: Any, codec: Codec) -> None:
    data = encode_batch([Record(0, NOW_MS, None, bytes(200_000))], compression=codec)
    options: dict[str, Any] = {"start_offset": 0, "end_offset": 1, "include_headers": False}
    with pytest.raises(ApiError) as raised:
        way(data, **options, max_batch_bytes=200_000)
    assert raised.value.code is ErrorCode.INVALID_RECORD
    assert rows_of(way(data, **options, max_batch_bytes=200_100)[0])[0][4] == bytes(200_000)


@pytest.mark.parametrize(
    "key",
    [
        b"a\xc3\xa9", b"\xe0\xa0\x80", b"\xed\x9f\xbf", b"\xee\x80\x80", b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf",
        b"\x80", b"\xc1\xbf", b"\xc3", b"\xc3(", b"\xe0\x9f\xbf", b"\xed\xa0\x80", b"\xef\xbf", b"\xef\xbf(",
        b"\xf0\x8f\xbf\xbf", b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\xf1\x80\x80(", b"ok\x00",
    ],
)  # fmt: skip
def test_header_keys_are_utf8_as_python_has_it(key: bytes) -> None:
    placeholder = "k" * len(key)
    # The length of this value begins with a byte that could continue a character.
    value = b"v" * 64
    made = encode_batch([Record(0, NOW_MS, b"", b"", (Header(placeholder, value),))])
    data = with_payload(made, made[61:].replace(placeholder.encode(), key))
    outcomes = []
    for way in (decode, decode_in_python):
        try:
            outcomes.append(rows_of(way(data, start_offset=0, end_offset=1, include_headers=True)[0])[0][5])
        except ApiError as error:
            outcomes.append(error.code)
    try:
        expected: Any = ((key.decode(), value),)
    except UnicodeDecodeError:
        expected = ErrorCode.INVALID_RECORD
    assert outcomes == [expected, expected]
