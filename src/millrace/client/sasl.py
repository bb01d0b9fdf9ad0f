"""The client's side of SASL: PLAIN (RFC 4616) and SCRAM (RFC 5802, RFC 7677), inside Kafka's two requests for it.

Sockets are not here: an exchange is given the function that asks the broker. Invariants: with SCRAM the password never
leaves this process, and a server that cannot prove that it knows the password is refused.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final

from millrace.client.settings import Security
from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode
from millrace.wire.messages.sasl import SaslAuthenticateRequest, SaslHandshakeRequest
from millrace.wire.schema import Request

Steps = Generator[bytes, bytes, None]
"""Yields what to send and is sent what came back; ends when both sides are satisfied."""

_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_MIN_ITERATIONS: Final = 4096
_MAX_ITERATIONS: Final = 1_000_000
"""A server that wants more is out to keep the processor busy."""
_GS2_HEADER: Final = "n,,"


@dataclass(frozen=True, slots=True)
class SaslClient:
    """Credentials that can be shown to any number of brokers."""

    mechanism: str
    username: str
    password: str = field(repr=False)

    @classmethod
    def for_security(cls, security: Security) -> SaslClient | None:
        """None where the protocol has no SASL."""
        if not security.uses_sasl:
            return None
        return cls(security.mechanism, security.username, security.password)

    def __call__(self, ask: Callable[[Request], Any]) -> None:
        """Authenticate on the connection behind `ask`; ApiError says why that failed, and is not worth a retry."""
        handshake = ask(SaslHandshakeRequest(mechanism=self.mechanism))
        if handshake.error_code:
            offered = ", ".join(handshake.mechanisms) or "none"
            raise ApiError(
                known_code(handshake.error_code), f"{self.mechanism} is not on offer; the broker has {offered}"
            )
        steps = self.steps()
        message = next(steps)
        while True:
            response = ask(SaslAuthenticateRequest(auth_bytes=message))
            if response.error_code:
                raise ApiError(
                    known_code(response.error_code),
                    f"user '{self.username}' by {self.mechanism}: {response.error_message or 'refused'}",
                )
            try:
                message = steps.send(response.auth_bytes)
            except StopIteration:
                return

    def steps(self) -> Steps:
        if self.mechanism == "PLAIN":
            return plain(self.username, self.password)
        return scram(_HASHES[self.mechanism], self.username, self.password, secrets.token_urlsafe(24))


def plain(username: str, password: str) -> Steps:
    """One message, which is the password: only for connections with TLS, or for tests."""
    yield f"\0{username}\0{password}".encode()


def scram(hash_name: str, username: str, password: str, nonce: str) -> Steps:
    """The three messages of SCRAM without channel binding; `nonce` must never be used twice."""
    escaped = username.replace("=", "=3D").replace(",", "=2C")
    client_first = f"n={escaped},r={nonce}"
    server_first = _text((yield (_GS2_HEADER + client_first).encode()))
    salt, iterations, server_nonce = _read_server_first(server_first, nonce)
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    without_proof = f"c={_base64(_GS2_HEADER.encode())},r={server_nonce}"
    exchange = f"{client_first},{server_first},{without_proof}".encode()
    signature = hmac.digest(hashlib.new(hash_name, client_key).digest(), exchange, hash_name)
    proof = bytes(a ^ b for a, b in zip(client_key, signature, strict=True))
    server_final = _text((yield f"{without_proof},p={_base64(proof)}".encode()))
    expected = hmac.digest(hmac.digest(salted, b"Server Key", hash_name), exchange, hash_name)
    fields = _fields(server_final)
    if "e" in fields:
        raise _failed(f"the broker says {fields['e']}")
    if not hmac.compare_digest(_from_base64(fields.get("v", "")), expected):
        raise _failed("the broker could not prove that it knows the password")


def _read_server_first(message: str, nonce: str) -> tuple[bytes, int, str]:
    fields = _fields(message)
    if "e" in fields:
        raise _failed(f"the broker says {fields['e']}")
    server_nonce, salt, iterations = fields.get("r", ""), fields.get("s", ""), fields.get("i", "")
    if not server_nonce.startswith(nonce) or len(server_nonce) == len(nonce):
        raise _failed("the broker's nonce does not go on from ours")
    if not iterations.isascii() or not iterations.isdigit():
        raise _failed(f"'{iterations}' is no number of iterations")
    if not _MIN_ITERATIONS <= int(iterations) <= _MAX_ITERATIONS:
        raise _failed(f"{iterations} iterations are outside {_MIN_ITERATIONS} to {_MAX_ITERATIONS}")
    return _from_base64(salt), int(iterations), server_nonce


def _fields(message: str) -> dict[str, str]:
    return {part[0]: part[2:] for part in message.split(",") if part[1:2] == "="}


def _text(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise _failed("the broker's message is not UTF-8") from None


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise _failed(f"'{text}' is not base64") from None


def _failed(reason: str) -> ApiError:
    return ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, reason)
