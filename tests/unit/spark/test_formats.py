"""JSON values as columns: the rules one by one, and that both ways of reading follow them."""

from __future__ import annotations

import datetime
import decimal
import json
import math
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as sql

from millrace.errors import ConfigError
from millrace.model import TopicPartition
from millrace.spark.columns import TIMESTAMP, RecordColumns
from millrace.spark.formats import PIECE_ROWS, BatchMaker, JsonValues, ValueMismatch
from millrace.spark.options import ValueFormat, ValueMode, ValueOptions

UTC = datetime.UTC
PLAIN = sql.StructType(
    [
        sql.StructField("id", sql.LongType()),
        sql.StructField("small", sql.ByteType()),
        sql.StructField("name", sql.StringType()),
        sql.StructField("ok", sql.BooleanType()),
        sql.StructField("size", sql.DoubleType()),
        sql.StructField("tags", sql.ArrayType(sql.StringType())),
        sql.StructField("inner", sql.StructType([sql.StructField("x", sql.IntegerType())])),
    ]
)


def read(fields: sql.StructType, *values: bytes | None) -> tuple[list[Any], list[str | None]]:
    structs, texts = JsonValues(fields, ValueMode.PERMISSIVE).read(pa.array(values, pa.binary()))
    assert len(structs) == len(texts) == len(values)
    return structs.to_pylist(), texts.to_pylist()


def one(kind: sql.DataType, text: str) -> Any:
    """The field, or the exception that says that it does not match."""
    fields = sql.StructType([sql.StructField("f", kind)])
    structs, texts = read(fields, f'{{"f": {text}}}'.encode())
    if texts[0] is not None:
        assert structs == [None]
        raise ValueError(texts[0])
    return structs[0]["f"]


def test_every_field_of_a_plain_schema() -> None:
    value = {"id": 2**63 - 1, "small": -128, "name": "é", "ok": True, "size": 2, "tags": ["a", None], "inner": {"x": 1}}
    wanted = {**value, "size": 2.0}
    assert read(PLAIN, json.dumps(value).encode()) == ([wanted], [None])


def test_missing_fields_and_nulls_are_null_and_others_ignored() -> None:
    nothing = dict.fromkeys(PLAIN.fieldNames())
    assert read(PLAIN, b'{"id": null, "other": {"deep": [1]}}') == ([nothing], [None])


def test_a_null_value_is_null_and_not_corrupt() -> None:
    structs, texts = read(PLAIN, b'{"id": 1}', None, b'{"id": 2}')
    assert [each and each["id"] for each in structs] == [1, None, 2]
    assert texts == [None, None, None]


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b" ",
        b"null",
        b"1",
        b"[]",
        b'{"id": 1',
        b'{"id": 1} x',
        b'{"id": 1}\n{"id": 2}',
        b"{'id': 1}",
        b"\xff",
        b'{"id": "1"}',
        b'{"id": 1.0}',
        b'{"id": true}',
        b'{"id": 9223372036854775808}',
        b'{"small": 128}',
        b'{"name": 1}',
        b'{"name": "\\ud800"}',
        b'{"ok": 1}',
        b'{"size": NaN}',
        b'{"size": 1e999}',
        b'{"tags": [1]}',
        b'{"tags": "a"}',
        b'{"inner": []}',
        b'{"inner": {"x": "1"}}',
        b'{"other": "\xff"}',
        b'{"other": Infinity}',
    ],
)
def test_values_that_do_not_match_leave_their_text(value: bytes) -> None:
    structs, texts = read(PLAIN, b'{"id": 1}', value, b'{"id": 2}')
    assert [each and each["id"] for each in structs] == [1, None, 2]
    assert texts == [None, value.decode("utf-8", "replace"), None]


def test_newlines_inside_a_value_are_white_space() -> None:
    assert [each["id"] for each in read(PLAIN, b'{\n"id":\r\n1}', b'{"id": 2}')[0]] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        (sql.FloatType(), "1.5", 1.5),
        (sql.FloatType(), "3", 3.0),
        (sql.ShortType(), "-32768", -32768),
        (sql.DecimalType(5, 2), "123.4", decimal.Decimal("123.40")),
        (sql.DecimalType(5, 2), "7", decimal.Decimal("7.00")),
        (sql.DateType(), '"2024-02-29"', datetime.date(2024, 2, 29)),
        (sql.TimestampType(), '"2024-02-29T12:00:00.000001Z"', datetime.datetime(2024, 2, 29, 12, 0, 0, 1, UTC)),
        (sql.TimestampType(), '"2024-02-29T12:00:00+02:00"', datetime.datetime(2024, 2, 29, 10, tzinfo=UTC)),
        (sql.TimestampType(), '"2024-02-29 12:00:00"', datetime.datetime(2024, 2, 29, 12, tzinfo=UTC)),
        (sql.TimestampNTZType(), '"2024-02-29T12:00:00"', datetime.datetime(2024, 2, 29, 12)),  # noqa: DTZ001
        (sql.BinaryType(), '"AAE="', b"\x00\x01"),
        (sql.MapType(sql.StringType(), sql.LongType()), '{"a": 1, "b": null}', [("a", 1), ("b", None)]),
        (sql.ArrayType(sql.DecimalType(3, 1)), "[1.5]", [decimal.Decimal("1.5")]),
    ],
)
def test_types(kind: sql.DataType, text: str, wanted: Any) -> None:
    assert one(kind, text) == wanted


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (sql.DecimalType(5, 2), "1234.5"),
        (sql.DecimalType(5, 2), "1.234"),
        (sql.DecimalType(5, 2), '"1.2"'),
        (sql.DateType(), '"2023-02-29"'),
        (sql.DateType(), "20240229"),
        (sql.TimestampType(), '"noon"'),
        (sql.TimestampType(), "1709208000"),
        (sql.TimestampNTZType(), '"2024-02-29T12:00:00Z"'),
        (sql.BinaryType(), '"not base64!"'),
        (sql.MapType(sql.StringType(), sql.LongType()), "[]"),
        (sql.MapType(sql.StringType(), sql.LongType(), valueContainsNull=False), '{"a": null}'),
        (sql.ArrayType(sql.LongType(), containsNull=False), "[null]"),
    ],
)
def test_mismatches(kind: sql.DataType, text: str) -> None:
    with pytest.raises(ValueError, match="f"):
        one(kind, text)


