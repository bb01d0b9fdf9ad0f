"""SCRAM on the server, with scramp and our own client as the other side."""

from __future__ import annotations

import base64
import hashlib
import inspect
import statistics
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scramp import ScramClient as OracleClient
from scramp import ScramMechanism as OracleMechanism

from millrace.errors import ApiError
from millrace.security import scram
from millrace.security.sasl import Done, LoginFailed, Step
from millrace.security.scram import (
    Account,
    Decoys,
    ScramCredential,
    ScramExchange,
    ScramMechanism,
    new_credential,
    salted_password,
)
from support.sasl import scram_messages

PASSWORD = "correct horse"
NAMES = {ScramMechanism.SCRAM_SHA_256: "sha256", ScramMechanism.SCRAM_SHA_512: "sha512"}
USERS = {
    (user, mechanism): new_credential(mechanism, PASSWORD)
    for user in ("alice", "o,=o", "żółć")
    for mechanism in ScramMechanism
}
both = pytest.mark.parametrize("mechanism", ScramMechanism, ids=lambda mechanism: mechanism.label)


def lookup(user: str, mechanism: ScramMechanism, by_token: bool) -> Account | None:
    credential = None if by_token else USERS.get((user, mechanism))
    return None if credential is None else Account(credential, f"User:{user}")


def exchange(mechanism: ScramMechanism = ScramMechanism.SCRAM_SHA_256, find: scram.Lookup = lookup) -> ScramExchange:
    return ScramExchange(mechanism, find, Decoys(lambda: USERS))


def stepped(server: ScramExchange, message: bytes) -> Step:
    step = server.step(message)
    assert not inspect.isawaitable(step)
    return step


class Client:
    """A client whose messages can be changed on their way."""

    def __init__(
        self, mechanism: ScramMechanism, user: str = "alice", password: str = PASSWORD, nonce: str = "n0nce"
    ) -> None:
        self.steps = scram_messages(NAMES[mechanism], user, password, nonce)
        self.first = next(self.steps)

    def final(self, server_first: bytes) -> bytes:
        return self.steps.send(server_first)

    def accepts(self, server_final: bytes) -> bool:
        try:
            self.steps.send(server_final)
        except StopIteration:
            return True
        return False


@both
@pytest.mark.parametrize("user", ["alice", "o,=o", "żółć"])
def test_a_user_is_let_in_by_the_password(mechanism: ScramMechanism, user: str) -> None:
    client, server = Client(mechanism, user), exchange(mechanism)
    challenge = stepped(server, client.first)
    assert challenge.done is None
    last = stepped(server, client.final(challenge.reply))
    assert last.done == Done(f"User:{user}")
    assert client.accepts(last.reply)


@both
def test_scramp_logs_in(mechanism: ScramMechanism) -> None:
    client = OracleClient([mechanism.label], "alice", PASSWORD)
    server = exchange(mechanism)
    first = client.get_client_first()
    client.set_server_first(stepped(server, first.encode()).reply.decode())
    last = stepped(server, client.get_client_final().encode())
    client.set_server_final(last.reply.decode())
    assert last.done == Done("User:alice")


@both
def test_scramp_derives_the_same_keys(mechanism: ScramMechanism) -> None:
    oracle = OracleMechanism(mechanism.label)
    salt, stored_key, server_key, iterations = oracle.make_auth_info(
        PASSWORD, iteration_count=5000, salt=b"0123456789ab"
    )
    salted = salted_password(mechanism, PASSWORD, b"0123456789ab", 5000)
    assert scram.credential_of(mechanism, salted, b"0123456789ab", 5000) == ScramCredential(
        salt, stored_key, server_key, iterations
    )


@both
def test_our_client_is_let_in_by_scramp(mechanism: ScramMechanism) -> None:
    oracle = OracleMechanism(mechanism.label)
    info = oracle.make_auth_info(PASSWORD, iteration_count=4096)
    server = oracle.make_server(lambda _user: info)
    client = Client(mechanism)
    server.set_client_first(client.first.decode())
    server.set_client_final(client.final(server.get_server_first().encode()).decode())
    assert client.accepts(server.get_server_final().encode())


