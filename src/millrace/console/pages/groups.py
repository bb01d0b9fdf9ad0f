"""Groups: how far each is, in records and in time, who its members are; moving it, with the change shown before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from starlette.responses import Response

from millrace.admin import groups as administration
from millrace.admin.groups import GroupView, PartitionLag, Shift, Target
from millrace.admin.overview import GroupRow
from millrace.admin.topics import chosen_partitions
from millrace.admin.waiting import first_unread_ms
from millrace.admin.words import Sum
from millrace.client.cluster import ClusterClient
from millrace.clock import SystemClock
from millrace.console.listing import listed
from millrace.console.monitor import Monitor
from millrace.console.records.times import parse_time_ms
from millrace.console.web import BadInput, Page, page
from millrace.console.wording import plural, segment
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition

TYPES: Final = ("all", "classic", "consumer", "share", "streams")
LOOK_S: Final = 1.5
"""How long a page spends on asking how old unread records are."""


class GroupLine(NamedTuple):
    """A group in the list."""

    group: GroupRow
    lag: Sum | None
    topics: int


class LagLine(NamedTuple):
    """A partition that a group reads."""

    lag: PartitionLag
    waiting_s: float | None
    """The age of the first record that was not read; 0 if all were, None if it is not known."""


@page("/groups")
def groups(page: Page) -> Response:
    view = page.access.companion(Monitor, Monitor).look()
    kind = page.asked("type", "all")
    rows = [
        GroupLine(each, view.group_lags.get(each.name), len({one.topic for one in view.commits.get(each.name, ())}))
        for each in (view.groups.rows if view.groups else ())
        if kind in {"all", each.type}
    ]
    listing = listed(
        rows,
        page.request.query_params,
        text=lambda line: f"{line.group.name} {line.group.state} {line.group.type}",
        columns={
            "name": lambda line: line.group.name,
            "type": lambda line: line.group.type,
            "state": lambda line: line.group.state,
            "topics": lambda line: line.topics,
            "lag": lambda line: None if line.lag is None else line.lag.known,
        },
        keep=("type",),
    )
    return page.render("groups.html", listing=listing, kind=kind, types=TYPES, view=view)


@page("/groups/{group:path}/reset", methods=["POST"])
def reset_group(page: Page) -> Response:
    """Show where a group would be moved to, or move it."""
    name = page.path["group"]
    with page.access.client() as client:
        committed = administration.committed_offsets(client, name)
        plan = _plan(page, client, committed)
        if page.field("action") == "move":
            administration.check_movable(client, name, now=True)
            administration.execute(client, name, plan)
            page.access.companion(Monitor, Monitor).changed()
            return page.go(f"/groups/{segment(name)}", good=f"{plural(len(plan), 'partition')} moved")
        administration.check_movable(client, name, now=False)
        return _show(page, client, _described(client, name), plan)


@page("/groups/{group:path}/delete", methods=["POST"])
def delete_group(page: Page) -> Response:
    name = page.path["group"]
    if page.field("name") != name:
        raise BadInput(f"type the name of the group, {name}, to delete it and its offsets")
    with page.access.client() as client:
        administration.delete_group(client, name)
    page.access.companion(Monitor, Monitor).changed()
    return page.go("/groups", good=f"Group {name} was deleted")


@page("/groups/{group:path}/forget", methods=["POST"])
def forget_topic(page: Page) -> Response:
    """Have the group forget what it has committed of one topic."""
    name, topic = page.path["group"], page.field("topic")
    with page.access.client() as client:
        committed = administration.committed_offsets(client, name)
        places = [each for each in committed if each.topic == topic]
        refused = administration.delete_offsets(client, name, places)
    if refused:
        place, why = next(iter(refused.items()))
        raise BadInput(f"{place}: {why}")
    page.access.companion(Monitor, Monitor).changed()
    # A group that has nothing left is no more.
    after = f"/groups/{segment(name)}" if len(places) < len(committed) else "/groups"
    return page.go(after, good=f"The group has forgotten {plural(len(places), 'partition')} of {topic}")


@page("/groups/{group:path}")
def group(page: Page) -> Response:
    name = page.path["group"]
    with page.access.client() as client:
        found = _described(client, name)
        if found.type == administration.SHARE:
            return page.go(f"/queues/{segment(name)}")
        return _show(page, client, found, None)


def _described(client: ClusterClient, name: str) -> GroupView:
    found = administration.describe_group(client, name)
    if found is None:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"There is no group {name}")
    return found


def _show(page: Page, client: ClusterClient, found: GroupView, plan: list[Shift] | None) -> Response:
    lags = administration.read_lag(client, found)
    listing = listed(
        lags,
        page.request.query_params,
        text=lambda each: str(each.place),
        columns={"partition": lambda each: each.place, "lag": lambda each: each.lag},
    )
    waiting = _waiting(client, listing.rows)
    topics = sorted({each.place.topic for each in lags})
    return page.render(
        "group.html",
        group=found,
        listing=listing,
        lines=[LagLine(each, waiting.get(each.place)) for each in listing.rows],
        total=administration.total_lag(lags),
        topics=topics,
        plan=plan,
        asked={key: page.field(key) for key in ("to", "offset", "time", "by")} | {"topics": page.fields("topics")},
    )


def _waiting(client: ClusterClient, lags: Sequence[PartitionLag]) -> dict[TopicPartition, float]:
    """How long what is not read has waited, by partition, where that is known."""
    behind = {each.place: each.committed for each in lags if each.lag and each.committed is not None}
    now_ms = SystemClock().wall_ms()
    times = first_unread_ms(client, behind, limit_s=LOOK_S)
    waiting = {place: max(now_ms - ms, 0) / 1000 for place, ms in times.items()}
    return waiting | {each.place: 0.0 for each in lags if each.lag == 0}


def _plan(page: Page, client: ClusterClient, committed: Mapping[TopicPartition, int]) -> list[Shift]:
    topics = [each for each in page.fields("topics") if each]
    chosen = chosen_partitions(client, topics) if topics else sorted(committed)
    if not chosen:
        raise BadInput("the group has committed nothing: name the topics that it is to be moved in")
    return administration.plan_reset(client, chosen, committed, target_of(page))


def target_of(page: Page) -> Target:
    """Where a form wants offsets to be moved to."""
    match page.field("to"):
        case "earliest":
            return Target(earliest=True)
        case "latest":
            return Target(latest=True)
        case "offset":
            return Target(offset=page.field_number("offset"))
        case "by":
            return Target(by=page.field_number("by", least=-(2**62)))
        case "time":
            try:
                return Target(time_ms=parse_time_ms(page.field("time"), now_ms=SystemClock().wall_ms()))
            except ValueError as error:
                raise BadInput(str(error)) from None
    raise BadInput("say where to: the first record, the end, an offset, a time, or so many records on or back")
