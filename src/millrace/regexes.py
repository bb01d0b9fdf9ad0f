"""Regular expressions that users write and a broker matches: by RE2, never by Python's `re`.

RE2's time is linear in the text whatever the expression is. An expression is bounded in length and in the memory that
its automaton may take. RE2 has neither back-references nor looking ahead or behind.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final

from millrace.errors import MillraceError

MAX_LENGTH: Final = 1_024
"""Characters."""
_MAX_AUTOMATON_BYTES: Final = 1024 * 1024
_COMPILED_KEPT: Final = 256


class NoRegex(MillraceError):
    """An expression cannot be used; the text says why."""


def compiled(expression: str) -> Any:
    """What has `fullmatch`; NoRegex where the expression is too long, or none that RE2 understands."""
    if len(expression) > MAX_LENGTH:
        raise NoRegex(f"the pattern has {len(expression)} characters, more than {MAX_LENGTH}")
    return _compiled(expression)


@lru_cache(maxsize=_COMPILED_KEPT)
def _compiled(expression: str) -> Any:
    # Only who has patterns pays for loading it.
    import re2  # type: ignore[import-untyped]  # noqa: PLC0415

    options = re2.Options()
    options.max_mem = _MAX_AUTOMATON_BYTES
    options.log_errors = False
    try:
        return re2.compile(expression, options)
    except (re2.error, UnicodeError) as error:
        reason = error.args[0] if error.args else "it cannot be read"
        text = reason.decode(errors="replace") if isinstance(reason, bytes) else str(reason)
        raise NoRegex(f"`{expression}` is no pattern that RE2 understands: {text}") from error
