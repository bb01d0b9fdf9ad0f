"""One topic: where its partitions lie, its settings and where each comes from, who reads it, who may."""

from __future__ import annotations

from typing import Final, NamedTuple

from starlette.responses import Response

from millrace.admin import acls, configs
from millrace.admin.overview import PartitionRow, TopicRow, lag_of, read_starts
from millrace.console.listing import listed
from millrace.console.monitor import Monitor
from millrace.console.roles import Role
from millrace.console.web import BadInput, Page, page
from millrace.console.wording import segment
from millrace.errors import ApiError, ErrorCode
from millrace.security.acls import AclFilter, PatternKind, ResourceKind

SOURCES: Final = {"all": "all", "set": "set for this topic"}


class PartitionLine(NamedTuple):
    """A partition, and what is in it."""

    number: int
    partition: PartitionRow
    start: int | None
    end: int | None
    size_bytes: int | None


class Reader(NamedTuple):
    """A group that reads the topic."""

    name: str
    type: str
    state: str
    partitions: int
    lag: int | None


@page("/topics/{topic}")
def topic(page: Page) -> Response:
    view = page.access.companion(Monitor, Monitor).look()
    name = page.path["topic"]
    with page.access.client() as client:
        row = found_topic(page, name)
        client.learn_brokers({each.broker_id: (each.host, each.port) for each in view.topology.brokers})
        starts = read_starts(client, view.topology, [name]).get(name, ())
    ends = view.ends.get(name, ())
    sizes = () if view.sizes is None else view.sizes.leaders.get(name, ())
    lines = [
        PartitionLine(index, each, _at(starts, index), _at(ends, index), _at(sizes, index))
        for index, each in enumerate(row.partitions)
    ]
    listing = listed(
        lines,
        page.request.query_params,
        text=lambda each: str(each.number),
        columns={
            "partition": lambda each: each.number,
            "leader": lambda each: each.partition.leader,
            "records": lambda each: None if each.end is None or each.start is None else each.end - each.start,
            "size": lambda each: each.size_bytes,
        },
    )
    return page.render("topic.html", tab="partitions", name=name, row=row, listing=listing, view=view)


@page("/topics/{topic}/settings")
def topic_settings(page: Page) -> Response:
    name = page.path["topic"]
    row = found_topic(page, name)
    with page.access.client() as client:
        found = configs.read_all(client, configs.topic(name))
    only_set = page.asked("show") == "set"
    own = configs.topic(name).own_source
    listing = listed(
        [each for each in found.values() if not only_set or each.source == own],
        page.request.query_params,
        text=lambda each: f"{each.name} {each.shown}",
        columns={"name": lambda each: each.name, "source": lambda each: each.plain_source},
        keep=("show",),
    )
    return page.render(
        "topic_settings.html", tab="settings", name=name, row=row, listing=listing, own=own,
        only_set=only_set,
    )  # fmt: skip


@page("/topics/{topic}/settings", methods=["POST"], role=Role.ADMIN)
def change_topic_setting(page: Page) -> Response:
    name, setting = page.path["topic"], page.field("setting").strip()
    if not setting:
        raise BadInput("give the name of a setting")
    address = f"/topics/{segment(name)}/settings"
    with page.access.client() as client:
        if page.field("action") == "unset":
            configs.change(client, configs.topic(name), {}, [setting])
            return page.go(address, good=f"{setting} is what it is by default again", show="set")
        configs.change(client, configs.topic(name), {setting: page.field("value")})
    return page.go(address, good=f"{setting} is {page.field('value')} now", show="set")


@page("/topics/{topic}/groups")
def topic_groups(page: Page) -> Response:
    view = page.access.companion(Monitor, Monitor).look()
    name = page.path["topic"]
    row = found_topic(page, name)
    known = {each.name: each for each in view.groups.rows} if view.groups else {}
    readers = []
    for group, commits in view.commits.items():
        own = [each for each in commits if each.topic == name]
        if own and group in known:
            lags = [lag_of(each, view.ends) for each in own]
            lag = None if None in lags else sum(each or 0 for each in lags)
            readers.append(Reader(group, known[group].type, known[group].state, len(own), lag))
    listing = listed(
        readers,
        page.request.query_params,
        text=lambda each: each.name,
        columns={"name": lambda each: each.name, "lag": lambda each: each.lag, "state": lambda each: each.state},
    )
    return page.render("topic_groups.html", tab="groups", name=name, row=row, listing=listing)


@page("/topics/{topic}/rights")
def topic_rights(page: Page) -> Response:
    name = page.path["topic"]
    row = found_topic(page, name)
    reason = ""
    rules = []
    try:
        with page.access.client() as client:
            rules = acls.read_rules(client, [AclFilter(ResourceKind.TOPIC, name, PatternKind.MATCH)])
    except ApiError as error:
        if error.code not in {ErrorCode.SECURITY_DISABLED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED}:
            raise
        reason = (
            "The brokers have no authorizer: everybody may do everything."
            if error.code is ErrorCode.SECURITY_DISABLED
            else "You may not see the rules."
        )
    return page.render("topic_rights.html", tab="rights", name=name, row=row, rules=rules, reason=reason)


def found_topic(page: Page, name: str) -> TopicRow:
    """The topic, also one that was made a moment ago."""
    monitor = page.access.companion(Monitor, Monitor)
    row = monitor.look().topology.topics.get(name)
    if row is not None:
        return row
    with page.access.client() as client:
        found = client.topics([name]).get(name)
    if found is None:
        raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, f"There is no topic {name}")
    monitor.changed()
    return TopicRow(
        name,
        found.internal,
        tuple(PartitionRow(each.leader, each.replicas, each.replicas) for each in found.partitions.values()),
    )


def _at(values: tuple[int | None, ...], index: int) -> int | None:
    return values[index] if index < len(values) else None
