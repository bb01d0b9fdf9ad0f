"""Topic patterns of consumer groups: regular expressions that the broker matches for its members (KIP-848).

A topic matches when its whole name does. Not here: what an expression may be (`regexes`), which member subscribes to
which pattern, and how many a group may have (`modern.step`).
"""

from __future__ import annotations

from collections.abc import Iterable

from millrace.errors import ApiError, ErrorCode
from millrace.regexes import MAX_LENGTH, NoRegex, compiled

MAX_PATTERN_LENGTH = MAX_LENGTH
"""Characters; the name of a topic has at most 249."""


def check(pattern: str) -> None:
    """ApiError INVALID_REGULAR_EXPRESSION where the pattern cannot be used."""
    try:
        compiled(pattern)
    except NoRegex as error:
        raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, str(error)) from error


def matching(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that the pattern matches as a whole; none where it cannot be used."""
    try:
        expression = compiled(pattern)
    except NoRegex:
        # It was checked when the member brought it: only the log of another broker can hold such a one.
        return set()
    return {name for name in names if expression.fullmatch(name) is not None}
