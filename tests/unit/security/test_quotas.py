"""Whose quota counts, and how rates and buckets are taken, with time under the test's control."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.security.quotas import (
    CLIENT_ID,
    IP,
    MAX_REMEMBERED,
    USER,
    Limit,
    QuotaEntity,
    QuotaTable,
    Rate,
    TokenBucket,
    Windows,
    quota_entity,
)

KEYS = ("producer_byte_rate", "consumer_byte_rate")
USERS = ("alice", "bob")
CLIENTS = ("app", "")
ENTITIES = [
    quota_entity(parts)
    for user, client in itertools.product((*USERS, None, "absent"), ("app", "other", None, "absent"))
    if (parts := {k: v for k, v in ((USER, user), (CLIENT_ID, client)) if v != "absent"})
]


def naive(quotas: Mapping[QuotaEntity, Mapping[str, float]], user: str, client: str, key: str) -> Limit | None:
    """The eight levels written out."""

    def get(**parts: str | None) -> float | None:
        entity = tuple(sorted((kind.replace("_", "-"), name) for kind, name in parts.items()))
        return quotas.get(entity, {}).get(key)

    levels = (
        (get(user=user, client_id=client), (user, client)),
        (get(user=user, client_id=None), (user, client)),
        (get(user=user), (user, None)),
        (get(user=None, client_id=client), (user, client)),
        (get(user=None, client_id=None), (user, client)),
        (get(user=None), (user, None)),
        (get(client_id=client), (None, client)),
        (get(client_id=None), (None, client)),
    )
    return next((Limit(rate, share) for rate, share in levels if rate is not None), None)


@given(
    quotas=st.dictionaries(
        st.sampled_from(ENTITIES), st.dictionaries(st.sampled_from(KEYS), st.integers(1, 10**6).map(float), min_size=1)
    ),
    user=st.sampled_from(USERS),
    client=st.sampled_from(CLIENTS),
)
def test_the_most_specific_quota_counts_for_each_key_by_itself(
    quotas: dict[QuotaEntity, dict[str, float]], user: str, client: str
) -> None:
    found = QuotaTable.of(quotas).limits(user, client)
    expected = {key: limit for key in KEYS if (limit := naive(quotas, user, client, key)) is not None}
    assert dict(found) == expected


def test_taking_levels_away_one_by_one_uncovers_the_next() -> None:
    """All eight at once, in Kafka's order."""
    levels = [
        {USER: "alice", CLIENT_ID: "app"}, {USER: "alice", CLIENT_ID: None}, {USER: "alice"},
        {USER: None, CLIENT_ID: "app"}, {USER: None, CLIENT_ID: None}, {USER: None},
        {CLIENT_ID: "app"}, {CLIENT_ID: None},
    ]  # fmt: skip
    quotas = {quota_entity(parts): {KEYS[0]: float(rank + 1)} for rank, parts in enumerate(levels)}
    for rank, parts in enumerate(levels):
        assert QuotaTable.of(quotas).limits("alice", "app")[KEYS[0]].rate == rank + 1
        del quotas[quota_entity(parts)]
    assert not QuotaTable.of(quotas).limits("alice", "app")


def test_what_a_table_remembers_is_bounded() -> None:
    table = QuotaTable.of({quota_entity({CLIENT_ID: None}): {KEYS[0]: 1.0}})
    for number in range(MAX_REMEMBERED + 10):
        assert table.limits("u", f"invented-{number}")[KEYS[0]].share == (None, f"invented-{number}")
    assert len(table._remembered) <= MAX_REMEMBERED


@pytest.mark.parametrize(
    ("asked", "rate"),
    [("10.0.0.1", 5), ("::ffff:10.0.0.1", 5), ("10.0.0.2", 9), ("2001:db8::1", 7), ("fe80::1%eth0", 9), ("local", 9)],
)
def test_an_address_is_the_same_however_it_is_written(asked: str, rate: float) -> None:
    key = "connection_creation_rate"
    table = QuotaTable.of(
        {
            quota_entity({IP: "10.0.0.1"}): {key: 5.0},
            quota_entity({IP: "2001:0DB8:0:0::1"}): {key: 7.0},
            quota_entity({IP: None}): {key: 9.0},
        }
    )
    assert table.connection_rate(asked) == rate
    assert not table.clients


# --- rates ------------------------------------------------------------------------------------------------------------


def test_a_beginner_may_use_ten_windows_at_once_and_then_waits_as_kafka_says() -> None:
    rate = Rate(Windows(11, 1))
    rate.add(1000, 100.0)
    assert rate.excess_s(100, 100.0) == 0, "1000 in the ten whole windows that are assumed"
    rate.add(50, 100.0)
    assert rate.excess_s(100, 100.0) == pytest.approx(0.5)  # (105 - 100) / 100 of ten seconds
    assert rate.excess_s(100, 100.5) == 0, "after just that long it is back at the bound"


