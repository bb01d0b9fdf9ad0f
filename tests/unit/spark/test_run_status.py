"""The status that a run of a pipeline keeps: what is in its file, how often it is written, and who is believed."""

from __future__ import annotations

import io
import json
import os
import stat
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path

import pytest

from millrace.cli.root import run
from millrace.clock import ManualClock, SystemClock
from millrace.local.ports import free_ports
from millrace.local.processes import is_same, process_key, send_signal
from millrace.security.hiding import HIDDEN, without_passwords
from millrace.spark.pipelines import status
from millrace.spark.pipelines.progress import QueryFigures
from millrace.spark.pipelines.status import (
    POINTS,
    RunKeeper,
    RunStatus,
    State,
    is_run_id,
    log_path,
    new_run_id,
    read_run,
    read_runs,
    remove_old,
    status_path,
)

OPTIONS = {
    "topic": "orders",
    "table": "postgresql://writer:pg-secret@db/metrics",
    "kafka.security.protocol": "SASL_SSL",
    "kafka.sasl.password": "broker-secret",
}


def figures(name: str = "metrics", rows: int = 10, lag: int | None = 3) -> QueryFigures:
    return QueryFigures(name, 7, rows, 5.0, 20.0, 150, lag, 1, 4, 1000, "2026-11-15T10:00:00Z", {"orders": rows})


def keeper(folder: Path, clock: ManualClock | None = None, run_id: str = "") -> RunKeeper:
    return RunKeeper.of_this_process(
        folder,
        pipeline="metrics",
        file=Path("/pipelines/metrics.py"),
        bootstrap="localhost:9092",
        options=OPTIONS,
        checkpoint="/checkpoints/metrics",
        master="local[*]",
        run_id=run_id,
        clock=clock,
    )


def only(folder: Path) -> RunStatus:
    (found,) = read_runs(folder)
    return found


def wait_until_written(folder: Path, state: State) -> RunStatus:
    deadline = SystemClock().monotonic() + 20
    while (found := only(folder)).state is not state:
        assert SystemClock().monotonic() < deadline, found
        threading.Event().wait(0.02)
    return found


