"""All topics, as a list; making, deleting and growing them."""

from __future__ import annotations

from typing import Final, NamedTuple

from starlette.responses import Response

from millrace.admin import topics as administration
from millrace.admin.overview import TopicRow
from millrace.console import wording
from millrace.console.listing import listed
from millrace.console.monitor import Monitor, View
from millrace.console.roles import Role
from millrace.console.web import BadInput, Page, page

KINDS: Final = ("user", "internal", "all", "problems")
MOST_PARTITIONS: Final = 100_000


class Row(NamedTuple):
    """A line of the list."""

    topic: TopicRow
    size_bytes: int | None
    rate: float | None
    groups: int
    lag: int | None


@page("/topics")
def topics(page: Page) -> Response:
    view = page.access.companion(Monitor, Monitor).look()
    shown = page.asked("show", "user")
    rows = [_row(view, topic) for topic in view.topology.topics.values() if _is_shown(topic, shown)]
    listing = listed(
        rows,
        page.request.query_params,
        text=lambda row: row.topic.name,
        columns={
            "name": lambda row: row.topic.name,
            "partitions": lambda row: len(row.topic.partitions),
            "replicas": lambda row: row.topic.replication_factor,
            "size": lambda row: row.size_bytes,
            "rate": lambda row: row.rate,
            "groups": lambda row: row.groups,
            "lag": lambda row: row.lag,
        },
        keep=("show",),
    )
    return page.render("topics.html", listing=listing, shown=shown, kinds=KINDS, view=view)


@page("/topics", methods=["POST"], role=Role.ADMIN)
def create_topic(page: Page) -> Response:
    name = page.field("name").strip()
    if not name:
        raise BadInput("give the topic a name")
    settings = parse_settings(page.field("settings"))
    with page.access.client() as client:
        answers = administration.create_topics(
            client,
            [name],
            partitions=page.field_number("partitions", 0, most=MOST_PARTITIONS) or None,
            replication_factor=page.field_number("replicas", 0, most=1000) or None,
            settings=settings,
        )
    if (error := answers[name]) is not None:
        raise error
    page.access.companion(Monitor, Monitor).changed()
    return page.go(f"/topics/{wording.segment(name)}", good=f"Topic {name} was created")


@page("/topics/{topic}/delete", methods=["POST"], role=Role.ADMIN)
def delete_topic(page: Page) -> Response:
    name = page.path["topic"]
    if page.field("name").strip() != name:
        raise BadInput(f"type the name of the topic, {name}, to delete it and everything in it")
    with page.access.client() as client:
        error = administration.delete_topics(client, [name])[name]
    if error is not None:
        raise error
    page.access.companion(Monitor, Monitor).changed()
    return page.go("/topics", good=f"Topic {name} was deleted")


@page("/topics/{topic}/grow", methods=["POST"], role=Role.ADMIN)
def grow_topic(page: Page) -> Response:
    name = page.path["topic"]
    with page.access.client() as client:
        administration.add_partitions(client, name, page.field_number("partitions", least=1, most=MOST_PARTITIONS))
    page.access.companion(Monitor, Monitor).changed()
    return page.go(
        f"/topics/{wording.segment(name)}", good=f"Topic {name} has {page.field('partitions')} partitions now"
    )


def parse_settings(text: str) -> dict[str, str]:
    """`name=value`, one on a line."""
    settings = {}
    for line in filter(None, map(str.strip, text.splitlines())):
        name, equals, value = line.partition("=")
        if not equals or not name.strip():
            raise BadInput(f"a setting is written NAME=VALUE, one on a line, not '{line[:100]}'")
        settings[name.strip()] = value.strip()
    return settings


def _is_shown(topic: TopicRow, kind: str) -> bool:
    if kind == "problems":
        return bool(topic.offline or topic.under_replicated)
    return kind == "all" or topic.internal == (kind == "internal")


def _row(view: View, topic: TopicRow) -> Row:
    lag = view.topic_lags.get(topic.name)
    return Row(
        topic,
        None if view.sizes is None else view.sizes.of_topic(topic.name).or_none,
        view.rates.get(topic.name),
        0 if lag is None else lag.groups,
        None if lag is None else lag.total,
    )
