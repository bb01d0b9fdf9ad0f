"""`millrace demo`: the whole system at work for a minute, and a check at the end that what went in came out.

A broker is started as its own process on a free port, or several with a ZooKeeper (`--brokers`). Sample producers write
topics and log files, three pipelines on one Spark session turn them into results in topics, in a database and in a
warehouse, and a consumer group reads beside them (`millrace.demo`). With three brokers or more one is killed half-way
and comes back. The exit code says whether everything is accounted for.
"""

from __future__ import annotations

import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer

from millrace.cli.output import CommandError, count_text, print_json, print_table, size_text
from millrace.clock import SystemClock
from millrace.installing import install_hint

if TYPE_CHECKING:
    from millrace.demo.failover import Outage
    from millrace.demo.scenario import Scenario

_HALF_OF_FOREVER_S: Final = 30.0

app = typer.Typer(add_completion=False)


@app.command(epilog="Example: millrace demo --seconds 20 --brokers 3")
def demo(
    *,
    seconds: Annotated[float, typer.Option("--seconds", min=5, help="How long to produce.")] = 60.0,
    forever: Annotated[bool, typer.Option("--forever", help="Until Ctrl-C.")] = False,
    brokers: Annotated[
        int,
        typer.Option(
            "--brokers",
            "-n",
            min=1,
            help="How many. Several share a ZooKeeper; of three or more one is killed half-way and started again.",
        ),
    ] = 1,
    rate: Annotated[int, typer.Option("--rate", min=100, help="Records per second, all producers together.")] = 3000,
    data: Annotated[
        Path | None,
        typer.Option("--data", help="An empty or new folder for everything [default: a new temporary one]."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Watch producers, brokers and Spark pipelines at work; checks at the end that everything arrived."""
    _require_spark()
    from millrace.demo.scenario import Scenario

    home = _home(data)
    with _Stop() as stop, Scenario(home, rate, brokers) as scenario:
        run = _Run(scenario, quiet=as_json)
        run.go(None if forever else seconds, stop)
        summary = run.summary()
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, home)
    if not summary["ok"]:
        raise typer.Exit(1)


def _require_spark() -> None:
    from importlib.util import find_spec

    missing = [name for name in ("pyspark", "pyarrow", "numba", "deltalake") if find_spec(name) is None]
    if missing:
        raise CommandError(f"the demo needs {', '.join(missing)}: {install_hint('spark')}")


def _home(data: Path | None) -> Path:
    if data is None:
        return Path(tempfile.mkdtemp(prefix="millrace-demo-"))
    if data.exists() and (not data.is_dir() or any(data.iterdir())):
        raise CommandError(f"--data {data} has to be an empty folder or a new one", exit_code=2)
    return data.absolute()


def _starting(brokers: int) -> str:
    return "starting a broker" if brokers == 1 else f"starting ZooKeeper and {brokers} brokers"


def _tell_news(outage: Outage | None, told: str, elapsed_s: float) -> str:
    """Print what is new about the failover; returns what is told now."""
    text = "" if outage is None else str(outage)
    if text != told:
        print(f"{elapsed_s:5.1f} s  {text}", flush=True)
    return text


class _Run:
    """One demo from start to the final account."""

    def __init__(self, scenario: Scenario, *, quiet: bool) -> None:
        self._scenario = scenario
        self._quiet = quiet
        self._clock = SystemClock()
        self._began_s = self._clock.monotonic()
        self._produced_s = 0.0
        self._first_result_s: float | None = None
        self._failure: str | None = None

    def go(self, seconds: float | None, stop: _Stop) -> None:
        scenario = self._scenario
        for said, begin in (
            (_starting(scenario.brokers.count), scenario.start_brokers),
            ("starting Spark", scenario.start_spark),
            ("starting producers, a consumer group and three pipelines", scenario.start_work),
        ):
            if stop.asked.is_set():
                self._failure = "stopped before it began"
                return
            self._say(said)
            begin()
            stop.listen()
        who = "broker" if scenario.brokers.count == 1 else "brokers"
        self._say(f"{who} at {scenario.bootstrap}; first results in some seconds; Ctrl-C ends it early")
        started_s = self._clock.monotonic()
        self._failure = self._watch(seconds, stop.asked)
        self._produced_s = self._clock.monotonic() - started_s
        if self._failure is None:
            self._say("producers stop; the pipelines work through the rest")
            scenario.finish()

    def _watch(self, seconds: float | None, stopping: threading.Event) -> str | None:
        """Show what happens until the time is over, someone stops it, or something fails."""
        from millrace.cli.demo_view import LIVE_EVERY_S, PLAIN_EVERY_S, View, open_screen

        scenario = self._scenario
        view = View(scenario)
        terminal = sys.stdout.isatty() and not self._quiet
        screen, draw = open_screen(terminal)
        half_s = seconds / 2 if seconds is not None else _HALF_OF_FOREVER_S
        # One upheaval at a time: with a failover half-way, the group rebalances before it.
        plan: list[tuple[float, Callable[[float], None]]] = [(half_s, lambda _: scenario.change_members())]
        if scenario.can_fail_over:
            plan = [(half_s / 2, lambda _: scenario.change_members()), (half_s, scenario.start_failover)]
        next_line_s, told = PLAIN_EVERY_S, ""
        started_s = self._clock.monotonic()
        with screen:
            while not stopping.wait(LIVE_EVERY_S):
                elapsed_s = self._clock.monotonic() - started_s
                failure = scenario.failure()
                if failure is not None or (seconds is not None and elapsed_s >= seconds):
                    return failure
                if plan and elapsed_s >= plan[0][0]:
                    plan.pop(0)[1](elapsed_s)
                self._note_first_result()
                view.sample(self._clock.monotonic())
                if terminal:
                    draw(view.renderable(elapsed_s, seconds))
                elif not self._quiet:
                    told = _tell_news(scenario.outage, told, elapsed_s)
                    if elapsed_s >= next_line_s:
                        print(view.line(elapsed_s), flush=True)
                        next_line_s += PLAIN_EVERY_S
        return None

    def _note_first_result(self) -> None:
        if self._first_result_s is None and self._scenario.reader.counts:
            self._first_result_s = self._clock.monotonic() - self._began_s

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"{self._clock.monotonic() - self._began_s:5.1f} s  {text}", flush=True)

    def summary(self) -> dict[str, Any]:
        if self._failure is not None:
            return {"ok": False, "problems": [self._failure], "checks": [], "results": str(self._scenario.results)}
        self._note_first_result()
        scenario = self._scenario
        checks = scenario.checks()
        problems = scenario.problems()
        return {
            "ok": not problems and all(check.ok for check in checks) and scenario.account.total() > 0,
            "brokers": scenario.brokers.count,
            "failover": None if scenario.outage is None else _failover_row(scenario.outage),
            "seconds": round(self._produced_s, 1),
            "first_result_s": None if self._first_result_s is None else round(self._first_result_s, 1),
            "records": scenario.account.total(),
            "bytes": scenario.account.bytes,
            "log_lines": scenario.lines_written().total(),
            "read_again": scenario.archive.read_again,
            "latency_p50_ms": scenario.archive.latency_ms(0.5),
            "latency_p99_ms": scenario.archive.latency_ms(0.99),
            "checks": [
                {"what": one.what, "expected": one.expected, "found": one.found, "late": one.late, "ok": one.ok}
                for one in checks
            ],
            "results": str(scenario.results),
            "problems": problems,
        }


def _failover_row(outage: Outage) -> dict[str, Any]:
    row = {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(outage).items()}
    return {**row, "text": str(outage)}


def _print_summary(summary: dict[str, Any], home: Path) -> None:
    if summary["checks"]:
        print_table(
            ["what came out", "expected", "found", "late", ""],
            [
                (one["what"], f"{one['expected']:,}", f"{one['found']:,}", one["late"], "ok" if one["ok"] else "WRONG")
                for one in summary["checks"]
            ],
        )
        print(
            f"{count_text(summary['records'], 'record')} ({size_text(summary['bytes'])}) and "
            f"{count_text(summary['log_lines'], 'log line')} through {count_text(summary['brokers'], 'broker')} in "
            f"{summary['seconds']} s; first result after "
            f"{summary['first_result_s']} s; chat end to end p50 {summary['latency_p50_ms']} ms, "
            f"p99 {summary['latency_p99_ms']} ms, {summary['read_again']:,} read again after the rebalance"
        )
        if summary["failover"] is not None:
            print(summary["failover"]["text"])
    for problem in summary["problems"]:
        print(f"problem: {problem}")
    if not summary["ok"]:
        print(f"FAILED: what went in and what came out differ; the logs of brokers and follower are in {home}")
        return
    print("OK: everything that went in came out, once")
    print(_how_to_look(home, summary["brokers"]))


def _how_to_look(home: Path, brokers: int) -> str:
    python, millrace = Path(sys.executable), Path(sys.executable).with_name("millrace")
    database, warehouse = home / "results" / "metrics.db", home / "results" / "logs"
    up = f"up --data {home / 'data'}" + (f" --brokers {brokers}" if brokers > 1 else "")
    newest = "SELECT * FROM cpu_by_host ORDER BY window_start DESC LIMIT 10"
    return f"""
the results, to look at:
  database     {python} -c "import sqlite3; print(*sqlite3.connect('{database}').execute('{newest}'), sep='\\n')"
  warehouse    {python} -c "import deltalake; print(deltalake.DeltaTable('{warehouse}').to_pandas())"
  topics       {millrace} {up}   and in another terminal
               {millrace} consume clicks-enriched-web --from-beginning --no-follow
remove all:    rm -r {home}"""


class _Stop:
    """Ctrl-C and SIGTERM end the demo early, with its summary; a second one ends it at once."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self.listen()
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def listen(self) -> None:
        """Needed again once Spark has started: its session takes Ctrl-C for itself."""
        for number in self._previous:
            signal.signal(number, self._stop)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        if self.asked.is_set():
            raise KeyboardInterrupt
        self.asked.set()
