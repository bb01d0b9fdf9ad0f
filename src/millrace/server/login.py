"""The login of a connection: Kafka's two requests around a SASL exchange, the first time and again (KIP-368).

    OPENING -> handshake -> EXCHANGING -> done -> IN -> its session ends -> ENDED
                                 ^                 |                          |
                                 +---- handshake --+--------------------------+

What is served in each state is told to the connection, so that a request that is out of place never reaches a decoder
or a handler, and one that is in place costs nothing more. Not here: what mechanisms ask for (`security`).

Invariants: one exchange at a time, and it is given up at the first failure; whoever fails is answered late and then
closed; a connection that does not log in is closed in time; another login is by the same mechanism and as the same
principal; nothing that a client sent is in the log but its mechanism, and of a token the names of algorithm and key.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from inspect import isawaitable
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from millrace.errors import ErrorCode
from millrace.handlers.needs import NOTHING
from millrace.handlers.registry import Api
from millrace.handlers.sasl import sasl_authenticate
from millrace.security.sasl import Done, Exchange, LoginFailed, Mechanism, Step
from millrace.security.sessions import Session
from millrace.wire.frame import RequestHeader, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages.sasl import SaslAuthenticateRequest, SaslAuthenticateResponse, SaslHandshakeResponse

if TYPE_CHECKING:
    from millrace.clock import Clock, Timer
    from millrace.handlers.registry import Buffers
    from millrace.server.refusals import Refusals

logger = logging.getLogger(__name__)

R = TypeVar("R")
HeaderReader = Callable[[memoryview], tuple[RequestHeader, int]]

LOGIN_WITHIN_S: Final = 30.0
"""A client logs in as soon as it is connected: one that does not is in the way."""
LAST_WORD_S: Final = 0.05
"""Between the answer to a failed login and the end of the connection: who sees both at once may not read the answer."""
MIN_INTERVAL_S: Final = 1.0
"""Between the beginnings of two further logins, as in Kafka."""


@dataclass(frozen=True, slots=True)
class LoginRules:
    """How one listener lets clients in."""

    mechanisms: Mapping[str, Mechanism]
    max_session_ms: Callable[[str], int]
    """`connections.max.reauth.ms` of a mechanism: how long a session lasts; 0 is for ever."""
    max_frame_bytes: int
    failure_delay_s: float
    within_s: float = LOGIN_WITHIN_S


class Door(Protocol):
    """The connection, as its login moves it."""

    def narrow(self, apis: Mapping[int, Api], max_frame_bytes: int, read_header: HeaderReader) -> None:
        """Serve only `apis`, in frames that `read_header` understands."""

    def open(self, session: Session) -> None:
        """Serve everything."""

    def served_apis(self, *keys: ApiKey) -> Mapping[int, Api]:
        """Those APIs out of all."""

    def close(self) -> None:
        """Close once what was written has left."""

    def abort(self) -> None:
        """Close at once."""

    def login_failed(self, user: str, mechanism: str, reason: str) -> None:
        """Somebody is not let in who says to be `user`, or nothing yet."""


class Login:
    """The login of one connection. Owner: that connection."""

    def __init__(self, rules: LoginRules, door: Door, clock: Clock, refusals: Refusals) -> None:
        self._rules = rules
        self._door = door
        self._clock = clock
        self._refusals = refusals
        self._host = ""
        self._mechanism = ""
        self._exchange: Exchange | None = None
        """The login under way."""
        self._session: Session | None = None
        """What the last login came to."""
        self._last_again: float | None = None
        self._timer: Timer | None = None

    def __repr__(self) -> str:
        return f"Login({self._host}, {self._session or 'not in'}, {self._exchange or 'no exchange'})"

    def begin(self, host: str) -> None:
        """A client is there: it has to log in before anything else."""
        self._host = host
        self._narrow(ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE)
        self._await_login()

    def end(self) -> None:
        """The client is gone."""
        self._exchange = None
        if self._timer is not None:
            self._timer.cancel()

    # --- handshake ----------------------------------------------------------------------------------------------------

    def handshake(
        self, mechanism: str, version: int
    ) -> SaslHandshakeResponse | Coroutine[Any, Any, SaslHandshakeResponse]:
        mechanisms = list(self._rules.mechanisms)
        if self._exchange is not None:
            response = SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE, mechanisms=mechanisms)
            return self._refuse(response, "a second handshake")
        if self._session is not None and not self._may_begin_again(self._session):
            return SaslHandshakeResponse(error_code=ErrorCode.ILLEGAL_SASL_STATE)
        begin = self._rules.mechanisms.get(mechanism)
        if begin is None:
            response = SaslHandshakeResponse(error_code=ErrorCode.UNSUPPORTED_SASL_MECHANISM, mechanisms=mechanisms)
            return self._refuse(response, "a mechanism that is not offered")
        self._exchange = begin()
        self._mechanism = mechanism
        if version:
            self._narrow(ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)
        else:
            self._door.narrow(_TOKEN_APIS, self._rules.max_frame_bytes, _token_header)
        self._await_login()
        return SaslHandshakeResponse(mechanisms=mechanisms)

    def _may_begin_again(self, session: Session) -> bool:
        """As in Kafka: a session without an end needs no other, and nobody logs in again all the time."""
        now = self._clock.monotonic()
        if session.ends_at is None or (self._last_again is not None and now - self._last_again < MIN_INTERVAL_S):
            return False
        self._last_again = now
        return True

    # --- authenticate -------------------------------------------------------------------------------------------------

    def authenticate(self, message: bytes) -> SaslAuthenticateResponse | Coroutine[Any, Any, SaslAuthenticateResponse]:
        exchange = self._exchange
        if exchange is None:
            return SaslAuthenticateResponse(
                error_code=ErrorCode.ILLEGAL_SASL_STATE, error_message="a login begins with SaslHandshake"
            )
        try:
            if self._session is not None and self._mechanism != self._session.mechanism:
                told = (
                    f"SASL mechanism '{self._mechanism}' requested by client is not supported for re-authentication of "
                    f"mechanism '{self._session.mechanism}'"
                )
                raise LoginFailed("another mechanism than before", told)
            step = exchange.step(message)
            if isawaitable(step):
                return self._step_later(step)
            return self._stepped(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is not in
            return self._fail(error)

    async def _step_later(self, step: Awaitable[Step]) -> SaslAuthenticateResponse:
        try:
            return self._stepped(await step)
        except Exception as error:  # noqa: BLE001 - whatever it is, the client is not in
            return await self._fail(error)

    def _stepped(self, step: Step) -> SaslAuthenticateResponse:
        lifetime_ms = 0 if step.done is None else self._let_in(step.done)
        return SaslAuthenticateResponse(error_message=None, auth_bytes=step.reply, session_lifetime_ms=lifetime_ms)

    def _let_in(self, done: Done) -> int:
        """Open the connection; how long for, in milliseconds, 0 is for ever."""
        if self._session is not None and self._session.principal != done.principal:
            before, after = (name.replace(":", ".", 1) for name in (self._session.principal, done.principal))
            raise LoginFailed(
                "another principal than before",
                f"Cannot change principals during re-authentication from {before}: {after}",
            )
        lifetimes_ms = [max_ms] if (max_ms := self._rules.max_session_ms(self._mechanism)) > 0 else []
        if done.expires_ms is not None:
            lifetimes_ms.append(max(done.expires_ms - self._clock.wall_ms(), 0))
        lifetime_ms = min(lifetimes_ms, default=None)
        ends_at = None if lifetime_ms is None else self._clock.monotonic() + lifetime_ms / 1000
        self._session = Session(done.principal, self._mechanism, done.token_id, ends_at)
        self._exchange = None
        self._set_timer(None if lifetime_ms is None else lifetime_ms / 1000, self._session_ended)
        self._door.open(self._session)
        logger.debug("%s logged in from %s by %s", done.principal, self._host, self._mechanism)
        return lifetime_ms or 0

    def _session_ended(self) -> None:
        self._narrow(ApiKey.SASL_HANDSHAKE)

    # --- failure ------------------------------------------------------------------------------------------------------

    def _fail(self, error: Exception) -> Coroutine[Any, Any, SaslAuthenticateResponse]:
        told = error.told if isinstance(error, LoginFailed) else ""
        if not told:
            what = "authentication" if self._session is None else "re-authentication"
            told = (
                f"Authentication failed during {what} due to invalid credentials with SASL mechanism {self._mechanism}"
            )
        if not isinstance(error, LoginFailed):
            logger.error("the login by %s could not be checked", self._mechanism, exc_info=error)
        response = SaslAuthenticateResponse(error_code=ErrorCode.SASL_AUTHENTICATION_FAILED, error_message=told)
        if isinstance(error, LoginFailed):
            return self._refuse(response, error.reason, str(error))
        return self._refuse(response, type(error).__name__)

    async def _refuse(self, response: R, reason: str, said: str = "") -> R:
        """Answer late, so that guessing takes its time, and close; nothing else of this client is begun meanwhile.

        `said` is the reason as it stands in the log, where that has more to it.
        """
        mechanism = self._mechanism or "no mechanism"
        self._refusals.tell(self._host, "a login from %s by %s failed: %s", self._host, mechanism, said or reason)
        self._door.login_failed("" if self._exchange is None else self._exchange.user, self._mechanism, reason)
        self._exchange = None
        await self._clock.sleep(self._rules.failure_delay_s)
        self._narrow()
        self._set_timer(LAST_WORD_S, self._door.close)
        return response

    # --- others -------------------------------------------------------------------------------------------------------

    def _narrow(self, *keys: ApiKey) -> None:
        self._door.narrow(self._door.served_apis(*keys), self._rules.max_frame_bytes, read_request_header)

    def _await_login(self) -> None:
        self._set_timer(self._rules.within_s, self._too_late)

    def _too_late(self) -> None:
        within_s = self._rules.within_s
        self._refusals.tell(self._host, "closing the connection from %s: no login within %.1f s", self._host, within_s)
        self._door.abort()

    def _set_timer(self, seconds: float | None, callback: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self._clock.call_later(seconds, callback)


# --- messages without a header ----------------------------------------------------------------------------------------

_TOKEN_HEADER: Final = RequestHeader(ApiKey.SASL_AUTHENTICATE, 0, 0, None)


def _token_header(frame: memoryview) -> tuple[RequestHeader, int]:
    """After a handshake of v0 a frame is a message of the exchange, and nothing else."""
    del frame
    return _TOKEN_HEADER, 0


def _decode_token(version: int, buffer: memoryview, pos: int) -> SaslAuthenticateRequest:
    del version
    return SaslAuthenticateRequest(auth_bytes=bytes(buffer[pos:]))


def _encode_token(correlation_id: int, version: int, response: SaslAuthenticateResponse) -> Buffers:
    """There is no place for an error: the connection is closed, as it would be in any case."""
    del correlation_id, version
    if response.error_code:
        return ()
    return (len(response.auth_bytes).to_bytes(4), response.auth_bytes)


_TOKEN_APIS: Final[Mapping[int, Api]] = {
    ApiKey.SASL_AUTHENTICATE: Api(
        key=ApiKey.SASL_AUTHENTICATE,
        min_version=0,
        max_version=0,
        advertised_min=0,
        handler=sasl_authenticate,
        decode=_decode_token,
        encode=_encode_token,
        overlaps=False,
        needs=NOTHING,
    )
}
