"""Who is at the other end of a connection, once that is known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

ANONYMOUS_PRINCIPAL: Final = "User:ANONYMOUS"


@dataclass(frozen=True, slots=True)
class Session:
    """What a login came to. Without one (PLAINTEXT), everybody is the same."""

    principal: str = ANONYMOUS_PRINCIPAL
    mechanism: str = ""
    """The SASL mechanism; empty without SASL."""
    token_id: str = ""
    """The delegation token by which it came, if it did: such a session may not ask for another."""
    ends_at: float | None = None
    """By the monotonic clock: from then on nothing is served but another login."""


ANONYMOUS: Final = Session()