@both
@given(password=st.text(st.characters(codec="utf-8"), max_size=20))
def test_no_other_password_is_right(mechanism: ScramMechanism, password: str) -> None:
    client, server = Client(mechanism, password=password), exchange(mechanism)
    final = client.final(stepped(server, client.first).reply)
    if password == PASSWORD:
        assert stepped(server, final).done is not None
        return
    with pytest.raises(LoginFailed) as caught:
        server.step(final)
    assert caught.value.told == ""


@both
def test_cve_2024_56128_the_nonce_must_be_the_whole_one_of_this_exchange(mechanism: ScramMechanism) -> None:
    client, server = Client(mechanism), exchange(mechanism)
    final = client.final(stepped(server, client.first).reply).decode()
    nonce = final.split(",r=")[1].split(",")[0]
    for wrong in ("n0nce", nonce[:-1], nonce + "x", nonce.swapcase(), "x" + nonce[1:]):
        other = exchange(mechanism)
        other._challenge = server._challenge
        with pytest.raises(LoginFailed, match="nonce"):
            other.step(final.replace(nonce, wrong).encode())
    assert stepped(server, final.encode()).done is not None


def test_an_exchange_cannot_be_replayed() -> None:
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    final = client.final(stepped(server, client.first).reply)
    assert stepped(server, final).done is not None
    with pytest.raises(LoginFailed):
        server.step(final)
    again = exchange()
    stepped(again, client.first)
    with pytest.raises(LoginFailed, match="nonce"):
        again.step(final)


def test_a_failed_exchange_has_no_second_try() -> None:
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    final = client.final(stepped(server, client.first).reply)
    with pytest.raises(LoginFailed):
        server.step(b"nonsense")
    with pytest.raises(LoginFailed):
        server.step(final)


@pytest.mark.parametrize("authzid", ["bob", "alice2", "Alice", "alic", "ali=2Cce"])
def test_cve_2017_12610_nobody_acts_as_another_user(authzid: str) -> None:
    with pytest.raises(LoginFailed) as caught:
        exchange().step(f"n,a={authzid},n=alice,r=abc".encode())
    assert "authorization id" in caught.value.told
    with pytest.raises(LoginFailed) as unknown:
        exchange().step(f"n,a={authzid},n=nobody,r=abc".encode())
    assert unknown.value.told == caught.value.told  # which tells nothing about either name


def test_the_own_name_is_no_other_authorization_id() -> None:
    assert stepped(exchange(), b"n,a=alice,n=alice,r=abc").reply
    assert stepped(exchange(), b"n,a=o=2C=3Do,n=o=2C=3Do,r=abc").reply


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"n",
        b"n,,",
        b"n,,n=alice",
        b"n,,r=abc,n=alice",
        b"n,,n=,r=abc",
        b"n,,n=alice,r=",
        b"n,,n=alice,r=a b",
        b"n,,n=al=ice,r=abc",
        b"n,,n=al=2cice,r=abc",
        b"n,,m=ext,n=alice,r=abc",
        b"p=tls-unique,,n=alice,r=abc",
        b"x,,n=alice,r=abc",
        b"n,,n=alice,r=abc,",
        b"n,,n=alice,r=abc,x",
        b"n,,n=alice\0,r=abc",
        b"n,,n=\xff\xfe,r=abc",
        b"n,,n=alice,r=abc\n",
        b"," * 10_000,
        b"n,,n=" + b"=" * 10_000,
        b"n,,n=alice,r=" + b"a" * scram.MAX_MESSAGE_BYTES,
        b"n,,n=" + b"a" * scram.MAX_MESSAGE_BYTES + b",r=abc",
    ],
)
def test_a_first_message_that_is_none(message: bytes) -> None:
    with pytest.raises(LoginFailed):
        exchange().step(message)


