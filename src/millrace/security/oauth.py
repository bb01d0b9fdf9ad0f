"""OAUTHBEARER (RFC 7628): a client shows an access token, a JWT that an identity provider has signed (RFC 9068).

A token counts if a key of the provider's set verifies its signature, by an algorithm on the list; if it was issued by
the expected issuer, for this audience, and is in date; and if it names a subject, which becomes the principal. Nothing
is taken for granted: without keys, issuer or audience a broker does not start (CVE-2026-33557, CVE-2026-110985).

`read_first_message` and `verify` are pure. A refused client gets the RFC's JSON error and has to answer with a single
0x01; then the login fails. Not here: where keys come from (`jwks`), and what happens when a session ends
(`server.login`). Tokens never reach a log: a reason names a claim, not its token.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import logging
import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from joserfc import jws
from joserfc.errors import JoseError, UnsupportedAlgorithmError

from millrace.clock import Clock
from millrace.config import BrokerConfig
from millrace.errors import ConfigError
from millrace.security.jwks import ALGORITHMS, KeyRing, VerificationKey, source_for
from millrace.security.sasl import OAUTHBEARER, Done, LoginFailed, Step

logger = logging.getLogger(__name__)

MAX_TOKEN_BYTES: Final = 32 * 1024
MAX_HEADER_BYTES: Final = 4096
MAX_SUBJECT_LENGTH: Final = 255
MAX_TIME_S: Final = 10**14
"""Of a claim: far beyond any date (Unix milliseconds taken for seconds, too), and still a number that can be sent."""
REFUSAL: Final = b'{"status":"invalid_token"}'

_FAST: Final = frozenset({"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "Ed25519"})
_FAST_BYTES: Final = 4096
"""What takes a tenth of a millisecond is verified on the loop; the rest, up to two, in a thread."""

_FOREIGN_AUTHORIZATION_ID: Final = (
    "Authentication failed: Client requested an authorization id that is different from the token's principal name"
)
_SEPARATOR: Final = b"\x01"
_GS2_HEADER: Final = re.compile(rb"n,(?:a=((?:[\x02-\x2b\x2d-\x3c\x3e-\x7f]|=2C|=3D)+))?,")
_PAIR: Final = re.compile(rb"([A-Za-z]+)=([\x21-\x7e \t\r\n]+)")
_BEARER: Final = re.compile(rb"[Bb][Ee][Aa][Rr][Ee][Rr] +([-_~+/.a-zA-Z0-9]+=*)")


class _Registry(jws.JWSRegistry):
    """As large as the tokens that providers hand out, and with whatever headers they add."""

    max_header_length = MAX_HEADER_BYTES
    max_payload_length = MAX_TOKEN_BYTES

    def get_alg(self, name: str) -> Any:
        if name not in ALGORITHMS:
            raise UnsupportedAlgorithmError(name)
        return self.algorithms[name]


_REGISTRY: Final = _Registry(strict_check_header=False)


@dataclass(frozen=True, slots=True)
class TokenRules:
    """What a token must say. None and empty: any (only where the administrator has said so)."""

    issuer: str | None
    audiences: frozenset[str]
    clock_skew_s: int = 30
    subject_claim: str = "sub"


@dataclass(frozen=True, slots=True)
class FirstMessage:
    """What a client begins with."""

    token: str = field(repr=False)
    authorization_id: str


def read_first_message(message: bytes) -> FirstMessage:
    """Take `n,[a=authzid],` and pairs of a name and a value apart, of which `auth` has the token; LoginFailed."""
    header, separator, rest = message.partition(_SEPARATOR)
    gs2 = _GS2_HEADER.fullmatch(header)
    if gs2 is None or not separator or not rest.endswith(_SEPARATOR * 2):
        raise LoginFailed("the first message is not one of OAUTHBEARER")
    values: dict[bytes, bytes] = {}
    for part in rest[:-2].split(_SEPARATOR):
        pair = _PAIR.fullmatch(part)
        if pair is None or pair[1] in values:
            raise LoginFailed("the first message has something that is no pair of a name and a value, or a name twice")
        values[pair[1]] = pair[2]
    bearer = _BEARER.fullmatch(values.get(b"auth", b""))
    if bearer is None:
        raise LoginFailed("the first message has no bearer token")
    authorization_id = (gs2[1] or b"").decode("ascii").replace("=2C", ",").replace("=3D", "=")
    return FirstMessage(bearer[1].decode("ascii"), authorization_id)


# --- tokens -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TokenHeader:
    """By what a token says that it was signed; nothing of it is verified."""

    algorithm: str
    key_id: str | None


@dataclass(frozen=True, slots=True)
class VerifiedToken:
    """Whom a token is for, and until when it is good."""

    subject: str
    expires_ms: int


def read_header(token: str) -> TokenHeader:
    """The header of a token, if it asks for an algorithm that is allowed; LoginFailed."""
    if len(token) > MAX_TOKEN_BYTES:
        raise LoginFailed(f"the token is larger than {MAX_TOKEN_BYTES} bytes")
    segment = token.partition(".")[0]
    if len(segment) > MAX_HEADER_BYTES:
        raise LoginFailed("the token's header is too large")
    try:
        header = json.loads(base64.urlsafe_b64decode(segment + "=" * (-len(segment) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        raise LoginFailed("the token is no JWT") from None
    if not isinstance(header, dict):
        raise LoginFailed("the token is no JWT")
    algorithm, key_id = header.get("alg"), header.get("kid")
    if not isinstance(algorithm, str) or algorithm not in ALGORITHMS:
        raise LoginFailed("tokens signed so are not taken", detail=f"{algorithm!r:.40}")
    if not (key_id is None or isinstance(key_id, str)):
        raise LoginFailed("the token's key id is not a text")
    if "crit" in header or "b64" in header:
        raise LoginFailed("the token's header asks for something that is not understood here")
    return TokenHeader(algorithm, key_id)


def verify(token: str, key: VerificationKey, rules: TokenRules, now_ms: int) -> VerifiedToken:
    """What a token says, if `key` has signed it and everything in it is right; LoginFailed says what is not."""
    try:
        signed = jws.extract_compact(token.encode("ascii"), registry=_REGISTRY)
        if signed.headers().get("alg") not in key.algorithms or not jws.validate_compact(
            signed, key.key, registry=_REGISTRY
        ):
            raise LoginFailed("the token's signature is not right")
        claims = json.loads(signed.payload or b"")
    except JoseError as error:
        raise LoginFailed(f"the token's signature is not right ({type(error).__name__})") from None
    except (ValueError, TypeError, RecursionError):
        raise LoginFailed("the token cannot be read") from None
    if not isinstance(claims, dict):
        raise LoginFailed("the token makes no claims")
    return check_claims(claims, rules, now_ms)


def check_claims(claims: dict[str, Any], rules: TokenRules, now_ms: int) -> VerifiedToken:
    """The subject and the end of a token whose signature is right; LoginFailed for a claim that is not."""
    if rules.issuer is not None and claims.get("iss") != rules.issuer:
        raise LoginFailed("the token is of another issuer")
    if rules.audiences and not rules.audiences.intersection(_audiences(claims.get("aud"))):
        raise LoginFailed("the token is for another audience")
    skew_ms = rules.clock_skew_s * 1000
    expires_ms = _time_ms(claims, "exp")
    if now_ms - skew_ms >= expires_ms:
        raise LoginFailed("the token has expired")
    if "nbf" in claims and now_ms + skew_ms < _time_ms(claims, "nbf"):
        raise LoginFailed("the token is not valid yet")
    if now_ms + skew_ms < _time_ms(claims, "iat"):
        raise LoginFailed("the token was issued in the future")
    subject = claims.get(rules.subject_claim)
    if not isinstance(subject, str) or not (subject := subject.strip()):
        raise LoginFailed(f"the token has no claim {rules.subject_claim}")
    if len(subject) > MAX_SUBJECT_LENGTH or not subject.isprintable():
        raise LoginFailed(f"the token's claim {rules.subject_claim} cannot be a name")
    # A token that counts only because clocks may differ is good for as long as it counts.
    return VerifiedToken(subject, expires_ms if expires_ms > now_ms else expires_ms + skew_ms)


def _audiences(value: Any) -> frozenset[str]:
    named = value if isinstance(value, list) else [value]
    return frozenset(each for each in named if isinstance(each, str))


def _time_ms(claims: dict[str, Any], name: str) -> int:
    value = claims.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MAX_TIME_S:
        raise LoginFailed(f"the token has no time in its claim {name}")
    return int(value * 1000)


# --- the exchange -----------------------------------------------------------------------------------------------------


class OAuthBearer:
    """The mechanism as one listener offers it. Owner: the broker, which starts and stops it."""

    def __init__(self, rules: TokenRules, keys: KeyRing, clock: Clock) -> None:
        self.rules = rules
        self._keys = keys
        self._clock = clock

    def __repr__(self) -> str:
        return f"OAuthBearer({self.rules!r}, {self._keys!r})"

    @classmethod
    def from_config(cls, config: BrokerConfig, listener: str, clock: Clock) -> OAuthBearer:
        """What the settings of a listener ask for; ConfigError where they would let unverified tokens in."""

        def value(name: str) -> Any:
            return config.listener_value(listener, name, OAUTHBEARER)

        url = value("sasl.oauthbearer.jwks.endpoint.url")
        if not url:
            raise ConfigError(
                f"listener {listener} offers OAUTHBEARER and has no keys to verify tokens with: "
                "set sasl.oauthbearer.jwks.endpoint.url"
            )
        issuer = value("sasl.oauthbearer.expected.issuer") or None
        audiences = frozenset(filter(None, value("sasl.oauthbearer.expected.audience")))
        for claim, expected, unverified in (
            ("issuer", issuer, "sasl.oauthbearer.allow.unverified.issuer"),
            ("audience", audiences, "sasl.oauthbearer.allow.unverified.audience"),
        ):
            if not expected and not value(unverified):
                raise ConfigError(
                    f"listener {listener} offers OAUTHBEARER to tokens of any {claim}: set "
                    f"sasl.oauthbearer.expected.{claim}, or {unverified}=true"
                )
        authorities = value("sasl.oauthbearer.jwks.endpoint.truststore.location")
        source = source_for(
            url,
            value("sasl.oauthbearer.allowed.urls"),
            look_s=value("sasl.oauthbearer.jwks.endpoint.refresh.ms") / 1000,
            authorities=Path(authorities) if authorities else None,
            clock=clock,
        )
        keys = KeyRing(
            source,
            clock=clock,
            first_pause_s=value("sasl.oauthbearer.jwks.endpoint.retry.backoff.ms") / 1000,
            longest_pause_s=value("sasl.oauthbearer.jwks.endpoint.retry.backoff.max.ms") / 1000,
        )
        rules = TokenRules(
            issuer, audiences, value("sasl.oauthbearer.clock.skew.seconds"), value("sasl.oauthbearer.sub.claim.name")
        )
        return cls(rules, keys, clock)

    async def start(self) -> None:
        """Return with keys; ConfigError where there are none."""
        await self._keys.start()

    async def stop(self) -> None:
        await self._keys.stop()

    def exchange(self) -> OAuthBearerExchange:
        return OAuthBearerExchange(self)

    def judge(self, token: str) -> VerifiedToken | Awaitable[VerifiedToken]:
        """What a token says. To be awaited where its key is not known, or it takes a while to verify; LoginFailed."""
        header = read_header(token)
        key = self._keys.find(header.key_id, header.algorithm)
        if key is None or header.algorithm not in _FAST or len(token) > _FAST_BYTES:
            return self._judge_later(token, header, key)
        return verify(token, key, self.rules, self._clock.wall_ms())

    async def _judge_later(self, token: str, header: TokenHeader, key: VerificationKey | None) -> VerifiedToken:
        if key is None:
            # Providers change their keys, and many clients give up at the first refusal.
            await self._keys.look_early()
            key = self._keys.find(header.key_id, header.algorithm)
        if key is None:
            named = f"{header.algorithm}, key {header.key_id!r:.100}"
            raise LoginFailed("no key here verifies the token", detail=named)
        return await asyncio.to_thread(verify, token, key, self.rules, self._clock.wall_ms())


class OAuthBearerExchange:
    """One login: the client's first message, and after a refusal its acknowledgement."""

    def __init__(self, mechanism: OAuthBearer) -> None:
        self.user = ""  # what a token says that is not good counts for nothing
        self._mechanism = mechanism
        self._refused: LoginFailed | None = None

    def __repr__(self) -> str:
        return f"OAuthBearerExchange({'refused' if self._refused else 'waiting'})"

    def step(self, message: bytes) -> Step | Awaitable[Step]:
        """LoginFailed for a message that is none, and for whatever follows a refusal."""
        if self._refused is not None:
            raise self._refused
        first = read_first_message(message)
        try:
            judged = self._mechanism.judge(first.token)
        except LoginFailed as reason:
            return self._refuse(reason)
        return _admit(first, judged) if isinstance(judged, VerifiedToken) else self._await(first, judged)

    async def _await(self, first: FirstMessage, judged: Awaitable[VerifiedToken]) -> Step:
        try:
            verified = await judged
        except LoginFailed as reason:
            return self._refuse(reason)
        return _admit(first, verified)

    def _refuse(self, reason: LoginFailed) -> Step:
        # The words by which Kafka refuses, too.
        self._refused = LoginFailed(reason.reason, REFUSAL.decode(), detail=reason.detail)
        return Step(REFUSAL)


def _admit(first: FirstMessage, verified: VerifiedToken) -> Step:
    if first.authorization_id not in ("", verified.subject):
        raise LoginFailed("the client asks to be somebody else than its token says", _FOREIGN_AUTHORIZATION_ID)
    return Step(b"", Done(f"User:{verified.subject}", expires_ms=verified.expires_ms))
