"""The login of a connection by hand: states, timers, and what is served when."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from millrace.clock import ManualClock
from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.registry import Api
from millrace.security.sasl import Done, LoginFailed, Step
from millrace.security.sessions import Session
from millrace.server.login import LAST_WORD_S, MIN_INTERVAL_S, HeaderReader, Login, LoginRules
from millrace.server.refusals import Refusals
from millrace.wire.keys import ApiKey
from millrace.wire.messages.sasl import SaslAuthenticateResponse, SaslHandshakeResponse

DELAY_S = 0.1
WITHIN_S = 30.0
EVERYTHING = "everything"
HANDSHAKE, AUTHENTICATE = ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE


class FakeDoor:
    def __init__(self) -> None:
        self.served: set[int] | str = set()
        self.session: Session | None = None
        self.max_frame_bytes = 0
        self.ended = ""
        self.failed: list[tuple[str, str, str]] = []

    def login_failed(self, user: str, mechanism: str, reason: str) -> None:
        self.failed.append((user, mechanism, reason))

    def narrow(self, apis: Mapping[int, Api], max_frame_bytes: int, read_header: HeaderReader) -> None:
        del read_header
        self.served = set(apis)
        self.max_frame_bytes = max_frame_bytes

    def open(self, session: Session) -> None:
        self.served = EVERYTHING
        self.session = session

    def served_apis(self, *keys: ApiKey) -> Mapping[int, Api]:
        return {key: registry.load()[key] for key in keys}

    def close(self) -> None:
        self.ended = "closed"

    def abort(self) -> None:
        self.ended = "aborted"


class Scripted:
    """An exchange that does what its messages say."""

    def __init__(self, clock: ManualClock) -> None:
        self.user = "somebody"
        self._clock = clock

    def step(self, message: bytes) -> Step | Awaitable[Step]:
        what, _, who = message.decode().partition(" ")
        if what == "later":
            return self._later(who)
        if what == "wrong":
            raise LoginFailed("reason", who)
        if what == "broken":
            raise RuntimeError("secret")
        if what == "more":
            return Step(b"challenge")
        expires_ms = self._clock.wall_ms() + int(what) if what.lstrip("-").isdigit() else None
        return Step(b"welcome", Done(f"User:{who}", "a-token" if expires_ms else "", expires_ms))

    async def _later(self, message: str) -> Step:
        await asyncio.sleep(0)
        step = self.step(message.encode())
        assert isinstance(step, Step)
        return step


class Rig:
    def __init__(self, max_session_ms: int = 0) -> None:
        self.clock = ManualClock()
        self.door = FakeDoor()
        begin: Callable[[], Scripted] = lambda: Scripted(self.clock)  # noqa: E731
        rules = LoginRules(
            mechanisms={"ONE": begin, "TWO": begin},
            max_session_ms=lambda _mechanism: max_session_ms,
            max_frame_bytes=1000,
            failure_delay_s=DELAY_S,
            within_s=WITHIN_S,
        )
        self.login = Login(rules, self.door, self.clock, Refusals(self.clock))
        self.login.begin("10.0.0.1")

    async def handshake(self, mechanism: str = "ONE", version: int = 1) -> SaslHandshakeResponse:
        answer: SaslHandshakeResponse = await self._answer(self.login.handshake(mechanism, version))
        return answer

    async def say(self, message: str) -> SaslAuthenticateResponse:
        answer: SaslAuthenticateResponse = await self._answer(self.login.authenticate(message.encode()))
        return answer

    async def _answer(self, answer: Any) -> Any:
        if not inspect.isawaitable(answer):
            return answer
        waiting = asyncio.ensure_future(answer)
        for _ in range(5):
            await asyncio.sleep(0)
        if not waiting.done():
            assert not self.door.ended
            self.clock.advance(DELAY_S / 2)
            await asyncio.sleep(0)
            assert not waiting.done(), "answered without delay"
            self.clock.advance(DELAY_S)
        return await waiting


async def test_what_is_served_on_the_way_in() -> None:
    rig = Rig()
    assert rig.door.served == {ApiKey.API_VERSIONS, HANDSHAKE}
    assert rig.door.max_frame_bytes == 1000
    assert (await rig.handshake()).mechanisms == ["ONE", "TWO"]
    assert rig.door.served == {HANDSHAKE, AUTHENTICATE}
    assert (await rig.say("more")).auth_bytes == b"challenge"
    assert rig.door.served == {HANDSHAKE, AUTHENTICATE}
    answer = await rig.say("later done alice")
    assert (answer.error_code, answer.auth_bytes, answer.session_lifetime_ms) == (ErrorCode.NONE, b"welcome", 0)
    assert rig.door.served == EVERYTHING
    assert rig.door.session == Session("User:alice", "ONE")
    rig.clock.advance(10 * WITHIN_S)
    assert (rig.door.served, rig.door.ended) == (EVERYTHING, "")


@pytest.mark.parametrize("message", ["wrong", "wrong the words", "broken", "later wrong", "later broken"])
async def test_a_failure_is_answered_late_and_then_closed(message: str, caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig()
    await rig.handshake()
    answer = await rig.say(message)
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    told = "Authentication failed during authentication due to invalid credentials with SASL mechanism ONE"
    assert answer.error_message == ("the words" if "words" in message else told)
    assert "secret" not in (answer.error_message or "")
    assert (rig.door.served, rig.door.ended) == (set(), "")
    rig.clock.advance(LAST_WORD_S)
    assert rig.door.ended == "closed"
    assert ("could not be checked" in caplog.text) == ("broken" in message)
    assert rig.door.failed == [("somebody", "ONE", "RuntimeError" if "broken" in message else "reason")]


async def test_handshakes_that_are_refused() -> None:
    rig = Rig()
    answer = await rig.handshake("THREE")
    assert (answer.error_code, answer.mechanisms) == (ErrorCode.UNSUPPORTED_SASL_MECHANISM, ["ONE", "TWO"])
    rig.clock.advance(LAST_WORD_S)
    assert rig.door.ended == "closed"
    rig = Rig()
    await rig.handshake()
    assert (await rig.handshake()).error_code == ErrorCode.ILLEGAL_SASL_STATE
    rig.clock.advance(LAST_WORD_S)
    assert rig.door.ended == "closed"


async def test_who_does_not_log_in_in_time_is_gone() -> None:
    rig = Rig()
    rig.clock.advance(WITHIN_S)
    assert rig.door.ended == "aborted"
    rig = Rig()
    rig.clock.advance(WITHIN_S - 1)
    await rig.handshake()
    rig.clock.advance(WITHIN_S - 1)
    assert not rig.door.ended
    rig.clock.advance(1)
    assert rig.door.ended == "aborted"


async def test_nothing_happens_after_the_client_is_gone() -> None:
    rig = Rig(1000)
    await rig.handshake()
    rig.login.end()
    rig.clock.advance(2 * WITHIN_S)
    assert not rig.door.ended


@pytest.mark.parametrize(
    ("max_session_ms", "message", "lifetime_ms"),
    [
        (0, "done alice", 0),
        (-1, "done alice", 0),
        (5000, "done alice", 5000),
        (0, "7000 alice", 7000),
        (5000, "7000 alice", 5000),
        (5000, "3000 alice", 3000),
    ],
)
async def test_how_long_a_session_lasts(max_session_ms: int, message: str, lifetime_ms: int) -> None:
    rig = Rig(max_session_ms)
    await rig.handshake()
    assert (await rig.say(message)).session_lifetime_ms == lifetime_ms
    assert rig.door.session is not None
    assert rig.door.session.ends_at == (lifetime_ms / 1000 if lifetime_ms else None)
    assert bool(rig.door.session.token_id) == (message != "done alice")
    if lifetime_ms:
        rig.clock.advance(lifetime_ms / 1000 - 0.001)
        assert rig.door.served == EVERYTHING
        rig.clock.advance(0.002)
        assert rig.door.served == {HANDSHAKE}


async def test_a_credential_that_has_ended_lets_nobody_stay() -> None:
    rig = Rig()
    await rig.handshake()
    await rig.say("-5 alice")
    rig.clock.advance(0)
    assert rig.door.served == {HANDSHAKE}


@pytest.mark.parametrize("wait_s", [1.0, 6.0], ids=["in time", "after the end"])
async def test_a_session_is_renewed(wait_s: float) -> None:
    rig = Rig(5000)
    await rig.handshake()
    await rig.say("done alice")
    rig.clock.advance(wait_s)
    assert (await rig.handshake()).error_code == ErrorCode.NONE
    assert rig.door.served == {HANDSHAKE, AUTHENTICATE}
    assert (await rig.say("done alice")).session_lifetime_ms == 5000
    assert rig.door.served == EVERYTHING
    assert rig.door.session is not None and rig.door.session.ends_at == wait_s + 5
    rig.clock.advance(4.5)
    assert rig.door.served == EVERYTHING, "the end of the session before is forgotten"


@pytest.mark.parametrize(
    ("mechanism", "message", "told"),
    [
        ("ONE", "done bob", "Cannot change principals during re-authentication from User.alice: User.bob"),
        ("TWO", "done alice", "SASL mechanism 'TWO' requested by client is not supported for re-authentication"),
        ("ONE", "wrong", "Authentication failed during re-authentication due to invalid credentials"),
        ("ONE", "later done bob", "Cannot change principals"),
    ],
)
async def test_a_renewal_is_by_the_same_mechanism_and_principal(mechanism: str, message: str, told: str) -> None:
    rig = Rig(5000)
    await rig.handshake()
    await rig.say("done alice")
    rig.clock.advance(1)
    assert (await rig.handshake(mechanism)).error_code == ErrorCode.NONE
    answer = await rig.say(message)
    assert answer.error_code == ErrorCode.SASL_AUTHENTICATION_FAILED
    assert told in (answer.error_message or "")
    rig.clock.advance(LAST_WORD_S)
    assert rig.door.ended == "closed"
    assert rig.door.session is not None and rig.door.session.principal == "User:alice"


async def test_a_session_without_an_end_is_not_renewed_and_others_not_all_the_time() -> None:
    rig = Rig()
    await rig.handshake()
    await rig.say("done alice")
    assert (await rig.handshake()).error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert (await rig.say("done alice")).error_code == ErrorCode.ILLEGAL_SASL_STATE
    assert (rig.door.served, rig.door.ended) == (EVERYTHING, "")
    rig = Rig(5000)
    for _ in range(2):
        assert (await rig.handshake()).error_code == ErrorCode.NONE
        await rig.say("done alice")
    assert (await rig.handshake()).error_code == ErrorCode.ILLEGAL_SASL_STATE
    rig.clock.advance(MIN_INTERVAL_S)
    assert (await rig.handshake()).error_code == ErrorCode.NONE
