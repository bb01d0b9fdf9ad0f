"""Batches into a Delta table through the `deltalake` package, exactly once, without a JAR.

The executors write Parquet files next to each other, each knowing only its own rows, and the driver commits all of them
in one transaction of the table's log. The same commit carries an application transaction (application = id of the
query, version = number of the batch): a batch whose number the table already knows is skipped, so a driver that died
after the commit and repeats the batch changes nothing, and one that died before it leaves only files that no commit
names, which the table's vacuum removes.

The other way, `toArrow()` and `write_deltalake` on the driver, is shorter, but every byte of a batch would pass through
the driver's memory; here it sees file names. On a cluster the path has to be one that every machine reaches: a shared
file system, or a URI that both `deltalake` and `pyarrow.fs` understand.

Invariants: a partition value stands in the log, never only in a path; a file is named by a commit once or never.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from pyspark.sql import DataFrame
from pyspark.sql.types import StructField, StructType

from millrace.clock import SystemClock
from millrace.errors import ConfigError
from millrace.spark.sinks.batch import BatchWriter, query_id_of

if TYPE_CHECKING:
    from deltalake import DeltaTable

_OPEN_FILES: Final = 64  # per task: a batch spread over more partition values than this closes files and opens new ones
_SAFE_NAME: Final = re.compile(r"[A-Za-z0-9._-]{1,100}")
_PARTITION_TYPES: Final = frozenset({"string", "byte", "short", "integer", "long", "boolean", "date"})
_ACTION_SCHEMA: Final = "path string, size long, partition_values string, stats string"
_ACTION_ARROW: Final = pa.schema(
    [("path", pa.string()), ("size", pa.int64()), ("partition_values", pa.string()), ("stats", pa.string())]
)


def delta(
    path: str,
    *,
    partition_by: Sequence[str] = (),
    merge_schema: bool = False,
    storage_options: Mapping[str, str] | None = None,
    query_id: str | None = None,
) -> BatchWriter:
    """A batch writer that appends to the Delta table at `path` and creates it if need be.

    `merge_schema` lets a batch bring columns that the table lacks. `storage_options` are those of `deltalake`, for the
    log; the executors write through `pyarrow.fs`, with the credentials it finds by itself. `query_id` is needed only
    outside a streaming query.
    """
    target = Target(path, tuple(partition_by), merge_schema, dict(storage_options or {}))

    def write(batch: DataFrame, batch_id: int) -> None:
        append(batch, batch_id, target, query_id or query_id_of(batch))

    return write


@dataclass(frozen=True, slots=True)
class Target:
    """The table that a sink writes to."""

    path: str
    partition_by: tuple[str, ...]
    merge_schema: bool
    storage_options: dict[str, str]


def append(batch: DataFrame, batch_id: int, target: Target, query_id: str) -> None:
    """Write one batch, unless the table has it already."""
    from deltalake.transaction import AddAction, CommitProperties, Transaction  # driver only

    schema = _nullable(batch.schema)
    _check_partitioning(schema, target)
    table = _open(schema, target)
    done = table.transaction_version(query_id)
    if done is not None and done >= batch_id:
        return
    schema = _agreed(table, schema, target)
    tasks = batch.sparkSession.sparkContext.defaultParallelism
    written = (
        batch.coalesce(tasks)  # a file per task and partition value: a topic of 200 partitions must not make 200 files
        .mapInArrow(_file_writer(target, _arrow_schema(schema)), _ACTION_SCHEMA)
        .collect()
    )
    if not written:
        return
    now_ms = SystemClock().wall_ms()
    table.create_write_transaction(
        [
            AddAction(one.path, one.size, json.loads(one.partition_values), now_ms, data_change=True, stats=one.stats)
            for one in written
        ],
        mode="append",
        schema=_delta_schema(schema),
        partition_by=list(target.partition_by),
        commit_properties=CommitProperties(app_transactions=[Transaction(query_id, batch_id, now_ms)]),
    )


# On the driver: the table and its schema. Delta's schema in JSON is Spark's.


def _nullable(schema: StructType) -> StructType:
    return StructType([StructField(field.name, field.dataType, nullable=True) for field in schema.fields])


def _delta_schema(schema: StructType) -> Any:
    from deltalake import Schema

    return Schema.from_json(schema.json())


def _arrow_schema(schema: StructType) -> pa.Schema:
    return pa.schema(_delta_schema(schema).to_arrow())


def _check_partitioning(schema: StructType, target: Target) -> None:
    types = {field.name: field.dataType.typeName() for field in schema.fields}
    for name in target.partition_by:
        if name not in types:
            raise ConfigError(f"partition_by: the stream has no column '{name}'; it has {', '.join(types)}")
        if types[name] not in _PARTITION_TYPES:
            raise ConfigError(f"partition_by: column '{name}' is a {types[name]}; use a text, integer or date")


def _open(schema: StructType, target: Target) -> DeltaTable:
    from deltalake import DeltaTable

    options = target.storage_options or None
    if not DeltaTable.is_deltatable(target.path, options):
        DeltaTable.create(
            target.path,
            _delta_schema(schema),
            mode="ignore",
            partition_by=list(target.partition_by),
            storage_options=options,
        )
    table = DeltaTable(target.path, storage_options=options)
    partitioned_by = tuple(table.metadata().partition_columns)
    if partitioned_by != target.partition_by:
        raise ConfigError(
            f"table {target.path} is partitioned by {list(partitioned_by)}, not by {list(target.partition_by)}"
        )
    return table


def _agreed(table: DeltaTable, schema: StructType, target: Target) -> StructType:
    """The schema that files are written with: the table's, after it got the columns it lacked."""
    ours = {field.name: field for field in schema.fields}
    theirs = {field.name: field for field in StructType.fromJson(json.loads(table.schema().to_json())).fields}
    for name in ours.keys() & theirs.keys():
        if ours[name].dataType != theirs[name].dataType:
            raise ConfigError(
                f"table {target.path}: column '{name}' is {theirs[name].dataType.simpleString()} there and "
                f"{ours[name].dataType.simpleString()} in the stream"
            )
    added = [field for name, field in ours.items() if name not in theirs]
    if added and not target.merge_schema:
        names = ", ".join(field.name for field in added)
        raise ConfigError(f"table {target.path} has no column {names}; pass merge_schema=True to add it")
    if added:
        table.alter.add_columns(list(_delta_schema(StructType(added)).fields))
    return StructType([*theirs.values(), *added])


