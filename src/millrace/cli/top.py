"""`millrace top`: what a cluster does now, again and again: rates, lags, replicas out of sync, busy partitions.

A screen on a terminal, a table per interval elsewhere, JSON for scripts. It only asks what any Kafka answers
(`admin.rates`). Where the cluster goes away it says so, and goes on when it is back. Not here: what the screen looks
like (`cli.top_view`).
"""

from __future__ import annotations

import fnmatch
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import datetime
from typing import Annotated, Final

import typer

from millrace.admin.overview import TopicRow
from millrace.admin.rates import Figures, Sample, figures, read_sample
from millrace.cli import top_view
from millrace.cli.choices import TOP_SORTS
from millrace.cli.entry import open_cluster
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, print_json, print_remark, print_table
from millrace.client.cluster import ClusterClient
from millrace.clock import SystemClock
from millrace.errors import MillraceError

PLAIN_ROWS: Final = 10
_SHORTEST_S: Final = 0.1
_PATIENCE_MS: Final = "10000"
"""For one answer. A large cluster needs seconds; one that hangs should be told of."""
_pause: Final = threading.Event()  # never set: a wait on it is a pause

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples: `millrace top`, `millrace top --topic 'orders*' --sort lag --interval 5`, "
    "`millrace top --once --json`, `millrace top -b kafka1:9092 | tee top.log`"
)
def top(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    interval: Annotated[
        float, typer.Option("--interval", "-i", min=_SHORTEST_S, metavar="SECONDS", help="How often to look.")
    ] = 2.0,
    topics: Annotated[
        list[str] | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Only topics that match, with * and ?.")
    ] = None,
    internal: Annotated[bool, typer.Option("--internal", help="Also internal topics.")] = False,
    sort: Annotated[
        str, typer.Option("--sort", help=f"By what topics are sorted: {', '.join(TOP_SORTS)}; also by keys.")
    ] = "rate",
    rows: Annotated[
        int | None,
        typer.Option(
            "--rows", "-n", min=1, help=f"So many rows of each table; {PLAIN_ROWS} without a terminal, all as JSON."
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="One interval, printed, and no more.")] = False,
    client: Client = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document per interval.")] = False,
) -> None:
    """Watch a cluster: what comes in, who lags behind, which replicas are not in sync, which partitions are busy.

    Rates are of records that came between two looks, by offsets, and of bytes, by sizes of logs: where old records went
    meanwhile, bytes are not known (-). Lag is that of the group that is furthest behind. Ctrl-C ends.
    """
    if sort not in TOP_SORTS:
        raise CommandError(f"--sort is {', '.join(TOP_SORTS[:-1])} or {TOP_SORTS[-1]}, not '{sort}'", exit_code=2)
    settings = {"request.timeout.ms": _PATIENCE_MS, **name_values(client, "--client")}
    try:
        with open_cluster(bootstrap, settings) as cluster:
            looks = Looks(cluster, _wanted(topics, internal=internal), only_readers=bool(topics))
            looks.look()  # whoever gave a wrong address hears of it now
            if once or as_json or not sys.stdout.isatty():
                _print_on(looks, interval, sort, rows, once=once, as_json=as_json)
            else:
                _show_on(looks, interval, sort, rows)
    except KeyboardInterrupt:
        pass


def _wanted(patterns: list[str] | None, *, internal: bool) -> Callable[[TopicRow], bool]:
    def wanted(topic: TopicRow) -> bool:
        if patterns:
            return any(fnmatch.fnmatchcase(topic.name, pattern) for pattern in patterns)
        return internal or not topic.internal

    return wanted