class TestAFile:
    def test_is_there_from_the_beginning_to_the_end(self, tmp_path: Path) -> None:
        folder = tmp_path / "state" / "runs"
        with keeper(folder) as kept:
            assert only(folder).state is State.STARTING
            kept.progress(figures())
            found = wait_until_written(folder, State.RUNNING)
            assert (found.pipeline, found.bootstrap, found.checkpoint) == (
                "metrics",
                "localhost:9092",
                "/checkpoints/metrics",
            )
            assert (found.input_rate, found.processed_rate, found.lag, found.records_read) == (5.0, 20.0, 3, 10)
            assert found.queries[0].figures.batch_id == 7 and len(found.queries[0].points) == 1
            kept.restarting("ValueError: no luck", 1.0, 1)
            assert kept.status.state is State.RESTARTING
            kept.progress(figures(rows=0))
            kept.stopping()
            kept.progress(figures(rows=1))
            assert kept.status.state is State.STOPPING, "a last batch does not make it run again"
            kept.done(stopped=True)
        found = only(folder)
        assert (found.state, found.error, found.last_error) == (State.STOPPED, "", "ValueError: no luck")
        assert found.ended_ms is not None and found.restart_count == 1 and found.records_read == 11
        assert not list(folder.glob(".*"))

    def test_is_for_its_owner_alone_and_without_secrets(self, tmp_path: Path) -> None:
        folder = tmp_path / "runs"
        with pytest.raises(RuntimeError), keeper(folder):
            raise RuntimeError("refused: broker-secret for postgresql://writer:other-secret@db")
        path = next(folder.iterdir())
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert "secret" not in path.read_text()
        found = only(folder)
        assert found.options["topic"] == "orders" and found.options["kafka.sasl.password"] == HIDDEN
        assert found.state is State.FAILED and found.error.startswith("refused: ")

    @pytest.mark.parametrize(("error", "state"), [(KeyboardInterrupt, State.STOPPED), (ValueError, State.FAILED)])
    def test_says_how_it_ended(self, tmp_path: Path, error: type[BaseException], state: State) -> None:
        with pytest.raises(error), keeper(tmp_path):
            raise error
        assert only(tmp_path).state is state

    def test_without_a_stop_it_is_done(self, tmp_path: Path) -> None:
        with keeper(tmp_path) as kept:
            kept.done(stopped=False)
        assert only(tmp_path).state is State.DONE

    def test_is_written_once_a_second_at_most(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written: list[float] = []
        write = RunKeeper._write

        def counted(self: RunKeeper, what: RunStatus) -> None:
            written.append(SystemClock().monotonic())
            write(self, what)

        monkeypatch.setattr(RunKeeper, "_write", counted)
        monkeypatch.setattr(status, "EVERY_S", 0.2)
        with keeper(tmp_path) as kept:
            while len(written) < 4:
                kept.progress(figures())
                threading.Event().wait(0.001)
            kept.done(stopped=True)
        between = [later - earlier for earlier, later in pairwise(written[:-1])]
        assert min(between) >= 0.19

    def test_a_folder_that_cannot_be_written_is_told_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        (tmp_path / "file").touch()
        with keeper(tmp_path / "file" / "runs") as kept:
            kept.progress(figures())
            kept.done(stopped=True)
        assert len(caplog.records) == 1 and "no console will show it" in caplog.text


class TestHistory:
    def test_a_point_stands_for_some_seconds_and_there_are_not_many(self, tmp_path: Path) -> None:
        clock = ManualClock()
        kept = keeper(tmp_path, clock)
        kept.progress(figures(lag=1))
        clock.advance(1)
        kept.progress(figures(lag=2))
        assert [point.lag for point in kept.status.queries[0].points] == [2]
        for number in range(100):
            clock.advance(5)
            kept.progress(figures(lag=number))
        lags = [point.lag for point in kept.status.queries[0].points]
        assert len(lags) == POINTS and lags[-1] == 99

    def test_of_several_queries_the_one_that_is_furthest_behind_counts(self, tmp_path: Path) -> None:
        kept = keeper(tmp_path)
        kept.progress(figures("a", lag=5))
        kept.progress(figures("b", lag=None))
        assert kept.status.lag == 5 and kept.status.input_rate == 5.0
        assert kept.status.records_read == 10, "both read the same records"

    def test_restarts_are_bounded_and_counted(self, tmp_path: Path) -> None:
        kept = keeper(tmp_path)
        for number in range(30):
            kept.restarting(f"reason {number} " + "x" * 5000, 1.0, number)
        found = kept.status
        assert found.restart_count == 30 and len(found.restarts) == status.MAX_RESTARTS
        assert found.last_error.startswith("reason 29 ") and len(found.last_error) == status.MAX_TEXT


class TestReading:
    def test_everything_comes_back(self, tmp_path: Path) -> None:
        kept = keeper(tmp_path)
        kept.progress(figures(lag=None))
        kept.restarting("reason", 1.0, 1)
        before = kept.status
        after = RunStatus.from_json(json.loads(json.dumps(before.as_json())))
        assert after.as_json() == json.loads(json.dumps(before.as_json())) | {
            "queries": before.as_json()["queries"],
            "restarts": before.restarts,
        }

    def test_one_whose_process_was_killed_is_seen_to_be(self, tmp_path: Path) -> None:
        code = (
            "import sys, time; from pathlib import Path; from millrace.spark.pipelines.status import RunKeeper\n"
            "with RunKeeper.of_this_process(Path(sys.argv[1]), pipeline='p', file=Path('p.py'), bootstrap='b',\n"
            "    options={}, checkpoint='c', master='m', run_id='run'):\n"
            "    print('there', flush=True); time.sleep(60)"
        )
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found = read_run(tmp_path, "run")
            assert found is not None and found.state is State.STARTING and found.pid == process.pid
            process.kill()
        found = read_run(tmp_path, "run")
        assert found is not None and found.state is State.KILLED

    def test_another_process_with_its_id_is_not_taken_for_it(self, tmp_path: Path) -> None:
        kept = keeper(tmp_path, run_id="run")
        written = kept.status.as_json() | {"process": "another boot:1"}
        status_path(tmp_path, "run").write_text(json.dumps(written))
        found = read_run(tmp_path, "run")
        assert found is not None and found.state is State.KILLED

    @pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 2}', '{"version": 1, "run": "x"}'])
    def test_what_is_no_status_is_passed_over(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "x.json").write_text(text)
        assert read_runs(tmp_path) == [] and read_run(tmp_path, "x") is None

    @pytest.mark.parametrize("name", ["", ".", "..", "../x", "a/b", ".x", "-x", "a\0", "x" * 300, "a b"])
    def test_a_name_cannot_lead_elsewhere(self, tmp_path: Path, name: str) -> None:
        assert not is_run_id(name) and read_run(tmp_path, name) is None

    def test_names_are_for_files(self) -> None:
        assert is_run_id(new_run_id("my pipeline/../é"))
        assert new_run_id("x") != new_run_id("x")

    def test_no_folder_is_no_runs(self, tmp_path: Path) -> None:
        assert read_runs(tmp_path / "nothing") == []

    def test_the_folder(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv(status.RUNS_VARIABLE, raising=False)
        monkeypatch.setenv("XDG_STATE_HOME", "/state")
        assert status.default_runs() == Path("/state/millrace/pipelines")
        monkeypatch.setenv(status.RUNS_VARIABLE, "/elsewhere")
        assert status.default_runs() == Path("/elsewhere")


class TestRemoving:
    def test_what_ended_long_ago_goes_with_its_log(self, tmp_path: Path) -> None:
        clock = ManualClock()
        for name in ("old", "new"):
            with keeper(tmp_path, clock, name):
                log_path(tmp_path, name).touch()
            clock.advance(4 * 86_400)
        log_path(tmp_path, "never-began").touch()
        os.utime(log_path(tmp_path, "never-began"), (0, 0))
        status_path(tmp_path, "running").write_text(
            json.dumps(keeper(tmp_path, ManualClock(0), "running").status.as_json())
        )
        remove_old(tmp_path, clock.wall_ms())
        assert {path.name for path in tmp_path.iterdir()} == {"new.json", "new.log", "running.json"}

    def test_the_oldest_of_many_go(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(status, "KEPT_RUNS", 2)
        clock = ManualClock()
        for name in ("a", "b", "c"):
            with keeper(tmp_path, clock, name):
                clock.advance(1)
        remove_old(tmp_path, clock.wall_ms())
        assert [each.run_id for each in read_runs(tmp_path)] == ["c", "b"]


class TestProcesses:
    def test_a_signal_reaches_its_process_or_none(self) -> None:
        with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
            key = process_key(process.pid)
            assert is_same(process.pid, key) and not is_same(process.pid, "x:1") and not is_same(process.pid, "")
            assert not send_signal(process.pid, "x:1", 9) and process.poll() is None
            assert send_signal(process.pid, key, 9)
        assert process.returncode == -9
        assert not send_signal(process.pid, key, 9) and process_key(process.pid) == ""


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://me:a@b@host/db failed", f"postgresql://me:{HIDDEN}@host/db failed"),
        ("postgresql://host/db?user=me&password=abc&x=1", f"postgresql://host/db?user=me&password={HIDDEN}&x=1"),
        ("localhost:9092 and sqlite:///file.db", "localhost:9092 and sqlite:///file.db"),
        ("it said hunter22", f"it said {HIDDEN}"),
    ],
)
def test_passwords_in_texts(text: str, shown: str) -> None:
    assert without_passwords(text, ["hunter22", "i"]) == shown


