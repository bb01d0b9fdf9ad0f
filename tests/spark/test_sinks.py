"""Sinks write each batch once, however often it is repeated, and say clearly what they cannot write."""

from __future__ import annotations

import datetime as dt
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from millrace.errors import ConfigError
from millrace.installing import install_hint
from millrace.spark import sinks
from millrace.spark.sinks.sql import BOOKKEEPING, Postgres, database_of
from support import postgres

DRIVER = Path(__file__).parent / "killed_driver.py"


def rows(spark: SparkSession, values: list[tuple[object, ...]], schema: str) -> DataFrame:
    return spark.createDataFrame(values, schema)


def table_rows(path: Path) -> list[dict[str, object]]:
    return sorted(DeltaTable(str(path)).to_pyarrow_table().to_pylist(), key=str)


# Delta


def test_delta_appends_partitions_and_skips_a_repeated_batch(spark: SparkSession, tmp_path: Path) -> None:
    path = tmp_path / "table"
    write = sinks.delta(str(path), partition_by=["day", "host"], query_id="q")
    day = dt.date(2026, 11, 15)
    at = dt.datetime(2026, 11, 15, 12, 30, tzinfo=dt.UTC)
    schema = "n int, text string, at timestamp, tags map<string,string>, day date, host string"
    first = rows(spark, [(1, "a", at, {"k": "v"}, day, "h 1/x"), (2, None, at, None, None, "h2")], schema)
    second = rows(spark, [(3, "c", at, {}, day, "h2")], schema)
    write(first, 0)
    write(first, 0)
    write(second, 1)
    write(first, 1)
    write(second, 0)
    table = DeltaTable(str(path))
    assert table.metadata().partition_columns == ["day", "host"]
    assert table.transaction_version("q") == 1
    found = {one["n"]: one for one in table.to_pyarrow_table().to_pylist()}
    assert sorted(found) == [1, 2, 3]
    assert found[1]["host"] == "h 1/x" and found[1]["day"] == day and found[1]["at"] == at
    assert found[1]["tags"] == [("k", "v")]
    assert found[2]["day"] is None and found[2]["text"] is None and found[2]["tags"] is None
    in_partition = table.to_pyarrow_table(filters=[("host", "=", "h2")])
    assert sorted(in_partition["n"].to_pylist()) == [2, 3]
    assert (
        sum(action["num_records"] for action in table.get_add_actions(flatten=True).to_struct_array().to_pylist()) == 3
    )


def test_delta_counts_batches_of_different_queries_apart(spark: SparkSession, tmp_path: Path) -> None:
    batch = rows(spark, [(1,)], "n int")
    sinks.delta(str(tmp_path / "t"), query_id="one")(batch, 5)
    sinks.delta(str(tmp_path / "t"), query_id="two")(batch, 0)
    assert len(table_rows(tmp_path / "t")) == 2


def test_delta_leaves_the_table_alone_when_a_batch_is_empty(spark: SparkSession, tmp_path: Path) -> None:
    write = sinks.delta(str(tmp_path / "t"), query_id="q")
    write(rows(spark, [(1,)], "n int"), 0)
    write(rows(spark, [], "n int"), 1)
    assert DeltaTable(str(tmp_path / "t")).version() == 1
    assert table_rows(tmp_path / "t") == [{"n": 1}]


