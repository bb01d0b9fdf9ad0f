"""The data source that Spark knows as `millrace`: from options to a schema, readers and writers.

Spark makes an object of this class in a process of its own for every `load` or `save`, and pickles it to the others:
it has options and nothing else. Cheap to import: whatever needs Arrow or numba is imported where it is used.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from millrace.errors import ConfigError
from millrace.spark.options import CORRUPT, SourceOptions, ValueFormat, ValueMode
from millrace.spark.worker import leave_when_let_go

if TYPE_CHECKING:
    from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter

    from millrace.spark.reader import BatchReader, StreamReader

NAME: Final = "millrace"

leave_when_let_go()  # every process of Spark's that has to do with topics imports this module

HEADERS: Final = ArrayType(StructType([StructField("key", StringType()), StructField("value", BinaryType())]))
_TYPES: Final[dict[str, DataType]] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
}


class MillraceSource(DataSource):
    """Topics of a Kafka-compatible broker as tables and streams.

        spark.readStream.format("millrace").option("kafka.bootstrap.servers", "localhost:9092")
            .option("subscribe", "orders").load()

    Columns and options are those of Spark's Kafka source and sink; docs/spark.md has them all. A schema given by the
    user may leave columns out, which are then not made at all.
    """

    @classmethod
    def name(cls) -> str:
        return NAME

    def schema(self) -> StructType | str:
        return schema_of(SourceOptions.parse(self.options))

    def reader(self, schema: StructType) -> BatchReader:
        from millrace.spark.reader import BatchReader

        return BatchReader(self._source_options(schema), schema)

    def streamReader(self, schema: StructType) -> StreamReader:  # noqa: N802
        from millrace.spark.reader import StreamReader

        return StreamReader(self._source_options(schema), schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        from millrace.spark.options import SinkOptions
        from millrace.spark.writer import BatchWriter

        return BatchWriter(SinkOptions.parse(self.options).for_batch(), schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802
        from millrace.spark.options import SinkOptions
        from millrace.spark.writer import StreamWriter

        return StreamWriter(SinkOptions.parse(self.options).for_stream(), schema, overwrite)

    def _source_options(self, schema: StructType) -> SourceOptions:
        options = SourceOptions.parse(self.options)
        check_schema(schema, options)
        return options


def schema_of(options: SourceOptions) -> StructType | str:
    """The columns; as DDL when value.schema is DDL, for only the JVM can parse that."""
    if options.value.format is ValueFormat.JSON and not options.value.schema.startswith("{"):
        value = f"STRUCT<{options.value.schema}>"
        columns = [f"{name} {value if name == 'value' else each.simpleString()}" for name, each in _TYPES.items()]
        if options.include_headers:
            columns.append("headers ARRAY<STRUCT<key: STRING, value: BINARY>>")
        if options.value.mode is ValueMode.PERMISSIVE:
            columns.append(f"{CORRUPT} STRING")
        return ", ".join(columns)
    types = dict(_TYPES)
    if options.value.format is ValueFormat.JSON:
        types["value"] = _parse_schema(options.value.schema)
    return StructType([StructField(name, each) for name, each in {**types, **_more(options)}.items()])


def check_schema(schema: StructType, options: SourceOptions) -> None:
    """ConfigError unless every column of `schema` is one of the source, with its type."""
    types = {**_TYPES, "headers": HEADERS, **_more(options)}
    for field in schema.fields:
        if field.name not in types:
            raise ConfigError(f"the source has no column {field.name!r}; it has {', '.join(types)}")
        if field.name == "value" and options.value.format is ValueFormat.JSON:
            if not isinstance(field.dataType, StructType):
                raise ConfigError("with value.format=json, column 'value' is a struct")
            from millrace.spark.formats import JsonValues

            JsonValues(field.dataType, options.value.mode)  # for its ConfigError, here rather than in a task
        elif field.dataType != types[field.name]:
            wanted = types[field.name].simpleString()
            raise ConfigError(f"column {field.name!r} is of type {wanted}, not {field.dataType.simpleString()}")
        if not field.nullable:
            raise ConfigError(f"column {field.name!r} cannot be NOT NULL in the schema of the source")


def _more(options: SourceOptions) -> dict[str, DataType]:
    more: dict[str, DataType] = {}
    if options.include_headers:
        more["headers"] = HEADERS
    if options.value.format is ValueFormat.JSON and options.value.mode is ValueMode.PERMISSIVE:
        more[CORRUPT] = StringType()
    return more


def _parse_schema(text: str) -> StructType:
    try:
        parsed: Any = json.loads(text)
        return StructType.fromJson(parsed)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"option 'value.schema' is not a schema: {type(error).__name__} {error}; "
            "give DDL such as 'id BIGINT, name STRING', or what StructType.json() prints"
        ) from None
