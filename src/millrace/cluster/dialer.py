"""How a broker calls another: where, over which protocol, and who it says it is.

A registration names the endpoint on which its broker takes other brokers first, and that one is dialled, whatever the
caller's own listener of brokers is: only the one who is called knows where it takes such calls. The protocol is that of
the endpoint; certificates and the login are this broker's own settings for the listener of that name. Not here: what is
asked, and when to try again.

That is what lets a running cluster move from one protocol to another, one broker at a time:

1. Every broker gets a second listener with the new protocol, and the settings to call it (`ssl.*`,
   `sasl.mechanism.inter.broker.protocol`, `listener.name.NEW.MECHANISM.sasl.jaas.config`). Nobody uses it yet.
2. Every broker gets `inter.broker.listener.name=NEW`. From its restart on it takes brokers there and is called there,
   and still calls the others where they take it.
3. Every broker loses its old listener.

Invariants
- Whoever is turned away, by TLS or at the login, has reached somebody who lives: `TurnedAway` is never a refusal of the
  connection, and `liveness` does not take it for one.
- What cannot be loaded does not replace what works: a certificate that is half written leaves the old one in use, and
  is tried again at the next call (`security.tls`).
- A failure to log in, or to be let do what brokers do, is logged when it begins, when its reason changes, and every
  minute while it lasts.

Owner: the event loop.
"""

from __future__ import annotations

import logging
import ssl
from typing import Final

from millrace.client.connection import Connection
from millrace.client.sasl import SaslClient
from millrace.client.settings import MECHANISMS, parse_jaas
from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ConfigError, ErrorCode
from millrace.metadata.deltas import Endpoint
from millrace.security.tls import ClientTls

logger = logging.getLogger(__name__)

REMIND_S: Final = 60.0
_CLIENT_ID: Final = "broker-"
_LOGIN_REFUSED: Final = frozenset({
    ErrorCode.SASL_AUTHENTICATION_FAILED,
    ErrorCode.UNSUPPORTED_SASL_MECHANISM,
    ErrorCode.ILLEGAL_SASL_STATE,
    ErrorCode.UNSUPPORTED_VERSION,
})  # fmt: skip


class TurnedAway(ApiError):
    """Somebody answers there and will not talk to this broker.

    The code is NETWORK_EXCEPTION: for whoever waits for the answer it is as if the way there were cut. SASL's own codes
    would tell a client, to which an error may be passed on, that its own login had failed.
    """


def client_id(broker_id: int) -> str:
    """How a broker names itself on its connections to others."""
    return f"{_CLIENT_ID}{broker_id}"


def broker_named(client_id: str | None) -> int | None:
    """The broker that names itself so; None for anybody else."""
    number = (client_id or "").removeprefix(_CLIENT_ID)
    return int(number) if number != client_id and number.isascii() and number.isdigit() else None


def inter_broker_endpoint(image: ClusterImage, broker_id: int) -> Endpoint | None:
    """Where a broker takes calls of the others; None for one that is not known."""
    broker = image.brokers.get(broker_id)
    return next(iter(broker.endpoints), None) if broker is not None else None


