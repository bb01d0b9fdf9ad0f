"""Pipelines in the console: runs that keep a status, what can be started, stopping. No Spark here.

The runs are processes that keep their status as real ones do and have no queries of their own. What is started from
the console is the real command, which ends before it comes to Spark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.routing import Route

from millrace.clock import SystemClock
from millrace.console.app import create_app
from millrace.console.pages import pipelines
from millrace.console.roles import Role
from millrace.console.settings import ConsoleSettings, Login
from millrace.local.ports import free_ports
from millrace.security.hiding import HIDDEN
from millrace.spark.pipelines import control
from millrace.spark.pipelines.progress import QueryFigures
from millrace.spark.pipelines.status import Point, QueryStatus, RunKeeper, RunStatus, State, log_path, read_run
from millrace.testing import Cluster
from support.consoles import Visitor, visiting, words

RUN = """
import signal, sys, threading
from pathlib import Path
from millrace.spark.pipelines.progress import QueryFigures
from millrace.spark.pipelines import status
from millrace.spark.pipelines.status import RunKeeper
status.EVERY_S = 0.02  # a test does not want to wait
folder, run_id, patience = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *_: stop.set())
with RunKeeper.of_this_process(folder, pipeline="metrics", file=Path(sys.argv[4]), bootstrap="localhost:9092",
    options={"topic": "<script>alert(1)</script>", "table": "postgresql://me:pg-secret@db/x"}, checkpoint="/c",
    master="local[2]", run_id=run_id) as keeper:
    keeper.restarting("ValueError: <b>no luck</b>", 1.0, 1)
    for name, lag in (("metrics", 1234), ("metrics-dead-letters", None)):
        keeper.progress(QueryFigures(name, 7, 500, 25.5, 1000.0, 2500, lag, 2, 4, 1500, "", {"t": 500}))
    print("there", flush=True)
    stop.wait()
    keeper.stopping()
    threading.Event().wait(patience)
    keeper.done(stopped=True)
