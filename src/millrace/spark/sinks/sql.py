"""Batches into a table of SQLite or PostgreSQL: rows are upserted by key, exactly once by the number of the batch.

A batch is one database transaction. Its first statement raises the number kept for (query, table) in the table
`millrace_batches`, and only if it is lower; when nothing was raised the batch is in the table already and is skipped.
So a driver that died between the commit and Spark's note of it repeats a batch without effect, and two drivers of the
same query cannot both write it. The rows pass through the driver: this sink is for results (counts, latest values), the
warehouse sink is for everything.

Not here: migrations. The table is created when it is missing; one that exists has to have the columns of the stream.
"""

from __future__ import annotations

import json
import re
import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

from pyspark.sql import DataFrame
from pyspark.sql.types import StructType

from millrace.errors import ConfigError
from millrace.installing import install_hint
from millrace.spark.sinks.batch import BatchWriter, query_id_of

BOOKKEEPING: Final = "millrace_batches"
_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,62}")
_SQLITE_TIMEOUT_S: Final = 30.0


def sql(url: str, table: str, *, keys: Sequence[str] = (), query_id: str | None = None) -> BatchWriter:
    """A batch writer that upserts into `table`: a row with the same `keys` is replaced. Without keys, rows are added.

    `url` is `sqlite:///relative/file.db`, `sqlite:////absolute/file.db` or `postgresql://user:password@host/database`.
    `query_id` is needed only outside a streaming query.
    """
    database = database_of(url)
    if not all(_NAME.fullmatch(part) for part in table.split(".")):
        raise ConfigError(f"'{table}' is not a table name: letters, digits and underscores, with a schema if need be")

    def write(batch: DataFrame, batch_id: int) -> None:
        upsert(database, Table(table, batch.schema, tuple(keys)), batch, batch_id, query_id or query_id_of(batch))

    return write


@dataclass(frozen=True, slots=True)
class Table:
    """A table as a stream sees it: its name, its columns, and those that make a row unique."""

    name: str
    schema: StructType
    keys: tuple[str, ...]

    def __post_init__(self) -> None:
        for key in self.keys:
            if key not in self.schema.names:
                raise ConfigError(
                    f"table {self.name}: key '{key}' is no column; there are {', '.join(self.schema.names)}"
                )


def upsert(database: Database, table: Table, batch: DataFrame, batch_id: int, query_id: str) -> None:
    """Write one batch in one transaction, unless the database has it already."""
    rows = batch.toArrow().to_pylist()
    with database.transaction() as cursor:
        cursor.execute(_create_bookkeeping())
        cursor.execute(_create_table(table, database))
        cursor.execute(_raise_batch_id(database), (query_id, table.name, batch_id))
        if cursor.rowcount == 0 or not rows:
            return
        names = table.schema.names
        cursor.executemany(
            _upsert(table, database), [tuple(database.value(row[name]) for name in names) for row in rows]
        )


# The statements: pure text.


def _quoted(name: str) -> str:
    return ".".join('"' + part.replace('"', '""') + '"' for part in name.split("."))