# On an executor: rows to files.


def _file_writer(target: Target, schema: pa.Schema) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    path, partition_by = target.path, target.partition_by

    def write(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        files = _Files(path, partition_by, schema)
        for batch in batches:
            files.add(batch)
        files.close()
        if files.closed:
            yield pa.RecordBatch.from_pylist(files.closed, schema=_ACTION_ARROW)

    return write


class _Files:
    """The open files of one task, one per partition value, and the descriptions of those it has closed."""

    def __init__(self, path: str, partition_by: tuple[str, ...], schema: pa.Schema) -> None:
        self._filesystem, self._root = _resolve(path)
        self._partition_by = partition_by
        self._schema = schema
        self._file_schema = pa.schema([field for field in schema if field.name not in partition_by])
        self._open: dict[tuple[str | None, ...], _File] = {}
        self.closed: list[dict[str, Any]] = []

    def add(self, batch: pa.RecordBatch) -> None:
        table = _conform(pa.Table.from_batches([batch]), self._schema)
        for values, rows in _by_value(table, self._partition_by):
            self._file(values).add(rows.select(self._file_schema.names))

    def close(self) -> None:
        for file in self._open.values():
            self.closed.append(file.close())
        self._open.clear()

    def _file(self, values: tuple[str | None, ...]) -> _File:
        if values not in self._open and len(self._open) >= _OPEN_FILES:
            self.close()
        if values not in self._open:
            named = dict(zip(self._partition_by, values, strict=True))
            self._open[values] = _File(self._filesystem, self._root, named, self._file_schema)
        return self._open[values]


class _File:
    """One Parquet file being written."""

    def __init__(
        self, filesystem: pa.fs.FileSystem, root: str, values: dict[str, str | None], schema: pa.Schema
    ) -> None:
        self._filesystem = filesystem
        self._values = values
        self._path = "/".join([*_folders(values), f"part-{uuid.uuid4()}.snappy.parquet"])
        self._place = f"{root}/{self._path}"
        self._rows = 0
        self._nulls = dict.fromkeys(schema.names, 0)
        self._ranges: dict[str, tuple[Any, Any]] = {}
        self._ranged = [field.name for field in schema if _has_range(field.type)]
        filesystem.create_dir(self._place.rpartition("/")[0], recursive=True)
        self._writer = pq.ParquetWriter(self._place, schema, filesystem=filesystem, compression="snappy")

    def add(self, rows: pa.Table) -> None:
        self._writer.write_table(rows)
        self._rows += rows.num_rows
        for name in self._nulls:
            self._nulls[name] += rows[name].null_count
        for name in self._ranged:
            found = pc.min_max(rows[name])
            low, high = found["min"].as_py(), found["max"].as_py()
            if low is not None:
                before = self._ranges.get(name, (low, high))
                self._ranges[name] = (min(low, before[0]), max(high, before[1]))

    def close(self) -> dict[str, Any]:
        self._writer.close()
        return {
            "path": self._path,
            "size": self._filesystem.get_file_info(self._place).size,
            "partition_values": json.dumps(self._values),
            "stats": json.dumps(self._stats()),
        }

    def _stats(self) -> dict[str, Any]:
        """What lets a reader skip the file."""
        return {
            "numRecords": self._rows,
            "minValues": {name: _bound(low) for name, (low, _) in self._ranges.items()},
            "maxValues": {name: _bound(high, up=True) for name, (_, high) in self._ranges.items()},
            "nullCount": self._nulls,
        }


def _has_range(kind: pa.DataType) -> bool:
    """Types whose bounds are exact in the log; text would have to be cut, and NaN has no place in an order."""
    return bool(pa.types.is_integer(kind) or pa.types.is_date32(kind) or pa.types.is_timestamp(kind))


def _bound(value: Any, *, up: bool = False) -> Any:
    """A bound as the log spells it. Times have milliseconds there, so an upper bound is rounded up."""
    if isinstance(value, datetime):
        if up:
            value += timedelta(microseconds=-value.microsecond % 1000)
        return value.isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return value.isoformat() if isinstance(value, date) else value


def _resolve(path: str) -> tuple[pa.fs.FileSystem, str]:
    if "://" in path:
        filesystem, root = pa.fs.FileSystem.from_uri(path)
        return filesystem, root.rstrip("/")
    return pa.fs.LocalFileSystem(), path.rstrip("/")


def _folders(values: dict[str, str | None]) -> list[str]:
    """Folders for the eye, as Hive names them; values that would need escaping get none, as the log has them anyway."""
    folders = [f"{name}={value}" for name, value in values.items() if value is not None]
    safe = all(_SAFE_NAME.fullmatch(part) for folder in folders for part in folder.split("=", 1))
    return folders if safe and len(folders) == len(values) else []


def _conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table's columns in the order and the types of `schema`; those it lacks are null."""
    columns = [
        table[field.name].cast(field.type) if field.name in table.column_names else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def _by_value(table: pa.Table, names: tuple[str, ...]) -> Iterator[tuple[tuple[str | None, ...], pa.Table]]:
    """The rows of each combination of partition values, with the values as Delta's log spells them."""
    if not names:
        if table.num_rows:
            yield (), table
        return
    for combination in table.select(names).group_by(list(names)).aggregate([]).to_pylist():
        mask: Any = None
        for name in names:
            value = combination[name]
            same = pc.is_null(table[name]) if value is None else pc.equal(table[name], pa.scalar(value))
            same = pc.fill_null(same, fill_value=False)
            mask = same if mask is None else pc.and_(mask, same)
        yield tuple(_spelled(combination[name]) for name in names), table.filter(mask)


def _spelled(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