def test_a_long_text_takes_no_time() -> None:
    began = SystemClock().monotonic()
    without_passwords("x" * 100_000 + "://a:" * 1000 + "password" * 1000)
    assert SystemClock().monotonic() - began < 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("topic=a", "is not JSON"),
        ("[1]", "is not an object"),
        ('{"tpic": "a"}', "has no option 'tpic': did you mean 'topic'?"),
    ],
)
def test_options_from_stdin_are_checked(
    given: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(given))
    assert run(["pipeline", "run", "metrics", "--option-file", "-"]) == 2
    assert told in capsys.readouterr().err


def test_options_from_a_file_and_what_is_said_besides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line wins. The run ends before Spark: nobody answers there, and that is noted."""
    (port,) = free_ports("127.0.0.1", 1)
    (tmp_path / "options").write_text("topic=filed\nwindow=5 minutes\nkafka.sasl.password=file-secret\n")
    words = ["pipeline", "run", "metrics", "-b", f"127.0.0.1:{port}", "--option-file", str(tmp_path / "options")]
    assert run([*words, "-o", "topic=given", "--runs", str(tmp_path / "runs"), "--run-id", "mine"]) == 1
    assert "no broker answers" in capsys.readouterr().err
    found = read_run(tmp_path / "runs", "mine")
    assert found is not None and found.state is State.FAILED and "no broker answers" in found.error
    shown = (found.options["topic"], found.options["window"], found.options["kafka.sasl.password"])
    assert shown == ("given", "5 minutes", HIDDEN)
