"""Pipelines: what runs on this machine and how it does, what could run; starting and stopping.

A run is known by the status that it keeps itself (`millrace.spark.pipelines.status`), whoever started it. Started from
here are only the pipelines that come with millrace and the files that lie directly in the folder that the console was
given: what a browser sends chooses among these, and is never part of a path or of a command line. A run that was
started here outlives the console, and logs in to the brokers as who started it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import Response

from millrace.console import wording
from millrace.console.listing import listed
from millrace.console.sessions import Access
from millrace.console.settings import ConsoleSettings, Login
from millrace.console.web import BadInput, Page, events, page
from millrace.errors import ConfigError
from millrace.security.hiding import HIDDEN, is_secret
from millrace.spark.pipelines import contract, control
from millrace.spark.pipelines.contract import Pipeline
from millrace.spark.pipelines.status import QueryStatus, RunStatus, State, default_runs, read_run, read_runs

EVERY_S: Final = 2.0
_FIELD: Final = "option."
_CLOSED: Final = (
    "Pipelines are processes of the machine that the console runs on. Users of the brokers see, start and stop them "
    "only if the console was started with --pipelines DIR"
)
_KINDS: Final = {
    State.STARTING: "info",
    State.RUNNING: "good",
    State.RESTARTING: "warn",
    State.STOPPING: "warn",
    State.FAILED: "bad",
    State.KILLED: "bad",
}


class Offer(NamedTuple):
    """Something that can be started, or a file in the folder that cannot."""

    key: str
    """What a browser chooses it by: the name of one that comes with millrace, or that of a file."""
    pipeline: Pipeline | None
    problem: str = ""


class Field(NamedTuple):
    """An option in the form."""

    name: str
    value: str
    doc: str
    required: bool
    secret: bool


class Asked:
    """The runs that somebody has asked to stop, as long as the console runs; asking again does not wait for them."""

    def __init__(self, _: Access) -> None:
        self._runs: set[str] = set()

    def __repr__(self) -> str:
        return f"Asked({len(self._runs)} runs)"

    def __contains__(self, run_id: str) -> bool:
        return run_id in self._runs

    def add(self, run_id: str) -> None:
        self._runs.add(run_id)


# --- the pages --------------------------------------------------------------------------------------------------------


@page("/pipelines")
def pipelines(page: Page) -> Response:
    _require_open(page.settings)
    runs = read_runs(_folder(page.settings))
    listing = listed(
        runs,
        page.request.query_params,
        text=lambda run: f"{run.pipeline} {run.state.value} {run.bootstrap} {run.run_id}",
        columns={
            "state": lambda run: (run.state.is_over, -run.started_ms),
            "name": lambda run: run.pipeline,
            "since": lambda run: run.started_ms,
            "in": lambda run: run.input_rate,
            "out": lambda run: run.processed_rate,
            "lag": lambda run: run.lag,
        },
    )
    return page.render(
        "pipelines.html",
        listing=listing,
        kinds=_KINDS,
        seen=_seen_list(runs),
        values=list_values(runs),
        offers=offers(page.settings.pipelines),
        missing=control.missing_package(),
    )


@page("/pipelines/start")
def pipeline_form(page: Page) -> Response:
    _require_open(page.settings)
    pipeline = _chosen(page.settings, page.asked("pipeline"))
    before = read_run(_folder(page.settings), page.asked("run"))
    return page.render(
        "pipeline_start.html",
        pipeline=pipeline,
        key=page.asked("pipeline"),
        form_fields=form_fields(pipeline, before.options if before is not None else {}),
        prefix=_FIELD,
        missing=control.missing_package(),
    )


@page("/pipelines/start", methods=["POST"])
def start_pipeline(page: Page) -> Response:
    _require_open(page.settings)
    pipeline = _chosen(page.settings, page.field("pipeline"))
    options = {
        option.name: value
        for option in pipeline.options
        if (value := page.field(_FIELD + option.name, option.default or "").strip()) or option.default is not None
    }
    try:
        run_id = control.start_run(
            pipeline,
            options,
            bootstrap=page.settings.bootstrap,
            client=page.access.given_properties(),
            folder=_folder(page.settings),
            once=page.field("once") == "yes",
        )
    except ConfigError as error:
        raise BadInput(str(error).replace("--option ", "")) from None
    return page.go(f"/pipelines/runs/{run_id}", good=f"Pipeline {pipeline.name} was started")


@page("/pipelines/runs/{run}")
def pipeline_run(page: Page) -> Response:
    run = _found(page)
    folder = _folder(page.settings)
    keys = {offer.key for offer in offers(page.settings.pipelines) if _is_of(offer, run)}
    return page.render(
        "pipeline.html",
        run=run,
        kind=_KINDS.get(run.state, ""),
        seen=_seen(run),
        series=series_of(run.queries),
        values=run_values(run),
        names=[each.figures.name for each in run.queries],
        log=control.log_tail(folder, run.run_id),
        start_key=next(iter(keys), ""),
        was_asked=run.state is State.STOPPING or run.run_id in page.access.companion(Asked, Asked),
    )


@page("/pipelines/runs/{run}/stop", methods=["POST"])
def stop_pipeline(page: Page) -> Response:
    run = _found(page)
    address = f"/pipelines/runs/{run.run_id}"
    asked = page.access.companion(Asked, Asked)
    if page.field("action") == "kill":
        if not control.stop_run(run, kill=True):
            return page.go(address, bad="It was over already")
        return page.go(address, good="It was killed; the batches that ran are done again by its next run")
    if run.run_id in asked and not run.state.is_over:
        return page.go(address, bad="It was asked to stop already, and finishes its batches")
    if not control.stop_run(run):
        return page.go(address, bad="It was over already")
    asked.add(run.run_id)
    return page.go(address, good="It was asked to stop; batches that run are finished first")


# --- what moves -------------------------------------------------------------------------------------------------------


@events("/events/pipelines")
async def pipelines_events(page: Page) -> AsyncIterator[tuple[str, Any]]:
    while not _closed(page.settings):
        runs = await run_in_threadpool(read_runs, _folder(page.settings))
        if _seen_list(runs) == page.asked("seen"):
            yield "values", list_values(runs)
        else:
            yield "reload", ""
        await asyncio.sleep(EVERY_S)
    yield "failure", _CLOSED


@events("/events/pipelines/{run}")
async def pipeline_events(page: Page) -> AsyncIterator[tuple[str, Any]]:
    folder, run_id = _folder(page.settings), str(page.path["run"])
    log: str | None = None
    while not _closed(page.settings):
        run = await run_in_threadpool(read_run, folder, run_id)
        if run is None:
            yield "failure", "There is no such run any more"
            return
        if _seen(run) == page.asked("seen"):
            before, log = log, await run_in_threadpool(control.log_tail, folder, run_id)
            yield "values", {**run_values(run), **({} if log in (None, before) else {"log": log})}
            yield "series", series_of(run.queries)
        else:
            yield "reload", ""
        await asyncio.sleep(EVERY_S)
    yield "failure", _CLOSED


def list_values(runs: Sequence[RunStatus]) -> dict[str, str]:
    """What changes in the list, as it is shown."""
    found = {}
    for run in runs:
        found[f"{run.run_id}:in"] = _rate(run.input_rate, run)
        found[f"{run.run_id}:out"] = _rate(run.processed_rate, run)
        found[f"{run.run_id}:lag"] = wording.count(run.lag)
    return found


def run_values(run: RunStatus) -> dict[str, str]:
    """What changes on the page of a run, as it is shown."""
    found = {"records": wording.count(run.records_read), "restarts": wording.count(run.restart_count)}
    for place, query in enumerate(run.queries):
        figures = query.figures
        found |= {
            f"{place}:batch": wording.count(figures.batch_id),
            f"{place}:rows": wording.count(figures.input_rows),
            f"{place}:in": _rate(figures.input_rate, run),
            f"{place}:out": _rate(figures.processed_rate, run),
            f"{place}:lag": wording.count(figures.lag),
            f"{place}:took": wording.duration(figures.batch_ms / 1000),
            f"{place}:late": wording.count(figures.late_rows),
            f"{place}:state": f"{wording.plural(figures.state_rows, 'row')}, {wording.size(figures.state_bytes)}",
        }
    return found


def series_of(queries: Sequence[QueryStatus]) -> dict[str, list[list[float | None]]]:
    """What the charts show, by their ids, a line for each query. What a query last said holds until it says more."""
    times = sorted({point.time_ms for query in queries for point in query.points})
    charts: dict[str, list[list[float | None]]] = {
        name: [[time / 1000 for time in times]] for name in ("chart-in", "chart-out", "chart-lag", "chart-took")
    }
    for query in queries:
        lines: list[tuple[float | None, ...]] = []
        points = iter(query.points)
        following = next(points, None)
        newest: tuple[float | None, ...] = (None, None, None, None)
        for time in times:
            if following is not None and following.time_ms == time:
                newest = (following.input_rate, following.processed_rate, following.lag, following.batch_ms)
                following = next(points, None)
            lines.append(newest)
        for place, chart in enumerate(charts.values()):
            chart.append([line[place] for line in lines])
    return charts


def _rate(rate: float | None, run: RunStatus) -> str:
    return "-" if rate is None or run.state.is_over else f"{wording.count(round(rate, 1))}/s"


def _seen(run: RunStatus) -> str:
    """What a page was made for: when it is another one, the page has to be made again."""
    return f"{run.state.value}-{len(run.queries)}-{run.restart_count}"


def _seen_list(runs: Sequence[RunStatus]) -> str:
    going = [f"{run.run_id[-6:]}{run.state.value}" for run in runs if not run.state.is_over]
    return "-".join([str(len(runs)), *going[:50]])


# --- what can be started ----------------------------------------------------------------------------------------------


def offers(folder: Path | None) -> list[Offer]:
    """What comes with millrace, and the files directly in the folder, read but not run."""
    found = [Offer(each.name, each) for each in contract.built_in()]
    for path in sorted(folder.absolute().glob("*.py")) if folder is not None else ():
        if not path.is_file():
            continue
        try:
            found.append(Offer(path.name, contract.read(path)))
        except (ConfigError, OSError, ValueError) as error:
            found.append(Offer(path.name, None, str(error)))
    return found


def form_fields(pipeline: Pipeline, before: Mapping[str, str]) -> list[Field]:
    """The options, with what they were in an earlier run; secrets are not kept, and have to be given again."""
    return [
        Field(
            option.name,
            value if (value := before.get(option.name, HIDDEN)).count(HIDDEN) == 0 else option.default or "",
            option.doc,
            option.default is None,
            is_secret(option.name),
        )
        for option in pipeline.options
    ]


def _chosen(settings: ConsoleSettings, key: str) -> Pipeline:
    for offer in offers(settings.pipelines):
        if offer.key == key:
            if offer.pipeline is None:
                raise BadInput(offer.problem)
            return offer.pipeline
    raise HTTPException(404, f"There is no pipeline '{key[:100]}' here")


def _is_of(offer: Offer, run: RunStatus) -> bool:
    return offer.pipeline is not None and str(offer.pipeline.path) == run.file


def _folder(settings: ConsoleSettings) -> Path:
    return (settings.pipeline_runs or default_runs()).absolute()


def _found(page: Page) -> RunStatus:
    _require_open(page.settings)
    run = read_run(_folder(page.settings), page.path["run"])
    if run is None:
        raise HTTPException(404, "There is no such run, or what was kept of it is gone")
    return run


def _closed(settings: ConsoleSettings) -> bool:
    """Users of the brokers need not be people who may have processes on this machine."""
    return settings.login is Login.BROKERS and settings.pipelines is None


def _require_open(settings: ConsoleSettings) -> None:
    if _closed(settings):
        raise HTTPException(403, _CLOSED)