@pytest.mark.parametrize("change", ["c=eSws", "c=biws,c=biws", "c=", "c=!!!!", "c=biw", "c=cD10bHMtdW5pcXVlLCw="])
def test_the_channel_binding_must_be_that_of_the_first_message(change: str) -> None:
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    final = client.final(stepped(server, client.first).reply)
    with pytest.raises(LoginFailed):
        server.step(final.replace(b"c=biws", change.encode()))


@pytest.mark.parametrize("proof", [b"", b"AAAA", b"!", b"A" * 43 + b"=", b"A" * 200])
def test_a_proof_that_is_none(proof: bytes) -> None:
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    final = client.final(stepped(server, client.first).reply)
    with pytest.raises(LoginFailed):
        server.step(final.rpartition(b",p=")[0] + b",p=" + proof)


def test_a_client_that_would_have_bound_the_channel_is_let_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """`y`: it can, and takes it that we cannot, which is so; but it has to say so both times."""
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    challenge = stepped(server, client.first.replace(b"n,,", b"y,,", 1)).reply
    with pytest.raises(LoginFailed, match="channel binding"):
        server.step(client.final(challenge))
    monkeypatch.setattr("millrace.client.sasl._GS2_HEADER", "y,,")
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    assert stepped(server, client.final(stepped(server, client.first).reply)).done is not None


@given(st.binary(max_size=200), st.binary(max_size=200))
def test_any_bytes_are_refused_or_answered(first: bytes, second: bytes) -> None:
    server = exchange()
    try:
        stepped(server, first)
        assert stepped(server, second).done is None
    except LoginFailed:
        pass


# --- users who do not exist -------------------------------------------------------------------------------------------


@both
def test_cve_2021_38153_an_unknown_user_is_answered_like_a_known_one(mechanism: ScramMechanism) -> None:
    answers: dict[str, dict[str, str]] = {}
    for user in ("alice", "nobody"):
        for _ in range(2):
            client, server = Client(mechanism, user, "wrong"), exchange(mechanism)
            challenge = stepped(server, client.first).reply
            fields = dict(part.split("=", 1) for part in challenge.decode().split(","))
            assert answers.setdefault(user, fields)["s"] == fields["s"]  # the salt stays
            with pytest.raises(LoginFailed) as caught:
                server.step(client.final(challenge))
            assert caught.value.told == ""
    alice, nobody = answers["alice"], answers["nobody"]
    assert alice["i"] == nobody["i"] and len(alice["s"]) == len(nobody["s"])


def test_cve_2021_38153_an_unknown_user_takes_as_long() -> None:
    """By construction the code is the same; this would see a derivation, or a shortcut, in one of the two."""

    def spent_s(user: str) -> float:
        client, server = Client(ScramMechanism.SCRAM_SHA_256, user, "wrong"), exchange()
        started = time.perf_counter()
        challenge = stepped(server, client.first).reply
        first_s = time.perf_counter() - started
        final = client.final(challenge)
        started = time.perf_counter()
        with pytest.raises(LoginFailed):
            server.step(final)
        return first_s + time.perf_counter() - started

    spent_s("alice"), spent_s("nobody")
    known, unknown = [], []
    for _ in range(60):
        known.append(spent_s("alice"))
        unknown.append(spent_s("nobody"))
    assert 0.5 < statistics.median(known) / statistics.median(unknown) < 2


def test_decoys_are_the_same_on_every_broker_and_differ_by_name() -> None:
    one, other = Decoys(lambda: USERS), Decoys(lambda: dict(USERS))
    mechanism = ScramMechanism.SCRAM_SHA_256
    assert one.credential("x", mechanism).salt == other.credential("x", mechanism).salt
    assert one.credential("x", mechanism).salt != one.credential("y", mechanism).salt
    assert one.credential("x", mechanism).salt != one.credential("x", ScramMechanism.SCRAM_SHA_512).salt


