"""SCRAM (RFC 5802, RFC 7677): what is kept of a password, and the server's side of the exchange.

Names and passwords are UTF-8 as they come, as in Kafka: nothing is normalised (SASLprep). Channel binding is not
offered.

A user who does not exist is answered like one who does: with a salt that stays the same (`Decoys`), by the same code,
and told only after the proof that the login has failed.

Invariants: `salted_password` is the only thing here that takes long, and no exchange calls it; what an exchange keeps
of a client's words is bounded; secrets are compared in constant time; no secret is in a repr or in an error's text.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from inspect import isawaitable
from typing import Final, NamedTuple

from millrace.security.sasl import FOREIGN_AUTHORIZATION_ID, Done, LoginFailed, Step

MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 16384
"""Kafka's bounds for new credentials."""
SALT_BYTES: Final = 32


class ScramMechanism(IntEnum):
    """The numbers are the protocol's."""

    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def label(self) -> str:
        """As clients name it."""
        return self.name.replace("_", "-")

    @property
    def hash_name(self) -> str:
        return "sha256" if self is ScramMechanism.SCRAM_SHA_256 else "sha512"

    @classmethod
    def labelled(cls, label: str) -> ScramMechanism:
        """The mechanism that clients name so; KeyError where there is none."""
        return cls[label.replace("-", "_")]


@dataclass(frozen=True, slots=True)
class ScramCredential:
    """What a server keeps of a password: enough to check a proof, not enough to make one."""

    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)
    iterations: int


Users = Mapping[tuple[str, ScramMechanism], ScramCredential]


# --- credentials ------------------------------------------------------------------------------------------------------


def salted_password(mechanism: ScramMechanism, password: str, salt: bytes, iterations: int) -> bytes:
    """PBKDF2: milliseconds, in which other threads run. Not for an event loop."""
    return hashlib.pbkdf2_hmac(mechanism.hash_name, password.encode(), salt, iterations)


def credential_of(mechanism: ScramMechanism, salted: bytes, salt: bytes, iterations: int) -> ScramCredential:
    """What is kept of a salted password."""
    client_key = hmac.digest(salted, b"Client Key", mechanism.hash_name)
    return ScramCredential(
        salt=salt,
        stored_key=hashlib.new(mechanism.hash_name, client_key).digest(),
        server_key=hmac.digest(salted, b"Server Key", mechanism.hash_name),
        iterations=iterations,
    )


def new_credential(mechanism: ScramMechanism, password: str, iterations: int = MIN_ITERATIONS) -> ScramCredential:
    """A credential with a salt of its own; as slow as `salted_password`."""
    salt = secrets.token_bytes(SALT_BYTES)
    return credential_of(mechanism, salted_password(mechanism, password, salt, iterations), salt, iterations)


class Decoys:
    """Credentials for users who do not exist, which nobody has a password for.

    Salt and iterations of a name stay the same, and look like those of the first user who does exist. They follow from
    that user's key, which only brokers know: so that they are the same on all of them, and after a restart. Where there
    is no user, a secret of this process serves.
    """

    def __init__(self, users: Callable[[], Users]) -> None:
        self._users = users
        self._seen: Users | None = None
        self._models: dict[ScramMechanism, ScramCredential] = {}
        self._secret = secrets.token_bytes(32)

    def __repr__(self) -> str:
        return f"Decoys(modelled on {len(self.models)} credentials)"

    @property
    def models(self) -> Mapping[ScramMechanism, ScramCredential]:
        """The first user's credential of each mechanism that any user has."""
        users = self._users()
        if users is not self._seen:
            first: dict[ScramMechanism, str] = {}
            for name, mechanism in users:
                first[mechanism] = min(name, first.get(mechanism, name))
            self._models = {mechanism: users[name, mechanism] for mechanism, name in first.items()}
            self._seen = users
        return self._models

    def credential(self, name: str, mechanism: ScramMechanism) -> ScramCredential:
        model = self.models.get(mechanism)
        secret, size, iterations = self._secret, SALT_BYTES, MIN_ITERATIONS
        if model is not None:
            secret, size, iterations = model.server_key, len(model.salt), model.iterations
        keyed = hmac.digest(secret, f"decoy {mechanism.label} {name}".encode(), "sha512")
        salt = hashlib.shake_256(keyed).digest(size)
        if model is not None and model.salt.isalnum():  # Java's tools write salts in letters and digits
            salt = bytes(_ALPHANUMERIC[byte % len(_ALPHANUMERIC)] for byte in salt)
        nobody = secrets.token_bytes(hashlib.new(mechanism.hash_name).digest_size)
        return ScramCredential(salt=salt, stored_key=nobody, server_key=nobody, iterations=iterations)


_ALPHANUMERIC: Final = b"0123456789abcdefghijklmnopqrstuvwxyz"


# --- the exchange -----------------------------------------------------------------------------------------------------


class Account(NamedTuple):
    """Who logs in by a credential."""

    credential: ScramCredential
    principal: str
    token_id: str = ""
    expires_ms: int | None = None


Lookup = Callable[[str, ScramMechanism, bool], "Account | Awaitable[Account | None] | None"]
"""The account of a user name, or with True of the id of a delegation token, whose password is the token's HMAC."""


