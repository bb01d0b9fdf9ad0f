"""`millrace demo`: the whole system at work for half a minute, and a check at the end that nothing was lost.

A broker is started as its own process on a free port with a temporary directory; producers write three topics, a
consumer group of three reads them, a fourth member joins half-way and the first one leaves, so that a rebalance can
be watched. The exit code says whether everything that was acknowledged was also read.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from millrace.cli.output import CommandError, count_text, print_json, print_remark, size_text
from millrace.clock import SystemClock

if TYPE_CHECKING:
    from millrace.cli.demo_traffic import Ledger, Member, StreamProducer

START_TIMEOUT_S: Final = 20.0
DRAIN_TIMEOUT_S: Final = 20.0
_MEMBERS: Final = 3

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace demo --seconds 10 --rate 20000")
def demo(
    *,
    seconds: Annotated[float, typer.Option("--seconds", min=1, help="How long to produce.")] = 30.0,
    forever: Annotated[bool, typer.Option("--forever", help="Until Ctrl-C.")] = False,
    brokers: Annotated[int, typer.Option("--brokers", min=1, help="How many; this version runs one.")] = 1,
    rate: Annotated[int, typer.Option("--rate", min=3, help="Records per second, all producers together.")] = 3000,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Watch producers, a broker and a consumer group at work; checks at the end that everything arrived."""
    if brokers > 1:
        raise CommandError(
            f"--brokers {brokers}: clusters of several brokers are not in this version, use 1", exit_code=2
        )
    stopping = threading.Event()
    with _stopped_by_signals(stopping), _broker_process() as (process, bootstrap):
        run = _Run(process, bootstrap, rate)
        try:
            run.start()
            run.watch(None if forever else seconds, stopping, quiet=as_json)
        finally:
            run.finish()
        summary = run.summary()
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary)
    if not summary["ok"]:
        raise typer.Exit(1)


class _Run:
    """One demo: the threads, from start to the final account."""

    def __init__(self, process: subprocess.Popen[str], bootstrap: str, rate: int) -> None:
        from millrace.cli.demo_traffic import STREAMS, Ledger, Member, StreamProducer

        self._process = process
        self._bootstrap = bootstrap
        self._settings: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 2}
        self._clock = SystemClock()
        self._began_s = self._clock.monotonic()
        self._produced_s = 0.0
        self._new_member = Member
        self._broker_died = False
        self.ledger: Ledger = Ledger()
        self.producers: list[StreamProducer] = [
            StreamProducer(stream, rate / len(STREAMS), self.ledger, self._settings, seed=number)
            for number, stream in enumerate(STREAMS)
        ]
        self.members: list[Member] = [Member(number, self.ledger, self._settings) for number in range(_MEMBERS)]
        self._committed_lag: int | None = None

    def start(self) -> None:
        from confluent_kafka.admin import AdminClient, NewTopic

        from millrace.cli.connection import result
        from millrace.cli.demo_traffic import STREAMS

        admin = AdminClient(self._settings)
        for future in admin.create_topics([NewTopic(one.topic, one.partitions) for one in STREAMS]).values():
            result(future)
        for thread in (*self.members, *self.producers):
            thread.start()
        self._began_s = self._clock.monotonic()

    def watch(self, seconds: float | None, stopping: threading.Event, *, quiet: bool) -> None:
        """Show the traffic until the time is over, someone stops it, or the broker dies."""
        from millrace.cli.demo_view import LIVE_EVERY_S, PLAIN_EVERY_S, View, open_screen

        view = View(self.ledger, self.members, self._process.pid, self._bootstrap)
        terminal = sys.stdout.isatty() and not quiet
        if not quiet:
            print(
                f"broker at {self._bootstrap}, three producers, a group of {_MEMBERS}; Ctrl-C ends it early", flush=True
            )
        screen, draw = open_screen(terminal)
        changed_at_s = seconds / 2 if seconds is not None else 15.0
        next_line_s = PLAIN_EVERY_S
        view.sample(self._clock.monotonic())
        with screen:
            while not stopping.wait(LIVE_EVERY_S):
                elapsed_s = self._clock.monotonic() - self._began_s
                if self._process.poll() is not None:
                    self._broker_died = True
                    return
                if seconds is not None and elapsed_s >= seconds:
                    return
                if elapsed_s >= changed_at_s and len(self.members) == _MEMBERS:
                    self._change_members()
                view.sample(self._clock.monotonic())
                if terminal:
                    draw(view.renderable(elapsed_s, seconds))
                elif not quiet and elapsed_s >= next_line_s:
                    print(view.line(elapsed_s), flush=True)
                    next_line_s += PLAIN_EVERY_S

    def _change_members(self) -> None:
        """A new member joins and the first one leaves: the group rebalances while records flow."""
        newcomer = self._new_member(_MEMBERS, self.ledger, self._settings)
        self.members.append(newcomer)
        newcomer.start()
        self.members[0].leave()

    def finish(self) -> None:
        """Stop producing, let the group read the rest, then let it leave."""
        for producer in self.producers:
            producer.stop()
        for producer in self.producers:
            if producer.ident is not None:
                producer.join()
        self._produced_s = self._clock.monotonic() - self._began_s
        deadline_s = self._clock.monotonic() + (0 if self._broker_died else DRAIN_TIMEOUT_S)
        pause = threading.Event()
        while self.ledger.unbalanced() and self._clock.monotonic() < deadline_s:
            pause.wait(0.05)
        for member in self.members:
            member.leave()
        for member in self.members:
            if member.ident is not None:
                member.join()

    def summary(self) -> dict[str, Any]:
        from millrace.cli.demo_traffic import STREAMS, committed_lag

        ledger = self.ledger
        problems = [thread.error for thread in self.producers if thread.error]
        problems += [thread.error for thread in self.members if thread.error]
        if self._broker_died:
            problems.append(f"the broker ended with status {self._process.returncode}")
        else:
            lag = committed_lag(ledger, self._settings)
            if lag:
                problems.append(f"the group's committed offsets are {lag:,} records behind")
        if ledger.failed:
            problems.append(f"{ledger.failed:,} records were refused")
        for topic, index in ledger.unbalanced():
            account = ledger.accounts[topic, index]
            problems.append(
                f"{topic}-{index}: produced {account.produced.count:,}, consumed {account.consumed.count:,}, "
                f"gaps {account.gaps}, checksums {'agree' if account.produced == account.consumed else 'differ'}"
            )
        return {
            "ok": not problems and ledger.produced() > 0,
            "seconds": round(self._produced_s, 1),
            "produced": ledger.produced(),
            "consumed": ledger.consumed(),
            "replayed": ledger.replayed(),
            "bytes": ledger.sent_bytes,
            "partitions": len(ledger.accounts),
            "latency_p50_ms": ledger.latency_ms(0.5),
            "latency_p99_ms": ledger.latency_ms(0.99),
            "topics": {
                stream.topic: {"produced": ledger.produced(stream.topic), "consumed": ledger.consumed(stream.topic)}
                for stream in STREAMS
            },
            "problems": problems,
        }


