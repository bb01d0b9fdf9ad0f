"""The life of delegation tokens, by Kafka's rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.clock import SystemClock
from millrace.cluster import tokens
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.tokens import (
    MAX_REMOVED_AT_ONCE,
    Lifetimes,
    plan_create_token,
    plan_expire_token,
    plan_remove_expired,
    plan_renew_token,
)
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import TokenChanged, TokenRemoved
from millrace.security.tokens import DelegationToken
from support.metadata import cluster_of, running_controller

DAY_MS = 86_400_000
NOW_MS = 1_700_000_000_000
LIFETIMES = Lifetimes(7 * DAY_MS, DAY_MS)
ALICE, BOB, EVE = "User:alice", "User:bob", "User:eve"


def made(max_lifetime_ms: int = -1, now_ms: int = NOW_MS, *, token_id: str = "t") -> DelegationToken:
    plan = plan_create_token(
        ALICE, ALICE, [BOB, BOB], max_lifetime_ms, now_ms=now_ms, lifetimes=LIFETIMES, make_id=lambda: token_id
    )
    assert plan.changes == (TokenChanged(plan.results),)
    return plan.results


def with_tokens(*given_tokens: DelegationToken) -> ClusterImage:
    return cluster_of(1).apply(tuple(map(TokenChanged, given_tokens)))


def renew(image: ClusterImage, period_ms: int, now_ms: int, by: str = ALICE) -> Plan[int]:
    return plan_renew_token(image, "t", by, period_ms, now_ms=now_ms, lifetimes=LIFETIMES)


def expire(image: ClusterImage, period_ms: int, now_ms: int, by: str = ALICE) -> Plan[int]:
    return plan_expire_token(image, "t", by, period_ms, now_ms=now_ms)


def refusal(plan: object, *arguments: object) -> ErrorCode:
    with pytest.raises(ApiError) as refused:
        plan(*arguments)  # type: ignore[operator]
    return refused.value.code


def test_a_new_token() -> None:
    token = made()
    assert token == DelegationToken("t", ALICE, ALICE, (BOB,), NOW_MS, NOW_MS + DAY_MS, NOW_MS + 7 * DAY_MS)
    assert made(5).max_ms == made(5).expires_ms == NOW_MS + 5
    assert made(0).max_ms == made(8 * DAY_MS).max_ms == NOW_MS + 7 * DAY_MS
    for_ever = Lifetimes(2**63 - 1, 2**63 - 1)
    endless = plan_create_token(ALICE, ALICE, (), -1, now_ms=NOW_MS, lifetimes=for_ever).results
    assert endless.max_ms == endless.expires_ms == 2**63 - 1
    assert len({tokens.new_token_id() for _ in range(100)}) == 100


def test_a_token_names_no_crowd() -> None:
    for renewers in ([f"User:{n}" for n in range(tokens.MAX_RENEWERS + 1)], ["User:" + "x" * tokens.MAX_NAMES_LENGTH]):
        with pytest.raises(ApiError, match="INVALID_REQUEST"):
            plan_create_token(ALICE, ALICE, renewers, -1, now_ms=NOW_MS, lifetimes=LIFETIMES)


def test_who_may_renew_and_expire() -> None:
    image = with_tokens(made())
    for plan in (renew, expire):
        for by in (ALICE, BOB):
            assert plan(image, 10, NOW_MS, by).results == NOW_MS + 10
        assert refusal(plan, image, 10, NOW_MS, EVE) == ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
        assert refusal(plan, cluster_of(1), 10, NOW_MS) == ErrorCode.DELEGATION_TOKEN_NOT_FOUND
    # Not by having asked for it on somebody else's behalf.
    for_bob = with_tokens(replace(made(), owner=BOB, requester=EVE, renewers=()))
    assert refusal(renew, for_bob, 10, NOW_MS, EVE) == ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH


def test_renewal_ends_with_the_token() -> None:
    image = with_tokens(made(3 * DAY_MS))
    later_ms = NOW_MS + DAY_MS
    assert renew(image, -1, later_ms).results == NOW_MS + 2 * DAY_MS
    assert renew(image, 9 * DAY_MS, later_ms).results == NOW_MS + 2 * DAY_MS, "no longer than a new one"
    renewed = image.apply(renew(image, 0, later_ms).changes)
    renewed = renewed.apply(renew(renewed, 0, NOW_MS + 2 * DAY_MS).changes)
    assert renewed.tokens["t"].expires_ms == NOW_MS + 3 * DAY_MS
    assert renew(renewed, 0, NOW_MS + 3 * DAY_MS).changes == (), "nothing to gain"
    assert refusal(renew, renewed, 0, NOW_MS + 3 * DAY_MS + 1) == ErrorCode.DELEGATION_TOKEN_EXPIRED
    # Expired comes before whose it is, as in Kafka; for the end of a token it is the other way round.
    late_ms = NOW_MS + DAY_MS + 1
    assert refusal(renew, image, 0, late_ms, EVE) == ErrorCode.DELEGATION_TOKEN_EXPIRED
    assert refusal(expire, image, 0, late_ms, EVE) == ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH
    assert refusal(expire, image, 0, late_ms) == ErrorCode.DELEGATION_TOKEN_EXPIRED


def test_a_token_ends_when_told() -> None:
    image = with_tokens(made())
    assert expire(image, -1, NOW_MS + 7) == Plan(NOW_MS + 7, (TokenRemoved("t"),))
    assert expire(image, -1, NOW_MS + 9 * DAY_MS).changes == (TokenRemoved("t"),), "also when it is over"
    assert expire(image, 0, NOW_MS).results == NOW_MS
    assert expire(image, 2**63 - 1, NOW_MS).results == NOW_MS + 7 * DAY_MS


def test_tokens_that_are_over_are_removed() -> None:
    image = with_tokens(*(made(n, token_id=str(n)) for n in range(1, 11)))
    assert plan_remove_expired(image, NOW_MS) == Plan(0, ())
    plan = plan_remove_expired(image, NOW_MS + 6)
    assert plan.results == 5
    assert set(image.apply(plan.changes).tokens) == set("6789") | {"10"}
    many = with_tokens(*(made(1, token_id=str(n)) for n in range(MAX_REMOVED_AT_ONCE + 1)))
    assert plan_remove_expired(many, NOW_MS + 2).results == MAX_REMOVED_AT_ONCE


steps = st.lists(
    st.tuples(
        st.sampled_from(["renew", "expire"]),
        st.sampled_from([ALICE, BOB, EVE]),
        st.integers(-1, 10 * DAY_MS),
        st.integers(0, 2 * DAY_MS),
    ),
    max_size=12,
)


@given(st.integers(-1, 10 * DAY_MS), steps)
def test_no_sequence_of_requests_makes_a_token_last_longer_than_it_was_made_for(
    max_lifetime_ms: int, asked: list[tuple[str, str, int, int]]
) -> None:
    first = made(max_lifetime_ms)
    image, now_ms = with_tokens(first), NOW_MS
    over, refusals = False, set[ErrorCode]()
    for verb, by, period_ms, pause_ms in asked:
        now_ms += pause_ms
        before = image.tokens.get("t")
        over = over or before is None or before.is_expired(now_ms)
        try:
            plan = renew(image, period_ms, now_ms, by) if verb == "renew" else expire(image, period_ms, now_ms, by)
        except ApiError as error:
            refusals.add(error.code)
            continue
        assert by != EVE
        image = image.apply(plan.changes)
        after = image.tokens.get("t")
        if after is None:
            assert (verb, period_ms, plan.results) == ("expire", -1, now_ms)
            continue
        assert not over, "what is over stays so"
        assert after == replace(first, expires_ms=plan.results), "nothing else changes"
        assert plan.results <= first.max_ms
        if verb == "renew":
            assert plan.results <= now_ms + LIFETIMES.expiry_ms
    assert refusals <= {
        ErrorCode.DELEGATION_TOKEN_NOT_FOUND,
        ErrorCode.DELEGATION_TOKEN_EXPIRED,
        ErrorCode.DELEGATION_TOKEN_OWNER_MISMATCH,
    }


async def test_the_controller_removes_what_is_over() -> None:
    settings = {"delegation.token.expiry.check.interval.ms": "5"}
    async with running_controller(settings=settings) as controller:
        now_ms = SystemClock().wall_ms()
        lasting, over = made(token_id="lasting", now_ms=now_ms), made(1, now_ms - 10, token_id="over")
        await controller.change(lambda _image: Plan(None, (TokenChanged(lasting), TokenChanged(over))))
        await controller.wait_for_image(lambda image: set(image.tokens) == {"lasting"}, 10)
