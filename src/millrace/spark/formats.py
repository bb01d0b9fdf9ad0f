"""From record columns to the columns of a query: choose, name and type them, and take JSON values apart.

JSON is read a piece of rows at a time by pyarrow, which knows no Python objects, as long as that gives exactly what the
rules below give; a piece in which anything is unusual is read again, value by value, by the standard library.

The rules for value.format=json: a value is one JSON object in UTF-8. A field that is missing or null is NULL, a field
that the schema does not name is ignored, and every other one must have the JSON type of its column: nothing is
converted, except that whole numbers are numbers for DOUBLE and FLOAT. Dates and times are ISO 8601 strings, a time
without a zone is in UTC; BINARY is base64. A NULL value (a tombstone) is NULL and matches every schema.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import inspect
import json
import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, NoReturn, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.json as arrow_json
from pyspark.sql import types as sql
from pyspark.sql.pandas.types import to_arrow_schema

from millrace.errors import ConfigError, MillraceError
from millrace.model import TopicPartition
from millrace.spark.columns import PlaceColumns, RecordColumns
from millrace.spark.options import CORRUPT, ValueFormat, ValueMode, ValueOptions

Converter: TypeAlias = Callable[[Any], Any]

PIECE_ROWS: Final = 16 * 1024
_OPEN, _CLOSE = ord("{"), ord("}")


class ValueMismatch(MillraceError):
    """A value does not match value.schema, and value.mode=failfast says that this is an error."""


class BatchMaker:
    """Makes the Arrow batches that Spark expects for a schema; one for a task."""

    def __init__(self, schema: sql.StructType, value: ValueOptions) -> None:
        self.names = tuple(schema.fieldNames())
        self._schema = arrow_schema(schema)
        self._place: PlaceColumns | None = None
        self._json: JsonValues | None = None
        if value.format is ValueFormat.JSON and not {"value", CORRUPT}.isdisjoint(self.names):
            # Without a value column there is nothing to match: only what is not a JSON object is corrupt then.
            fields = schema["value"].dataType if "value" in self.names else sql.StructType()
            assert isinstance(fields, sql.StructType)
            self._json = JsonValues(fields, value.mode)

    def __call__(self, columns: RecordColumns, partition: TopicPartition) -> pa.RecordBatch:
        if self._place is None or self._place.partition != partition:
            self._place = PlaceColumns(partition)
        found = columns.by_name(self._place, include_headers="headers" in self.names)
        if self._json is not None:
            try:
                found["value"], found[CORRUPT] = self._json.read(columns.value)
            except _Bad as bad:
                raise ValueMismatch(
                    f"topic {partition.topic}, partition {partition.partition}, offset {columns.offset[bad.row]}: "
                    f"the value does not match value.schema: {bad}; set option value.mode to permissive to go on"
                ) from None
        return pa.RecordBatch.from_arrays([found[name] for name in self.names], schema=self._schema)


def arrow_schema(schema: sql.StructType) -> pa.Schema:
    """What Spark expects of the batches that a source yields."""
    convert = to_arrow_schema
    if "timezone" in inspect.signature(to_arrow_schema).parameters:  # Spark 4.2; before, it was UTC without saying so
        convert = partial(to_arrow_schema, timezone="UTC")
    return convert(schema)


class JsonValues:
    """Reads values as JSON objects of one schema; ConfigError for a type that JSON cannot give."""

    def __init__(self, fields: sql.StructType, mode: ValueMode) -> None:
        self._type = pa.struct(list(arrow_schema(fields)))
        self._convert = _converter(fields, "")
        self._mode = mode
        self._exact_in_arrow = _is_exact_in_arrow(fields)
        self._parse = partial(json.loads, parse_constant=_refuse)
        if _has_decimals(fields):
            self._parse = partial(self._parse, parse_float=decimal.Decimal)

    def read(self, values: pa.Array) -> tuple[pa.Array, pa.Array]:
        """The structs, and the texts of the values that do not match; failfast raises for the first of these."""
        structs, texts = [], []
        for start in range(0, len(values), PIECE_ROWS):
            struct, text = self._read_piece(values.slice(start, PIECE_ROWS), start)
            structs.append(struct)
            texts.append(text)
        if len(structs) == 1:
            return structs[0], texts[0]
        return pa.concat_arrays(structs or [pa.array([], self._type)]), pa.concat_arrays(texts or [pa.nulls(0, "str")])

    def _read_piece(self, values: pa.Array, start: int) -> tuple[pa.Array, pa.Array]:
        structs = self.read_with_arrow(values) if self._exact_in_arrow else None
        if structs is not None:
            return structs, pa.nulls(len(values), pa.string())
        return self.read_one_by_one(values, start)

    def read_with_arrow(self, values: pa.Array) -> pa.Array | None:
        """The structs, or None when the result could differ from reading one by one, or a value does not match."""
        rows = [value for value in values.to_pylist() if value is not None]
        if not rows or not all(rows):
            return None
        data = b"\n".join(rows)
        # One object per line, so that a line more here cannot make up for one less there; and pyarrow takes NaN.
        if data.count(b"\n") != len(rows) - 1 or b"\r" in data or b"NaN" in data or b"Inf" in data:
            return None
        ends = np.cumsum([len(row) + 1 for row in rows]) - 2
        flat = np.frombuffer(data, np.uint8)
        if flat[0] != _OPEN or not (flat[ends[:-1] + 2] == _OPEN).all() or not (flat[ends] == _CLOSE).all():
            return None
        try:
            data.decode("utf-8")  # pyarrow does not look at what it ignores
            table = arrow_json.read_json(
                pa.BufferReader(data),
                read_options=arrow_json.ReadOptions(use_threads=False, block_size=len(data) + 1),
                parse_options=arrow_json.ParseOptions(
                    explicit_schema=pa.schema(list(self._type)), unexpected_field_behavior="ignore"
                ),
            )
        except (pa.ArrowInvalid, UnicodeDecodeError):
            return None
        if table.num_rows != len(rows):
            return None
        columns = [column.combine_chunks() for column in table.columns]
        structs = pa.StructArray.from_arrays(columns, fields=list(self._type))
        if not values.null_count:
            return structs
        present = np.asarray(values.is_valid())
        return structs.take(pa.array(np.cumsum(present) - 1, mask=~present))

    def read_one_by_one(self, values: pa.Array, start: int = 0) -> tuple[pa.Array, pa.Array]:
        """Both columns by the rules of this module; `start` is the row of the first value, for `_Bad`."""
        found: list[dict[str, Any] | None] = []
        texts: list[str | None] = []
        for row, value in enumerate(values.to_pylist()):
            struct, text = None, None
            if value is not None:
                try:
                    struct = self._convert(self._parse(value.decode("utf-8")))
                except (ValueError, RecursionError) as error:
                    if self._mode is ValueMode.FAILFAST:
                        raise _Bad(start + row, error) from None
                    text = value.decode("utf-8", "replace")
            found.append(struct)
            texts.append(text)
        return pa.array(found, self._type), pa.array(texts, pa.string())


class _Bad(Exception):
    """The value in a row of a column does not match."""

    def __init__(self, row: int, error: Exception) -> None:
        super().__init__("it is nested too deeply" if isinstance(error, RecursionError) else str(error))
        self.row = row


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


# What is exact in pyarrow: FLOAT would be rounded once instead of twice, the others are text in JSON.
_EXACT_IN_ARROW: Final = (
    sql.StringType,
    sql.BooleanType,
    sql.ByteType,
    sql.ShortType,
    sql.IntegerType,
    sql.LongType,
    sql.DoubleType,
)


def _is_exact_in_arrow(kind: sql.DataType) -> bool:
    if isinstance(kind, sql.StructType):
        # pyarrow fills a missing field with NULL even where the schema forbids it.
        return len(kind.fields) > 0 and all(each.nullable and _is_exact_in_arrow(each.dataType) for each in kind.fields)
    if isinstance(kind, sql.ArrayType):
        return kind.containsNull and _is_exact_in_arrow(kind.elementType)
    return type(kind) in _EXACT_IN_ARROW


def _has_decimals(kind: sql.DataType) -> bool:
    if isinstance(kind, sql.StructType):
        return any(_has_decimals(each.dataType) for each in kind.fields)
    if isinstance(kind, sql.ArrayType):
        return _has_decimals(kind.elementType)
    if isinstance(kind, sql.MapType):
        return _has_decimals(kind.valueType)
    return isinstance(kind, sql.DecimalType)


def _converter(kind: sql.DataType, path: str) -> Converter:
    """A function from what `json` gives to what pyarrow takes; it raises ValueError with the path of the field."""
    if isinstance(kind, sql.StructType):
        return _struct(kind, path)
    if isinstance(kind, sql.ArrayType):
        return _array(kind, path)
    if isinstance(kind, sql.MapType):
        return _map(kind, path)
    scalar = _scalar(kind)
    if scalar is None:
        raise ConfigError(
            f"option 'value.schema': field {path!r} has type {kind.simpleString()}, which is not read from JSON here; "
            "leave value.format out and use Spark's own functions"
        )
    wanted = kind.simpleString()

    def convert(value: Any) -> Any:
        try:
            return scalar(value)
        except (ValueError, TypeError, OverflowError, decimal.InvalidOperation):
            raise _mismatch(path, wanted, value) from None

    return convert


def _struct(kind: sql.StructType, path: str) -> Converter:
    fields = [
        (field.name, field.nullable, _converter(field.dataType, f"{path}.{field.name}".lstrip(".")))
        for field in kind.fields
    ]

    def convert(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _mismatch(path, "a JSON object", value)
        found: dict[str, Any] = {}
        for name, nullable, inner in fields:
            item = value.get(name)
            if item is None:
                if not nullable:
                    raise ValueError(f"field {f'{path}.{name}'.lstrip('.')!r} must not be null")
                found[name] = None
            else:
                found[name] = inner(item)
        return found

    return convert


def _array(kind: sql.ArrayType, path: str) -> Converter:
    inner = _converter(kind.elementType, f"{path}[]")

    def convert(value: Any) -> list[Any]:
        if type(value) is not list:
            raise _mismatch(path, "an array", value)
        if not kind.containsNull and None in value:
            raise ValueError(f"field {path!r} must not contain null")
        return [None if item is None else inner(item) for item in value]

    return convert


def _map(kind: sql.MapType, path: str) -> Converter:
    if type(kind.keyType) is not sql.StringType:
        raise ConfigError(f"option 'value.schema': the keys of map {path!r} must be STRING, as they are in JSON")
    inner = _converter(kind.valueType, f"{path}{{}}")

    def convert(value: Any) -> list[tuple[str, Any]]:
        if type(value) is not dict:
            raise _mismatch(path, "an object", value)
        if not kind.valueContainsNull and None in value.values():
            raise ValueError(f"field {path!r} must not contain null")
        return [(_text(key), None if item is None else inner(item)) for key, item in value.items()]

    return convert


def _mismatch(path: str, wanted: str, value: Any) -> ValueError:
    where = f"field {path!r}" if path else "the value"
    return ValueError(f"{where} is to be {wanted}, and is {json.dumps(value, default=str)[:80]}")


_INTEGER_BITS: Final[dict[type[sql.DataType], int]] = {
    sql.ByteType: 8,
    sql.ShortType: 16,
    sql.IntegerType: 32,
    sql.LongType: 64,
}


def _scalar(kind: sql.DataType) -> Converter | None:
    if type(kind) in _INTEGER_BITS:
        return partial(_integer, limit=1 << (_INTEGER_BITS[type(kind)] - 1))
    if isinstance(kind, sql.DecimalType):
        return partial(_decimal, precision=kind.precision, scale=kind.scale)
    return {
        sql.StringType: _text,
        sql.VarcharType: _text,
        sql.CharType: _text,
        sql.BooleanType: _boolean,
        sql.FloatType: _number,
        sql.DoubleType: _number,
        sql.DateType: _date,
        sql.TimestampType: _timestamp,
        sql.TimestampNTZType: _local_timestamp,
        sql.BinaryType: _bytes,
    }.get(type(kind))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError
    value.encode("utf-8")  # a lone surrogate is legal in JSON's escapes, and no text
    return value


def _boolean(value: Any) -> bool:
    if type(value) is not bool:
        raise ValueError
    return value


def _integer(value: Any, limit: int) -> int:
    if type(value) is not int or not -limit <= value < limit:
        raise ValueError
    return value


def _number(value: Any) -> float:
    if type(value) not in {int, float, decimal.Decimal}:
        raise ValueError
    number = float(value)
    if math.isinf(number):
        raise ValueError
    return number


def _decimal(value: Any, precision: int, scale: int) -> decimal.Decimal:
    if type(value) not in {int, decimal.Decimal}:
        raise ValueError
    with decimal.localcontext(prec=precision + 1) as context:
        context.traps[decimal.Inexact] = True
        try:
            number = decimal.Decimal(value).quantize(decimal.Decimal(1).scaleb(-scale))
        except decimal.Inexact:
            raise ValueError from None
    if len(number.as_tuple().digits) > precision:
        raise ValueError
    return number


def _date(value: Any) -> datetime.date:
    return datetime.date.fromisoformat(_text(value))


def _timestamp(value: Any) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(_text(value))
    return moment.replace(tzinfo=datetime.UTC) if moment.tzinfo is None else moment.astimezone(datetime.UTC)


def _local_timestamp(value: Any) -> datetime.datetime:
    moment = datetime.datetime.fromisoformat(_text(value))
    if moment.tzinfo is not None:
        raise ValueError
    return moment


def _bytes(value: Any) -> bytes:
    return base64.b64decode(_text(value), validate=True)
