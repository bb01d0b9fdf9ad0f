"""The pages, one module each, and the menu that leads to them."""

from __future__ import annotations

from types import ModuleType
from typing import Final, NamedTuple

from starlette.routing import Route

from millrace.console.pages import brokers, entrance, overview, produce, records, topic, topics

ALL: Final[tuple[ModuleType, ...]] = (entrance, overview, topics, topic, records, produce, brokers)


class MenuItem(NamedTuple):
    """A line of the menu; `key` leads there after `g`."""

    path: str
    title: str
    key: str


MENU: Final = (
    MenuItem("/", "Overview", "o"),
    MenuItem("/topics", "Topics", "t"),
    MenuItem("/brokers", "Brokers", "b"),
)


def routes() -> list[Route]:
    """Of all pages, as their modules declare them."""
    return [each for module in ALL for each in vars(module).values() if isinstance(each, Route)]
