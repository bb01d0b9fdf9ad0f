"""The three pipelines that come with millrace, on a real broker: exact results, late data, dead letters."""

from __future__ import annotations

import datetime as dt
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka.admin import AdminClient
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from millrace.spark.pipelines.contract import find, read
from support.topic_contents import Found, contents
from support.topics import QUIET, Sent, Topics

# The first query of a process starts Python workers and loads compiled code: slow on a busy machine.
pytestmark = pytest.mark.timeout(300)

TOPIC_OPTIONS = ("topic", "output", "dead_letters", "errors", "other")


class Prepared:
    """A pipeline whose topics have names of their own and exist. Each `run` works through what is there."""

    def __init__(self, spark: SparkSession, topics: Topics, home: Path, name: str, **given: str) -> None:
        self._spark = spark
        self._topics = topics
        prefix = topics.create(name)
        pipeline = find(name)
        tables = ("table",) if name == "streams" else ()
        named = {
            one.name: f"{prefix}-{one.default}" for one in pipeline.options if one.name in (*TOPIC_OPTIONS, *tables)
        }
        self.options = pipeline.resolve({**named, **given, "kafka.bootstrap.servers": topics.bootstrap})
        self.options |= {"once": "true", "checkpoint": str(home / "checkpoints")}
        self._loaded = pipeline.load()
        for topic in self._loaded.topics(self.options):
            topics.create(topic, 2, exact=True)

    def send(self, option: str, *values: object, key: str | None = None, headers: dict[str, str] | None = None) -> None:
        """Records for the topic that an option names: bytes and None as they are, everything else as JSON."""
        pairs = tuple((name, value.encode()) for name, value in (headers or {}).items())
        self._topics.send(
            self.options[option],
            [
                Sent(
                    value if isinstance(value, bytes | None) else json.dumps(value).encode(),
                    key=None if key is None else key.encode(),
                    headers=pairs,
                )
                for value in values
            ],
            message_max_bytes=2_000_000,  # whether a record is too large is for the broker to say
        )

    def run(self) -> list[dict[str, Any]]:
        """The reports of all batches of all queries."""
        reports = []
        for query in self._loaded.start(self._spark, self.options):
            query.awaitTermination()
            reports += [json.loads(one.json) for one in query.recentProgress]
        return reports

    def received(self, option: str, suffix: str = "") -> list[Found]:
        return contents(self._topics.bootstrap, self.options[option] + suffix)

    def json_received(self, option: str, suffix: str = "") -> list[Any]:
        return [json.loads(one.value or "null") for one in self.received(option, suffix)]

    def dead_letters(self) -> dict[str | None, dict[str, str]]:
        """Headers by value."""
        return {one.value: one.headers for one in self.received("dead_letters")}


@pytest.fixture
def prepare(spark: SparkSession, topics: Topics, tmp_path: Path) -> Any:
    def make(name: str, **given: str) -> Prepared:
        return Prepared(spark, topics, tmp_path, name, **given)

    return make


def at(minute: int, second: int = 0) -> str:
    return f"2024-11-15T10:{minute:02}:{second:02}Z"


# metrics