class Looks:
    """Looks at a cluster, each compared with the one before."""

    def __init__(self, cluster: ClusterClient, wanted: Callable[[TopicRow], bool], *, only_readers: bool) -> None:
        self._cluster = cluster
        self._wanted = wanted
        self._only_readers = only_readers
        self._clock = SystemClock()
        self._last: Sample | None = None
        self.figures: Figures | None = None
        """Of the last look that was answered."""
        self.took_s = 0.0
        """How long the last look took."""

    def look(self) -> None:
        """Look again. Where nobody answers, it raises, and the next look that is answered knows no rates."""
        before, self._last = self._last, None
        began_s = self._clock.monotonic()
        try:
            self._last = read_sample(self._cluster, self._clock, self._wanted)
        finally:
            self.took_s = self._clock.monotonic() - began_s
        self.figures = figures(before, self._last, only_readers=self._only_readers)

    def try_look(self) -> str | None:
        """Look again; what went wrong, or None."""
        try:
            self.look()
        except MillraceError as error:
            self._cluster.close()  # nothing that was half read is left on a connection
            return str(error)
        return None


# --- without a terminal -----------------------------------------------------------------------------------------------


def _print_on(looks: Looks, interval: float, sort: str, rows: int | None, *, once: bool, as_json: bool) -> None:
    away = False
    while True:
        # A cluster that is large enough to take longer than that is not asked without a break.
        _pause.wait(max(interval, looks.took_s))
        if once:
            looks.look()
            _print(looks, sort, rows, as_json=as_json)
            return
        trouble = looks.try_look()
        if trouble is not None:
            _print_trouble(trouble, as_json=as_json)
        elif away:
            print_remark(f"{_now():%H:%M:%S} the cluster answers again")
        else:
            _print(looks, sort, rows, as_json=as_json)
        away = trouble is not None
        sys.stdout.flush()


def _print(looks: Looks, sort: str, rows: int | None, *, as_json: bool) -> None:
    found = looks.figures
    assert found is not None
    if as_json:
        print_json({"time_ms": int(_now().timestamp() * 1000), **top_view.as_json(found, sort, rows)})
        return
    print(f"{_now():%H:%M:%S}  {top_view.heading(found)}")
    for section in top_view.sections(found, sort, rows or PLAIN_ROWS):
        print()
        print_table(section.columns, section.rows, title=section.title)
    print()


def _print_trouble(trouble: str, *, as_json: bool) -> None:
    if as_json:
        print_json({"time_ms": int(_now().timestamp() * 1000), "error": trouble})
    else:
        print_remark(f"{_now():%H:%M:%S} {trouble}; trying again")


def _now() -> datetime:
    return datetime.now().astimezone()


# --- the screen -------------------------------------------------------------------------------------------------------


def _show_on(looks: Looks, interval: float, sort: str, rows: int | None) -> None:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    trouble: str | None = None
    since = _now()

    def screen() -> Text:
        assert looks.figures is not None
        remark = "" if trouble is None else f"no answer since {since:%H:%M:%S}, trying again: {trouble}"
        width, height = console.size
        lines = top_view.screen(looks.figures, sort, width=width, height=height, most=rows, remark=remark)
        text = Text(no_wrap=True, overflow="crop", end="")
        for number, line in enumerate(lines):
            text.append(("\n" if number else "") + line.text, style="bold" if line.bold else "")
        return text

    with ExitStack() as held:
        keys = held.enter_context(_keys())
        live = held.enter_context(Live(screen(), console=console, screen=True, auto_refresh=False))
        clock = SystemClock()
        next_s = clock.monotonic() + interval
        while True:
            pressed = keys(max(next_s - clock.monotonic(), 0))
            if pressed == "q":
                return
            sort = top_view.KEYS.get(pressed, sort)
            if clock.monotonic() >= next_s:
                was_well = trouble is None
                trouble = looks.try_look()
                since = _now() if was_well else since
                next_s = clock.monotonic() + max(interval, looks.took_s)
            live.update(screen(), refresh=True)


def _no_key(seconds: float) -> str:
    _pause.wait(seconds)
    return ""


@contextmanager
def _keys() -> Iterator[Callable[[float], str]]:
    """A function that waits so many seconds for a key, and returns it, or an empty text for none."""
    if not sys.stdin.isatty():
        yield _no_key
        return
    import termios
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def wait(seconds: float) -> str:
        if not select.select([fd], [], [], seconds)[0]:
            return ""
        return os.read(fd, 1).decode(errors="replace")

    try:
        tty.setcbreak(fd)
        yield wait
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
