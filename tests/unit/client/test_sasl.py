"""PLAIN and SCRAM: the examples of the RFCs, a server that checks, and servers that lie."""

from __future__ import annotations

import base64
import hashlib
import hmac
from typing import Any

import pytest

from millrace.client.blocking import BlockingConnection
from millrace.client.sasl import SaslClient, plain, scram
from millrace.client.settings import Security
from millrace.errors import ApiError, ErrorCode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.sasl import SaslAuthenticateResponse, SaslHandshakeResponse
from support.fake_broker import FakeBroker

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
    steps = scram(hash_name, "user", "pencil", nonce)
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


@pytest.mark.parametrize("server_final", [b"v=AAAA", b"e=invalid-proof", b"", b"v=*"])
def test_a_server_that_does_not_know_the_password_is_refused(server_final: bytes) -> None:
    nonce, _, server_first, _, _ = VECTORS["sha256"]
    steps = scram("sha256", "user", "pencil", nonce)
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


def secured(mechanism: str, server: ScramServer) -> FakeBroker:
    def handshake(request: Any) -> SaslHandshakeResponse:
        known = request.mechanism == mechanism
        return SaslHandshakeResponse(error_code=0 if known else 33, mechanisms=[mechanism])

    return FakeBroker(
        {
            ApiKey.SASL_HANDSHAKE: handshake,
            ApiKey.SASL_AUTHENTICATE: lambda request: server.answer(request.auth_bytes),
        }
    )


@pytest.mark.parametrize(("mechanism", "hash_name"), [("SCRAM-SHA-256", "sha256"), ("SCRAM-SHA-512", "sha512")])
def test_scram_on_a_connection(mechanism: str, hash_name: str) -> None:
    with secured(mechanism, ScramServer(hash_name, "secret")) as broker:
        for password, right in (("secret", True), ("guess", False)):
            client = SaslClient(mechanism, "me", password)
            with BlockingConnection("127.0.0.1", broker.port, authenticate=client) as connection:
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
        _ = BlockingConnection("127.0.0.1", broker.port, authenticate=SaslClient("PLAIN", "me", "x")).offered
    assert caught.value.code is ErrorCode.UNSUPPORTED_SASL_MECHANISM


def test_the_client_of_a_security() -> None:
    assert SaslClient.for_security(Security()) is None
    security = Security(protocol="SASL_SSL", mechanism="PLAIN", username="u", password="hidden")
    client = SaslClient.for_security(security)
    assert client == SaslClient("PLAIN", "u", "hidden")
    assert "hidden" not in repr(client)
