"""PLAIN and SCRAM: the examples of the RFCs, a server that checks, servers that lie, and both kinds of connection."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import threading
from typing import Any

import pytest

from millrace.client import sasl
from millrace.client.blocking import BlockingConnection
from millrace.client.connection import Connection
from millrace.client.sasl import SaslClient, Work, plain, scram
from millrace.client.settings import Security
from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import HeartbeatRequest, HeartbeatResponse
from millrace.wire.messages.sasl import SaslAuthenticateResponse, SaslHandshakeResponse
from support.fake_broker import FakeBroker
from support.sasl import scram_messages

# RFC 5802, section 5, and RFC 7677, section 3.
VECTORS = {
    "sha1": (
        "fyko+d2lbbFgONRv9qkxdawL",
        b"n,,n=user,r=fyko+d2lbbFgONRv9qkxdawL",
        b"r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,s=QSXCR+Q6sek8bf92,i=4096",
        b"c=biws,r=fyko+d2lbbFgONRv9qkxdawL3rfcNHYJY1ZVvWVs7j,p=v0X8v3Bz2T0CJGbJQyF0X+HI4Ts=",
        b"v=rmF9pqV8S7suAoZWja4dJRkFsKQ=",
    ),
    "sha256": (
        "rOprNGfwEbeRWgbNEkqO",
        b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO",
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096",
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=",
        b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=",
    ),
}


@pytest.mark.parametrize("hash_name", VECTORS)
def test_the_examples_of_the_rfcs(hash_name: str) -> None:
    nonce, client_first, server_first, client_final, server_final = VECTORS[hash_name]
    steps = scram_messages(hash_name, "user", "pencil", nonce)
    assert next(steps) == client_first
    assert steps.send(server_first) == client_final
    with pytest.raises(StopIteration):
        steps.send(server_final)


@pytest.mark.parametrize(
    ("server_first", "reason"),
    [
        (b"r=other,s=QSXCR+Q6sek8bf92,i=4096", "nonce"),
        (b"r=fyko+d2lbbFgONRv9qkxdawL,s=QSXCR+Q6sek8bf92,i=4096", "nonce"),
        (b"r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i=4095", "4095 iterations"),
        (b"r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i=1000001", "iterations"),
        (b"r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+Q6sek8bf92,i=x", "iterations"),
        (b"r=fyko+d2lbbFgONRv9qkxdawLx,s=*,i=4096", "base64"),
        ("r=fyko+d2lbbFgONRv9qkxdawLx,s=QSXCR+é,i=4096".encode(), "base64"),
        (b"e=unknown-user", "unknown-user"),
        (b"\xff", "UTF-8"),
        (b"", "nonce"),
    ],
)
def test_a_first_message_that_is_refused(server_first: bytes, reason: str) -> None:
    steps = scram("sha256", "user", "pencil", "fyko+d2lbbFgONRv9qkxdawL")
    next(steps)
    with pytest.raises(ApiError, match=reason) as caught:
        steps.send(server_first)
    assert caught.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED


@pytest.mark.parametrize("server_final", [b"v=AAAA", b"e=invalid-proof", b"", b"v=*", "v=é".encode()])
def test_a_server_that_does_not_know_the_password_is_refused(server_final: bytes) -> None:
    nonce, _, server_first, _, _ = VECTORS["sha256"]
    steps = scram_messages("sha256", "user", "pencil", nonce)
    next(steps)
    steps.send(server_first)
    with pytest.raises(ApiError) as caught:
        steps.send(server_final)
    assert caught.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED


def test_names_are_escaped() -> None:
    assert next(scram("sha256", "a=b,c", "p", "N")) == b"n,,n=a=3Db=2Cc,r=N"


def test_plain() -> None:
    steps = plain("me", "pässword")
    assert next(steps) == "\0me\0pässword".encode()
    with pytest.raises(StopIteration):
        steps.send(b"")


class ScramServer:
    """The other side, written from the RFC's formulas."""

    def __init__(self, hash_name: str, password: str) -> None:
        self._hash = hash_name
        self._salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), b"salty", 4096)
        self._said = ""

    def answer(self, message: bytes) -> SaslAuthenticateResponse:
        text = message.decode()
        if text.startswith("n,,"):
            bare = text.removeprefix("n,,")
            first = f"r={bare.partition('r=')[2]}SERVER,s={base64.b64encode(b'salty').decode()},i=4096"
            self._said = f"{bare},{first}"
            return SaslAuthenticateResponse(auth_bytes=first.encode(), error_message=None)
        without_proof, _, proof = text.rpartition(",p=")
        exchange = f"{self._said},{without_proof}".encode()
        key = hmac.digest(self._salted, b"Client Key", self._hash)
        signature = hmac.digest(hashlib.new(self._hash, key).digest(), exchange, self._hash)
        if base64.b64decode(proof) != bytes(a ^ b for a, b in zip(key, signature, strict=True)):
            return SaslAuthenticateResponse(error_code=58, error_message="wrong password")
        verifier = hmac.digest(hmac.digest(self._salted, b"Server Key", self._hash), exchange, self._hash)
        return SaslAuthenticateResponse(auth_bytes=b"v=" + base64.b64encode(verifier), error_message=None)


