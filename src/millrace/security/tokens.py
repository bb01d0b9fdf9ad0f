"""Delegation tokens (KIP-48): credentials that a logged-in user has made for somebody, for a while.

A token is a user name and a password of SCRAM: its id, and an HMAC of the id by a secret that only brokers know. So
nothing secret of a token is kept anywhere, and every broker with the same secret knows the password. Not here: who may
have, prolong or see one (`cluster.tokens`, `handlers.delegation_tokens`), and the exchange (`scram`).
"""

from __future__ import annotations

import base64
import hmac
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from millrace.clock import Clock
from millrace.security.derivation import KeyDerivation, Recipe
from millrace.security.scram import (
    MIN_ITERATIONS,
    SALT_BYTES,
    Account,
    ScramCredential,
    ScramMechanism,
    credential_of,
)

_SPARE: Final = 64


@dataclass(frozen=True, slots=True)
class DelegationToken:
    """A token. Its secret is not kept: it follows from the id and `delegation.token.secret.key`."""

    token_id: str
    owner: str
    """The principal it logs in as."""
    requester: str
    renewers: tuple[str, ...]
    issued_ms: int
    expires_ms: int
    max_ms: int
    """When it ends for good, however often it was renewed."""

    def is_expired(self, now_ms: int) -> bool:
        return self.max_ms < now_ms or self.expires_ms < now_ms

    def is_of(self, principal: str) -> bool:
        """Whether it is the principal's own, or one that it may renew."""
        return principal == self.owner or principal in self.renewers

    def concerns(self, principal: str) -> bool:
        """Whether the principal may see it: its own, one that it may renew, or one that it asked for (KIP-373)."""
        return self.is_of(principal) or principal == self.requester


Tokens = Mapping[str, DelegationToken]


class TokenPasswords:
    """What only brokers can tell of tokens: their passwords, and which token a password is of.

    Owner: the event loop. Keys are derived in a thread, once per token and mechanism.
    """

    def __init__(
        self, secret: str | None, tokens: Callable[[], Tokens], derivation: KeyDerivation, clock: Clock
    ) -> None:
        """Without a secret there are no tokens, whatever `tokens` has."""
        self._secret = (secret or "").encode()
        self._tokens = tokens
        self._derivation = derivation
        self._clock = clock
        self._credentials: dict[tuple[str, ScramMechanism], ScramCredential] = {}
        self._indexed: Tokens | None = None
        self._ids: dict[bytes, str] = {}

    def __repr__(self) -> str:
        return f"TokenPasswords({len(self._tokens())} tokens{'' if self.is_enabled else ', disabled'})"

    @property
    def is_enabled(self) -> bool:
        return bool(self._secret)

    def hmac(self, token_id: str) -> bytes:
        """The password of a token; in SCRAM, as base64."""
        return hmac.digest(self._secret, token_id.encode(), "sha512")

    def find(self, mac: bytes) -> DelegationToken | None:
        """The token whose password this is."""
        tokens = self._tokens()
        if tokens is not self._indexed:
            known = {token_id: mac for mac, token_id in self._ids.items()}
            self._ids = {known.get(token_id) or self.hmac(token_id): token_id for token_id in tokens}
            self._indexed = tokens
        token_id = self._ids.get(mac)
        return None if token_id is None else tokens.get(token_id)

    async def account(self, token_id: str, mechanism: ScramMechanism) -> Account | None:
        """Who logs in with a token; None for one that does not exist or is over."""
        token = self._tokens().get(token_id)
        if not self.is_enabled or token is None or token.is_expired(self._clock.wall_ms()):
            return None
        credential = self._credentials.get((token_id, mechanism))
        if credential is None:
            self._forget_the_gone()
            credential = self._credentials[token_id, mechanism] = await self._derive(token_id, mechanism)
        return Account(credential, token.owner, token_id, min(token.expires_ms, token.max_ms))

    async def _derive(self, token_id: str, mechanism: ScramMechanism) -> ScramCredential:
        recipe = Recipe(mechanism, secrets.token_bytes(SALT_BYTES), MIN_ITERATIONS)
        password = base64.b64encode(self.hmac(token_id)).decode()
        (salted,) = await self._derivation.salted_passwords(password, [recipe])
        return credential_of(mechanism, salted, recipe.salt, recipe.iterations)

    def _forget_the_gone(self) -> None:
        tokens = self._tokens()
        if len(self._credentials) >= len(ScramMechanism) * len(tokens) + _SPARE:
            self._credentials = {key: kept for key, kept in self._credentials.items() if key[0] in tokens}