def test_delta_adds_columns_only_when_asked(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    sinks.delta(path, query_id="q")(rows(spark, [(1,)], "n int"), 0)
    wider = rows(spark, [(2, "x")], "n int, text string")
    with pytest.raises(ConfigError, match="has no column text; pass merge_schema=True"):
        sinks.delta(path, query_id="q")(wider, 1)
    sinks.delta(path, query_id="q", merge_schema=True)(wider, 1)
    sinks.delta(path, query_id="q")(rows(spark, [(3,)], "n int"), 2)
    assert table_rows(tmp_path / "t") == [{"n": 1, "text": None}, {"n": 2, "text": "x"}, {"n": 3, "text": None}]


def test_delta_refuses_another_type_or_partitioning(spark: SparkSession, tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    sinks.delta(path, query_id="q")(rows(spark, [(1,)], "n int"), 0)
    with pytest.raises(ConfigError, match="column 'n' is int there and string in the stream"):
        sinks.delta(path, query_id="q")(rows(spark, [("1",)], "n string"), 1)
    with pytest.raises(ConfigError, match=r"partitioned by \[\], not by \['n'\]"):
        sinks.delta(path, partition_by=["n"], query_id="q")(rows(spark, [(1,)], "n int"), 1)
    with pytest.raises(ConfigError, match="no column 'day'; it has n"):
        sinks.delta(path, partition_by=["day"], query_id="q")(rows(spark, [(1,)], "n int"), 1)
    with pytest.raises(ConfigError, match="column 'x' is a double"):
        sinks.delta(path, partition_by=["x"], query_id="q")(rows(spark, [(1.0,)], "x double"), 1)


def test_delta_closes_files_when_a_batch_has_many_partition_values(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 150  # more than a task keeps open
    batch = spark.range(count * 2).select((F.col("id") % count).cast("int").alias("bucket"), "id")
    sinks.delta(str(tmp_path / "t"), partition_by=["bucket"], query_id="q")(batch.repartition(1), 0)
    found = DeltaTable(str(tmp_path / "t")).to_pyarrow_table().to_pylist()
    assert sorted(one["id"] for one in found) == list(range(count * 2))
    assert all(one["bucket"] == one["id"] % count for one in found)


def test_delta_notes_what_lets_readers_skip_files(spark: SparkSession, tmp_path: Path) -> None:
    schema = "n long, day date, at timestamp, text string"
    early, late = (dt.datetime(2026, 11, 15, 10, 0, 0, micros, tzinfo=dt.UTC) for micros in (1_500, 2_500))
    values = [(5, dt.date(2026, 1, 1), late, "x"), (-7, None, early, None), (None, None, None, None)]
    write = sinks.delta(str(tmp_path / "t"), query_id="q")
    write(rows(spark, values, schema).repartition(1), 0)
    write(rows(spark, [(100, None, None, None)], schema), 1)
    table = DeltaTable(str(tmp_path / "t"))
    found = {one["max.n"]: one for one in table.get_add_actions(flatten=True).to_struct_array().to_pylist()}
    first = found[5]
    assert (first["min.n"], first["null_count.n"], first["null_count.text"]) == (-7, 1, 2)
    assert (first["min.day"], first["max.day"]) == (dt.date(2026, 1, 1), dt.date(2026, 1, 1))
    assert first["min.at"] <= early and first["max.at"] >= late
    wanted = table.to_pyarrow_table(filters=[("at", ">=", late)])
    assert wanted["n"].to_pylist() == [5]
    assert table.to_pyarrow_table(filters=[("n", ">", 50)])["n"].to_pylist() == [100]


# SQL


@pytest.fixture(scope="module")
def postgres_url() -> Iterator[str]:
    programs = postgres.find()
    if programs is None:
        pytest.skip("no PostgreSQL server programs on this machine (initdb, pg_ctl)")
    with postgres.server(programs) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'results.db'}"
    url: str = request.getfixturevalue("postgres_url")
    return url


def ask(url: str, statement: str) -> list[tuple[object, ...]]:
    with database_of(url).transaction() as cursor:
        return [tuple(row) for row in cursor.execute(statement).fetchall()]


def test_sql_upserts_by_key_and_skips_a_repeated_batch(spark: SparkSession, database_url: str) -> None:
    schema = "page string, hits long, share double, seen timestamp, tags array<string>, ok boolean"
    at = dt.datetime(2026, 11, 15, 12, 30, tzinfo=dt.UTC)
    write = sinks.sql(database_url, "pages", keys=["page"], query_id="q1")
    write(rows(spark, [("/", 1, 0.5, at, ["a"], True), ("/x", 1, None, None, None, None)], schema), 0)
    write(rows(spark, [("/", 5, 0.75, at, [], False)], schema), 1)
    write(rows(spark, [("/", 99, 0.0, at, [], False)], schema), 1)
    write(rows(spark, [("/", 98, 0.0, at, [], False)], schema), 0)
    assert ask(database_url, "SELECT page, hits, share FROM pages ORDER BY page") == [("/", 5, 0.75), ("/x", 1, None)]
    assert ask(database_url, f"SELECT query_id, target, batch_id FROM {BOOKKEEPING} WHERE query_id = 'q1'") == [
        ("q1", "pages", 1)
    ]
    (seen,) = ask(database_url, "SELECT seen FROM pages WHERE page = '/'")[0]
    assert (dt.datetime.fromisoformat(seen) if isinstance(seen, str) else seen) == at


def test_sql_adds_rows_without_keys(spark: SparkSession, database_url: str) -> None:
    write = sinks.sql(database_url, "events", query_id="q2")
    for batch_id in (0, 0, 1):
        write(rows(spark, [(1, "a"), (1, "a")], "n int, text string"), batch_id)
    assert ask(database_url, "SELECT count(*) FROM events") == [(4,)]


def test_sql_keeps_nothing_of_a_batch_that_fails(spark: SparkSession, database_url: str) -> None:
    write = sinks.sql(database_url, "strict", keys=["n"], query_id="q3")
    write(rows(spark, [(1, "a")], "n int, text string"), 0)
    with pytest.raises(Exception, match="missing"):
        write(rows(spark, [(2, "b", "c")], "n int, text string, missing string"), 1)
    assert ask(database_url, "SELECT n FROM strict") == [(1,)]
    write(rows(spark, [(2, "b")], "n int, text string"), 1)  # the number was not used up
    assert ask(database_url, "SELECT n FROM strict ORDER BY n") == [(1,), (2,)]


def test_sql_says_what_is_wrong_with_its_arguments(spark: SparkSession, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no database for 'mysql'"):
        sinks.sql("mysql://host/db", "t")
    with pytest.raises(ConfigError, match="wants a file"):
        sinks.sql("sqlite:///", "t")
    with pytest.raises(ConfigError, match="is not a table name"):
        sinks.sql("sqlite:///x.db", "t; DROP TABLE x")
    with pytest.raises(ConfigError, match="key 'id' is no column; there are n"):
        sinks.sql("sqlite:///x.db", "t", keys=["id"], query_id="q")(rows(spark, [(1,)], "n int"), 0)
    with pytest.raises(ConfigError, match="belongs to no streaming query"):
        sinks.sql("sqlite:///x.db", "t")(rows(spark, [(1,)], "n int"), 0)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigError, match=re.escape(install_hint("postgres"))):
        Postgres("postgresql://host/db")


# Together


def test_fan_out_hands_a_batch_to_each_sink_and_computes_it_once(spark: SparkSession, tmp_path: Path) -> None:
    computed = spark.sparkContext.accumulator(0)

    counted = F.udf(lambda number: (computed.add(1), number)[1], "long")  # type: ignore[func-returns-value]
    batch = spark.range(10).select(counted("id").alias("n"))
    sinks.fan_out(
        sinks.delta(str(tmp_path / "t"), query_id="q"),
        sinks.sql(f"sqlite:///{tmp_path / 'r.db'}", "t", keys=["n"], query_id="q"),
    )(batch, 0)
    assert len(table_rows(tmp_path / "t")) == 10
    assert ask(f"sqlite:///{tmp_path / 'r.db'}", "SELECT count(*) FROM t") == [(10,)]
    assert computed.value == 10
    with pytest.raises(ConfigError, match="at least one sink"):
        sinks.fan_out()


def test_dead_letters_carry_their_reason_and_their_origin(spark: SparkSession) -> None:
    schema = (
        "key binary, value binary, topic string, partition int, offset long, "
        "headers array<struct<key:string,value:binary>>, error string"
    )
    records = rows(
        spark,
        [
            (b"k", b"not json", "events", 3, 42, [("trace", b"1")], "not JSON"),
            (None, None, "events", 0, 7, None, "no value"),
            (b"k", b"{}", "events", 0, 8, None, None),
        ],
        schema,
    )
    first, second = sorted(sinks.dead_letters(records).collect(), key=lambda row: row.key is None)
    assert (bytes(first.key), bytes(first.value)) == (b"k", b"not json")
    assert {header.key: bytes(header.value).decode() for header in first.headers} == {
        "trace": "1",
        "millrace.error": "not JSON",
        "millrace.topic": "events",
        "millrace.partition": "3",
        "millrace.offset": "42",
    }
    assert second.key is None and second.value is None and len(second.headers) == 4


@pytest.mark.timeout(300)  # processes of its own, each with a JVM: slow on a busy machine
def test_a_driver_killed_around_its_commits_repeats_nothing(tmp_path: Path) -> None:
    """kill -9 of driver and JVM when two sinks have committed a batch and the third has files without a commit."""
    source = tmp_path / "source"
    source.mkdir()
    for number in range(4):
        lines = [json.dumps({"n": number * 100 + one, "bucket": one % 3}) for one in range(100)]
        (source / f"{number}.json").write_text("\n".join(lines))
    for kill_at, status in (("1", -signal.SIGKILL), ("never", 0)):
        done = subprocess.run(
            [sys.executable, str(DRIVER), str(tmp_path), kill_at],
            start_new_session=True,
            capture_output=True,
            text=True,
            timeout=140,
            check=False,
        )
        assert done.returncode == status, done.stderr[-3000:]
        if kill_at != "never":
            assert DeltaTable(str(tmp_path / "early")).to_pyarrow_table().num_rows == 200
            assert DeltaTable(str(tmp_path / "late")).to_pyarrow_table().num_rows == 100
            assert len(list((tmp_path / "late").rglob("*.parquet"))) > len(
                DeltaTable(str(tmp_path / "late")).file_uris()
            )
    wanted = list(range(400))
    for table in ("early", "late"):
        assert sorted(one["n"] for one in table_rows(tmp_path / table)) == wanted
    assert [n for (n,) in ask(f"sqlite:///{tmp_path / 'results.db'}", "SELECT n FROM copied ORDER BY n")] == wanted
    listed = _files_of_the_sink(tmp_path / "parquet")
    assert sorted(n for path in listed for n in pq.read_table(path)["n"].to_pylist()) == wanted


def _files_of_the_sink(folder: Path) -> list[str]:
    """The files that Spark's file sink has committed; others may lie there, of batches that were killed."""
    paths = []
    for log in (folder / "_spark_metadata").iterdir():
        if log.name.isdigit():
            paths += [json.loads(line)["path"] for line in log.read_text().splitlines()[1:]]
    return [path.removeprefix("file://") for path in paths]