def secured(mechanism: str, server: ScramServer, *, lifetime_ms: int = 0) -> FakeBroker:
    def handshake(request: Any) -> SaslHandshakeResponse:
        known = request.mechanism == mechanism
        return SaslHandshakeResponse(error_code=0 if known else 33, mechanisms=[mechanism])

    def authenticate(request: Any) -> SaslAuthenticateResponse:
        response = server.answer(request.auth_bytes)
        response.session_lifetime_ms = lifetime_ms
        return response

    return FakeBroker(
        {
            ApiKey.SASL_HANDSHAKE: handshake,
            ApiKey.SASL_AUTHENTICATE: authenticate,
            ApiKey.HEARTBEAT: lambda request: HeartbeatResponse(error_code=int(request.group_id)),
        }
    )


@pytest.mark.parametrize(("mechanism", "hash_name"), [("SCRAM-SHA-256", "sha256"), ("SCRAM-SHA-512", "sha512")])
def test_scram_on_a_connection(mechanism: str, hash_name: str) -> None:
    with secured(mechanism, ScramServer(hash_name, "secret")) as broker:
        for password, right in (("secret", True), ("guess", False)):
            client = SaslClient(mechanism, "me", password)
            with BlockingConnection("127.0.0.1", broker.port, sasl=client) as connection:
                if right:
                    assert ApiKey.SASL_HANDSHAKE in connection.offered
                    continue
                with pytest.raises(ApiError, match=r"user 'me' by SCRAM.*wrong password") as caught:
                    _ = connection.offered
                assert caught.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED
                assert not connection.is_connected


def test_a_mechanism_that_the_broker_lacks() -> None:
    refused = pytest.raises(ApiError, match="the broker has SCRAM-SHA-256")
    with secured("SCRAM-SHA-256", ScramServer("sha256", "x")) as broker, refused as caught:
        _ = BlockingConnection("127.0.0.1", broker.port, sasl=SaslClient("PLAIN", "me", "x")).offered
    assert caught.value.code is ErrorCode.UNSUPPORTED_SASL_MECHANISM


def test_the_client_of_a_security() -> None:
    assert SaslClient.for_security(Security()) is None
    security = Security(protocol="SASL_SSL", mechanism="PLAIN", username="u", password="hidden")
    client = SaslClient.for_security(security)
    assert client == SaslClient("PLAIN", "u", "hidden")
    assert "hidden" not in repr(client)


# --- on connections ---------------------------------------------------------------------------------------------------


def keys(broker: FakeBroker) -> list[ApiKey]:
    return [key for key, _ in broker.seen]


LOGIN = [ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.SASL_AUTHENTICATE]


@pytest.mark.parametrize("negotiate", [True, False])
async def test_scram_on_an_asyncio_connection(negotiate: bool) -> None:
    with secured("SCRAM-SHA-512", ScramServer("sha512", "secret")) as broker:
        client = SaslClient("SCRAM-SHA-512", "me", "secret")
        async with await Connection.open("127.0.0.1", broker.port, sasl=client, negotiate=negotiate) as connection:
            assert (await connection.request(HeartbeatRequest(group_id="7"), 4)).error_code == 7
        assert keys(broker) == [*([ApiKey.API_VERSIONS] if negotiate else []), *LOGIN, ApiKey.HEARTBEAT]


async def test_a_wrong_password_ends_an_asyncio_connection() -> None:
    with secured("SCRAM-SHA-256", ScramServer("sha256", "secret")) as broker:
        with pytest.raises(ApiError, match=r"user 'me' by SCRAM.*wrong password") as caught:
            await Connection.open("127.0.0.1", broker.port, sasl=SaslClient("SCRAM-SHA-256", "me", "guess"))
        assert caught.value.code is ErrorCode.SASL_AUTHENTICATION_FAILED
        assert "guess" not in str(caught.value)


