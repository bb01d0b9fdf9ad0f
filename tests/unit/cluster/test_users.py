"""Plans for users: Kafka's rules, one error per user, nothing that could be used to log in."""

from __future__ import annotations

from typing import Any

import pytest

from millrace.cluster.image import ClusterImage
from millrace.cluster.users import CredentialRemoval, NewCredential, plan_users
from millrace.errors import ErrorCode
from millrace.metadata.deltas import ScramChanged
from millrace.security.scram import ScramMechanism, credential_of, salted_password

SHA_256, SHA_512 = ScramMechanism
SALTED = salted_password(SHA_256, "secret", b"salt", 4096)


def new(user: str = "alice", mechanism: int = SHA_256, iterations: int = 4096, **changes: Any) -> NewCredential:
    return NewCredential(user, mechanism, iterations, **{"salt": b"salt", "salted_password": SALTED, **changes})


def with_users(*users: str) -> ClusterImage:
    return ClusterImage().apply(plan_users(ClusterImage(), [new(user) for user in users]).changes)


def test_a_credential_is_kept_without_what_logs_in() -> None:
    plan = plan_users(ClusterImage(), [new(), new("bob", SHA_512, 16384)])
    assert plan.results == {"alice": None, "bob": None}
    (alice, bob) = plan.changes
    assert alice == ScramChanged("alice", SHA_256, credential_of(SHA_256, SALTED, b"salt", 4096))
    assert isinstance(bob, ScramChanged) and bob.credential is not None and bob.credential.iterations == 16384
    assert SALTED not in (bob.credential.stored_key, bob.credential.server_key)
    image = ClusterImage().apply(plan.changes)
    assert set(image.users) == {("alice", SHA_256), ("bob", SHA_512)}


def test_a_credential_is_replaced_and_removed() -> None:
    image = with_users("alice", "bob")
    image = image.apply(plan_users(image, [new(iterations=5000)]).changes)
    assert image.users["alice", SHA_256].iterations == 5000
    image = image.apply(plan_users(image, [CredentialRemoval("alice", SHA_256)]).changes)
    assert set(image.users) == {("bob", SHA_256)}


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        (new(""), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (CredentialRemoval("", SHA_256), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(mechanism=0), ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        (new(mechanism=3), ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        (CredentialRemoval("alice", -1), ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        (new(iterations=4095), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(iterations=-1), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(iterations=16385), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(iterations=2**31 - 1), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(salt=b""), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(salted_password=b""), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new(salt=bytes(1025)), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (new("ü" * 513), ErrorCode.UNACCEPTABLE_CREDENTIAL),
        (CredentialRemoval("alice", SHA_512), ErrorCode.RESOURCE_NOT_FOUND),
        (CredentialRemoval("nobody", SHA_256), ErrorCode.RESOURCE_NOT_FOUND),
    ],
)
def test_what_is_refused_changes_nothing(asked: CredentialRemoval | NewCredential, code: ErrorCode) -> None:
    plan = plan_users(with_users("alice"), [asked])
    ((user, error),) = plan.results.items()
    assert error is not None and (user, error.code) == (asked.user, code)
    assert plan.changes == ()


def test_a_user_who_is_named_twice_fails_and_others_do_not() -> None:
    image = with_users("alice")
    plan = plan_users(image, [CredentialRemoval("alice", SHA_256), new("bob"), new("alice", SHA_512)])
    alice, bob = plan.results["alice"], plan.results["bob"]
    assert alice is not None and alice.code == ErrorCode.DUPLICATE_RESOURCE and bob is None
    assert [change.user for change in plan.changes if isinstance(change, ScramChanged)] == ["bob"]


def test_secrets_are_not_shown() -> None:
    assert "salt" not in repr(new()).replace("salt=", "") and repr(SALTED) not in repr(new())