def test_metrics_aggregates_per_window_and_key(prepare: Any, tmp_path: Path) -> None:
    database = tmp_path / "metrics.db"
    metrics = prepare("metrics", table=f"sqlite:///{database}", by="name,tags.host")
    metrics.send("topic", *({"name": "load", "value": n, "ts": at(0, n % 60)} for n in range(1, 101)))
    metrics.send("topic", {"name": "load", "value": 7, "ts": at(0), "tags": {"host": "web-1"}})
    milliseconds = int(dt.datetime(2024, 11, 15, 10, 1, 30, tzinfo=dt.UTC).timestamp() * 1000)
    metrics.send("topic", {"name": "hits", "ts": milliseconds}, {"name": "hits", "ts": milliseconds // 1000})
    metrics.send("topic", {"name": "hits", "ts": at(20)})
    metrics.send("topic", b"not json", None, {"value": 1}, {"name": "x", "value": "many"}, {"name": "x", "ts": "noon"})
    metrics.run()

    def stored() -> list[tuple[Any, ...]]:
        with closing(sqlite3.connect(database)) as connection:
            return connection.execute(
                "SELECT substr(window_start, 12, 5), name, host, count, sum, min, max, avg, p95 FROM metrics "
                "ORDER BY 1, 2, 3"
            ).fetchall()

    assert stored() == [
        ("10:00", "load", "", 100, 5050.0, 1.0, 100.0, 50.5, 95.0),
        ("10:00", "load", "web-1", 1, 7.0, 7.0, 7.0, 7.0, 7.0),
        ("10:01", "hits", "", 2, 2.0, 1.0, 1.0, 1.0, 1.0),
        ("10:20", "hits", "", 1, 1.0, 1.0, 1.0, 1.0, 1.0),
    ]
    sent = {one.key: json.loads(one.value or "") for one in metrics.received("output")}
    assert len(sent) == 4
    key = json.dumps({"window_start": "2024-11-15T10:01:00.000Z", "name": "hits", "host": ""}, separators=(",", ":"))
    assert sent[key]["count"] == 2 and sent[key]["window_end"] == "2024-11-15T10:02:00.000Z"
    reasons = {value: headers["millrace.error"] for value, headers in metrics.dead_letters().items()}
    assert reasons == {
        "not json": "not a JSON event",
        None: "no value",
        '{"value": 1}': "no field 'name'",
        '{"name": "x", "value": "many"}': "not a JSON event",
        '{"name": "x", "ts": "noon"}': "field 'ts' is not a time",
    }
    # What comes later changes its window, under the same key; what comes too late is dropped and counted.
    metrics.send("topic", {"name": "late", "ts": at(1)}, {"name": "hits", "value": 4, "ts": at(20)})
    reports = metrics.run()
    assert sum(one["numRowsDroppedByWatermark"] for report in reports for one in report["stateOperators"]) == 1
    assert ("10:20", "hits", "", 2, 5.0, 1.0, 4.0, 2.5, 4.0) in stored()
    assert not [row for row in stored() if row[1] == "late"]


NO_TIMES = [1e300, -1e15, "12000-01-01T00:00:00Z", "+10000-01-01T00:00:00Z", "9999-12-31T23:59:59Z"]


def nasty(**good: object) -> list[object]:
    """Records of one batch, none of which is any good."""
    return [
        *({**good, "ts": ts} for ts in (*NO_TIMES, "2099-01-01T00:00:00Z", -1, "0001-01-01T00:00:00Z")),
        *(b"\xff\xfe", b"", b"{", b"[" * 2000 + b"]" * 2000, b"x" * 1_040_000, b'{"a": ' + b"9" * 5000 + b"}"),
        json.dumps({**good, "pad": "p" * 1_030_000}).encode()[:-1],
    ]


def test_metrics_outlives_a_batch_of_nonsense_and_an_event_from_the_future(prepare: Any, tmp_path: Path) -> None:
    database = tmp_path / "metrics.db"
    metrics = prepare("metrics", table=f"sqlite:///{database}")
    bad = [
        *nasty(name="load"),
        {"name": "n" * 200_000},
        {"name": "load", "value": 1e999},
        b'{"name": "x", "value": NaN}',
    ]
    metrics.send("topic", {"name": "load", "value": 1, "ts": at(0)}, *bad, {"name": "lo\0ad", "value": 2, "ts": at(0)})
    metrics.run()
    # The watermark did not move to where the nonsense was: this event is in time.
    metrics.send("topic", {"name": "load", "value": 5, "ts": at(0)})
    metrics.run()
    with closing(sqlite3.connect(database)) as connection:
        stored = connection.execute("SELECT name, count, sum FROM metrics ORDER BY name").fetchall()
    assert stored == [("lo\0ad", 1, 2.0), ("load", 2, 6.0)]
    letters = metrics.received("dead_letters")
    assert len(letters) == len(bad)
    reasons = [one.headers["millrace.error"] for one in letters]
    assert reasons.count("its time is more than 10 minutes in the future") == 5
    assert reasons.count("its time is before 1970") == 3
    assert reasons.count("field 'value' is not a number") == 2
    assert "its key (name) is longer than 100000 bytes" in reasons
    cut = [one for one in letters if "millrace.cut" in one.headers]
    assert sorted(len(one.value or "") for one in cut) == [1_000_000, 1_000_000]
    assert cut[0].headers["millrace.cut"].startswith("key 0, value 10")


def test_metrics_can_write_each_window_once_into_a_delta_table(prepare: Any, tmp_path: Path) -> None:
    path = tmp_path / "table"
    metrics = prepare("metrics", table=str(path), emit="final", output="", dead_letters="")
    metrics.send("topic", *({"name": "load", "value": n, "ts": at(n)} for n in range(6)))
    metrics.run()
    found = DeltaTable(str(path)).to_pyarrow_table().to_pylist()
    assert sorted(one["sum"] for one in found) == [0.0, 1.0, 2.0]  # the watermark stands at 10:03
    metrics.run()
    assert DeltaTable(str(path)).to_pyarrow_table().num_rows == 3


def test_metrics_says_which_options_do_not_go_together(prepare: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="emit is update or final, not 'sometimes'"):
        prepare("metrics", emit="sometimes").run()
    with pytest.raises(ValueError, match="a Delta table keeps every row"):
        prepare("metrics", table=str(tmp_path / "t")).run()


# logs

COMMON = '10.0.0.1 - ann [15/Nov/2024:10:00:00 +0000] "GET /shop HTTP/1.1" 200 512 "-" "curl/8"'
FAILED = '10.0.0.2 - - [15/Nov/2024:23:59:59 -0100] "POST /pay HTTP/1.1" 503 0'
SYSLOG = "<11>Nov 15 10:00:01 db-1 postgres[88]: deadlock detected"
ISO_SYSLOG = "2024-11-15T10:00:02.5Z app-1 worker: WARNING disk is 91% full"
JSON_LINE = '{"ts": 1731664803, "severity": "CRITICAL", "msg": "out of memory", "host": "app-2", "pid": 7}'


def test_logs_parses_splits_errors_and_keeps_all_by_day(prepare: Any, tmp_path: Path) -> None:
    logs = prepare("logs", warehouse=str(tmp_path / "logs"))
    web = {"host": "web-1", "file": "/var/log/access.log"}
    logs.send("topic", COMMON.encode(), FAILED.encode(), headers=web)
    logs.send("topic", SYSLOG.encode(), ISO_SYSLOG.encode(), JSON_LINE.encode())
    logs.send("topic", b"hello", b"{broken")
    logs.run()
    logs.run()
    table = DeltaTable(str(tmp_path / "logs"))
    assert table.metadata().partition_columns == ["day"]
    found = {one["message"]: one for one in table.to_pyarrow_table().to_pylist()}
    assert len(found) == table.to_pyarrow_table().num_rows == 5
    shop = found["GET /shop HTTP/1.1"]
    assert (shop["level"], shop["host"], shop["file"]) == ("info", "web-1", "/var/log/access.log")
    assert dict(shop["fields"]) == {
        "client": "10.0.0.1",
        "user": "ann",
        "status": "200",
        "size": "512",
        "agent": "curl/8",
    }
    assert found["POST /pay HTTP/1.1"]["day"] == dt.date(2024, 11, 16)  # in UTC
    deadlock = found["deadlock detected"]
    # Such a line has no year of its own: it was written in the last one in which that day is not in the future.
    tomorrow = dt.datetime.now(dt.UTC) + dt.timedelta(days=1)
    this_year = dt.datetime(tomorrow.year, 11, 15, 10, 0, 1, tzinfo=dt.UTC)
    assert deadlock["at"] == (this_year if this_year <= tomorrow else this_year.replace(year=tomorrow.year - 1))
    assert (deadlock["level"], deadlock["host"]) == ("error", "db-1")
    assert dict(deadlock["fields"]) == {"program": "postgres", "pid": "88"}
    assert found["WARNING disk is 91% full"]["level"] == "warn"
    assert found["out of memory"]["at"] == dt.datetime.fromtimestamp(1731664803, dt.UTC)
    assert dict(found["out of memory"]["fields"]) == {"pid": "7"}
    errors = {one["message"]: one["level"] for one in logs.json_received("errors")}
    assert errors == {"POST /pay HTTP/1.1": "error", "deadlock detected": "error", "out of memory": "fatal"}
    assert {value: headers["millrace.error"] for value, headers in logs.dead_letters().items()} == dict.fromkeys(
        ("hello", "{broken"), "no format fits the line (pattern auto)"
    )


@pytest.mark.parametrize("form", ["delta", "parquet"])
def test_logs_outlives_a_batch_of_nonsense(prepare: Any, tmp_path: Path, form: str) -> None:
    logs = prepare("logs", warehouse=str(tmp_path / "logs"), format=form)
    bad = nasty(msg="m", level="error")
    bad.remove(b"")  # an empty line is none
    long = {"ts": at(0), "level": "error", "msg": "\x01" * 170_000}  # as JSON six times as long as it is
    good = [{"ts": at(0), "msg": "first"}, long, {"ts": "soon", "msg": "no time"}, {"ts": at(1), "msg": "last"}]
    logs.send("topic", *good[:2], *bad, *good[2:])
    logs.send("topic", b'{"msg": "caf\xe9"}', headers={"host": "h"})
    logs.run()
    if form == "delta":
        rows = DeltaTable(str(tmp_path / "logs")).to_pyarrow_table().to_pylist()
    else:
        rows = pq.read_table(tmp_path / "logs").to_pylist()
    assert {one["message"] for one in rows} == {"first", "\x01" * 170_000, "no time", "last", "caf\ufffd"}
    assert [len(one["message"]) for one in logs.json_received("errors")] == [10_000]
    assert len(logs.received("dead_letters")) == len(bad)


def test_logs_takes_a_pattern_and_writes_parquet(prepare: Any, tmp_path: Path) -> None:
    pattern = r"^(?<at>\d{4}-\S+ \S+) (?<level>\w+) \[(?<thread>[^\]]+)\] (?<message>.*)"
    logs = prepare("logs", warehouse=str(tmp_path / "logs"), format="parquet", pattern=pattern)
    logs.send("topic", b"2024-11-15 10:00:00 ERROR [main] it broke", COMMON.encode())
    logs.run()
    (row,) = pq.read_table(tmp_path / "logs" / "day=2024-11-15").to_pylist()
    assert (row["level"], row["message"], dict(row["fields"])) == ("error", "it broke", {"thread": "main"})
    assert [one["message"] for one in logs.json_received("errors")] == ["it broke"]
    assert list(logs.dead_letters()) == [COMMON]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"format": "orc"}, "option format is delta or parquet, not 'orc'"),
        ({"pattern": "(unclosed"}, "option pattern is not a regular expression"),
        ({"pattern": "comon"}, "auto, json, common, syslog, or has named groups"),
    ],
)
def test_logs_says_what_is_wrong_with_an_option(prepare: Any, options: dict[str, str], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        prepare("logs", **options).run()


# streams


def test_streams_joins_without_duplicates_and_routes(prepare: Any) -> None:
    streams = prepare("streams", routes="book, toy", within="5 minutes")
    streams.send("table", {"name": "Old Ann"}, {"name": "Ann"}, key="u1")
    streams.send("table", {"name": "Bob"}, None, key="u2")  # deleted again
    order = {"id": "o1", "user": "u1", "kind": "book", "ts": at(0)}
    streams.send("topic", order, order)
    streams.send("topic", {"id": "o2", "user": "u2", "kind": "toy", "ts": at(1)})
    streams.send("topic", {"id": "o3", "user": "u9", "kind": "../etc", "ts": at(1)})
    streams.send("topic", b"oops", {"user": "u1"})
    streams.send("other", {"order": "o1", "paid": 5, "ts": at(4)}, {"order": "o3", "paid": 9, "ts": at(20)})
    streams.send("other", b"[broken")
    streams.run()
    assert streams.json_received("output", "-book") == [
        {"event": order, "table": {"name": "Ann"}, "other": {"order": "o1", "paid": 5, "ts": at(4)}}
    ]
    reasons = {value: headers["millrace.error"] for value, headers in streams.dead_letters().items()}
    assert reasons == {"oops": "not JSON", '{"user": "u1"}': "no field 'id'", "[broken": "not JSON"}
    origin = streams.dead_letters()["[broken"]
    assert origin["millrace.topic"] == streams.options["other"]
    # Time goes on: an order seen before is dropped, those without a payment close to them are written alone, and the
    # table is read anew.
    later = {"id": "o4", "user": "u1", "kind": "book", "ts": at(40)}
    streams.send("topic", order, later)
    streams.send("other", {"order": "o4", "ts": at(40)})
    streams.send("table", {"name": "Ann II"}, key="u1")
    streams.run()
    assert sorted((one["event"]["id"], one["table"]) for one in streams.json_received("output", "-book")) == [
        ("o1", {"name": "Ann"}),
        ("o4", {"name": "Ann II"}),
    ]
    alone = streams.json_received("output", "-toy")
    alone += streams.json_received("output", "-other")
    assert [(one["event"]["id"], one["table"], one["other"]) for one in alone] == [
        ("o2", None, None),
        ("o3", None, None),
    ]


def test_streams_outlives_nonsense_and_writes_nothing_but_json(prepare: Any) -> None:
    streams = prepare("streams", other="", route="")
    for user, value in (("u1", b"plain text"), ("u2", b'{"a": 1} trailing'), ("u3", b"\xff\0"), ("u4", b'{"n": 1.10}')):
        streams.send("table", value, key=user)
    streams.send("table", {"much": "t" * 600_000}, key="u5")
    events = [{"id": f"o{number}", "user": f"u{number}", "ts": at(0)} for number in range(1, 5)]
    large = {"id": "o5", "user": "u5", "ts": at(0), "pad": "p" * 600_000}
    bad = [*nasty(id="bad"), b'{"id": "a"} x', b'{"id": "a"},{"id": "b"}', b'{"id": "a"}] [', b'{"id": "a", "b": NaN}']
    streams.send("topic", *events, large, *bad)
    streams.run()
    tables = {one["event"]["id"]: one["table"] for one in streams.json_received("output")}
    assert tables == {"o1": "plain text", "o2": '{"a": 1} trailing', "o3": "\ufffd\0", "o4": {"n": 1.10}}
    letters = streams.received("dead_letters")
    assert len(letters) == len(bad) + 1
    (too_large,) = [one for one in letters if one.headers["millrace.error"].startswith("its result is larger")]
    assert json.loads(too_large.value or "") == large


def test_streams_can_leave_out_both_joins_and_the_routing(prepare: Any) -> None:
    streams = prepare("streams", table="", other="", route="")
    streams.send("topic", {"id": "o1", "ts": at(0)}, {"id": "o1", "ts": at(0)})
    streams.run()
    assert streams.json_received("output") == [{"event": {"id": "o1", "ts": at(0)}, "table": None, "other": None}]


def test_the_pipeline_of_the_documentation_runs(spark: SparkSession, topics: Topics, tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "pipelines.md"
    code = page.read_text().split("```python\n")[1].split("```")[0]
    (tmp_path / "counts.py").write_text(code)
    topic = topics.create("counted")
    topics.send(topic, [Sent(b"x", key=b"a"), Sent(b"y", key=b"a"), Sent(b"z", key=b"b")])
    pipeline = read(tmp_path / "counts.py")
    options = pipeline.resolve({"topic": topic, "database": f"sqlite:///{tmp_path / 'counts.db'}"})
    options |= {"kafka.bootstrap.servers": topics.bootstrap, "checkpoint": str(tmp_path / "c"), "once": "true"}
    for query in pipeline.load().start(spark, options):
        query.awaitTermination()
    with closing(sqlite3.connect(tmp_path / "counts.db")) as connection:
        assert connection.execute("SELECT key, count FROM counts ORDER BY key").fetchall() == [(b"a", 2), (b"b", 1)]


def test_every_pipeline_names_topics_that_can_exist(topics: Topics, prepare: Any) -> None:
    streams = prepare("streams", routes="book")
    existing = AdminClient({"bootstrap.servers": topics.bootstrap, **QUIET}).list_topics(timeout=10).topics
    assert {streams.options["output"] + "-book", streams.options["output"] + "-other"} <= set(existing)
