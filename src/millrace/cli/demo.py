"""`millrace demo`: the whole system at work for a minute, and a check at the end that what went in came out.

A broker is started as its own process on a free port, or several with a ZooKeeper (`--brokers`). Sample producers write
topics and log files, three pipelines on one Spark session turn them into results in topics, in a database and in a
warehouse, and a consumer group reads beside them (`millrace.demo`). With three brokers or more one is killed half-way
and comes back. The exit code says whether everything is accounted for.
"""

from __future__ import annotations

import os
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

from millrace.admin.times import parse_duration_ms
from millrace.cli.output import CommandError, count_text, print_json, print_table, size_text
from millrace.clock import SystemClock
from millrace.installing import install_hint

if TYPE_CHECKING:
    from millrace.cli.demo_view import View
    from millrace.demo.failover import Outage
    from millrace.demo.scenario import Scenario
    from millrace.local.console import ConsoleProcess

_HOST: Final = "127.0.0.1"
_HALF_OF_FOREVER_S: Final = 30.0
_INTERRUPTED: Final = 130

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
    keep: Annotated[
        str,
        typer.Option(
            "--keep",
            metavar="DURATION",
            help="How long the brokers and the console stay afterwards, to look at what there is; 0 for not at all.",
        ),
    ] = "15m",
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; keeps nothing running.")] = False,
) -> None:
    """Watch producers, brokers and Spark pipelines at work; checks at the end that everything arrived."""
    _require_spark()
    from millrace.demo.scenario import Scenario

    kept_ms = 0 if as_json or keep == "0" else parse_duration_ms(keep)
    home = _home(data)
    with _Stop() as stop, Scenario(home, rate, brokers) as scenario:
        run = _Run(scenario, home, quiet=as_json)
        try:
            run.go(None if forever else seconds, stop)
            summary = run.summary()
        finally:
            run.console.stop()
    if as_json:
        print_json(summary)
    else:
        _print_summary(summary, home)
        if summary["ok"] and kept_ms:
            _keep(home, brokers, keep, run.console.port)
    if summary.get("stopped"):
        raise typer.Exit(_INTERRUPTED)
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


class _Run:
    """One demo from start to the final account. All times that are told count from its beginning."""

    def __init__(self, scenario: Scenario, home: Path, *, quiet: bool) -> None:
        self._scenario = scenario
        self.console = _Console(home)
        self._quiet = quiet
        self._clock = SystemClock()
        self._began_s = self._clock.monotonic()
        self._produced_s = 0.0
        self._first_result_s: float | None = None
        self._failure: str | None = None
        self._stopped = False
        self._told = ""
        self._next_line_s = 0.0

    def go(self, seconds: float | None, stop: _Stop) -> None:
        scenario = self._scenario
        for said, begin in (
            (_starting(scenario.brokers.count), scenario.start_brokers),
            ("starting Spark", scenario.start_spark),
            ("starting producers, a consumer group and three pipelines", scenario.start_work),
        ):
            if stop.asked.is_set():
                self._stopped = True
                return
            self._say(said)
            begin()
            stop.listen()
        if not self._quiet:
            self.console.start(scenario.bootstrap, self._say)
        who = "broker" if scenario.brokers.count == 1 else "brokers"
        self._say(f"{who} at {scenario.bootstrap}; first results in some seconds; Ctrl-C ends it early")
        from millrace.cli.demo_view import PLAIN_EVERY_S, View, open_screen

        view = View(scenario)
        screen, draw = open_screen(sys.stdout.isatty() and not self._quiet)
        self._next_line_s = self._now_s() + PLAIN_EVERY_S
        with screen:
            self._failure = self._watch(seconds, stop.asked, lambda: self._show(view, draw, seconds))
        if self._failure is None:
            self._say("producers stop; the pipelines work through the rest")
            self._finish(lambda: self._show(view, None, None))

    def _watch(self, seconds: float | None, stopping: threading.Event, show: Callable[[], None]) -> str | None:
        """Produce until the time is over, someone stops it, or something fails: then it says what."""
        from millrace.cli.demo_view import LIVE_EVERY_S

        scenario = self._scenario
        half_s = seconds / 2 if seconds is not None else _HALF_OF_FOREVER_S
        # One upheaval at a time: with a failover half-way, the group rebalances before it.
        plan: list[tuple[float, Callable[[], None]]] = [(half_s, scenario.change_members)]
        if scenario.can_fail_over:
            plan = [
                (half_s / 2, scenario.change_members),
                (half_s, lambda: scenario.start_failover(self._now_s())),
            ]
        started_s = self._now_s()
        while not stopping.wait(LIVE_EVERY_S):
            self._produced_s = self._now_s() - started_s
            failure = scenario.failure()
            if failure is not None or (seconds is not None and self._produced_s >= seconds):
                return failure
            if plan and self._produced_s >= plan[0][0]:
                plan.pop(0)[1]()
            show()
        self._produced_s = self._now_s() - started_s
        return None

    def _finish(self, show: Callable[[], None]) -> None:
        """Let everything come to its end, and show how far it is: Spark may need a minute or two for the rest."""
        from millrace.cli.demo_view import LIVE_EVERY_S

        finishing = _Finishing(self._scenario)
        finishing.start()
        while finishing.is_alive():
            finishing.join(LIVE_EVERY_S)
            show()
        if finishing.error is not None:
            raise finishing.error

    def _show(self, view: View, draw: Callable[[Any], None] | None, seconds: float | None) -> None:
        """What there is to see now: on the screen, or, where there is none, a line when something happened."""
        from millrace.cli.demo_view import PLAIN_EVERY_S

        self._note_first_result()
        now_s = self._now_s()
        view.sample(now_s)
        if draw is not None and sys.stdout.isatty() and not self._quiet:
            draw(view.renderable(now_s, self._produced_s, seconds))
            return
        outage = "" if self._scenario.outage is None else str(self._scenario.outage)
        if outage != self._told:
            self._told = outage
            self._say(outage)
        if now_s >= self._next_line_s:
            self._next_line_s = now_s + PLAIN_EVERY_S
            self._say(view.line())

    def _now_s(self) -> float:
        return self._clock.monotonic() - self._began_s

    def _note_first_result(self) -> None:
        if self._first_result_s is None and self._scenario.reader.counts:
            self._first_result_s = self._now_s()

    def _say(self, text: str) -> None:
        if not self._quiet:
            print(f"{self._now_s():5.1f} s  {text}", flush=True)

    def summary(self) -> dict[str, Any]:
        if self._stopped:
            return {"ok": False, "stopped": True, "problems": [], "checks": [], "results": str(self._scenario.results)}
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


