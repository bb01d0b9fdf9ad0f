"""A pipeline started, watched and stopped in the console: the real command, with Spark, by a user of the brokers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from confluent_kafka import Producer

from millrace.clock import SystemClock
from millrace.console.settings import ConsoleSettings, Login
from millrace.local.processes import is_alive
from millrace.spark.pipelines.control import stop_run
from millrace.spark.pipelines.status import RunStatus, State, read_run
from millrace.testing import Cluster
from support.consoles import visiting, words

CLIENT = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN"}
COUNTING = '''
"""Counts what comes."""
OPTIONS = [("topic", None, "what to count"), ("trigger", "2 seconds", "how often")]


def topics(options):
    return [options["topic"]]


def start(spark, options):
    client = {name: value for name, value in options.items() if name.startswith("kafka.")}
    records = spark.readStream.format("millrace").options(**client).option("startingOffsets", "earliest")
    return (
        records.option("subscribe", options["topic"]).load()
        .writeStream.queryName("counting").format("noop")
        .option("checkpointLocation", options["checkpoint"])
        .trigger(processingTime=options["trigger"]).start()
    )
'''
LOGIN = {"sasl.username": "alice", "sasl.password": "alice-secret"}


def wait_until(runs: Path, run_id: str, condition: Callable[[RunStatus], bool]) -> RunStatus:
    deadline = SystemClock().monotonic() + 120
    while True:
        run = read_run(runs, run_id)
        assert run is not None
        if condition(run):
            return run
        assert SystemClock().monotonic() < deadline and not run.state.is_over, run
        threading.Event().wait(0.1)


@pytest.mark.cluster
@pytest.mark.timeout(300)  # a process of its own with a JVM: slow on a busy machine
def test_started_watched_and_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs, folder = tmp_path / "runs", tmp_path / "pipelines"
    folder.mkdir()
    (folder / "counting.py").write_text(COUNTING.lstrip())
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    broker_settings = {
        "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
        "sasl.enabled.mechanisms": "PLAIN",
        "plain.sasl.jaas.config": 'PlainLoginModule required user_alice="alice-secret";',
    }
    with Cluster(settings=broker_settings) as cluster:
        producer = Producer({"bootstrap.servers": cluster.bootstrap_servers, **CLIENT, **LOGIN})
        for value in (b"one", b"two", b"three", b"four"):
            producer.produce("things", value)
        assert producer.flush(30) == 0
        settings = ConsoleSettings(
            cluster.bootstrap_servers, client=CLIENT, login=Login.BROKERS, pipelines=folder, pipeline_runs=runs
        )
        with visiting(settings) as visitor:
            visitor.client.post("/login", data={"username": "alice", "password": "alice-secret"})
            visitor.get("/pipelines")
            answer = visitor.post(
                "/pipelines/start",
                pipeline="counting.py",
                **{"option.topic": "things", "option.trigger": "200 milliseconds"},
            )
            assert answer.status_code == 303, words(answer)
            address = answer.headers["location"]
            run_id = address.rpartition("/")[2]
            run = read_run(runs, run_id)
            assert run is not None
            try:
                command_line = Path(f"/proc/{run.pid}/cmdline").read_bytes()
                assert b"counting.py" in command_line
                assert not [word for word in (b"secret", b"things", b"milliseconds") if word in command_line]
                run = wait_until(runs, run_id, lambda run: run.records_read == 4)
                assert run.state is State.RUNNING
                shown = words(visitor.get(address))
                assert "counting running" in shown and "Records read 4 " in shown, shown
                assert "It was asked to stop" in visitor.done(f"{address}/stop", action="stop")
                run = wait_until(runs, run_id, lambda run: run.state.is_over)
            finally:
                stop_run(run, kill=True)
            shown = words(visitor.get(address))
        assert run.state is State.STOPPED and run.error == "" and run.restart_count == 0
        assert "pipeline counting stopped: 4 records read in" in shown, shown
        while is_alive(run.pid):  # it has said its last word
            threading.Event().wait(0.05)
    assert "alice-secret" not in "".join(path.read_text() for path in runs.iterdir())