_NAME: Final = r"(?:[^\0,=]|=2C|=3D)+"
_CLIENT_FIRST: Final = re.compile(
    rf"(?P<gs2>[ny],(?:a=(?P<authzid>{_NAME}))?,)"
    rf"(?P<bare>n=(?P<name>{_NAME}),r=(?P<nonce>[!-+\--~]+)(?P<extensions>(?:,[A-Za-z]+=[^\0,]+)*))"
)
_CLIENT_FINAL: Final = re.compile(
    r"(?P<without_proof>c=(?P<binding>[A-Za-z0-9/+=]+),r=(?P<nonce>[!-+\--~]+)(?:,[A-Za-z]+=[^\0,]+)*)"
    r",p=(?P<proof>[A-Za-z0-9/+=]+)"
)
MAX_MESSAGE_BYTES: Final = 16 * 1024
"""Name and authorization id of a kilobyte, each byte escaped, and more than any client needs: what a stranger has said
is kept until it says the rest, and nobody counts it."""
_BY_TOKEN: Final = ("tokenauth", "true")
_NONCE_BYTES: Final = 24


@dataclass(frozen=True, slots=True)
class _Challenge:
    """What the second message of the client is checked against."""

    account: Account | None
    credential: ScramCredential = field(repr=False)
    binding: bytes
    nonce: str = field(repr=False)
    messages: str = field(repr=False)
    """The client's first message without its header, and ours."""


class ScramExchange:
    """The server's side: two messages of the client, two answers."""

    def __init__(self, mechanism: ScramMechanism, lookup: Lookup, decoys: Decoys) -> None:
        self.user = ""
        self._mechanism = mechanism
        self._lookup = lookup
        self._decoys = decoys
        self._challenge: _Challenge | None = None
        self._is_over = False

    def __repr__(self) -> str:
        return f"ScramExchange({self._mechanism.label})"

    def step(self, message: bytes) -> Step | Awaitable[Step]:
        if self._is_over:
            raise LoginFailed("a message after the last one")
        if len(message) > MAX_MESSAGE_BYTES:
            raise LoginFailed(f"a message is larger than {MAX_MESSAGE_BYTES} bytes")
        text = _text(message)
        if self._challenge is not None:
            self._is_over = True
            return self._finish(self._challenge, text)
        first = _CLIENT_FIRST.fullmatch(text)
        if first is None:
            raise LoginFailed("the client's first message is not understood")
        name = self.user = _unescaped(first["name"])
        if first["authzid"] is not None and _unescaped(first["authzid"]) != name:
            raise LoginFailed("another authorization id than the user name", FOREIGN_AUTHORIZATION_ID)
        extensions = [each.partition("=") for each in first["extensions"].lower().split(",")]
        by_token = any((key, value) == _BY_TOKEN for key, _, value in extensions)
        found = self._lookup(name, self._mechanism, by_token)
        if isawaitable(found):
            return self._begin_later(found, name, first)
        return self._begin(found, name, first)

    async def _begin_later(self, found: Awaitable[Account | None], name: str, first: re.Match[str]) -> Step:
        return self._begin(await found, name, first)

    def _begin(self, account: Account | None, name: str, first: re.Match[str]) -> Step:
        decoy = self._decoys.credential(name, self._mechanism)  # made in any case: it takes its time, too
        credential = decoy if account is None else account.credential
        nonce = first["nonce"] + secrets.token_urlsafe(_NONCE_BYTES)
        salt = base64.b64encode(credential.salt).decode()
        answer = f"r={nonce},s={salt},i={credential.iterations}"
        self._challenge = _Challenge(account, credential, first["gs2"].encode(), nonce, f"{first['bare']},{answer}")
        return Step(answer.encode())

    def _finish(self, challenge: _Challenge, text: str) -> Step:
        final = _CLIENT_FINAL.fullmatch(text)
        if final is None:
            raise LoginFailed("the client's final message is not understood")
        if not hmac.compare_digest(final["nonce"], challenge.nonce):
            raise LoginFailed("the nonce is not the one of this exchange")
        if not hmac.compare_digest(_from_base64(final["binding"]), challenge.binding):
            raise LoginFailed("the channel binding is not the one of the first message")
        hash_name, credential = self._mechanism.hash_name, challenge.credential
        signed = f"{challenge.messages},{final['without_proof']}".encode()
        signature = hmac.digest(credential.stored_key, signed, hash_name)
        proof = _from_base64(final["proof"])
        if len(proof) != len(signature):
            raise LoginFailed("the proof has the wrong length")
        client_key = bytes(a ^ b for a, b in zip(proof, signature, strict=True))
        is_proved = hmac.compare_digest(hashlib.new(hash_name, client_key).digest(), credential.stored_key)
        account = challenge.account
        if account is None or not is_proved:
            raise LoginFailed("no such user" if account is None else "a wrong password")
        verifier = base64.b64encode(hmac.digest(credential.server_key, signed, hash_name))
        return Step(b"v=" + verifier, Done(account.principal, account.token_id, account.expires_ms))


def _text(message: bytes) -> str:
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise LoginFailed("a message is not UTF-8") from None


def _unescaped(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _from_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error:
        raise LoginFailed("a field is not base64") from None
