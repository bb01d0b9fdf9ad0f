"""Which quotas a filter means, and what an alteration changes or is refused for."""

from __future__ import annotations

import math

import pytest

from millrace.cluster.image import ClusterImage
from millrace.cluster.quotas import QuotaAlteration, QuotaFilter, matching, plan_alter_quotas
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import QuotaChanged
from millrace.security.quotas import quota_entity

ALICE = (("user", "alice"),)
PRODUCE, CONSUME, CONNECT = "producer_byte_rate", "consumer_byte_rate", "connection_creation_rate"


def test_only_what_differs_is_changed() -> None:
    image = ClusterImage().apply((QuotaChanged(ALICE, ((PRODUCE, 5.0), (CONSUME, 6.0))),))
    plan = plan_alter_quotas(
        image,
        [
            QuotaAlteration(ALICE, ((PRODUCE, 5.0), (CONSUME, None), ("request_percentage", None))),
            QuotaAlteration((("user", None), ("client-id", "app")), ((PRODUCE, 1.0),)),
            QuotaAlteration((("client-id", "same"),), ((PRODUCE, None),)),
        ],
    )
    assert plan.results == [None, None, None]
    assert plan.changes == (
        QuotaChanged(ALICE, ((CONSUME, None),)),
        QuotaChanged((("client-id", "app"), ("user", None)), ((PRODUCE, 1.0),)),
    )
    after = image.apply(plan.changes)
    assert after.quotas[ALICE] == {PRODUCE: 5.0}


@pytest.mark.parametrize(
    ("parts", "operations"),
    [
        ((), ((PRODUCE, 1.0),)),
        ((("planet", "mars"),), ((PRODUCE, 1.0),)),
        ((("user", ""),), ((PRODUCE, 1.0),)),
        ((("user", "a"), ("user", "b")), ((PRODUCE, 1.0),)),
        ((("user", "a"), ("ip", "1.2.3.4")), ((CONNECT, 1.0),)),
        ((("ip", "not-an-address"),), ((CONNECT, 1.0),)),
        ((("ip", "1.2.3.4"),), ((PRODUCE, 1.0),)),
        (ALICE, ((CONNECT, 1.0),)),
        (ALICE, (("colour", 1.0),)),
        (ALICE, ((PRODUCE, 0.0),)),
        (ALICE, ((PRODUCE, -1.0),)),
        (ALICE, ((PRODUCE, 1.5),)),
        (ALICE, ((PRODUCE, 1e30),)),
        (ALICE, ((PRODUCE, math.nan),)),
        (ALICE, (("request_percentage", math.inf),)),
        ((("ip", None),), ((CONNECT, 2.0**31),)),
        (ALICE, ((PRODUCE, 1.0), (PRODUCE, 2.0))),
    ],
)
def test_what_cannot_be_is_refused(
    parts: tuple[tuple[str, str | None], ...], operations: tuple[tuple[str, float | None], ...]
) -> None:
    plan = plan_alter_quotas(ClusterImage(), [QuotaAlteration(parts, operations)])
    (error,) = plan.results
    assert error is not None and error.code is ErrorCode.INVALID_REQUEST and not plan.changes


def test_an_entity_named_twice_is_refused_twice_and_others_are_not() -> None:
    twice = QuotaAlteration((("user", "a"), ("client-id", "c")), ((PRODUCE, 1.0),))
    turned = QuotaAlteration((("client-id", "c"), ("user", "a")), ((PRODUCE, 2.0),))
    plan = plan_alter_quotas(ClusterImage(), [twice, QuotaAlteration(ALICE, ((PRODUCE, 1.5e9),)), turned])
    assert [error is None for error in plan.results] == [False, True, False]
    assert [change.entity for change in plan.changes if isinstance(change, QuotaChanged)] == [ALICE]


QUOTAS = {
    quota_entity(parts): {PRODUCE: 1.0}
    for parts in (
        {"user": "a"}, {"user": None}, {"user": "a", "client-id": "c"}, {"user": "a", "client-id": None},
        {"client-id": "c"}, {"ip": "1.2.3.4"}, {"ip": None},
    )
}  # fmt: skip
EXACT, DEFAULT, ANY = range(3)


@pytest.mark.parametrize(
    ("components", "strict", "expected"),
    [
        ((), False, 7),
        ((), True, 0),
        ((("user", EXACT, "a"),), False, 3),
        ((("user", EXACT, "a"),), True, 1),
        ((("user", DEFAULT, None),), False, 1),
        ((("user", ANY, None),), False, 4),
        ((("user", ANY, None),), True, 2),
        ((("client-id", ANY, None), ("user", ANY, None)), True, 2),
        ((("client-id", DEFAULT, None), ("user", EXACT, "a")), False, 1),
        ((("ip", ANY, None),), True, 2),
        ((("user", EXACT, "nobody"),), False, 0),
    ],
)
def test_filters(components: tuple[tuple[str, int, str | None], ...], strict: bool, expected: int) -> None:
    assert len(list(matching(QUOTAS, QuotaFilter(components, strict)))) == expected


@pytest.mark.parametrize(
    ("components", "code"),
    [
        ((("", EXACT, "a"),), ErrorCode.INVALID_REQUEST),
        ((("user", EXACT, None),), ErrorCode.INVALID_REQUEST),
        ((("user", DEFAULT, "a"),), ErrorCode.INVALID_REQUEST),
        ((("user", ANY, "a"),), ErrorCode.INVALID_REQUEST),
        ((("user", 3, None),), ErrorCode.INVALID_REQUEST),
        ((("user", ANY, None), ("user", EXACT, "a")), ErrorCode.INVALID_REQUEST),
        ((("user", ANY, None), ("ip", ANY, None)), ErrorCode.INVALID_REQUEST),
        ((("planet", ANY, None),), ErrorCode.UNSUPPORTED_VERSION),
    ],
)
def test_filters_that_mean_nothing(components: tuple[tuple[str, int, str | None], ...], code: ErrorCode) -> None:
    with pytest.raises(ApiError) as refused:
        list(matching(QUOTAS, QuotaFilter(components)))
    assert refused.value.code is code