class _Console:
    """The console while the demo runs, on a port that the one afterwards has again: a page that is open comes back."""

    def __init__(self, home: Path) -> None:
        from millrace.local.ports import free_ports

        self.port = free_ports(_HOST, 1)[0]
        self._log_path = home / "console.log"
        self._process: ConsoleProcess | None = None

    def start(self, bootstrap: str, say: Callable[[str], None]) -> None:
        from millrace.local.console import ConsoleProcess

        self._process = ConsoleProcess(bootstrap, f"{_HOST}:{self.port}", {}, self._log_path)
        self._process.start(
            lambda url: say(f"console at {url}, in a browser"), lambda why: say(f"the console has ended: {why}")
        )

    def stop(self) -> None:
        if self._process is not None:
            self._process.stop()


def _keep(home: Path, brokers: int, lasting: str, port: int) -> None:
    """Start brokers and console again on what is there, in the background, and say where the console is."""
    import subprocess

    words = [
        *("up", "--detach", "--data", str(home / "data"), "--port", "0", "--for", lasting),
        *(("--brokers", str(brokers)) if brokers > 1 else ()),
        *("--console", "--console-listen", f"{_HOST}:{port}"),
    ]
    started = subprocess.run(  # noqa: S603  # our own command line
        [sys.executable, "-m", "millrace", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
    )
    lines = dict(line.partition("=")[::2] for line in started.stdout.splitlines())
    if started.returncode or "console" not in lines:
        last = started.stderr.strip().splitlines()[-1:] or ["no reason given"]
        print(f"the brokers could not be left running to look at: {last[0].removeprefix('millrace: error: ')}")
        return
    millrace = Path(sys.executable).with_name("millrace")
    print(f"\nbrokers and console stay for {lasting}; to end them now: {millrace} down --data {home / 'data'}")
    print(f"open in a browser: {lines['console']}", flush=True)


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
    if summary.get("stopped"):
        print(f"stopped before anything was produced\nremove all:    rm -r {home}")
        return
    if not summary["ok"]:
        why = "what went in and what came out differ" if summary["checks"] else "it did not come to its end"
        print(f"FAILED: {why}; the logs of brokers and follower are in {home}")
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
        # Not `print`, which a signal handler may have interrupted.
        os.write(2, b"stopping, which may take a while; Ctrl-C again ends it at once\n")


class _Finishing(threading.Thread):
    """The end of the scenario, which waits for Spark, beside the thread that shows how it goes."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(name="finishing", daemon=True)
        self._scenario = scenario
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self._scenario.finish()
        except Exception as error:  # noqa: BLE001  # raised again where it is waited for
            self.error = error
