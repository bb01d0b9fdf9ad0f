"""OAUTHBEARER: the client's message, what a token must be, and the exchange."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.clock import ManualClock
from millrace.config import BrokerConfig
from millrace.errors import ConfigError
from millrace.security.jwks import JwksFile, KeyRing, parse_jwks, select_key
from millrace.security.oauth import (
    MAX_TOKEN_BYTES,
    REFUSAL,
    OAuthBearer,
    TokenRules,
    VerifiedToken,
    check_claims,
    read_first_message,
    read_header,
    verify,
)
from millrace.security.sasl import Done, LoginFailed, Step
from support import identity_provider as provider

NOW_MS = 1_700_000_000_000
RULES = TokenRules(provider.ISSUER, frozenset({provider.AUDIENCE, "other"}))


def judged(token: str, rules: TokenRules = RULES, keys: bytes | None = None) -> VerifiedToken:
    header = read_header(token)
    found = select_key(parse_jwks(keys or provider.key_set(provider.key())), header.key_id, header.algorithm)
    if found is None:
        raise LoginFailed("no key")
    return verify(token, found, rules, NOW_MS)


def said(**changed: Any) -> dict[str, Any]:
    return provider.claims(NOW_MS, **changed)


# --- the first message ------------------------------------------------------------------------------------------------


def test_a_first_message_is_taken_apart() -> None:
    first = read_first_message(b"n,a=al=2Cice=3D,\x01auth=bearer  a.b-_c.d\x01logicalCluster=lkc 1\x01\x01")
    assert (first.token, first.authorization_id) == ("a.b-_c.d", "al,ice=")
    assert read_first_message(provider.first_message("x.y.z", "", "host=h")).authorization_id == ""


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"n,,",
        b"n,,\x01\x01",
        b"n,,\x01auth=Bearer x.y.z\x01",  # one separator short
        b"n,,\x01auth=Bearer x.y.z\x01\x01\x01",
        b"y,,\x01auth=Bearer x.y.z\x01\x01",  # channel binding
        b"n,a=,\x01auth=Bearer x.y.z\x01\x01",
        b"n,a=x\x01auth=Bearer x.y.z\x01\x01",
        b"n,,\x01auth=Basic x.y.z\x01\x01",
        b"n,,\x01auth=Bearer \x01\x01",
        b"n,,\x01auth=Bearer x y\x01\x01",
        b"n,,\x01auth=Bearer x.y\xc3\xa9.z\x01\x01",
        b"n,,\x01auth=Bearer a.b.c\x01auth=Bearer d.e.f\x01\x01",
        b"n,,\x01host=h\x01\x01",
        b"n,,\x01auth=Bearer x.y.z\x01ho st=h\x01\x01",
        b"n,,\x01auth=Bearer x.y.z\x01host=\x01\x01",
        b"\0user\0password",
    ],
)
def test_anything_else_is_no_first_message(message: bytes) -> None:
    with pytest.raises(LoginFailed):
        read_first_message(message)


@given(st.binary(max_size=300))
def test_no_bytes_break_the_reading(message: bytes) -> None:
    try:
        read_first_message(b"n,,\x01auth=Bearer " + message)
    except LoginFailed:
        pass


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [
        *(("RSA", name) for name in ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512")),
        ("P-256", "ES256"),
        ("P-384", "ES384"),
        ("P-521", "ES512"),
        ("Ed25519", "EdDSA"),
        ("Ed25519", "Ed25519"),
        ("Ed448", "EdDSA"),
    ],
)
@pytest.mark.filterwarnings("ignore:EdDSA is deprecated")
def test_tokens_by_every_algorithm_of_the_list_count(kind: str, algorithm: str) -> None:
    key = provider.key(kind)
    token = provider.token(said(), by=key, algorithm=algorithm)
    keys = provider.key_set(provider.key("RSA", "another"), key)
    assert judged(token, keys=keys) == VerifiedToken("alice", NOW_MS + 300_000)
    head, body, signature = token.split(".")
    changed = provider.segment(said(sub="mallory"))
    with pytest.raises(LoginFailed, match="signature"):
        judged(f"{head}.{changed}.{signature}", keys=keys)
    with pytest.raises(LoginFailed, match="signature"):
        judged(f"{head}.{body}.", keys=keys)


@pytest.mark.parametrize("spelling", ["none", "None", "NONE", "nOnE"])
def test_cve_2026_33557_unsigned_tokens_are_refused(spelling: str) -> None:
    for key_id in ("one", None):
        with pytest.raises(LoginFailed, match="are not taken"):
            judged(provider.unsigned(said(), {"alg": spelling, "kid": key_id}))


def test_an_hmac_by_the_public_key_is_refused() -> None:
    from cryptography.hazmat.primitives import serialization

    public = provider.key().raw_value.public_key()
    forms = serialization.PublicFormat
    pem = public.public_bytes(serialization.Encoding.PEM, forms.SubjectPublicKeyInfo)
    der = public.public_bytes(serialization.Encoding.DER, forms.SubjectPublicKeyInfo)
    for secret in (pem, pem.strip(), der, provider.key_set(provider.key())):
        with pytest.raises(LoginFailed, match="are not taken: 'HS256'"):
            judged(provider.signed_with_public_key(said(), secret, "one"))


def test_a_key_verifies_only_what_it_was_made_for() -> None:
    only_ps = provider.key_set(provider.key(), alg="PS256")
    assert judged(provider.token(said(), algorithm="PS256"), keys=only_ps).subject == "alice"
    with pytest.raises(LoginFailed, match="no key"):
        judged(provider.token(said(), algorithm="RS256"), keys=only_ps)
    # Nor if it is handed over by mistake.
    rsa, elliptic = (parse_jwks(provider.key_set(provider.key(kind)))[0] for kind in ("RSA", "P-256"))
    with pytest.raises(LoginFailed, match="signature"):
        verify(provider.token(said()), elliptic, RULES, NOW_MS)
    with pytest.raises(LoginFailed, match="signature"):
        verify(provider.token(said(), by=provider.key("P-256"), algorithm="ES256"), rsa, RULES, NOW_MS)


def test_the_signature_of_another_key_is_refused() -> None:
    with pytest.raises(LoginFailed, match="signature"):
        judged(provider.token(said(), by=provider.key("RSA", "stranger"), header={"kid": "one"}))
    with pytest.raises(LoginFailed, match="no key"):
        judged(provider.token(said(), by=provider.key("RSA", "stranger")))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"iss": "https://id.example/"}, "another issuer"),
        ({"iss": None}, "another issuer"),
        ({"iss": [provider.ISSUER]}, "another issuer"),
        ({"aud": "somebody"}, "another audience"),
        ({"aud": ["somebody", 7]}, "another audience"),
        ({"aud": None}, "another audience"),
        ({"aud": {"millrace": 1}}, "another audience"),
        ({"exp": None}, "claim exp"),
        ({"exp": "1700000300"}, "claim exp"),
        ({"exp": True}, "claim exp"),
        ({"exp": float("nan")}, "claim exp"),
        ({"exp": float("inf")}, "claim exp"),
        ({"exp": -1}, "claim exp"),
        ({"exp": 1e308}, "claim exp"),
        ({"exp": 10**400}, "claim exp"),
        ({"exp": NOW_MS // 1000 - 30}, "expired"),
        ({"nbf": NOW_MS // 1000 + 31}, "not valid yet"),
        ({"nbf": "soon"}, "claim nbf"),
        ({"iat": NOW_MS // 1000 + 31}, "in the future"),
        ({"iat": None}, "claim iat"),
        ({"sub": None}, "no claim sub"),
        ({"sub": " "}, "no claim sub"),
        ({"sub": 7}, "no claim sub"),
        ({"sub": "a\nb"}, "cannot be a name"),
        ({"sub": "a" * 256}, "cannot be a name"),
    ],
)
def test_claims_that_are_not_right(changed: Mapping[str, Any], reason: str) -> None:
    with pytest.raises(LoginFailed, match=reason):
        judged(provider.token(said(**changed)))


def test_claims_that_are_right() -> None:
    assert judged(provider.token(said(aud=["somebody", "other"], nbf=NOW_MS // 1000 + 30))).subject == "alice"
    by_mail = TokenRules(None, frozenset(), 0, "email")
    assert check_claims(said(iss=None, aud=None, email=" a@b "), by_mail, NOW_MS).subject == "a@b"


@given(st.integers(-100, 100), st.integers(0, 60))
def test_a_session_never_outlasts_what_the_clocks_allow(left_s: int, skew_s: int) -> None:
    rules = TokenRules(None, frozenset(), skew_s)
    good = left_s > -skew_s
    try:
        verified = check_claims(said(exp=NOW_MS // 1000 + left_s), rules, NOW_MS)
    except LoginFailed:
        assert not good
    else:
        assert good
        assert NOW_MS < verified.expires_ms <= NOW_MS + max(left_s, left_s + skew_s) * 1000
        if left_s > 0:
            assert verified.expires_ms == NOW_MS + left_s * 1000, "in date: it ends with the token"


@pytest.mark.parametrize(
    "token",
    [
        "x",
        "..",
        "a.b.c.d",
        "!!.??.==",
        provider.segment([1]) + ".e30.x",
        provider.segment("alg") + ".e30.x",
        provider.segment({"kid": "one"}) + ".e30.x",
        provider.segment({"alg": ["RS256"], "kid": "one"}) + ".e30.x",
        provider.segment({"alg": "RS256", "kid": ["one"]}) + ".e30.x",
        provider.segment({"alg": "RS256", "kid": "one", "crit": ["exp"]}) + ".e30.x",
        provider.segment({"alg": "RS256", "kid": "one", "b64": False}) + ".e30.x",
        "W1tb" * 1000 + ".e30.x",  # lists in lists
        provider.segment({"alg": "RS256", "kid": "one", "pad": "x" * 4096}) + ".e30.x",
        "x" * (MAX_TOKEN_BYTES + 1),
    ],
)
def test_what_is_no_token_is_refused_before_any_key_is_used(token: str) -> None:
    with pytest.raises(LoginFailed):
        read_header(token)


def test_a_token_of_several_kilobytes_counts_and_one_beyond_the_limit_does_not() -> None:
    assert judged(provider.token(said(groups=["g" * 100] * 100))).subject == "alice"
    with pytest.raises(LoginFailed, match="larger than"):
        judged(provider.token(said(groups=["g" * 100] * 400)))


def test_a_payload_that_is_no_object_is_refused() -> None:
    for payload in ([], "x", 7, None):
        with pytest.raises(LoginFailed):
            judged(provider.token(payload))  # type: ignore[arg-type]


@given(st.lists(st.sampled_from([b".", b"e30", b"eyJhbGciOiJSUzI1NiJ9", b"AAAA", b"=", b"-_"]), max_size=6))
def test_no_text_breaks_the_verification(parts: list[bytes]) -> None:
    key = parse_jwks(provider.key_set(provider.key()))[0]
    with pytest.raises(LoginFailed):
        verify(b"".join(parts).decode(), key, RULES, NOW_MS)


# --- the exchange -----------------------------------------------------------------------------------------------------


class Offered:
    """The mechanism with the provider's keys in a file."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(NOW_MS)
        self.file = folder / "keys.json"
        self.file.write_bytes(provider.key_set(provider.key()))
        self.mechanism = OAuthBearer(RULES, KeyRing(JwksFile(self.file), clock=self.clock), self.clock)

    async def __aenter__(self) -> Self:
        await self.mechanism.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.mechanism.stop()

    async def login(self, message: bytes) -> Step:
        step = self.mechanism.exchange().step(message)
        return step if isinstance(step, Step) else await step


