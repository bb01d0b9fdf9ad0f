"""Why something that was asked of a cluster cannot be done, in one line for people.

What a broker refuses is an `ApiError`. What is seen before a broker is asked, or made plainer than its answer, is an
`AdminError`; its text is the whole message, and ends with the command that helps where there is one.
"""

from __future__ import annotations

from millrace.errors import MillraceError


class AdminError(MillraceError):
    """What was asked for cannot be done. `reason` says why, `remedy` what to do about it on the command line.

    A `mistake` is in the question itself: the same would be wrong in any cluster.
    """

    def __init__(self, reason: str, *, remedy: str | None = None, mistake: bool = False) -> None:
        super().__init__(reason if remedy is None else f"{reason}; {remedy}")
        self.reason = reason
        self.remedy = remedy
        self.mistake = mistake


class Unreachable(AdminError):
    """Nobody answers."""