def test_decoys_look_like_the_users_there_are() -> None:
    model = ScramCredential(b"1a2b3c4d5e6f7g8h9i0jklmnop", b"s", b"k", 8192)
    decoys = Decoys(lambda: {("a", ScramMechanism.SCRAM_SHA_256): model})
    decoy = decoys.credential("x", ScramMechanism.SCRAM_SHA_256)
    assert (len(decoy.salt), decoy.iterations) == (26, 8192) and decoy.salt.isalnum()
    alone = decoys.credential("x", ScramMechanism.SCRAM_SHA_512)
    assert (len(alone.salt), alone.iterations) == (scram.SALT_BYTES, scram.MIN_ITERATIONS)
    assert list(decoys.models) == [ScramMechanism.SCRAM_SHA_256]


def test_decoys_follow_the_users() -> None:
    users: dict[tuple[str, ScramMechanism], ScramCredential] = {}
    current = [users]
    decoys = Decoys(lambda: current[0])
    before = decoys.credential("x", ScramMechanism.SCRAM_SHA_256)
    current[0] = {("a", ScramMechanism.SCRAM_SHA_256): USERS["alice", ScramMechanism.SCRAM_SHA_256]}
    assert decoys.credential("x", ScramMechanism.SCRAM_SHA_256).salt != before.salt


# --- delegation tokens ------------------------------------------------------------------------------------------------


async def test_tokens_are_looked_up_as_tokens() -> None:
    mechanism = ScramMechanism.SCRAM_SHA_256
    credential = new_credential(mechanism, "hmac")
    asked: list[tuple[str, bool]] = []

    async def find(user: str, _mechanism: ScramMechanism, by_token: bool) -> Account | None:
        asked.append((user, by_token))
        return Account(credential, "User:owner", user, 12345)

    for extension, by_token in (("", False), (",tokenauth=false", False), (",tokenauth=true", True)):
        server = exchange(mechanism, find)
        step = server.step(f"n,,n=the-id,r=abc{extension}".encode())
        assert inspect.isawaitable(step)
        assert b"r=abc" in (await step).reply
        assert asked.pop() == ("the-id", by_token)
    client, server = Client(mechanism, "the-id", "hmac"), exchange(mechanism, find)
    step = server.step(client.first)
    assert inspect.isawaitable(step)
    assert stepped(server, client.final((await step).reply)).done == Done("User:owner", "the-id", 12345)


# --- our own client ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("iterations", ["1000001", "4294967296", "9" * 5000, "4095", "0", "-1", "1e9", "٤٠٩٦"])
def test_cve_2026_10143_the_client_caps_what_a_server_asks_for(
    iterations: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_derivation(*_: Any) -> bytes:
        raise AssertionError("derived")

    client = Client(ScramMechanism.SCRAM_SHA_256)
    monkeypatch.setattr(hashlib, "pbkdf2_hmac", no_derivation)
    salt = base64.b64encode(b"salt").decode()
    with pytest.raises(ApiError, match="iterations"):
        client.final(f"r=n0nceServer,s={salt},i={iterations}".encode())


def test_cve_2026_10143_the_server_derives_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    challenge = stepped(server, client.first).reply
    final = client.final(challenge)

    def no_derivation(*_: Any) -> bytes:
        raise AssertionError("derived")

    monkeypatch.setattr(hashlib, "pbkdf2_hmac", no_derivation)
    assert stepped(server, final).done is not None


def test_secrets_are_not_shown() -> None:
    credential = ScramCredential(b"salt", b"stored", b"server", 4096)
    client, server = Client(ScramMechanism.SCRAM_SHA_256), exchange()
    stepped(server, client.first)
    for shown in (repr(credential), repr(server), repr(server._challenge), repr(Account(credential, "User:a"))):
        assert "salt" not in shown and "stored" not in shown and "n0nce" not in shown
