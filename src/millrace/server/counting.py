"""What is counted of a listener's connections and logins: plain numbers, read when somebody asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

CERTIFICATE: Final = "SSL"
"""The mechanism, as it is told, of whoever is known by a certificate."""
NO_MECHANISM: Final = "none"
"""Of whoever has not named one that is offered."""


class ListenerCounts:
    """The counts of one listener. Owner: the event loop."""

    __slots__ = (
        "accepted", "failures", "protocol_errors", "refused_certificate", "refused_limit", "refused_rate",
        "refused_tls", "successes",
    )  # fmt: skip

    def __init__(self) -> None:
        self.accepted = 0
        self.refused_limit = 0
        self.refused_rate = 0
        self.refused_tls = 0
        self.refused_certificate = 0
        self.protocol_errors = 0
        """Connections that were closed because what came could not be understood, or not be answered."""
        self.successes: dict[str, int] = {}
        """Logins by mechanism."""
        self.failures: dict[str, int] = {}

    def __repr__(self) -> str:
        return f"ListenerCounts({self.accepted} accepted, {self.refused})"

    @property
    def refused(self) -> Mapping[str, int]:
        """Connections that were turned away, by reason."""
        return {
            "limit": self.refused_limit,
            "rate": self.refused_rate,
            "tls": self.refused_tls,
            "certificate": self.refused_certificate,
        }

    def logged_in(self, mechanism: str) -> None:
        self.successes[mechanism] = self.successes.get(mechanism, 0) + 1

    def login_failed(self, mechanism: str) -> None:
        """`mechanism` is one that is offered, or empty: what clients invent does not become a name here."""
        mechanism = mechanism or NO_MECHANISM
        self.failures[mechanism] = self.failures.get(mechanism, 0) + 1