async def test_a_login_by_token(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        token = provider.token(said())
        expected = Step(b"", Done("User:alice", expires_ms=NOW_MS + 300_000))
        assert await offered.login(provider.first_message(token)) == expected
        assert await offered.login(provider.first_message(token, "alice", "host=h")) == expected


async def test_a_large_token_is_verified_beside_the_loop(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        large = said(groups=["g" * 100] * 100)
        step = offered.mechanism.exchange().step(provider.first_message(provider.token(large)))
        assert not isinstance(step, Step)
        assert (await step).done is not None
        large["aud"] = "x"
        assert await offered.login(provider.first_message(provider.token(large))) == Step(REFUSAL)


async def test_a_refused_client_hears_so_and_acknowledges(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        exchange = offered.mechanism.exchange()
        assert exchange.step(provider.first_message(provider.token(said(aud="x")))) == Step(REFUSAL)
        assert json.loads(REFUSAL) == {"status": "invalid_token"}
        with pytest.raises(LoginFailed, match="another audience"):
            exchange.step(b"\x01")
        # A good token does not help after a refusal.
        with pytest.raises(LoginFailed, match="another audience"):
            exchange.step(provider.first_message(provider.token(said())))


async def test_a_client_cannot_make_up_reasons(tmp_path: Path) -> None:
    """The audit log counts by reason: ever new ones would push everybody else's events out of it."""
    reasons, texts = set(), set()
    async with Offered(tmp_path) as offered:
        for number in range(3):
            for token in (
                provider.token(said(), by=provider.key("RSA", f"stranger-{number}")),
                provider.unsigned(said(), {"alg": f"none-{number}"}),
            ):
                exchange = offered.mechanism.exchange()
                step = exchange.step(provider.first_message(token))
                assert (step if isinstance(step, Step) else await step) == Step(REFUSAL)
                with pytest.raises(LoginFailed) as failed:
                    exchange.step(b"\x01")
                reasons.add(failed.value.reason)
                texts.add(str(failed.value))
    assert len(texts) == 6, "the broker's log tells them apart"
    assert len(reasons) == 2


async def test_nobody_becomes_somebody_else(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        with pytest.raises(LoginFailed, match="somebody else"):
            await offered.login(provider.first_message(provider.token(said()), "admin"))


async def test_a_token_is_refused_after_its_end(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        message = provider.first_message(provider.token(said()))
        offered.clock.advance(299)
        assert (await offered.login(message)).done is not None
        offered.clock.advance(31)
        assert await offered.login(message) == Step(REFUSAL)


async def test_a_key_that_the_provider_has_since_yesterday_is_found(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        new = provider.key("RSA", "two")
        message = provider.first_message(provider.token(said(), by=new))
        assert await offered.login(message) == Step(REFUSAL)
        offered.file.write_bytes(provider.key_set(provider.key(), new))
        assert await offered.login(message) == Step(REFUSAL), "it was looked for a moment ago"
        offered.clock.advance(10)
        assert (await offered.login(message)).done is not None


async def test_no_token_is_in_a_text_that_is_logged(tmp_path: Path) -> None:
    async with Offered(tmp_path) as offered:
        token = provider.token(said(aud="x"))
        first = read_first_message(provider.first_message(token))
        exchange = offered.mechanism.exchange()
        exchange.step(provider.first_message(token))
        with pytest.raises(LoginFailed) as refused:
            exchange.step(b"\x01")
        for text in (repr(first), repr(exchange), repr(offered.mechanism), str(refused.value), repr(refused.value)):
            assert not any(part in text for part in token.split("."))


# --- settings ---------------------------------------------------------------------------------------------------------

GOOD = {
    "sasl.oauthbearer.jwks.endpoint.url": "https://id.example/keys",
    "sasl.oauthbearer.allowed.urls": "https://id.example/keys",
    "sasl.oauthbearer.expected.issuer": provider.ISSUER,
    "sasl.oauthbearer.expected.audience": "millrace,other",
}


def offered_by(**changed: str | None) -> OAuthBearer:
    settings = {**GOOD, **{f"sasl.oauthbearer.{name.replace('_', '.')}": value for name, value in changed.items()}}
    config = BrokerConfig({name: value for name, value in settings.items() if value is not None})
    return OAuthBearer.from_config(config, "CLIENTS", ManualClock())


def test_settings_are_read() -> None:
    assert offered_by().rules == RULES
    own = BrokerConfig({**GOOD, "listener.name.clients.oauthbearer.sasl.oauthbearer.sub.claim.name": "email"})
    assert OAuthBearer.from_config(own, "CLIENTS", ManualClock()).rules.subject_claim == "email"
    assert OAuthBearer.from_config(own, "OTHERS", ManualClock()).rules.subject_claim == "sub"


def test_cve_2026_110985_no_listener_offers_it_without_keys() -> None:
    with pytest.raises(ConfigError, match=re.escape("no keys to verify tokens with")):
        offered_by(jwks_endpoint_url=None)


def test_an_issuer_and_an_audience_are_expected_unless_told_otherwise() -> None:
    for claim in ("issuer", "audience"):
        with pytest.raises(ConfigError, match=f"tokens of any {claim}"):
            offered_by(**{f"expected_{claim}": None})
        offered_by(**{f"expected_{claim}": None, f"allow_unverified_{claim}": "true"})


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example/keys",
        "https://id.example/keys/",
        "https://ID.example/keys",
        "https://id.example/keys?x",
        "https://169.254.169.254/latest/meta-data",
        "file:///etc/passwd",
        "ftp://id.example/keys",
    ],
)
def test_cve_2025_27817_only_urls_on_the_list_are_used(url: str) -> None:
    with pytest.raises(ConfigError, match=r"is not in sasl\.oauthbearer\.allowed\.urls"):
        offered_by(jwks_endpoint_url=url)


@pytest.mark.parametrize(
    "url",
    [
        "http://id.example/keys",
        "ftp://id.example/keys",
        "file://elsewhere/keys",
        "file:keys",
        "/etc/keys",
        "https:///keys",
        "https://id.example:x/keys",
        "https://user:pass@id.example/keys",
    ],
)
def test_cve_2025_27817_urls_of_other_kinds_are_refused_even_if_listed(url: str) -> None:
    with pytest.raises(ConfigError, match=r"sasl\.oauthbearer\.jwks\.endpoint\.url"):
        offered_by(jwks_endpoint_url=url, allowed_urls=url)
