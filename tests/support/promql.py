"""What a PromQL expression names: its metrics with the labels that are matched, and the labels that it groups by.

Just enough of the language to hold queries against the catalogue of metrics; whether they are well-formed is for
promtool to say, or for Prometheus.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+)
      | (?P<string>"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')
      | (?P<range>\[[^\]]*\])
      | (?P<number>\d[\w.]*(?:[eE][+-]?\d+)?)
      | (?P<name>[A-Za-z_:][\w:]*)
      | (?P<operator>=~|!~|!=|==|<=|>=|[-+*/%^=<>(){},@])""",
    re.VERBOSE,
)
_GROUPINGS: Final = frozenset({"by", "without", "on", "ignoring", "group_left", "group_right"})
_WORDS: Final = frozenset({"and", "or", "unless", "bool", "offset", "inf", "nan"})


class NotPromQL(Exception):
    """There is something in it that no query has."""


@dataclass(frozen=True)
class Selector:
    """A metric as it is asked for; the name is empty where only labels are given."""

    name: str
    labels: frozenset[str]
    function: str
    """The function whose first argument it is, or an empty text."""


@dataclass
class Named:
    """All that an expression names."""

    selectors: list[Selector] = field(default_factory=list)
    grouping: set[str] = field(default_factory=set)
    """Labels after `by`, `on` and the like."""
    functions: set[str] = field(default_factory=set)
    joins: bool = False
    """Whether lines of one side keep their labels (`group_left`, `group_right`)."""


def tokens(expression: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each token."""
    position = 0
    while position < len(expression):
        found = _TOKEN.match(expression, position)
        if found is None:
            raise NotPromQL(f"at {expression[position : position + 20]!r} in {expression}")
        position = found.end()
        kind = found.lastgroup
        assert kind is not None
        if kind != "space":
            yield kind, found[0]


def named_in(expression: str) -> Named:
    """What an expression names."""
    found = Named()
    parts = [*tokens(expression), ("end", "")]
    index = 0
    while index < len(parts):
        kind, text = parts[index]
        following = parts[index + 1][1] if index + 1 < len(parts) else ""
        if kind == "name" and text in _GROUPINGS:
            labels, index = _list_of_labels(parts, index + 1, ")")
            found.grouping |= labels
            found.joins |= text.startswith("group_")
        elif kind == "name" and text.lower() in _WORDS:
            index += 1
        elif kind == "name" and (following == "(" or (following in _GROUPINGS and _is_aggregated(parts, index))):
            found.functions.add(text)
            index += 1
        elif kind == "name" or text == "{":
            name, start = (text, index + 1) if kind == "name" else ("", index)
            labels, end = _list_of_labels(parts, start, "}") if parts[start][1] == "{" else (set(), start)
            found.selectors.append(Selector(name, frozenset(labels), _function_before(parts, index)))
            index = end
        else:
            index += 1
    return found


def _is_aggregated(parts: list[tuple[str, str]], index: int) -> bool:
    """`sum by (...)` and not `metric on (...)`."""
    return parts[index + 1][1] in ("by", "without")


def _function_before(parts: list[tuple[str, str]], index: int) -> str:
    if index >= 2 and parts[index - 1][1] == "(" and parts[index - 2][0] == "name":
        return parts[index - 2][1]
    return ""


def _list_of_labels(parts: list[tuple[str, str]], start: int, end: str) -> tuple[set[str], int]:
    """The names between brackets, and where it goes on."""
    index = start + 1
    labels = set()
    while parts[index][1] != end:
        if parts[index][0] == "end":
            raise NotPromQL(f"{end} is missing")
        if parts[index][0] == "name":
            labels.add(parts[index][1])
        index += 1
    return labels, index + 1
