"""PLAIN on the server: users of a JAAS line, users with a SCRAM credential, and nobody else."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.errors import ConfigError
from millrace.security.derivation import KeyDerivation, Recipe
from millrace.security.plain import JaasUsers, PlainExchange, plain_users
from millrace.security.sasl import Done, LoginFailed
from millrace.security.scram import Decoys, ScramMechanism, Users, new_credential

SHA_256, SHA_512 = ScramMechanism
JAAS = 'PlainLoginModule required username="broker" password="own" user_listed="l1sted" user_both="jaas";'
SCRAM: Users = {
    ("kept", SHA_256): new_credential(SHA_256, "k3pt"),
    ("strong", SHA_512): new_credential(SHA_512, "str0ng"),
    ("both", SHA_256): new_credential(SHA_256, "scram"),
}


class Counting(KeyDerivation):
    """Remembers what was derived for whom."""

    def __init__(self) -> None:
        super().__init__()
        self.recipes: list[Sequence[Recipe]] = []

    async def salted_passwords(self, password: str, recipes: Sequence[Recipe]) -> list[bytes]:
        self.recipes.append(recipes)
        return await super().salted_passwords(password, recipes)


@pytest.fixture
async def derivation() -> AsyncIterator[Counting]:
    made = Counting()
    yield made
    await made.stop()


def exchange(derivation: KeyDerivation, line: str | None = JAAS, users: Users = SCRAM) -> PlainExchange:
    return PlainExchange(JaasUsers(lambda: line), lambda: users, Decoys(lambda: users), derivation)


@pytest.mark.parametrize(
    ("user", "password"), [("listed", "l1sted"), ("kept", "k3pt"), ("strong", "str0ng"), ("both", "jaas")]
)
async def test_users_are_let_in(derivation: Counting, user: str, password: str) -> None:
    for authzid in ("", user):
        step = await exchange(derivation).step(f"{authzid}\0{user}\0{password}".encode())
        assert (step.reply, step.done) == (b"", Done(f"User:{user}"))


@pytest.mark.parametrize(
    ("user", "password"),
    [
        ("listed", "k3pt"),
        ("kept", "l1sted"),
        ("both", "scram"),
        ("nobody", "l1sted"),
        ("broker", "own"),
        ("kept", "k3p"),
    ],
)
async def test_others_are_not(derivation: Counting, user: str, password: str) -> None:
    with pytest.raises(LoginFailed) as caught:
        await exchange(derivation).step(f"\0{user}\0{password}".encode())
    assert caught.value.told == "Authentication failed: Invalid username or password"
    assert password not in str(caught.value)


@pytest.mark.parametrize(
    "message",
    [b"", b"\0", b"\0\0", b"\0kept", b"\0kept\0", b"\0\0k3pt", b"\0kept\0k3pt\0", b"\0kept\0k3pt\0\0", b"\0\xff\0k3pt"],
)
async def test_a_message_that_is_none(derivation: Counting, message: bytes) -> None:
    with pytest.raises(LoginFailed):
        await exchange(derivation).step(message)
    assert derivation.recipes == []


async def test_cve_2017_12610_nobody_acts_as_another_user(derivation: Counting) -> None:
    with pytest.raises(LoginFailed, match="authorization id") as caught:
        await exchange(derivation).step(b"listed\0kept\0k3pt")
    assert "authorization id" in caught.value.told
    with pytest.raises(LoginFailed) as wrong:  # without the password nobody learns which rule it was
        await exchange(derivation).step(b"listed\0kept\0wrong")
    assert "authorization id" not in wrong.value.told


@pytest.mark.parametrize("user", ["listed", "kept", "strong", "both", "nobody"])
async def test_cve_2021_38153_whoever_asks_costs_the_same_derivations(derivation: Counting, user: str) -> None:
    with pytest.raises(LoginFailed):
        await exchange(derivation).step(f"\0{user}\0wrong".encode())
    ((first, second),) = derivation.recipes
    assert [(each.mechanism, each.iterations) for each in (first, second)] == [(SHA_256, 4096), (SHA_512, 4096)]
    assert len(first.salt) == len(second.salt) == 32


async def test_where_nobody_has_a_credential_nothing_is_derived(derivation: Counting) -> None:
    assert (await exchange(derivation, users={}).step(b"\0listed\0l1sted")).done == Done("User:listed")
    with pytest.raises(LoginFailed):
        await exchange(derivation, users={}).step(b"\0nobody\0x")
    with pytest.raises(LoginFailed):
        await exchange(derivation, line=None, users={}).step(b"\0nobody\0x")
    assert derivation.recipes == []


async def test_cve_2026_10143_keys_are_derived_beside_the_loop_and_few_at_once(
    derivation: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    derive = hashlib.pbkdf2_hmac
    lock, at_once, most = threading.Lock(), 0, 0

    def watched(*args: Any) -> bytes:
        nonlocal at_once, most
        assert threading.current_thread().name.startswith("derive-keys")
        with lock:
            at_once += 1
            most = max(most, at_once)
        try:
            return derive(*args)
        finally:
            with lock:
                at_once -= 1

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", watched)
    steps = await asyncio.gather(*(exchange(derivation).step(b"\0kept\0k3pt") for _ in range(20)))
    assert all(step.done for step in steps)
    assert 1 <= most <= derivation._threads


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]{1,8}", fullmatch=True), st.text(st.characters(codec="utf-8", exclude_characters='"\\'))
    )
)
def test_users_of_a_line(users: dict[str, str]) -> None:
    line = "PlainLoginModule required " + " ".join(f'user_{name}="{text}"' for name, text in users.items())
    assert plain_users(line) == users


def test_a_line_that_is_wrong_is_refused_at_start_and_has_no_users_later(caplog: pytest.LogCaptureFixture) -> None:
    for wrong in ("ScramLoginModule required user_a=secret;", "secret"):
        with pytest.raises(ConfigError) as caught:
            JaasUsers(lambda wrong=wrong: wrong)  # type: ignore[misc]
        assert "secret" not in str(caught.value)
    lines = [JAAS]
    users = JaasUsers(lambda: lines[-1])
    assert set(users.passwords) == {"listed", "both"}
    lines.append("secret")
    assert users.passwords == {}
    assert "secret" not in caplog.text and "JAAS" in caplog.text
    lines.append("PlainLoginModule required user_new=n;")
    assert users.passwords == {"new": "n"}
    assert "'n'" not in repr(users)


def test_a_credential_of_a_user_with_both_mechanisms_is_enough() -> None:
    users = {("a", SHA_256): new_credential(SHA_256, "one"), ("a", SHA_512): new_credential(SHA_512, "two")}

    async def logs_in(password: str) -> bool:
        made = KeyDerivation()
        try:
            await exchange(made, line=None, users=users).step(f"\0a\0{password}".encode())
        except LoginFailed:
            return False
        finally:
            await made.stop()
        return True

    assert asyncio.run(logs_in("one")) and asyncio.run(logs_in("two")) and not asyncio.run(logs_in("three"))
