"""The data source as Spark sees it before any query: name, schema, and what its import costs."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pyspark.sql import types as sql

from millrace.errors import ConfigError
from millrace.spark.options import SourceOptions
from millrace.spark.source import check_schema, schema_of

BASE = {"kafka.bootstrap.servers": "one:1", "subscribe": "t"}
JSON = {**BASE, "value.format": "json", "value.schema": "id BIGINT"}
KAFKA_COLUMNS = (
    "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int"
)


def test_the_module_that_spark_looks_for_is_light() -> None:
    program = (
        "import json, sys, pyspark.sql.datasource as api, pyspark_millrace as found\n"
        "assert issubclass(found.DefaultSource, api.DataSource)\n"
        "heavy = [name for name in ('numba', 'pyarrow', 'numpy', 'pandas') if name in sys.modules]\n"
        "print(json.dumps([found.DefaultSource.name(), heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["millrace", []]


def test_the_columns_of_the_kafka_source() -> None:
    schema = schema_of(SourceOptions.parse(BASE))
    assert isinstance(schema, sql.StructType)
    assert schema.simpleString() == f"{KAFKA_COLUMNS}>"
    schema = schema_of(SourceOptions.parse({**BASE, "includeHeaders": "true"}))
    assert isinstance(schema, sql.StructType)
    assert schema.simpleString() == f"{KAFKA_COLUMNS},headers:array<struct<key:string,value:binary>>>"


def test_a_schema_in_ddl_is_left_to_spark() -> None:
    assert schema_of(SourceOptions.parse({**JSON, "includeHeaders": "true"})) == (
        "key binary, value STRUCT<id BIGINT>, topic string, partition int, offset bigint, timestamp timestamp, "
        "timestampType int, headers ARRAY<STRUCT<key: STRING, value: BINARY>>, _corrupt STRING"
    )
    assert "_corrupt" not in str(schema_of(SourceOptions.parse({**JSON, "value.mode": "failfast"})))


def test_a_schema_in_json() -> None:
    fields = sql.StructType([sql.StructField("id", sql.LongType())])
    schema = schema_of(SourceOptions.parse({**JSON, "value.schema": fields.json()}))
    assert isinstance(schema, sql.StructType)
    assert schema["value"].dataType == fields
    assert schema.names[-1] == "_corrupt"


@pytest.mark.parametrize("text", ["{", "{}", '{"type": "struct"}', '{"type": "struct", "fields": [1]}'])
def test_what_is_no_schema(text: str) -> None:
    with pytest.raises(ConfigError, match=r"option 'value\.schema' is not a schema"):
        schema_of(SourceOptions.parse({**JSON, "value.schema": text}))


@pytest.mark.parametrize(
    ("field", "words"),
    [
        (sql.StructField("text", sql.StringType()), "has no column 'text'"),
        (sql.StructField("offset", sql.IntegerType()), "column 'offset' is of type bigint, not int"),
        (sql.StructField("offset", sql.LongType(), nullable=False), "NOT NULL"),
        (sql.StructField("value", sql.BinaryType()), "column 'value' is a struct"),
        (sql.StructField("value", sql.StructType().add("f", sql.VariantType())), "field 'f' has type variant"),
    ],
)
def test_what_a_schema_of_the_user_cannot_be(field: sql.StructField, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_schema(sql.StructType([field]), SourceOptions.parse(JSON))
