"""Logging in by hand: a raw client that goes through a SASL login step by step, and a watched broker that asks for one.

`SaslBroker` has two listeners: PLAINTEXT, for the watching, and SASL_PLAINTEXT. Its users are made by `add_user`.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping
from typing import Any, Final

from millrace.client.sasl import Steps, Work, plain, scram
from millrace.errors import ErrorCode
from millrace.local.ports import free_ports
from millrace.security.scram import ScramMechanism, salted_password
from millrace.wire.messages.sasl import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from millrace.wire.messages.scram import AlterUserScramCredentialsRequest
from support.raw import RawClient, WatchedBroker
from support.servers import HOST

MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}


Messages = Generator[bytes, bytes, None]


def messages(steps: Steps) -> Messages:
    """What a client says, when its work is done at once."""
    try:
        step = next(steps)
        while True:
            step = steps.send(step.call() if isinstance(step, Work) else (yield step))
    except StopIteration:
        return


def scram_messages(hash_name: str, user: str, password: str, nonce: str, *, by_token: bool = False) -> Messages:
    return messages(scram(hash_name, user, password, nonce, by_token=by_token))


def steps_of(mechanism: str, user: str, password: str, *, by_token: bool = False) -> Messages:
    """The client's side of an exchange."""
    if mechanism == "PLAIN":
        return messages(plain(user, password))
    return scram_messages(_HASHES[mechanism], user, password, secrets.token_urlsafe(24), by_token=by_token)


class SaslClient(RawClient):
    """One connection to a listener with SASL."""

    def handshake(self, mechanism: str, version: int = 1) -> SaslHandshakeResponse:
        response: SaslHandshakeResponse = self.call(SaslHandshakeRequest(mechanism=mechanism), version)
        return response

    def authenticate(self, message: bytes, version: int = 2) -> SaslAuthenticateResponse:
        response: SaslAuthenticateResponse = self.call(SaslAuthenticateRequest(auth_bytes=message), version)
        return response

    def exchange(
        self, mechanism: str, user: str, password: str, version: int = 2, *, by_token: bool = False
    ) -> SaslAuthenticateResponse:
        """The messages of a login, after its handshake; the last answer."""
        steps = steps_of(mechanism, user, password, by_token=by_token)
        step = next(steps)
        while True:
            answer = self.authenticate(step, version)
            if answer.error_code:
                return answer
            try:
                step = steps.send(answer.auth_bytes)
            except StopIteration:
                return answer

    def log_in(
        self, mechanism: str, user: str, password: str, version: int = 2, *, by_token: bool = False
    ) -> SaslAuthenticateResponse:
        """A whole login; its last answer."""
        assert self.handshake(mechanism).error_code == ErrorCode.NONE
        return self.exchange(mechanism, user, password, version, by_token=by_token)


def upsertion(
    user: str, mechanism: ScramMechanism, password: str, iterations: int = 4096
) -> AlterUserScramCredentialsRequest.ScramCredentialUpsertion:
    """A credential as a client makes it."""
    salt = secrets.token_bytes(16)
    return AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
        name=user,
        mechanism=mechanism,
        iterations=iterations,
        salt=salt,
        salted_password=salted_password(mechanism, password, salt, iterations),
    )


def add_user(client: RawClient, user: str, password: str) -> None:
    """Give a user both credentials; one request has room for one."""
    for mechanism in ScramMechanism:
        request = AlterUserScramCredentialsRequest(upsertions=[upsertion(user, mechanism, password)])
        (result,) = client.call(request, 0).results
        assert (result.user, result.error_code) == (user, ErrorCode.NONE), result.error_message


class SaslBroker(WatchedBroker):
    """`millrace up` with a second listener, on which clients have to log in."""

    def __init__(self, settings: Mapping[str, str] | None = None, users: Mapping[str, str] | None = None) -> None:
        super().__init__({"sasl.enabled.mechanisms": ",".join(MECHANISMS), **(settings or {})})
        self.sasl_port = 0
        self.users = dict(users or {})

    def _prepare(self) -> None:
        if not self.port:
            self.port, self.sasl_port = free_ports(HOST, 2)
            self.settings["listeners"] = f"PLAINTEXT://{HOST}:{self.port},SASL_PLAINTEXT://{HOST}:{self.sasl_port}"

    def __enter__(self) -> Any:
        super().__enter__()
        try:
            with self.connect() as client:
                for user, password in self.users.items():
                    add_user(client, user, password)
        except BaseException:
            self.close()
            raise
        return self

    def enter(self, **options: Any) -> SaslClient:
        """A connection on which nobody has logged in yet."""
        return SaslClient((HOST, self.sasl_port), **options)
