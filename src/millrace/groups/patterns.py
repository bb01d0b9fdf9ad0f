"""Topic patterns of consumer groups: regular expressions that the broker matches for its members (KIP-848).

They are written by users, so they are matched by RE2, whose time is linear in the text whatever the pattern is; never
by Python's `re`. A pattern is bounded in length and in the memory that its automaton may take. A topic matches when
its whole name does. Not here: which member subscribes to which pattern, and how many a group may have (`modern.step`).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final

from millrace.errors import ApiError, ErrorCode

MAX_PATTERN_LENGTH: Final = 1_024
"""Characters; the name of a topic has at most 249."""
_MAX_AUTOMATON_BYTES: Final = 1024 * 1024
_COMPILED_KEPT: Final = 256


def check(pattern: str) -> None:
    """ApiError INVALID_REGULAR_EXPRESSION where the pattern cannot be used."""
    if len(pattern) > MAX_PATTERN_LENGTH:
        raise ApiError(
            ErrorCode.INVALID_REGULAR_EXPRESSION,
            f"the pattern has {len(pattern)} characters, more than {MAX_PATTERN_LENGTH}",
        )
    _compiled(pattern)


def matching(pattern: str, names: Iterable[str]) -> set[str]:
    """The names that the pattern matches as a whole; none where it cannot be used."""
    try:
        compiled = _compiled(pattern)
    except ApiError:
        # It was checked when the member brought it: only the log of another broker can hold such a one.
        return set()
    return {name for name in names if compiled.fullmatch(name) is not None}


@lru_cache(maxsize=_COMPILED_KEPT)
def _compiled(pattern: str) -> Any:
    # Only who has patterns pays for loading it.
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415

    options = re2.Options()
    options.max_mem = _MAX_AUTOMATON_BYTES
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else "it cannot be read"
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise ApiError(
            ErrorCode.INVALID_REGULAR_EXPRESSION,
            f"`{pattern}` is no pattern that RE2 understands: {text}",
        ) from error