class Dialer:
    """Opens this broker's connections to others."""

    def __init__(self, config: BrokerConfig, clock: Clock) -> None:
        self.broker_id = config.broker_id
        self._config = config
        self._clock = clock
        self._tls: dict[str, ClientTls] = {}
        self._logins: dict[str, SaslClient] = {}
        self._said: dict[int, tuple[str, float]] = {}

    def __repr__(self) -> str:
        return f"Dialer(broker {self.broker_id}, {self._config.inter_broker_listener})"

    @property
    def is_secured(self) -> bool:
        """Whether a call takes several turns before the first question can be asked."""
        return any(listener.security_protocol != "PLAINTEXT" for listener in self._config.listeners)

    def check(self) -> None:
        """ConfigError where this broker could not call one that is set up as it is. Blocks; for the start."""
        own = self._config.inter_broker_listener
        listener = next(each for each in self._config.listeners if each.name == own)
        if listener.security_protocol in ("SSL", "SASL_SSL"):
            ClientTls(own, self._config).check()
        if listener.security_protocol in ("SASL_PLAINTEXT", "SASL_SSL"):
            login_of(self._config, own)

    async def open(self, endpoint: Endpoint, broker_id: int, *, timeout_ms: int) -> Connection:
        """A connection to broker `broker_id`, logged in; every request on it must name its version.

        ApiError: NETWORK_EXCEPTION and REQUEST_TIMED_OUT as of `Connection.open`, `TurnedAway`. The timeout is for each
        step.
        """
        try:
            connection = await Connection.open(
                endpoint.host,
                endpoint.port,
                client_id=client_id(self.broker_id),
                timeout_ms=timeout_ms,
                clock=self._clock,
                ssl=await self._context(endpoint),
                sasl=self._login(endpoint),
                # With TLS 1.3 a client learns only from the first answer that its certificate was not liked.
                negotiate=endpoint.security_protocol == "SSL",
            )
        except ConfigError as error:
            self._note(broker_id, str(error))
            raise ApiError(ErrorCode.NETWORK_EXCEPTION, str(error)) from error
        except ApiError as error:
            if not _is_turned_away(error):
                raise
            self._note(broker_id, error.message or error.code.name)
            raise TurnedAway(ErrorCode.NETWORK_EXCEPTION, error.message) from error
        if self._said.pop(broker_id, None) is not None:
            logger.info("broker %d has logged in to broker %d", self.broker_id, broker_id)
        return connection

    def not_allowed(self, broker_id: int) -> None:
        """Broker `broker_id` has let this one in, and says that it may not ask what brokers ask."""
        self._note(broker_id, "it may not act as a broker there; its principal belongs in super.users")

    async def _context(self, endpoint: Endpoint) -> ssl.SSLContext | None:
        if endpoint.security_protocol not in ("SSL", "SASL_SSL"):
            return None
        tls = self._tls.get(endpoint.listener)
        if tls is None:
            tls = self._tls[endpoint.listener] = ClientTls(endpoint.listener, self._config)
        return await tls.context()

    def _login(self, endpoint: Endpoint) -> SaslClient | None:
        """The same object for the same login: it keeps the keys that were derived from the password."""
        if endpoint.security_protocol not in ("SASL_PLAINTEXT", "SASL_SSL"):
            return None
        wanted = login_of(self._config, endpoint.listener)
        known = self._logins.get(endpoint.listener)
        if known != wanted:
            known = self._logins[endpoint.listener] = wanted
        return known

    def _note(self, broker_id: int, reason: str) -> None:
        now_s = self._clock.monotonic()
        said, when_s = self._said.get(broker_id, ("", 0.0))
        if reason != said or now_s - when_s >= REMIND_S:
            self._said[broker_id] = (reason, now_s)
            logger.error("broker %d could not log in to broker %d: %s", self.broker_id, broker_id, reason)


def _is_turned_away(error: ApiError) -> bool:
    if error.code in _LOGIN_REFUSED:
        return True
    # What ends in the middle of TLS may be a process that dies; what TLS complains of was said by somebody.
    cause = error.__cause__
    return isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)


def login_of(config: BrokerConfig, listener: str) -> SaslClient:
    """As whom this broker logs in to others on `listener`; ConfigError where that is not said."""
    mechanism = str(config.listener_value(listener, "sasl.mechanism.inter.broker.protocol")).upper()
    if mechanism not in MECHANISMS:
        raise ConfigError(
            f"sasl.mechanism.inter.broker.protocol={mechanism}: brokers log in to each other by one of "
            f"{', '.join(MECHANISMS)}"
        )
    jaas = config.listener_value(listener, "sasl.jaas.config", mechanism)
    name = f"listener.name.{listener.lower()}.{mechanism.lower()}.sasl.jaas.config"
    if not jaas:
        raise ConfigError(f"{name} is missing: it says as whom this broker logs in to the others")
    try:
        return SaslClient(mechanism, *parse_jaas(str(jaas)))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
