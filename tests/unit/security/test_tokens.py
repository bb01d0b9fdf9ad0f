"""The passwords of delegation tokens, and logins by them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from dataclasses import replace

import pytest

from millrace.clock import ManualClock
from millrace.security import tokens
from millrace.security.derivation import KeyDerivation
from millrace.security.scram import ScramMechanism
from millrace.security.tokens import DelegationToken, TokenPasswords

NOW_MS = 1_700_000_000_000
TOKEN = DelegationToken("id-1", "User:alice", "User:admin", (), NOW_MS, NOW_MS + 1000, NOW_MS + 5000)
SHA_256, SHA_512 = ScramMechanism


class Brokers:
    """A broker's passwords, and the tokens it knows of."""

    def __init__(self, secret: str | None = "s3cret", *known: DelegationToken) -> None:
        self.clock = ManualClock(NOW_MS)
        self.known = {each.token_id: each for each in known or (TOKEN,)}
        self.passwords = TokenPasswords(secret, lambda: self.known, KeyDerivation(), self.clock)


def test_a_password_follows_from_the_id_and_the_secret() -> None:
    passwords = Brokers().passwords
    assert passwords.hmac("id-1") == hmac.new(b"s3cret", b"id-1", hashlib.sha512).digest()
    assert "s3cret" not in repr(passwords)


def test_a_token_is_found_by_its_password() -> None:
    broker = Brokers()
    mac = broker.passwords.hmac("id-1")
    assert broker.passwords.find(mac) is TOKEN
    assert broker.passwords.find(mac[:-1]) is None
    assert broker.passwords.find(b"") is None
    other = replace(TOKEN, token_id="id-2")
    broker.known = {"id-2": other}
    assert broker.passwords.find(mac) is None
    assert broker.passwords.find(broker.passwords.hmac("id-2")) is other


@pytest.mark.parametrize("mechanism", ScramMechanism)
async def test_a_login_by_token(mechanism: ScramMechanism) -> None:
    broker = Brokers()
    account = await broker.passwords.account("id-1", mechanism)
    assert account is not None
    assert (account.principal, account.token_id, account.expires_ms) == ("User:alice", "id-1", NOW_MS + 1000)
    credential = account.credential
    assert credential.iterations == 4096
    name = mechanism.name[-7:].replace("_", "").lower()
    password = base64.b64encode(broker.passwords.hmac("id-1"))
    salted = hashlib.pbkdf2_hmac(name, password, credential.salt, 4096)
    assert credential.server_key == hmac.new(salted, b"Server Key", name).digest()
    again = await broker.passwords.account("id-1", mechanism)
    assert again is not None
    assert again.credential is credential, "derived once"
    assert credential.salt.hex() not in repr(account)


async def test_who_does_not_log_in_by_token() -> None:
    broker = Brokers()
    assert await broker.passwords.account("id-2", SHA_256) is None
    assert await Brokers(None).passwords.account("id-1", SHA_256) is None
    assert await Brokers("").passwords.account("id-1", SHA_256) is None
    broker.clock.advance(1)
    assert await broker.passwords.account("id-1", SHA_256) is not None
    broker.clock.advance(0.001)
    assert await broker.passwords.account("id-1", SHA_256) is None, "reuse after its end"
    broker.known = {"id-1": replace(TOKEN, expires_ms=NOW_MS + 9000)}
    assert await broker.passwords.account("id-1", SHA_256) is not None, "renewed"
    broker.clock.advance(5)
    assert await broker.passwords.account("id-1", SHA_256) is None, "its end for good"


async def test_credentials_of_tokens_that_are_gone_are_forgotten() -> None:
    many = [replace(TOKEN, token_id=str(number)) for number in range(100)]
    broker = Brokers("s3cret", *many)
    await asyncio.gather(*(broker.passwords.account(each.token_id, SHA_256) for each in many))
    broker.known = {"id-1": TOKEN}
    await broker.passwords.account("id-1", SHA_512)
    assert len(broker.passwords._credentials) <= 1 + tokens._SPARE
