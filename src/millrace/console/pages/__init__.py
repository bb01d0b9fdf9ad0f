"""The pages, one module each, and the menu that leads to them."""

from __future__ import annotations

from types import ModuleType
from typing import Final, NamedTuple

from starlette.routing import Route

from millrace.console.pages import (
    brokers,
    entrance,
    groups,
    overview,
    pipelines,
    produce,
    queues,
    records,
    security,
    topic,
    topics,
)

ALL: Final[tuple[ModuleType, ...]] = (
    entrance,
    overview,
    topics,
    topic,
    records,
    produce,
    groups,
    queues,
    brokers,
    security,
    pipelines,
)


class MenuItem(NamedTuple):
    """A line of the menu; `key` leads there after `g`."""

    path: str
    title: str
    key: str


MENU: Final = (
    MenuItem("/", "Overview", "o"),
    MenuItem("/topics", "Topics", "t"),
    MenuItem("/groups", "Groups", "g"),
    MenuItem("/queues", "Queues", "q"),
    MenuItem("/brokers", "Brokers", "b"),
    MenuItem("/security", "Security", "s"),
    MenuItem("/pipelines", "Pipelines", "p"),
)


def routes() -> list[Route]:
    """Of all pages, as their modules declare them."""
    return [each for module in ALL for each in vars(module).values() if isinstance(each, Route)]
