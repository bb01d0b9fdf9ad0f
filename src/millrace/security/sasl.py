"""What all SASL mechanisms of a server share: an exchange, its steps, how it ends, and which ones a listener offers.

A mechanism is a function that begins an `Exchange`; each is in a module of its own (`plain`, `scram`, `oauth`). Not
here: Kafka's requests around an exchange, and what follows from its end (`server.login`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from millrace.config import BrokerConfig
from millrace.errors import ConfigError, MillraceError

PLAIN: Final = "PLAIN"
SCRAM_SHA_256: Final = "SCRAM-SHA-256"
SCRAM_SHA_512: Final = "SCRAM-SHA-512"
OAUTHBEARER: Final = "OAUTHBEARER"
MECHANISMS: Final = (PLAIN, SCRAM_SHA_256, SCRAM_SHA_512, OAUTHBEARER)

FOREIGN_AUTHORIZATION_ID: Final = (
    "Authentication failed: Client requested an authorization id that is different from username"
)
"""Kafka's words to a client that would act as somebody else (CVE-2017-12610)."""


@dataclass(frozen=True, slots=True)
class Done:
    """Who the client has proved to be."""

    principal: str
    """`User:alice`."""
    token_id: str = ""
    """The delegation token by which it came."""
    expires_ms: int | None = None
    """By the wall clock: when the credential itself ends."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the client is answered; with `done` it is in."""

    reply: bytes = field(repr=False)
    done: Done | None = None


class LoginFailed(MillraceError):
    """The client is not who it says, or does not follow the mechanism.

    The text is for the log. What the client is told is `told`; where that is empty, the same for every reason, so that
    a user who does not exist cannot be told from a wrong password. `reason` is one of a few fixed texts, by which the
    audit log counts; what the client sent may be in `detail`.
    """

    def __init__(self, reason: str, told: str = "", *, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.told = told
        self.detail = detail


class Exchange(Protocol):
    """One login under way."""

    user: str
    """Who the client says it is, for the audit log; empty as long as it has not said."""

    def step(self, message: bytes) -> Step | Awaitable[Step]:
        """Take the client's next message; LoginFailed ends it.

        Awaitable where keys are derived or something is asked for: neither may keep the event loop.
        """


Mechanism = Callable[[], Exchange]


def offered(config: BrokerConfig, listener: str) -> tuple[str, ...]:
    """The mechanisms of a listener; ConfigError where it names none, or one that does not exist here."""
    names: tuple[str, ...] = config.listener_value(listener, "sasl.enabled.mechanisms")
    for name in names:
        if name not in MECHANISMS:
            raise ConfigError(
                f"the listener {listener} cannot offer {name}: set sasl.enabled.mechanisms (Kafka's default is GSSAPI) "
                f"to one or more of {', '.join(MECHANISMS)}"
            )
    if not names:
        raise ConfigError(f"the listener {listener} needs sasl.enabled.mechanisms: {', '.join(MECHANISMS)}")
    return tuple(dict.fromkeys(names))
