"""What clients have used of their quotas: who counts together, what is kept, and how long one has to be quiet."""

from __future__ import annotations

import pytest

from millrace.clock import ManualClock
from millrace.security import metering
from millrace.security.metering import ClientQuotas, Meter, MutationQuota
from millrace.security.quotas import CLIENT_ID, IP, USER, QuotaEntity, Windows, quota_entity
from millrace.security.sessions import ANONYMOUS, Session

ALICE = Session("User:alice")
BOB = Session("User:bob")
PRODUCE, CONSUME, TIME, CHANGE = (
    "producer_byte_rate", "consumer_byte_rate", "request_percentage", "controller_mutation_rate",
)  # fmt: skip


def quotas_of(*given: tuple[dict[str, str | None], dict[str, float]]) -> dict[QuotaEntity, dict[str, float]]:
    return {quota_entity(parts): values for parts, values in given}


def client_quotas(*given: tuple[dict[str, str | None], dict[str, float]]) -> tuple[ClientQuotas, ManualClock]:
    clock = ManualClock()
    quotas = ClientQuotas(clock=clock)
    quotas.take(quotas_of(*given))
    return quotas, clock


def metered(quotas: ClientQuotas, session: Session, client_id: str | None) -> Meter:
    meter = quotas.meter(session, client_id)
    assert meter is not None
    return meter


def produce(quotas: ClientQuotas, session: Session, client_id: str | None, size_bytes: int) -> int:
    meter = metered(quotas, session, client_id)
    meter.received(size_bytes)
    return meter.charge()


def test_without_quotas_nothing_is_kept() -> None:
    quotas, _ = client_quotas()
    assert not quotas.active and quotas.meter(ALICE, "app") is None
    assert quotas.mutations(ALICE, "app", strict=True) is None
    assert "0 counts" in repr(quotas)


def test_addresses_alone_do_not_make_requests_pay() -> None:
    quotas, _ = client_quotas(({IP: None}, {"connection_creation_rate": 3.0}))
    assert not quotas.active and quotas.table.addresses


def test_clients_of_a_user_count_together_and_others_do_not() -> None:
    quotas, _ = client_quotas(({USER: None}, {PRODUCE: 100.0}))
    assert produce(quotas, ALICE, "one", 900) == 0
    assert produce(quotas, ALICE, "two", 300) == 2000, "1200 of 1000 in ten seconds"
    assert produce(quotas, BOB, "one", 900) == 0
    assert produce(quotas, ANONYMOUS, None, 1100) == 1000


def test_a_client_id_counts_together_over_users() -> None:
    quotas, _ = client_quotas(({CLIENT_ID: "app"}, {PRODUCE: 100.0}))
    assert produce(quotas, ALICE, "app", 900) == 0
    assert produce(quotas, BOB, "app", 300) == 2000
    assert quotas.meter(BOB, "other") is None


def test_a_client_without_an_id_does_not_get_around_the_default() -> None:
    quotas, _ = client_quotas(({CLIENT_ID: None}, {PRODUCE: 100.0}))
    assert produce(quotas, ALICE, None, 1200) == 2000
    assert produce(quotas, ALICE, "", 0) == 2000


def test_a_changed_quota_holds_for_what_was_counted_before() -> None:
    quotas, _ = client_quotas(({USER: "alice"}, {PRODUCE: 100.0}))
    assert produce(quotas, ALICE, "app", 1000) == 0
    image = quotas_of(({USER: "alice"}, {PRODUCE: 50.0}))
    quotas.take(image)
    assert produce(quotas, ALICE, "app", 0) == 10_000
    table = quotas.table
    quotas.take(image)
    assert quotas.table is table, "the same quotas are not looked at again"
    quotas.take({})
    assert not quotas.active and "0 counts" in repr(quotas)


def test_the_longest_of_several_counts() -> None:
    quotas, clock = client_quotas(({USER: "alice"}, {PRODUCE: 100.0, TIME: 1.0}))
    meter = metered(quotas, ALICE, "app")
    meter.received(1050)
    clock.advance(2.0)
    assert meter.throttle_ms == 500
    assert meter.charge() == 1000, "2 s in 10 are 20 percent; as Kafka does, one window at most for that"


def test_time_is_counted_while_the_request_is_worked_on() -> None:
    quotas, clock = client_quotas(({USER: "alice"}, {TIME: 10.0}))
    for _ in range(2):
        meter = metered(quotas, ALICE, "app")
        clock.advance(0.2)
        meter.pause()
        clock.advance(0.3)  # it waits
        meter.resume()
        clock.advance(0.1)
        assert meter.charge() == 0
        clock.advance(0.2)
        meter.finish()
        clock.advance(0.5)
    meter = metered(quotas, ALICE, "app")
    clock.advance(0.01)
    assert meter.charge() > 0, "1.01 s of 10 at 10 percent"


@pytest.mark.parametrize("size_bytes", [1000, 1500])
def test_a_throttled_fetch_is_not_counted_and_one_that_never_fits_is_sent_alone(size_bytes: int) -> None:
    quotas, clock = client_quotas(({USER: "alice"}, {CONSUME: 100.0}))
    assert metered(quotas, ALICE, "app").room_bytes == 1000
    assert metered(quotas, ALICE, "app").may_send(1000)
    meter = metered(quotas, ALICE, "app")
    assert not meter.may_send(size_bytes)
    assert meter.charge() == size_bytes * 10
    clock.advance(11.0)
    meter = metered(quotas, ALICE, "app")
    assert meter.may_send(size_bytes), "nothing else was sent for all windows"
    assert meter.charge() == (size_bytes - 1000) * 10
    assert not metered(quotas, ALICE, "app").may_send(1)


def test_invented_client_ids_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metering, "MAX_COUNTS", 100)
    quotas, clock = client_quotas(({CLIENT_ID: None}, {PRODUCE: 100.0}))
    for number in range(500):
        produce(quotas, ALICE, f"invented-{number}", 1)
        produce(quotas, ALICE, "steady", 10)
    assert len(quotas._rates) == 100
    assert produce(quotas, ALICE, "steady", 0) > 0, "who is here all the time is not forgotten"
    clock.advance(quotas.windows.span_s)
    produce(quotas, ALICE, "late", 1)
    assert len(quotas._rates) == 1, "and nobody is kept whose count is nothing"


# --- changes of metadata ----------------------------------------------------------------------------------------------


def mutations(quotas: ClientQuotas, *, strict: bool) -> MutationQuota:
    quota = quotas.mutations(ALICE, "app", strict=strict)
    assert quota is not None
    return quota


def test_a_strict_quota_refuses_once_it_is_used_up() -> None:
    clock = ManualClock()
    quotas = ClientQuotas(clock=clock, controller_windows=Windows(2, 1))
    quotas.take(quotas_of(({USER: "alice"}, {CHANGE: 10.0})))
    quota = mutations(quotas, strict=True)
    assert quota.admit(30), "twenty are left, and one change is not cut"
    assert quota.throttle_ms == 0, "it was not refused"
    assert not quota.admit(1)
    assert quota.throttle_ms == 1000
    clock.advance(1.0)
    assert mutations(quotas, strict=True).admit(1)


def test_a_permissive_quota_lets_wait_instead() -> None:
    quotas, _ = client_quotas(({USER: "alice"}, {CHANGE: 10.0}))
    quota = mutations(quotas, strict=False)
    assert quota.admit(110) and quota.throttle_ms == 0
    assert quota.admit(20) and quota.throttle_ms == 2000
    quota.give_back(20)
    assert quota.throttle_ms == 0
