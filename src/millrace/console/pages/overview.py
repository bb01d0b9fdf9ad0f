"""The first page: is the cluster well, and what goes through it. Its figures and charts move by themselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final, NamedTuple

from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from millrace.admin.errors import AdminError
from millrace.console import wording
from millrace.console.monitor import Monitor, Point, View
from millrace.console.sessions import is_refused_login
from millrace.console.web import Page, events, page
from millrace.errors import ApiError
from millrace.model import NO_BROKER

EVERY_S: Final = 2.0
SHOWN: Final = 20
"""Problems that are listed; the others are counted."""


class Problem(NamedTuple):
    """Something that somebody should look at."""

    kind: str
    text: str
    path: str


@page("/")
def overview(page: Page) -> Response:
    view = page.access.companion(Monitor, Monitor).look()
    problems = problems_of(view)
    busiest = sorted(view.rates.items(), key=lambda pair: -pair[1])[:10]
    behind = sorted(view.group_lags.items(), key=lambda pair: -pair[1].known)[:10]
    return page.render(
        "overview.html",
        view=view,
        problems=problems[:SHOWN],
        more_problems=max(len(problems) - SHOWN, 0),
        values=live_values(view),
        series=series_of(view.points),
        busiest=[(name, rate) for name, rate in busiest if rate],
        behind=[(name, lag) for name, lag in behind if lag.known],
    )


@page("/reachable")
def reachable(page: Page) -> Response:
    """What an open page asks from time to time: whether the cluster answers, and if not, why. It costs one request."""
    try:
        with page.access.client() as client:
            client.broker_ids()
    except ApiError as error:
        if is_refused_login(error):
            raise
        return JSONResponse({"failure": wording.explain(error)[1]})
    return JSONResponse({"failure": ""})


@events("/events/overview")
async def overview_events(page: Page) -> AsyncIterator[tuple[str, Any]]:
    monitor = page.access.companion(Monitor, Monitor)
    while True:
        try:
            view = await run_in_threadpool(monitor.look)
        except (ApiError, AdminError) as error:
            yield (
                "failure",
                (wording.explain(error) if isinstance(error, ApiError) else wording.explain_admin(error))[1],
            )
        else:
            yield "failure", view.failure
            yield "values", live_values(view)
            yield "series", series_of(view.points)
        await asyncio.sleep(EVERY_S)


def live_values(view: View) -> dict[str, str]:
    """What stands on the page and changes, as it is shown."""
    topology = view.topology
    rate = view.records_in
    return {
        "brokers": wording.count(len(topology.brokers)),
        "controller": "none" if topology.controller_id == NO_BROKER else str(topology.controller_id),
        "topics": wording.count(len(topology.topics)),
        "partitions": wording.count(topology.partitions),
        "under-replicated": wording.count(view.under_replicated),
        "offline": wording.count(view.offline),
        "records-in": "-" if rate is None else f"{wording.count(round(rate, 1))}/s",
        "bytes-in": "-" if view.bytes_in is None else f"{wording.size(view.bytes_in)}/s",
        "groups": "-" if view.groups is None else wording.count(len(view.groups.rows)),
        "lag": wording.count(view.lag),
    }


def series_of(points: tuple[Point, ...]) -> dict[str, list[list[float | None]]]:
    """What the charts show, by their ids."""
    times: list[float | None] = [point.time_s for point in points]
    return {
        "chart-records": [times, [point.records_in for point in points]],
        "chart-bytes": [times, [point.bytes_in for point in points]],
        "chart-lag": [times, [point.lag for point in points]],
        "chart-health": [times, [point.under_replicated for point in points]],
    }


def problems_of(view: View) -> list[Problem]:
    """The worst first: no controller, no leader, brokers that are silent, replicas that are missing."""
    found = []
    if view.topology.controller_id == NO_BROKER:
        found.append(
            Problem("bad", "There is no controller: nothing can be changed, and no leader elected", "/brokers")
        )
    topics = [topic for topic in view.topology.topics.values() if topic.offline or topic.under_replicated]
    for topic in topics:
        if topic.offline:
            text = f"{topic.name}: {wording.plural(topic.offline, 'partition')} without a leader"
            found.append(Problem("bad", text, f"/topics/{wording.segment(topic.name)}"))
    for silent in view.sizes.silent if view.sizes else ():
        text = f"Broker {silent} does not tell of all its log directories"
        found.append(Problem("bad", text, f"/brokers/{silent}"))
    for topic in topics:
        if topic.under_replicated:
            text = f"{topic.name}: {wording.plural(topic.under_replicated, 'partition')} under-replicated"
            found.append(Problem("warn", text, f"/topics/{wording.segment(topic.name)}"))
    return found