def test_a_steady_rate_is_its_own_measure() -> None:
    rate = Rate(Windows(11, 1))
    for tick in range(600):
        rate.add(10, tick / 10)
    now = 59.9
    assert rate.excess_s(101, now) == 0
    assert rate.excess_s(90, now) > 0


def test_what_is_older_than_all_windows_does_not_count() -> None:
    rate = Rate(Windows(3, 2))
    rate.add(1e9, 0.0)
    assert not rate.is_idle(5.9) and rate.excess_s(1, 5.9) > 0
    assert rate.is_idle(6.0) and rate.excess_s(1, 6.0) == 0


def test_what_would_be_added_is_judged_and_not_counted() -> None:
    rate = Rate(Windows())
    assert rate.excess_s(10, 0.0, 200) == pytest.approx(10.0)
    assert rate.excess_s(10, 0.0) == 0


def test_nothing_at_all_is_allowed_by_a_bound_of_nothing() -> None:
    assert math.isinf(Rate(Windows()).excess_s(0, 0.0, 1))


@given(
    steps=st.lists(st.tuples(st.floats(0, 20), st.floats(0, 1000)), min_size=1, max_size=60),
    count=st.integers(1, 12),
    seconds=st.integers(1, 5),
)
def test_the_sampled_rate_is_kafkas(steps: list[tuple[float, float]], count: int, seconds: int) -> None:
    """Against a ring of samples that are reset in place, as Kafka's SampledStat and Rate keep them."""
    rate, ring, now = Rate(Windows(count, seconds)), Ring(count, seconds), 0.0
    for pause, amount in steps:
        now += pause
        rate.add(amount, now)
        ring.record(amount, now)
        for bound in (0.5, 10.0, 500.0):
            assert rate.excess_s(bound, now) == pytest.approx(ring.excess(bound, now), abs=1e-6)


class Ring:
    """The rate in the words of Kafka's own classes."""

    def __init__(self, count: int, seconds: int) -> None:
        self.count, self.seconds = count, seconds
        self.samples: list[list[float]] = []
        self.current = 0

    def record(self, amount: float, now: float) -> None:
        if not self.samples:
            self.samples.append([now, now, 0.0])
        if now - self.samples[self.current][0] >= self.seconds:
            self.current = (self.current + 1) % (self.count + 1)
            if self.current >= len(self.samples):
                self.samples.append([now, now, 0.0])
            else:
                self.samples[self.current] = [now, now, 0.0]
        self.samples[self.current][1] = now
        self.samples[self.current][2] += amount

    def excess(self, bound: float, now: float) -> float:
        for place, sample in enumerate(self.samples):
            if now - sample[1] >= self.count * self.seconds:
                self.samples[place] = [now, now, 0.0]
        elapsed = now - min(sample[0] for sample in self.samples)
        full = int(elapsed / self.seconds)
        if full < self.count - 1:
            elapsed += (self.count - 1 - full) * self.seconds
        window = max(elapsed, 0.001)
        value = sum(sample[2] for sample in self.samples) / window
        return max((value - bound) / bound * window, 0.0)


# --- buckets ----------------------------------------------------------------------------------------------------------


def test_a_bucket_begins_full_and_may_be_emptied_beyond_its_bottom() -> None:
    bucket = TokenBucket(Windows(100, 1))  # the example of KIP-599
    bucket.take(560, 5, 1000.0)
    assert bucket.excess_s(5, 1000.0) == pytest.approx(12.0)
    assert bucket.excess_s(5, 1011.9) > 0
    assert bucket.excess_s(5, 1012.0) == pytest.approx(0)


def test_a_bucket_is_never_more_than_full() -> None:
    bucket = TokenBucket(Windows(2, 1))
    bucket.take(0, 10, 0.0)
    bucket.take(-100, 10, 0.0)
    bucket.take(25, 10, 5.0)
    assert bucket.excess_s(10, 5.0) == pytest.approx(0.5)


def test_no_more_is_kept_of_a_long_client_id_than_is_needed() -> None:
    """A client may send 32 KiB of one, another one with every request."""
    long, other = "x" * 32_000, "x" * 31_999 + "y"
    limited = {
        quota_entity({USER: None, CLIENT_ID: None}): {"producer_byte_rate": 1.0},
        quota_entity({CLIENT_ID: long}): {"consumer_byte_rate": 2.0},
    }
    table = QuotaTable.of(limited)
    found, apart = table.limits("alice", long), table.limits("alice", other)
    assert (found["producer_byte_rate"].rate, found["consumer_byte_rate"].rate) == (1.0, 2.0)
    assert apart.keys() == {"producer_byte_rate"}
    shares = [each.share for each in (*found.values(), *apart.values())]
    assert len(set(shares)) == 3, "each counts for itself"
    assert all(len(part or "") <= 256 for share in shares for part in share)
    assert table._remembered == {}
    assert table.limits("alice", long) == found
