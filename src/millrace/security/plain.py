"""PLAIN (RFC 4616): the client sends name and password, so its connection should have TLS.

Users are those of the listener's JAAS line (`user_NAME="password"`), as in Kafka, and otherwise those who have a SCRAM
credential. Whoever asks costs the same derivations, whether the name exists, and where: one for each mechanism that any
user has.
"""

from __future__ import annotations

import hmac
import logging
import secrets
from collections.abc import Callable, Mapping
from typing import Final

from millrace.errors import ConfigError
from millrace.security import jaas
from millrace.security.derivation import KeyDerivation, Recipe
from millrace.security.sasl import FOREIGN_AUTHORIZATION_ID, Done, LoginFailed, Step
from millrace.security.scram import Decoys, Users, credential_of

logger = logging.getLogger(__name__)

LOGIN_MODULE: Final = "PlainLoginModule"
_WRONG: Final = "Authentication failed: Invalid username or password"


class JaasUsers:
    """The users of a JAAS line, which may change."""

    def __init__(self, line: Callable[[], str | None]) -> None:
        """Raises ConfigError where the line is wrong; one that is wrong later has no users."""
        self._line = line
        self._read = line()
        self._passwords = plain_users(self._read)

    def __repr__(self) -> str:
        return f"JaasUsers({sorted(self._passwords)})"

    @property
    def passwords(self) -> Mapping[str, str]:
        line = self._line()
        if line != self._read:
            self._read = line
            try:
                self._passwords = plain_users(line)
            except ConfigError as error:
                self._passwords = {}
                logger.error("nobody can log in by the new JAAS line: %s", error)  # noqa: TRY400 - the text says it all
        return self._passwords


def plain_users(line: str | None) -> dict[str, str]:
    """Names and passwords from a JAAS line; ConfigError where it is not one of PlainLoginModule."""
    if not line:
        return {}
    module = jaas.parse(line)
    if module.name != LOGIN_MODULE:
        raise ConfigError(f"sasl.jaas.config for PLAIN names {module.name}, not {LOGIN_MODULE}")
    prefix = jaas.USER_OPTION_PREFIX
    return {name.removeprefix(prefix): text for name, text in module.options.items() if name.startswith(prefix)}


class PlainExchange:
    """The server's side: one message, one answer."""

    def __init__(
        self, listed: JaasUsers, users: Callable[[], Users], decoys: Decoys, derivation: KeyDerivation
    ) -> None:
        self.user = ""
        self._listed = listed
        self._users = users
        self._decoys = decoys
        self._derivation = derivation

    def __repr__(self) -> str:
        return "PlainExchange()"

    async def step(self, message: bytes) -> Step:
        try:
            authzid, name, password = message.decode().split("\0")
        except ValueError:  # of the encoding, or of the number of parts
            raise LoginFailed("the message is not [authzid] NUL name NUL password") from None
        self.user = name
        if not name or not password:
            raise LoginFailed("no user name" if not name else "no password")
        if not await self._is_right(name, password):
            raise LoginFailed("no such user, or a wrong password", _WRONG)
        if authzid not in ("", name):
            raise LoginFailed("another authorization id than the user name", FOREIGN_AUTHORIZATION_ID)
        return Step(b"", Done(f"User:{name}"))

    async def _is_right(self, name: str, password: str) -> bool:
        by_scram = await self._is_right_by_scram(name, password)
        listed = self._listed.passwords.get(name)
        expected = secrets.token_hex() if listed is None else listed
        by_list = hmac.compare_digest(password.encode(), expected.encode())
        return by_scram if listed is None else by_list

    async def _is_right_by_scram(self, name: str, password: str) -> bool:
        users, mechanisms = self._users(), sorted(self._decoys.models)
        if not mechanisms:
            return False
        kept = [users.get((name, mechanism)) or self._decoys.credential(name, mechanism) for mechanism in mechanisms]
        recipes = [
            Recipe(mechanism, credential.salt, credential.iterations)
            for mechanism, credential in zip(mechanisms, kept, strict=True)
        ]
        derived = await self._derivation.salted_passwords(password, recipes)
        is_right = False
        for mechanism, salted, credential in zip(mechanisms, derived, kept, strict=True):
            made = credential_of(mechanism, salted, credential.salt, credential.iterations)
            matches = hmac.compare_digest(made.stored_key, credential.stored_key)
            is_right |= matches and (name, mechanism) in users
        return is_right