def _print_summary(summary: dict[str, Any]) -> None:
    from millrace.cli.output import print_table

    print_table(
        ["topic", "produced", "consumed"],
        [(topic, f"{one['produced']:,}", f"{one['consumed']:,}") for topic, one in summary["topics"].items()],
    )
    print(
        f"{count_text(summary['produced'], 'record')} ({size_text(summary['bytes'])}) in {summary['seconds']} s, "
        f"end to end p50 {summary['latency_p50_ms']} ms, p99 {summary['latency_p99_ms']} ms, "
        f"{summary['replayed']:,} read again after rebalances"
    )
    for problem in summary["problems"]:
        print(f"problem: {problem}")
    if summary["ok"]:
        print(f"OK: everything produced was consumed, in all {summary['partitions']} partitions, by count and checksum")
    else:
        print("FAILED: what was produced and what was consumed differ")


@contextmanager
def _stopped_by_signals(stopping: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM end the demo early, with its summary."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        stopping.set()

    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def _broker_process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A broker of its own on a free port; it is stopped and its data removed at the end."""
    home = Path(tempfile.mkdtemp(prefix="millrace-demo-"))
    log_path = home / "broker.log"
    command = [sys.executable, "-m", "millrace", "up", "--port", "0", "--data", str(home / "data")]
    with log_path.open("w") as log:
        process = subprocess.Popen(  # noqa: S603  # our own command line
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,  # Ctrl-C is for the demo, which stops the broker last
            env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
        )
    try:
        yield process, _bootstrap_of(process, log_path)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            print_remark("the broker did not stop within 10 s and was killed")
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()
        shutil.rmtree(home, ignore_errors=True)


def _bootstrap_of(process: subprocess.Popen[str], log_path: Path) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
    watchdog.start()
    try:
        line = process.stdout.readline().strip()
    finally:
        watchdog.cancel()
    prefix = "ready bootstrap="
    if not line.startswith(prefix):
        process.wait(START_TIMEOUT_S)
        reason = log_path.read_text(errors="replace").strip().splitlines()
        raise CommandError(f"the broker did not start: {reason[-1] if reason else 'no output'}")
    return line.removeprefix(prefix)