async def test_keys_are_derived_once_and_never_on_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """CVE-2026-10143: the server chooses how long the derivation takes."""
    threads: list[int] = []
    derive = sasl._derive

    def noted(*args: Any) -> sasl.Keys:
        threads.append(threading.get_ident())
        return derive(*args)

    monkeypatch.setattr(sasl, "_derive", noted)
    with secured("SCRAM-SHA-256", ScramServer("sha256", "secret")) as broker:
        client = SaslClient("SCRAM-SHA-256", "me", "secret")
        for _ in range(3):
            await (await Connection.open("127.0.0.1", broker.port, sasl=client)).close()
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_the_keys_of_ever_new_salts_are_not_hoarded() -> None:
    client = SaslClient("SCRAM-SHA-256", "me", "secret")
    for number in range(40):
        steps = scram("sha256", "me", "secret", "N", client._keys)
        next(steps)
        salt = base64.b64encode(b"%d" % number).decode()
        work = steps.send(f"r=Nx,s={salt},i=4096".encode())
        assert isinstance(work, Work)
        steps.send(sasl.Keys(b"c" * 32, b"s" * 32))
    assert len(client._keys) <= 16


async def test_a_login_is_renewed_before_it_ends() -> None:
    clock = ManualClock()
    with secured("SCRAM-SHA-256", ScramServer("sha256", "secret"), lifetime_ms=10_000) as broker:
        client = SaslClient("SCRAM-SHA-256", "me", "secret")
        async with await Connection.open(
            "127.0.0.1", broker.port, sasl=client, clock=clock, negotiate=False
        ) as connection:
            clock.advance(8.4)
            await connection.request(HeartbeatRequest(group_id="1"), 4)
            clock.advance(1.2)  # 9.6 s of 10
            ask = [connection.request(HeartbeatRequest(group_id=str(number)), 4) for number in range(3)]
            assert [answer.error_code for answer in await asyncio.gather(*ask)] == [0, 1, 2]
        # Nothing came between the steps of the second login, and it was made once.
        beat = ApiKey.HEARTBEAT
        assert keys(broker) == [*LOGIN, beat, *LOGIN, beat, beat, beat]


async def test_a_renewal_that_is_refused_ends_the_connection() -> None:
    clock = ManualClock()
    server = ScramServer("sha256", "secret")
    with secured("SCRAM-SHA-256", server, lifetime_ms=10_000) as broker:
        client = SaslClient("SCRAM-SHA-256", "me", "secret")
        connection = await Connection.open("127.0.0.1", broker.port, sasl=client, clock=clock)
        server._salted = b"another password"
        clock.advance(9.6)
        with pytest.raises(ApiError, match="wrong password"):
            await connection.request(HeartbeatRequest(group_id="1"))
        assert connection.is_closed


async def test_a_renewal_that_is_cancelled_ends_the_connection() -> None:
    clock = ManualClock()
    with secured("PLAIN", ScramServer("sha256", "secret"), lifetime_ms=10_000) as broker:
        broker.answers[ApiKey.SASL_AUTHENTICATE] = lambda _: SaslAuthenticateResponse(session_lifetime_ms=10_000)
        connection = await Connection.open("127.0.0.1", broker.port, sasl=SaslClient("PLAIN", "a", "b"), clock=clock)
        broker.answers[ApiKey.SASL_HANDSHAKE] = lambda _: None
        clock.advance(9.6)
        asking = asyncio.create_task(connection.request(HeartbeatRequest(group_id="1")))
        while keys(broker).count(ApiKey.SASL_HANDSHAKE) < 2:
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert connection.is_closed


def test_a_blocking_connection_renews_its_login() -> None:
    with secured("SCRAM-SHA-256", ScramServer("sha256", "secret"), lifetime_ms=5) as broker:
        client = SaslClient("SCRAM-SHA-256", "me", "secret")
        with BlockingConnection("127.0.0.1", broker.port, sasl=client) as connection:
            while keys(broker).count(ApiKey.SASL_HANDSHAKE) < 3:
                first = connection.send(HeartbeatRequest(group_id="1"))
                second = connection.send(HeartbeatRequest(group_id="2"))
                assert connection.receive(second).error_code == 2
                assert connection.receive(first).error_code == 1
        assert keys(broker).count(ApiKey.API_VERSIONS) == 1
