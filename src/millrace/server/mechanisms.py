"""The login mechanisms of a broker's listeners, made from its settings and joined with where users are kept.

Which mechanisms a listener offers and by which rules clients log in there is in the settings; who the users are is in
the cluster's image, among the delegation tokens, in the listener's own settings (PLAIN) or with an issuer of tokens
(OAUTHBEARER). Not here: what a mechanism asks for (`security`), and the login of a connection (`login`).

Owner: the broker; `stop` ends what the mechanisms keep going, the fetching of issuers' keys.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

from millrace.clock import Clock
from millrace.config import BrokerConfig
from millrace.security.derivation import KeyDerivation
from millrace.security.plain import JaasUsers, PlainExchange
from millrace.security.sasl import OAUTHBEARER, PLAIN, Mechanism, offered
from millrace.security.scram import Account, Decoys, ScramExchange, ScramMechanism, Users
from millrace.security.tokens import TokenPasswords
from millrace.server.login import LOGIN_WITHIN_S, LoginRules

if TYPE_CHECKING:
    from millrace.security.oauth import OAuthBearer


class Mechanisms:
    """See the module's text."""

    def __init__(
        self,
        config: BrokerConfig,
        *,
        users: Callable[[], Users],
        tokens: TokenPasswords,
        derivation: KeyDerivation,
        clock: Clock,
    ) -> None:
        self._config = config
        self._users = users
        self._tokens = tokens
        self._derivation = derivation
        self._clock = clock
        self._decoys = Decoys(users)
        self._issuers: list[OAuthBearer] = []

    def __repr__(self) -> str:
        return f"Mechanisms({len(self._issuers)} listeners take tokens of issuers)"

    async def rules(self) -> dict[str, LoginRules]:
        """How clients log in on each listener that asks for it; ConfigError where the settings cannot be kept to."""
        config = self._config
        idle_ms = config.get_int("connections.max.idle.ms")
        return {
            listener: LoginRules(
                mechanisms={name: await self._mechanism(listener, name) for name in offered(config, listener)},
                max_session_ms=partial(config.listener_value, listener, "connections.max.reauth.ms"),
                max_frame_bytes=config.listener_value(listener, "sasl.server.max.receive.size"),
                failure_delay_s=config.get_int("connection.failed.authentication.delay.ms") / 1000,
                within_s=min(LOGIN_WITHIN_S, idle_ms / 1000) if idle_ms > 0 else LOGIN_WITHIN_S,
            )
            for listener in (each.name for each in config.listeners if each.security_protocol.startswith("SASL_"))
        }

    async def stop(self) -> None:
        for issuer in self._issuers:
            await issuer.stop()

    async def _mechanism(self, listener: str, name: str) -> Mechanism:
        if name == PLAIN:
            listed = JaasUsers(partial(self._config.listener_value, listener, "sasl.jaas.config", PLAIN))
            return lambda: PlainExchange(listed, self._users, self._decoys, self._derivation)
        if name == OAUTHBEARER:
            return await self._of_issuer(listener)
        scram = ScramMechanism.labelled(name)
        return lambda: ScramExchange(scram, self._account, self._decoys)

    async def _of_issuer(self, listener: str) -> Mechanism:
        from millrace.security.oauth import OAuthBearer  # noqa: PLC0415 - its libraries take a while to load

        issuer = OAuthBearer.from_config(self._config, listener, self._clock)
        self._issuers.append(issuer)
        await issuer.start()
        return issuer.exchange

    def _account(
        self, user: str, mechanism: ScramMechanism, by_token: bool
    ) -> Account | Awaitable[Account | None] | None:
        if by_token:
            return self._tokens.account(user, mechanism)
        credential = self._users().get((user, mechanism))
        return None if credential is None else Account(credential, f"User:{user}")