"""

Begin = Callable[..., subprocess.Popen[bytes]]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = SystemClock().monotonic() + 30
    while not condition():
        assert SystemClock().monotonic() < deadline
        threading.Event().wait(0.02)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def begin(runs: Path) -> Iterator[Begin]:
    """Starts a run as a process; it has said how it is when this returns."""
    processes = []

    def begin(
        run_id: str = "metrics-1", patience: float = 0, file: str = "/nowhere/metrics.py"
    ) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", RUN, str(runs), run_id, str(patience), file]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": ":".join(sys.path)}
        )
        processes.append(process)
        assert process.stdout is not None and process.stdout.readline() == b"there\n"
        wait_for(lambda: state(runs, run_id) is State.RUNNING)
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def state(runs: Path, run_id: str) -> State | None:
    found = read_run(runs, run_id)
    return None if found is None else found.state


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "pipelines"
    folder.mkdir()
    (folder / "mine.py").write_text(
        '"""Counts <i>things</i>."""\nOPTIONS = [("topic", None, "what to count"), ("api_token", "", "who asks")]\n'
        "def topics(options): return [options['topic']]\ndef start(spark, options): ...\n"
    )
    (folder / "helper.py").write_text("x = 1\n")
    (tmp_path / "outside.py").write_text('"""Outside."""\ndef start(spark, options): ...\n')
    return folder


@pytest.fixture
def settings(runs: Path, folder: Path) -> ConsoleSettings:
    """In front of brokers that are not there: pipelines are shown without them."""
    (port,) = free_ports("127.0.0.1", 1)
    return ConsoleSettings(f"127.0.0.1:{port}", pipelines=folder, pipeline_runs=runs)


@pytest.fixture
def visitor(settings: ConsoleSettings) -> Iterator[Visitor]:
    with visiting(settings) as visitor:
        visitor.get("/pipelines")
        yield visitor


class TestRuns:
    def test_there_are_none(self, visitor: Visitor) -> None:
        assert "Nothing has run yet." in words(visitor.get("/pipelines"))
        assert visitor.get("/pipelines/runs/nothing").status_code == 404

    def test_one_that_runs(self, visitor: Visitor, begin: Begin) -> None:
        begin()
        listed = visitor.get("/pipelines")
        assert "metrics ValueError: <b>no luck</b> running" in words(listed), words(listed)
        assert "localhost:9092 2 25.5/s 1,000/s 1,234 " in words(listed)
        answer = visitor.get("/pipelines/runs/metrics-1")
        shown = words(answer)
        assert "metrics 7 500 25.5/s 1,000/s 1,234 2.5 s 2 4 rows, 1.5 kB" in shown, shown
        assert "metrics-dead-letters 7 500 25.5/s 1,000/s - " in shown
        assert "Records read 500 " in shown and "Restarts 1 " in shown
        assert "its terminal has what it said" in shown
        assert f"postgresql://me:{HIDDEN}@db/x" in shown
        for page in (listed, answer):
            assert "pg-secret" not in page.text and "<script>alert" not in page.text and "<b>no" not in page.text

    def test_a_page_names_its_stream(self, begin: Begin, visitor: Visitor) -> None:
        begin()
        page = visitor.get("/pipelines/runs/metrics-1").text
        path = page.partition('data-events="')[2].partition('"')[0]
        assert path == "/events/pipelines/metrics-1?seen=running-2-1"
        assert "/events/pipelines?seen=1-rics-1running" in visitor.get("/pipelines").text

    def test_one_that_was_killed(self, visitor: Visitor, begin: Begin) -> None:
        process = begin()
        process.kill()
        process.wait()
        assert "killed" in words(visitor.get("/pipelines"))
        assert "left no word" in words(visitor.get("/pipelines/runs/metrics-1"))
        assert "over already" in visitor.done("/pipelines/runs/metrics-1/stop", action="stop")

    def test_the_log_is_shown_without_passwords(self, visitor: Visitor, begin: Begin, runs: Path) -> None:
        begin()
        log_path(runs, "metrics-1").write_text("x\n" * 100_000 + "<script>alert(2)</script> postgresql://me:pw-1@db\n")
        answer = visitor.get("/pipelines/runs/metrics-1")
        assert f"<script>alert(2)</script> postgresql://me:{HIDDEN}@db" in words(answer)
        assert "<script>alert" not in answer.text and "pw-1" not in answer.text and len(answer.text) < 100_000

    def test_it_can_be_started_again_with_what_it_was_given(
        self, visitor: Visitor, begin: Begin, settings: ConsoleSettings
    ) -> None:
        begin(file=str(next(each.pipeline.path for each in pipelines.offers(None) if each.pipeline))).kill()
        wait_for(lambda: "Start again" in words(visitor.get("/pipelines/runs/metrics-1")))
        form = visitor.get("/pipelines/start?pipeline=metrics&run=metrics-1").text
        assert 'value="&lt;script&gt;alert(1)&lt;/script&gt;"' in form
        assert HIDDEN not in form


class TestStopping:
    def test_a_press_asks_and_another_does_not_wait(self, visitor: Visitor, begin: Begin, runs: Path) -> None:
        process = begin(patience=60)
        assert "Stop" in words(visitor.get("/pipelines/runs/metrics-1"))
        told = visitor.done("/pipelines/runs/metrics-1/stop", action="stop")
        assert "It was asked to stop" in told and "Kill it" in told
        assert "asked to stop already" in visitor.done("/pipelines/runs/metrics-1/stop", action="stop")
        wait_for(lambda: state(runs, "metrics-1") is State.STOPPING)
        assert process.poll() is None
        assert "It was killed" in visitor.done("/pipelines/runs/metrics-1/stop", action="kill")
        assert process.wait(30) == -9

    def test_one_that_ends_by_itself(self, visitor: Visitor, begin: Begin, runs: Path) -> None:
        process = begin()
        visitor.done("/pipelines/runs/metrics-1/stop", action="stop")
        assert process.wait(30) == 0
        shown = words(visitor.get("/pipelines/runs/metrics-1"))
        assert "metrics stopped" in shown and "Kill it" not in shown

    def test_another_process_of_its_id_is_left_alone(self, visitor: Visitor, begin: Begin, runs: Path) -> None:
        process = begin()
        path = runs / "copied.json"
        path.write_text(
            json.dumps(json.loads((runs / "metrics-1.json").read_text()) | {"run": "copied", "process": "x:1"})
        )
        assert "over already" in visitor.done("/pipelines/runs/copied/stop", action="kill")
        assert process.poll() is None

    def test_a_viewer_may_not(self, settings: ConsoleSettings, begin: Begin, runs: Path, folder: Path) -> None:
        process = begin()
        viewer = ConsoleSettings(settings.bootstrap, pipelines=folder, pipeline_runs=runs, default_role=Role.VIEWER)
        with visiting(viewer) as visitor:
            page = visitor.get("/pipelines/runs/metrics-1")
            assert page.status_code == 200 and "/stop" not in page.text
            assert visitor.post("/pipelines/runs/metrics-1/stop", action="kill").status_code == 403
            assert "Start…" not in words(visitor.get("/pipelines"))
        assert process.poll() is None


class TestStarting:
    def test_what_there_is(self, visitor: Visitor) -> None:
        answer = visitor.get("/pipelines")
        shown = words(answer)
        for name in ("metrics", "logs", "streams", "mine.py"):
            assert f"/pipelines/start?pipeline={name}" in answer.text
        assert "mine.py Counts <i>things</i>. 2 options topic what to count (has to be given)" in shown, shown
        assert "helper.py" in shown and "has no docstring" in shown and "pipeline=helper.py" not in answer.text
        assert "outside" not in shown
        form = visitor.get("/pipelines/start?pipeline=mine.py")
        assert 'name="option.topic" value="" required' in form.text
        assert 'name="option.api_token" value="" type="password"' in form.text
        assert 'name="option.window" value="1 minute"' in visitor.get("/pipelines/start?pipeline=metrics").text

    @pytest.mark.parametrize(
        "name",
        [
            "../outside.py",
            "../pipelines/mine.py",
            "outside.py",
            "mine",
            "./mine.py",
            "/etc/passwd",
            "",
            "--help",
            "metrics.py",
        ],
    )
    def test_nothing_else_can_be_started(self, visitor: Visitor, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(control, "_detached", lambda *_: pytest.fail("something was started"))
        assert visitor.get("/pipelines/start", params={"pipeline": name}).status_code == 404
        assert visitor.post("/pipelines/start", pipeline=name).status_code == 404

    def test_a_file_that_is_no_pipeline_and_an_option_that_is_missing(
        self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(control, "_detached", lambda *_: pytest.fail("something was started"))
        assert "has no docstring" in words(visitor.post("/pipelines/start", pipeline="helper.py"))
        answer = visitor.post("/pipelines/start", pipeline="mine.py")
        assert answer.status_code == 400 and "needs topic=... (what to count)" in words(answer)
        answer = visitor.post("/pipelines/start", pipeline="mine.py", **{"option.topic": "x" * 40_000})
        assert answer.status_code == 400 and "at most" in words(answer)

    def test_a_run_that_fails_says_why(
        self, visitor: Visitor, runs: Path, settings: ConsoleSettings, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The real command, in front of brokers that are not there; what was typed is in no command line."""
        commands: list[list[str]] = []
        detached = control._detached

        def recorded(command: list[str], handed: bytes, log: int) -> int:
            commands.append(command)
            return detached(command, handed, log)

        monkeypatch.setattr(control, "_detached", recorded)
        typed = {"option.topic": "$(touch x); --master", "option.api_token": "typed-secret", "once": "yes"}
        answer = visitor.post("/pipelines/start", pipeline="mine.py", **typed)
        assert answer.status_code == 303, words(answer)
        address = answer.headers["location"]
        run_id = address.rpartition("/")[2]
        wait_for(lambda: state(runs, run_id) is State.FAILED)
        shown = words(visitor.get(address))
        assert f"no broker answers at {settings.bootstrap}" in shown and "was started" in shown, shown
        assert f"api_token {HIDDEN} topic $(touch x); --master" in shown and "typed-secret" not in shown
        assert "Log millrace: error: no broker answers" in shown
        assert "--once" in commands[0]
        assert not [word for word in commands[0] if "touch" in word or "typed" in word]
        assert all(path.stat().st_mode & 0o077 == 0 for path in (runs, *runs.iterdir()))

    def test_a_second_run_on_its_checkpoint_is_refused(
        self, visitor: Visitor, runs: Path, settings: ConsoleSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
        place = settings.bootstrap.replace(":", "_")
        with RunKeeper.of_this_process(
            runs,
            pipeline="mine",
            file=Path("mine.py"),
            bootstrap="b",
            options={},
            checkpoint=str(tmp_path / "state" / "millrace" / "checkpoints" / place / "mine"),
            master="m",
        ):
            answer = visitor.post("/pipelines/start", pipeline="mine.py", **{"option.topic": "t"})
        assert answer.status_code == 400
        assert f"runs already with this checkpoint (pid {os.getpid()})" in words(answer), words(answer)
        assert not list(runs.glob("*.log"))

    def test_without_spark_it_says_what_to_install(self, visitor: Visitor, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pyspark", None)
        shown = words(visitor.get("/pipelines"))
        assert "Nothing can be started here: pipelines need PySpark: pip install" in shown and "Start…" not in shown
        assert "need PySpark" in words(visitor.get("/pipelines/start?pipeline=metrics"))
        answer = visitor.post("/pipelines/start", pipeline="metrics")
        assert answer.status_code == 400 and "need PySpark" in words(answer)


@pytest.fixture(scope="module")
def secured() -> Iterator[Cluster]:
    settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "PLAIN",
        "plain.sasl.jaas.config": 'PlainLoginModule required user_alice="alice-secret";',
    }
    with Cluster(settings=settings) as cluster:
        yield cluster


class TestUsersOfTheBrokers:
    def console(self, cluster: Cluster, runs: Path, folder: Path | None) -> ConsoleSettings:
        return ConsoleSettings(
            cluster.bootstrap_servers,
            client={"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"},
            login=Login.BROKERS,
            pipelines=folder,
            pipeline_runs=runs,
        )

    def test_see_nothing_unless_a_folder_was_given(self, secured: Cluster, runs: Path, begin: Begin) -> None:
        process = begin()
        with visiting(self.console(secured, runs, None)) as visitor:
            visitor.client.post("/login", data={"username": "alice", "password": "alice-secret"})
            for path in ("/pipelines", "/pipelines/start?pipeline=metrics", "/pipelines/runs/metrics-1"):
                answer = visitor.get(path)
                assert answer.status_code == 403 and "--pipelines DIR" in words(answer)
            assert "1234" not in visitor.get("/events/pipelines/metrics-1").text
            visitor.get("/")
            assert visitor.post("/pipelines/start", pipeline="metrics").status_code == 403
            assert visitor.post("/pipelines/runs/metrics-1/stop", action="kill").status_code == 403
        assert process.poll() is None

    def test_what_they_start_logs_in_as_they_do(
        self, secured: Cluster, runs: Path, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The run is let in by the brokers, and ends where it would import PySpark."""
        (tmp_path / "modules").mkdir()
        (tmp_path / "modules" / "pyspark.py").write_text("raise ImportError('not here')\n")
        monkeypatch.syspath_prepend(str(tmp_path / "modules"))
        commands: list[list[str]] = []
        detached = control._detached

        def recorded(command: list[str], handed: bytes, log: int) -> int:
            commands.append(command)
            return detached(command, handed, log)

        monkeypatch.setattr(control, "_detached", recorded)
        with visiting(self.console(secured, runs, folder)) as visitor:
            visitor.client.post("/login", data={"username": "alice", "password": "alice-secret"})
            assert "as alice" in words(visitor.get("/pipelines/start?pipeline=metrics"))
            answer = visitor.post("/pipelines/start", pipeline="metrics")
            assert answer.status_code == 303, words(answer)
            run_id = answer.headers["location"].rpartition("/")[2]
            wait_for(lambda: state(runs, run_id) is State.FAILED)
            shown = words(visitor.get(answer.headers["location"]))
        assert "pipelines need PySpark" in shown, shown
        assert "kafka.sasl.username alice" in shown and f"kafka.sasl.password {HIDDEN}" in shown
        assert "alice-secret" not in shown + " ".join(commands[0]) + "".join(p.read_text() for p in runs.iterdir())


def test_charts_have_a_line_for_each_query() -> None:
    figures = QueryFigures("q", 1, 1, 1.0, 1.0, 1, None, 0, 0, 0)
    first = QueryStatus(figures, (Point(1000, 1.0, 2.0, 3, 4), Point(3000, 5.0, 6.0, None, 8)))
    second = QueryStatus(figures, (Point(2000, 9.0, 10.0, 11, 12),))
    charts = pipelines.series_of([first, second])
    assert charts["chart-in"] == [[1.0, 2.0, 3.0], [1.0, 1.0, 5.0], [None, 9.0, 9.0]]
    assert charts["chart-lag"] == [[1.0, 2.0, 3.0], [3, 3, None], [None, 11, 11]]
    assert charts["chart-took"][1:] == [[4, 4, 8], [None, 12, 12]]
    assert pipelines.series_of([])["chart-out"] == [[]]


async def stream(settings: ConsoleSettings, route: Route, seen: str, count: int, **parts: str) -> list[tuple[str, Any]]:
    """The first events of a stream, as a browser gets them."""
    scope = {
        "type": "http",
        "method": "GET",
        "app": create_app(settings),
        "path": route.path,
        "path_params": parts,
        "query_string": f"seen={seen}".encode(),
        "headers": [],
    }
    answer = await route.endpoint(Request(scope))
    body, found = answer.body_iterator, []
    async for text in body:
        event, data = text.strip().split("\n")
        found.append((event.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        if len(found) == count:
            break
    await body.aclose()
    return found


async def test_streams_have_figures_and_say_when_a_page_is_old(
    settings: ConsoleSettings, begin: Begin, runs: Path
) -> None:
    begin()
    log_path(runs, "metrics-1").write_text("so far, so good\n")
    one, many = pipelines.pipeline_events, pipelines.pipelines_events
    (_, values), (_, series) = await stream(settings, one, "running-2-1", 2, run="metrics-1")
    assert values["0:lag"] == "1,234" and values["log"] == "so far, so good"
    assert series["chart-lag"][1][-1] == 1234
    assert await stream(settings, one, "starting-0-0", 1, run="metrics-1") == [("reload", "")]
    ((kind, told),) = await stream(settings, one, "", 5, run="../metrics-1")
    assert kind == "failure" and "no such run" in told
    ((kind, values),) = await stream(settings, many, "1-rics-1running", 1)
    assert kind == "values" and values["metrics-1:lag"] == "1,234"
    assert await stream(settings, many, "0", 1) == [("reload", "")]


def test_values_of_one_that_is_over_have_no_rates(tmp_path: Path) -> None:
    run = RunStatus(
        "r", "p", "p.py", 1, "x", "b", {}, "c", "m", 0, State.FAILED,
        queries=(QueryStatus(QueryFigures("q", 1, 1, 7.0, 7.0, 1, 5, 0, 0, 0)),),
    )  # fmt: skip
    assert pipelines.list_values([run]) == {"r:in": "-", "r:out": "-", "r:lag": "5"}