def _column(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _create_bookkeeping() -> str:
    return (
        f"CREATE TABLE IF NOT EXISTS {BOOKKEEPING} (query_id TEXT NOT NULL, target TEXT NOT NULL, "
        "batch_id BIGINT NOT NULL, PRIMARY KEY (query_id, target))"
    )


def _raise_batch_id(database: Database) -> str:
    mark = database.placeholder
    return (
        f"INSERT INTO {BOOKKEEPING} (query_id, target, batch_id) VALUES ({mark}, {mark}, {mark}) "  # noqa: S608
        "ON CONFLICT (query_id, target) DO UPDATE SET batch_id = excluded.batch_id "
        f"WHERE {BOOKKEEPING}.batch_id < excluded.batch_id"
    )


def _create_table(table: Table, database: Database) -> str:
    columns = [f"{_column(field.name)} {database.type_of(field.dataType.typeName())}" for field in table.schema.fields]
    if table.keys:
        columns.append(f"PRIMARY KEY ({', '.join(map(_column, table.keys))})")
    return f"CREATE TABLE IF NOT EXISTS {_quoted(table.name)} ({', '.join(columns)})"


def _upsert(table: Table, database: Database) -> str:
    names = table.schema.names
    statement = (
        f"INSERT INTO {_quoted(table.name)} ({', '.join(map(_column, names))}) "  # noqa: S608  # names are quoted
        f"VALUES ({', '.join([database.placeholder] * len(names))})"
    )
    if not table.keys:
        return statement
    changed = [f"{_column(name)} = excluded.{_column(name)}" for name in names if name not in table.keys]
    action = f"DO UPDATE SET {', '.join(changed)}" if changed else "DO NOTHING"
    return f"{statement} ON CONFLICT ({', '.join(map(_column, table.keys))}) {action}"


# The two databases.


class Database(ABC):
    """What differs between databases: how to connect, what a type is called, how a value is handed over."""

    placeholder: str

    @abstractmethod
    def transaction(self) -> Any:
        """A context manager: a cursor whose work is committed together, or not at all."""

    @abstractmethod
    def type_of(self, spark_type: str) -> str:
        """The column type for a Spark type, by its short name."""

    @abstractmethod
    def value(self, value: object) -> object:
        """A value as the driver of the database takes it."""


class Sqlite(Database):
    placeholder = "?"

    _TYPES: Final = {"byte", "short", "integer", "long", "boolean"}

    def __init__(self, path: str) -> None:
        self.path = path

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        with closing(sqlite3.connect(self.path, timeout=_SQLITE_TIMEOUT_S, isolation_level=None)) as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection.cursor()
            except BaseException:
                connection.execute("ROLLBACK")
                raise
            connection.execute("COMMIT")

    def type_of(self, spark_type: str) -> str:
        if spark_type in self._TYPES:
            return "INTEGER"
        return {"float": "REAL", "double": "REAL", "binary": "BLOB"}.get(spark_type, "TEXT")

    def value(self, value: object) -> object:
        if isinstance(value, datetime):
            return value.isoformat(sep=" ")
        if isinstance(value, date | Decimal):
            return str(value)
        if isinstance(value, list | dict):
            return json.dumps(value, default=str, ensure_ascii=False)
        return value


class Postgres(Database):
    placeholder = "%s"

    _TYPES: Final = {
        "byte": "SMALLINT",
        "short": "SMALLINT",
        "integer": "INTEGER",
        "long": "BIGINT",
        "boolean": "BOOLEAN",
        "float": "REAL",
        "double": "DOUBLE PRECISION",
        "decimal": "NUMERIC",
        "date": "DATE",
        "timestamp": "TIMESTAMPTZ",
        "timestamp_ntz": "TIMESTAMP",
        "binary": "BYTEA",
        "array": "JSONB",
        "map": "JSONB",
        "struct": "JSONB",
    }

    def __init__(self, url: str) -> None:
        try:
            import psycopg  # noqa: F401  # an extra of its own
        except ImportError as error:
            raise ConfigError(f"PostgreSQL needs psycopg: {install_hint('postgres')}") from error
        self.url = url

    @contextmanager
    def transaction(self) -> Iterator[Any]:
        import psycopg

        with psycopg.connect(self.url) as connection, connection.cursor() as cursor:
            yield cursor

    def type_of(self, spark_type: str) -> str:
        return self._TYPES.get(spark_type, "TEXT")

    def value(self, value: object) -> object:
        if isinstance(value, list | dict):
            value = json.dumps(value, default=str, ensure_ascii=False).replace("\\u0000", "\ufffd")
        if isinstance(value, str):
            return value.replace("\0", "\ufffd")  # the one character that its text cannot hold
        return value


def database_of(url: str) -> Database:
    """The database that a URL names; ConfigError when it names none we know."""
    if url.startswith("sqlite:///"):
        path = url.removeprefix("sqlite:///")
        if not path:
            raise ConfigError("sqlite:/// wants a file: sqlite:///counts.db, or sqlite:////absolute/counts.db")
        return Sqlite(path)
    if url.startswith(("postgresql://", "postgres://")):
        return Postgres(url)
    scheme = url.partition("://")[0]
    raise ConfigError(f"no database for '{scheme}': use sqlite:///FILE or postgresql://user:password@host/database")
