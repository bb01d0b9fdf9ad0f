"""Key sets: what is taken from them, where they come from, and how they are kept up to date."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from joserfc.jwk import OctKey, RSAKey

from millrace.clock import ManualClock, SystemClock
from millrace.errors import ConfigError
from millrace.security import jwks
from millrace.security.jwks import JwksEndpoint, JwksError, JwksFile, KeyRing, parse_jwks, select_key
from support import identity_provider as provider
from support.identity_provider import Endpoint


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[Endpoint]:
    with Endpoint(tmp_path).serving() as running:
        yield running


def behind(endpoint: Endpoint, **changed: Any) -> JwksEndpoint:
    arguments = {"look_s": 3600.0, "authorities": endpoint.authorities, "clock": SystemClock(), **changed}
    return JwksEndpoint(endpoint.url, **arguments)


def ids(ring: KeyRing) -> list[str | None]:
    return [each.key_id for each in ring._keys]


# --- what is taken ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Key size should be")
def test_only_public_keys_for_signatures_are_taken() -> None:
    private = provider.key("P-256", "private").as_dict(private=True)
    rows = [
        provider.key().as_dict(private=False),
        private,
        {**provider.key("RSA", "enc").as_dict(private=False), "use": "enc"},
        {**provider.key("RSA", "oaep").as_dict(private=False), "alg": "RSA-OAEP"},
        OctKey.generate_key(256, {"kid": "shared"}).as_dict(private=True),
        RSAKey.generate_key(1024, {"kid": "weak"}).as_dict(private=False),
        {"kty": "RSA", "kid": "broken", "n": "!", "e": "AQAB"},
        {"kty": "EC", "kid": "off", "crv": "P-256", "x": "AAAA", "y": "AAAA"},
        {"kty": "AKP", "kid": "from the future"},
        {**provider.key("RSA", "no text").as_dict(private=False), "alg": ["RS256"]},
        7,
    ]
    taken = parse_jwks(json.dumps({"keys": rows}).encode())
    assert [each.key_id for each in taken] == ["one", "private"]
    assert not taken[1].key.is_private
    assert not any("HS" in name or name == "none" for each in taken for name in each.algorithms)


@pytest.mark.parametrize(
    "raw", [b"", b"x", b"[]", b"{}", b'{"keys": {}}', b'{"keys": []}', b'{"keys": [1]}', b"[" * 9999]
)
def test_what_has_no_key_is_no_key_set(raw: bytes) -> None:
    with pytest.raises(JwksError):
        parse_jwks(raw)


def test_a_token_without_a_key_id_means_the_only_key_that_fits() -> None:
    keys = parse_jwks(provider.key_set(provider.key(), provider.key("P-256", "two")))
    assert select_key(keys, None, "RS256") is keys[0]
    assert select_key(keys, None, "ES256") is keys[1]
    assert select_key(keys, "one", "ES256") is None
    several = parse_jwks(provider.key_set(provider.key(), provider.key("RSA", "two")))
    assert select_key(several, None, "RS256") is None
    assert select_key(several, "two", "RS256") is several[1]


# --- files ------------------------------------------------------------------------------------------------------------


async def test_a_file_is_read_again_when_it_has_changed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "keys.json"
    file.write_bytes(provider.key_set(provider.key()))
    clock = ManualClock()
    ring = KeyRing(JwksFile(file), clock=clock)
    await ring.start()
    try:
        file.write_bytes(provider.key_set(provider.key("RSA", "second")))
        await _until(lambda: ids(ring) == ["second"], clock)
        file.write_bytes(b"half a fi")
        await _until(lambda: "it is not JSON" in caplog.text, clock)
        assert ids(ring) == ["second"], "the old keys stay"
        file.unlink()
        await _until(lambda: "No such file" in caplog.text, clock)
        assert ids(ring) == ["second"]
        file.write_bytes(provider.key_set(provider.key("RSA", "third")))
        await _until(lambda: ids(ring) == ["third"], clock)
    finally:
        await ring.stop()


async def _until(condition: Any, clock: ManualClock) -> None:
    for _ in range(1000):
        clock.advance(jwks.FILE_LOOK_S)
        await asyncio.sleep(0.002)
        if condition():
            return
    raise AssertionError("it did not happen")


@pytest.mark.parametrize("content", [None, b"", b"{}", b" " * (jwks.MAX_JWKS_BYTES + 1)])
async def test_without_keys_there_is_no_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="no keys to verify tokens with"):
        await KeyRing(JwksFile(file), clock=SystemClock()).start()


# --- endpoints --------------------------------------------------------------------------------------------------------


async def test_keys_come_from_an_endpoint(endpoint: Endpoint) -> None:
    assert [each.key_id for each in await behind(endpoint).load()] == ["one"]


async def test_an_endpoint_that_nobody_vouches_for_is_not_believed(endpoint: Endpoint) -> None:
    with pytest.raises(JwksError, match="certificate"):
        await behind(endpoint, authorities=None).load()
    endpoint.url = endpoint.url.replace("localhost", "127.0.0.1")
    with pytest.raises(JwksError, match="certificate"):
        await behind(endpoint).load()
    assert endpoint.asked == 0


def test_authorities_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_bytes(b"")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(ConfigError, match=name):
            JwksEndpoint("https://x/", look_s=1, authorities=tmp_path / name, clock=SystemClock())


async def test_cve_2025_27817_redirects_are_not_followed(endpoint: Endpoint) -> None:
    for status in (301, 302, 307, 308):
        endpoint.status, endpoint.headers = status, {"Location": endpoint.url + "/elsewhere"}
        with pytest.raises(JwksError, match=f"it answered {status}"):
            await behind(endpoint).load()
    assert endpoint.asked == 4


async def test_an_answer_is_bounded_in_size_and_time(endpoint: Endpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint.body = b" " * (jwks.MAX_JWKS_BYTES + 1)
    with pytest.raises(JwksError, match="larger than"):
        await behind(endpoint).load()
    endpoint.status, endpoint.body = 500, b""
    with pytest.raises(JwksError, match="answered 500"):
        await behind(endpoint).load()
    monkeypatch.setattr(jwks, "FETCH_S", 0)  # it is over before there is anything to cut
    with pytest.raises(JwksError, match="too long to connect"):
        await behind(endpoint).load()
    monkeypatch.setattr(jwks, "FETCH_S", 0.05)
    endpoint.open.clear()
    async with asyncio.timeout(4):  # the time-out of the socket alone would be 5 s
        with pytest.raises(JwksError):
            await behind(endpoint).load()


async def test_old_keys_stay_in_use_while_the_endpoint_is_away(endpoint: Endpoint) -> None:
    clock = ManualClock()
    ring = KeyRing(behind(endpoint, clock=clock), clock=clock)
    await ring.start()
    try:
        endpoint.stop()
        clock.advance(3600)
        await ring.look_early()
        assert ring.find("one", "RS256") is not None
    finally:
        await ring.stop()


async def test_made_up_key_ids_ask_the_endpoint_once(endpoint: Endpoint) -> None:
    clock = ManualClock()
    ring = KeyRing(behind(endpoint, clock=clock), clock=clock)
    await ring.start()
    try:
        assert endpoint.asked == 1
        await asyncio.gather(*(ring.look_early() for _ in range(100)))
        assert endpoint.asked == 1, "a moment after the last look"
        clock.advance(jwks.EARLY_LOOK_S)
        await asyncio.gather(*(ring.look_early() for _ in range(100)))
        assert endpoint.asked == 2, "all of them waited for one"
        await ring.look_early()
        assert endpoint.asked == 2
    finally:
        await ring.stop()


async def test_an_endpoint_that_is_away_at_the_start_is_waited_for_a_while(endpoint: Endpoint) -> None:
    endpoint.status = 503
    ring = KeyRing(behind(endpoint), clock=SystemClock(), first_pause_s=0.01, longest_pause_s=0.2)
    with pytest.raises(ConfigError, match="it answered 503"):
        await ring.start()
    assert endpoint.asked > 2
    starting = asyncio.ensure_future(
        (patient := KeyRing(behind(endpoint), clock=SystemClock(), first_pause_s=0.01, longest_pause_s=20)).start()
    )
    endpoint.entered.clear()
    while not endpoint.entered.is_set():
        await asyncio.sleep(0.005)
    endpoint.status = 200
    await asyncio.wait_for(starting, 10)
    assert ids(patient) == ["one"]
    await patient.stop()


async def test_stopping_does_not_wait_for_an_endpoint(endpoint: Endpoint) -> None:
    clock = ManualClock()
    ring = KeyRing(behind(endpoint, clock=clock), clock=clock)
    await ring.start()
    endpoint.entered.clear()
    endpoint.open.clear()
    clock.advance(jwks.EARLY_LOOK_S)
    looking = asyncio.ensure_future(ring.look_early())
    while not endpoint.entered.is_set():
        await asyncio.sleep(0.005)
    await asyncio.wait_for(ring.stop(), 4)
    with pytest.raises(asyncio.CancelledError):
        await looking
