"""The client's side of SASL: PLAIN (RFC 4616) and SCRAM (RFC 5802, RFC 7677), inside Kafka's two requests for it.

Sockets are not here: `SaslClient.login` describes an exchange once, and the asyncio and the blocking connection each
carry it out in their own way. Invariants: with SCRAM the password never leaves this process, and a server that cannot
prove that it knows the password is refused. What the key derivation cost is paid once: the keys are kept for as long as
the server asks with the same salt.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from millrace.client import versions
from millrace.client.settings import Security
from millrace.client.versions import known_code
from millrace.errors import ApiError, ErrorCode
from millrace.wire.messages.sasl import SaslAuthenticateRequest, SaslHandshakeRequest
from millrace.wire.schema import Request


class Ask(NamedTuple):
    """A request to the broker; its response is what the exchange wants to be sent."""

    message: Request
    version: int


class Work(NamedTuple):
    """Something that keeps a processor busy for milliseconds: never on an event loop."""

    call: Callable[[], Any]


Login = Generator[Ask | Work, Any, int]
"""Yields what has to be done and is sent what came of it. Returns for how long it is good, in ms; 0: for ever."""
Steps = Generator[bytes | Work, Any, None]
"""A mechanism: yields what to send, or work, and is sent what came of it; ends when both sides are satisfied."""

_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
_MIN_ITERATIONS: Final = 4096
_MAX_ITERATIONS: Final = 1_000_000
"""A server that wants more is out to keep the processor busy."""
_MAX_DIGITS: Final = 10
_MAX_KEYS: Final = 16
"""A user has one salt for each mechanism, and another after a change of password."""
_GS2_HEADER: Final = "n,,"
_TOKEN_LOGIN: Final = ",tokenauth=true"  # noqa: S105 - an extension, no password
_RENEW: Final = (0.85, 0.95)
"""When to log in again, as a part of the time for which a login is good; not everybody in the same moment."""
_RANDOM: Final = secrets.SystemRandom()


class Keys(NamedTuple):
    """What SCRAM derives from a password, a salt and a number of iterations; as secret as the password."""

    client_key: bytes
    server_key: bytes


@dataclass(frozen=True, slots=True)
class SaslClient:
    """Credentials that can be shown to any number of brokers."""

    mechanism: str
    username: str
    password: str = field(repr=False)
    by_token: bool = False
    """User and password are the id and the HMAC of a delegation token."""
    _keys: dict[tuple[bytes, int], Keys] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def for_security(cls, security: Security) -> SaslClient | None:
        """None where the protocol has no SASL."""
        if not security.uses_sasl:
            return None
        return cls(security.mechanism, security.username, security.password, security.by_token)

    def login(self, offered: versions.Offered | None) -> Login:
        """The exchange with a broker that serves `offered`, or, where that was not asked, the newest versions.

        ApiError says why it failed, and is not worth a retry.
        """
        handshake = yield _ask(SaslHandshakeRequest(mechanism=self.mechanism), offered)
        if handshake.error_code:
            on_offer = ", ".join(handshake.mechanisms) or "none"
            raise ApiError(
                known_code(handshake.error_code), f"{self.mechanism} is not on offer; the broker has {on_offer}"
            )
        steps = self._steps()
        step = next(steps)
        while True:
            if isinstance(step, Work):
                step = steps.send((yield step))
                continue
            response = yield _ask(SaslAuthenticateRequest(auth_bytes=step), offered)
            if response.error_code:
                raise ApiError(
                    known_code(response.error_code),
                    f"user '{self.username}' by {self.mechanism}: {response.error_message or 'refused'}",
                )
            try:
                step = steps.send(response.auth_bytes)
            except StopIteration:
                return max(int(response.session_lifetime_ms), 0)

    def _steps(self) -> Steps:
        if self.mechanism == "PLAIN":
            return plain(self.username, self.password)
        nonce = secrets.token_urlsafe(24)
        return scram(_HASHES[self.mechanism], self.username, self.password, nonce, self._keys, by_token=self.by_token)


def renew_after_s(lifetime_ms: int) -> float:
    """How long after a login to log in again, on the same connection, when it is good for that long."""
    return lifetime_ms / 1000 * _RANDOM.uniform(*_RENEW)


def _ask(message: Request, offered: versions.Offered | None) -> Ask:
    newest = type(message).max_version
    return Ask(message, newest if offered is None else versions.version_for(type(message), offered))


def plain(username: str, password: str) -> Steps:
    """One message, which is the password: only for connections with TLS, or for tests."""
    yield f"\0{username}\0{password}".encode()


def scram(
    hash_name: str,
    username: str,
    password: str,
    nonce: str,
    known: dict[tuple[bytes, int], Keys] | None = None,
    *,
    by_token: bool = False,
) -> Steps:
    """The three messages of SCRAM without channel binding; `nonce` must never be used twice.

    `known` are the keys of this password that were derived before, by salt and iterations; new ones are put there.
    """
    known = {} if known is None else known
    escaped = username.replace("=", "=3D").replace(",", "=2C")
    client_first = f"n={escaped},r={nonce}{_TOKEN_LOGIN if by_token else ''}"
    server_first = _text((yield (_GS2_HEADER + client_first).encode()))
    salt, iterations, server_nonce = _read_server_first(server_first, nonce)
    keys = known.get((salt, iterations))
    if keys is None:
        keys = yield Work(lambda: _derive(hash_name, password, salt, iterations))
        if len(known) >= _MAX_KEYS:
            known.clear()
        known[salt, iterations] = keys
    without_proof = f"c={_base64(_GS2_HEADER.encode())},r={server_nonce}"
    exchange = f"{client_first},{server_first},{without_proof}".encode()
    signature = hmac.digest(hashlib.new(hash_name, keys.client_key).digest(), exchange, hash_name)
    proof = bytes(a ^ b for a, b in zip(keys.client_key, signature, strict=True))
    server_final = _text((yield f"{without_proof},p={_base64(proof)}".encode()))
    fields = _fields(server_final)
    if "e" in fields:
        raise _failed(f"the broker says {fields['e']}")
    if not hmac.compare_digest(_from_base64(fields.get("v", "")), hmac.digest(keys.server_key, exchange, hash_name)):
        raise _failed("the broker could not prove that it knows the password")


def _derive(hash_name: str, password: str, salt: bytes, iterations: int) -> Keys:
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), salt, iterations)
    return Keys(hmac.digest(salted, b"Client Key", hash_name), hmac.digest(salted, b"Server Key", hash_name))


def _read_server_first(message: str, nonce: str) -> tuple[bytes, int, str]:
    fields = _fields(message)
    if "e" in fields:
        raise _failed(f"the broker says {fields['e']}")
    server_nonce, salt, iterations = fields.get("r", ""), fields.get("s", ""), fields.get("i", "")
    if not server_nonce.startswith(nonce) or len(server_nonce) == len(nonce):
        raise _failed("the broker's nonce does not go on from ours")
    if not iterations.isascii() or not iterations.isdigit() or len(iterations) > _MAX_DIGITS:
        raise _failed(f"'{iterations[:20]}' is no number of iterations")
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
    except ValueError:  # binascii.Error is one, and so is what letters beyond ASCII raise
        raise _failed("the broker's message is not base64") from None


def _failed(reason: str) -> ApiError:
    return ApiError(ErrorCode.SASL_AUTHENTICATION_FAILED, reason)