def test_a_field_that_must_not_be_null() -> None:
    fields = sql.StructType([sql.StructField("id", sql.LongType(), nullable=False)])
    assert read(fields, b'{"id": 1}', b"{}")[1] == [None, "{}"]


@pytest.mark.parametrize("kind", [sql.VariantType(), sql.MapType(sql.LongType(), sql.LongType())])
def test_types_that_json_cannot_give(kind: sql.DataType) -> None:
    with pytest.raises(ConfigError, match=r"value\.schema"):
        JsonValues(sql.StructType([sql.StructField("f", kind)]), ValueMode.PERMISSIVE)


def test_failfast_names_topic_partition_offset_and_field() -> None:
    count = PIECE_ROWS + 10
    values = [b'{"id": 1}'] * count
    values[-2] = b'{"id": "x"}'
    columns = RecordColumns(
        key=pa.nulls(count, pa.binary()),
        value=pa.array(values, pa.binary()),
        offset=pa.array(range(1000, 1000 + count), pa.int64()),
        timestamp=pa.array([0] * count, TIMESTAMP),
        timestamp_type=pa.array([0] * count, pa.int32()),
        headers=None,
    )
    schema = sql.StructType([sql.StructField("value", PLAIN)])
    make = BatchMaker(schema, ValueOptions(ValueFormat.JSON, "...", ValueMode.FAILFAST))
    with pytest.raises(ValueMismatch) as caught:
        make(columns, TopicPartition("t", 3))
    assert str(caught.value) == (
        f"topic t, partition 3, offset {1000 + count - 2}: the value does not match value.schema: "
        "field 'id' is to be bigint, and is \"x\"; set option value.mode to permissive to go on"
    )


def test_a_corrupt_value_in_one_piece_leaves_the_others() -> None:
    values: list[bytes | None] = [json.dumps({"id": number}).encode() for number in range(PIECE_ROWS * 2 + 5)]
    values[7] = b"?"
    structs, texts = read(PLAIN, *values)
    assert [each and each["id"] for each in structs] == [None if row == 7 else row for row in range(len(values))]
    assert [row for row, text in enumerate(texts) if text is not None] == [7]


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
documents = st.dictionaries(
    st.sampled_from(["id", "small", "name", "ok", "size", "tags", "inner", "other"]),
    scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.sampled_from(["x", "y"]), scalars, max_size=2),
    max_size=5,
)
fitting = st.fixed_dictionaries(
    {},
    optional={
        "id": st.none() | st.integers(-(2**63), 2**63 - 1),
        "small": st.integers(-128, 127),
        "name": st.none() | st.text(),
        "ok": st.booleans(),
        "size": st.floats(allow_nan=False, allow_infinity=False) | st.integers(-(2**100), 2**100),
        "tags": st.lists(st.none() | st.text(max_size=3), max_size=3),
        "inner": st.none() | st.fixed_dictionaries({}, optional={"x": st.none() | st.integers(-(2**31), 2**31 - 1)}),
        "other": scalars.filter(lambda each: not isinstance(each, float) or math.isfinite(each)),  # Infinity is no JSON
    },
)
values = st.lists(
    st.none()
    | fitting.map(lambda each: json.dumps(each).encode())
    | documents.map(lambda each: json.dumps(each).encode()),
    min_size=1,
    max_size=6,
)


@given(values)
def test_arrow_agrees_with_reading_one_by_one(rows: list[bytes | None]) -> None:
    reader = JsonValues(PLAIN, ValueMode.PERMISSIVE)
    array = pa.array(rows, pa.binary())
    fast = reader.read_with_arrow(array)
    slow, texts = reader.read_one_by_one(array)
    if fast is not None:
        assert texts.null_count == len(rows)
        assert fast.type == slow.type
        assert repr(fast.to_pylist()) == repr(slow.to_pylist())


@given(st.lists(st.none() | fitting.map(lambda each: json.dumps(each).encode()), min_size=1, max_size=6))
def test_values_that_match_are_never_corrupt(rows: list[bytes | None]) -> None:
    assert read(PLAIN, *rows)[1] == [None] * len(rows)


def test_ordinary_values_take_the_fast_way() -> None:
    rows = pa.array([b'{"id": 1, "name": "x"}', None, b'{"size": 1.5}'], pa.binary())
    assert JsonValues(PLAIN, ValueMode.PERMISSIVE).read_with_arrow(rows) is not None
