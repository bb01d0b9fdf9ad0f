"""What follows from what was heard of other brokers: who is fenced, who counts again, who takes an office over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.cluster.evidence import (
    CALLED_WITHIN_S,
    CALLS_COUNT_S,
    FENCED_WITHIN_S,
    Health,
    Hearsay,
    Verdict,
    is_refusal_confirmed,
    is_refuted,
    is_silent,
    judge,
    refuses,
    takeover_delay_s,
    takeover_s,
)
from support.metadata import cluster_of

SILENCE_S = 6.0
NOW_S = 1000.0


def heard(broker_id: int, ago_s: float | None = 0.5, *, since_s: float = 0.0, **others: object) -> Health:
    answered_s = None if ago_s is None else NOW_S - ago_s
    return Health(broker_id, 100 + broker_id, since_s, answered_s, **others)  # type: ignore[arg-type]


def refused(broker_id: int, *times_s: float) -> Health:
    health = heard(broker_id)
    for time_s in times_s:
        health = health.refused(time_s)
    return health


def refusing(broker_id: int, for_s: float = 0.0, **others: object) -> Health:
    return replace(refused(broker_id, NOW_S - for_s - 0.05, NOW_S - for_s), **others)  # type: ignore[arg-type]


def verdict(*peers: Health, fenced_s: Mapping[int, float] | None = None, registered: int | None = None) -> Verdict:
    """Of a controller to which every peer is registered, unless `registered` says otherwise."""
    count = len(peers) + 1 if registered is None else registered
    return judge(peers, fenced_s or {}, registered=count, now_s=NOW_S, silence_s=SILENCE_S)


def test_nothing_is_done_about_brokers_that_answer() -> None:
    assert verdict(heard(2), heard(3), heard(4, 5.9)) == Verdict({}, {})


def test_two_refusals_in_short_order_count_and_one_does_not() -> None:
    assert verdict(heard(2), refused(3, NOW_S)) == Verdict({}, {})
    assert verdict(heard(2), refused(3, NOW_S - 0.1, NOW_S)) == Verdict({3: 103}, {})
    assert verdict(heard(2), refused(3, NOW_S - 0.3, NOW_S)) == Verdict({}, {})
    # They go on counting while it is tried again less often, until it answers.
    assert refuses(refused(3, NOW_S - 2, NOW_S - 1.9, NOW_S - 1.4, NOW_S - 0.9))
    assert not refuses(refused(3, NOW_S - 0.1, NOW_S).answered(NOW_S, going=False))


def test_silence_is_death_after_a_session_and_counts_from_the_start_of_the_watch() -> None:
    assert verdict(heard(2), heard(3, 6.0)) == Verdict({3: 103}, {})
    assert verdict(heard(2), heard(3, None, since_s=NOW_S - 5)) == Verdict({}, {})
    assert verdict(heard(2), heard(3, None, since_s=NOW_S - 6)) == Verdict({3: 103}, {})
    assert verdict(heard(2), heard(3, 60.0, since_s=NOW_S - 1)) == Verdict({}, {})  # the watch was resumed


def test_whoever_turns_a_login_away_is_neither_silent_nor_back() -> None:
    turning = heard(3, 60.0).turned_away(NOW_S - 1)
    assert verdict(heard(2), turning) == Verdict({}, {})
    assert not refuses(turning)
    assert verdict(heard(2), turning, fenced_s={3: NOW_S - 30}) == Verdict({}, {})
    assert verdict(heard(2), heard(3, 60.0).turned_away(NOW_S - 6)) == Verdict({3: 103}, {})
    # It does not take back what was heard of the address before.
    assert verdict(heard(2), refused(3, NOW_S - 0.1, NOW_S).turned_away(NOW_S)) == Verdict({3: 103}, {})


def test_a_controller_that_reaches_too_few_resigns() -> None:
    silent = [heard(number, 7.0) for number in (2, 3, 4)]
    assert verdict(*silent[:2]) == Verdict({}, {}, resign=True)
    assert verdict(silent[0], heard(3)) == Verdict({2: 102}, {})
    assert verdict(*silent[:2], heard(4)) == Verdict({}, {}, resign=True)
    assert verdict(*silent[:2], heard(4), heard(5)) == Verdict({2: 102, 3: 103}, {})
    # Between two, the session with the store decides, and the controller has one.
    assert verdict(silent[0]) == Verdict({2: 102}, {})
    # Those who are known to be dead say nothing about the network.
    assert verdict(silent[0], refusing(3, 60.0)) == Verdict({2: 102, 3: 103}, {})


def test_a_fenced_broker_counts_again_after_an_answer_to_a_later_question() -> None:
    fenced_s = {3: NOW_S - 2}
    assert verdict(heard(2), heard(3, 1.0), fenced_s=fenced_s) == Verdict({}, {3: 103})
    assert verdict(heard(2), heard(3, 2.5), fenced_s=fenced_s) == Verdict({}, {})
    assert verdict(heard(2), heard(3, None), fenced_s=fenced_s) == Verdict({}, {})
    assert verdict(heard(2), heard(3, 1.0, going=True), fenced_s=fenced_s) == Verdict({}, {})
    assert verdict(heard(2), heard(3, 1.0, refused_s=NOW_S), fenced_s=fenced_s) == Verdict({}, {})


def test_a_controller_gives_a_refusing_majority_a_moment_in_which_it_is_deposed_if_they_live() -> None:
    # Of three brokers the two others could; of two brokers, or of three where one answers, nobody can.
    assert verdict(refusing(2), refusing(3)) == Verdict({}, {}, again_s=NOW_S + CALLED_WITHIN_S)
    assert verdict(refusing(2)) == Verdict({2: 102}, {})
    assert verdict(refusing(2), heard(3)) == Verdict({2: 102}, {})
    assert verdict(refusing(2, 2 * CALLED_WITHIN_S), refusing(3)) == Verdict(
        {2: 102}, {}, again_s=NOW_S + CALLED_WITHIN_S
    )
    # Whoever is fenced and registered still could vote, too.
    assert not verdict(refusing(2, 9.0), refusing(3), fenced_s={2: NOW_S - 8}).fence
    assert verdict(refusing(3), fenced_s={2: NOW_S - 8}, registered=2) == Verdict({3: 103}, {})


def test_a_controller_that_is_called_by_most_of_those_who_refuse_it_resigns() -> None:
    deaf = [refusing(number, 1.0, called_s=NOW_S - 0.1) for number in (2, 3)]
    fenced_s = {2: NOW_S - 0.5, 3: NOW_S - 0.5}
    assert verdict(*deaf) == Verdict({}, {}, resign=True)
    assert verdict(*deaf, fenced_s=fenced_s) == Verdict({}, {}, resign=True)
    # One of two is the link to that one; it stays fenced while it is not reached.
    assert verdict(deaf[0], heard(3)) == Verdict({2: 102}, {})
    assert verdict(deaf[0], heard(3), fenced_s={2: NOW_S - 0.5}) == Verdict({}, {})
    # Between two, the session decides.
    assert verdict(deaf[0]) == Verdict({2: 102}, {})
    # Who called before it refused may have died since.
    assert not verdict(*(replace(each, called_s=NOW_S - 1.1) for each in deaf)).resign


def test_a_call_refutes_refusals_for_as_long_as_calls_come() -> None:
    assert is_refuted(refusing(2, 1.0, called_s=NOW_S - 0.9), NOW_S)
    assert not is_refuted(refusing(2, 1.0, called_s=NOW_S - 1.0), NOW_S)
    assert not is_refuted(refusing(2, 60.0, called_s=NOW_S - CALLS_COUNT_S), NOW_S)
    assert not is_refuted(heard(2, called_s=NOW_S), NOW_S)


@st.composite
def healths(draw: st.DrawFn) -> Health:
    refused_s = draw(st.none() | st.floats(NOW_S - 10, NOW_S))
    refusing_s = None if refused_s is None else draw(st.none() | st.floats(NOW_S - 10, refused_s))
    return Health(
        draw(st.integers(1, 9)),
        5,
        draw(st.floats(0, NOW_S)),
        draw(st.none() | st.floats(0, NOW_S)),
        draw(st.booleans()),
        refused_s,
        refusing_s,
        draw(st.none() | st.floats(NOW_S - 10, NOW_S)),
    )


@given(
    st.lists(healths(), unique_by=lambda health: health.broker_id),
    st.dictionaries(st.integers(1, 9), st.floats(0, NOW_S)),
    st.integers(1, 10),
)
def test_verdicts_are_for_those_they_fit(peers: list[Health], fenced_s: dict[int, float], registered: int) -> None:
    given_verdict = judge(peers, fenced_s, registered=registered, now_s=NOW_S, silence_s=SILENCE_S)
    by_id = {peer.broker_id: peer for peer in peers}
    assert not set(given_verdict.fence) & set(given_verdict.unfence)
    assert not set(given_verdict.fence) & set(fenced_s) and set(given_verdict.unfence) <= set(fenced_s)
    for broker_id in given_verdict.fence:
        assert refuses(by_id[broker_id]) or is_silent(by_id[broker_id], NOW_S, SILENCE_S)
    live = [peer for peer in peers if peer.broker_id not in fenced_s and not refuses(peer)]
    silent = [peer for peer in live if is_silent(peer, NOW_S, SILENCE_S)]
    lost = len(silent) + sum(is_refuted(peer, NOW_S) for peer in peers)
    if given_verdict.resign:
        assert lost > len(live) - len(silent)
        assert not set(given_verdict.fence) & {peer.broker_id for peer in live}
    else:
        assert lost <= len(live) - len(silent) + len(given_verdict.unfence) or lost == 1
        assert {peer.broker_id for peer in silent} <= set(given_verdict.fence)


# --- the office -------------------------------------------------------------------------------------------------------


def witnesses(reach_it: int = 0, are_refused: int = 0) -> Hearsay:
    return Hearsay(frozenset(range(10, 10 + reach_it)), frozenset(range(20, 20 + are_refused)))


def when(
    controller: Health,
    hearsay: Hearsay,
    *,
    registered: int = 3,
    is_fenced: bool = False,
    turn_s: float = NOW_S,
) -> float | None:
    return takeover_s(controller, hearsay, registered=registered, is_fenced=is_fenced, turn_s=turn_s, now_s=NOW_S)


def test_most_of_the_brokers_depose_a_controller_that_refuses_them_all_fenced_or_not() -> None:
    for is_fenced in (False, True):
        assert when(refusing(1), witnesses(are_refused=1), is_fenced=is_fenced) == NOW_S
        assert when(refusing(1), witnesses(are_refused=2), registered=5, is_fenced=is_fenced) == NOW_S
    assert when(refusing(1), witnesses(are_refused=1), turn_s=NOW_S + 0.1) == NOW_S + 0.1


def test_a_controller_that_somebody_reaches_or_that_calls_is_not_deposed() -> None:
    assert when(heard(1), witnesses(are_refused=1)) is None
    assert when(refusing(1), witnesses(reach_it=1, are_refused=3), registered=5) is None
    assert when(refusing(1, 0.2, called_s=NOW_S - 0.1), witnesses(are_refused=1)) is None


def test_fewer_wait_whether_the_controller_fences_them_and_are_bound_by_it() -> None:
    alone = witnesses()
    assert when(refusing(1, 0.1), alone) == pytest.approx(NOW_S - 0.1 + CALLED_WITHIN_S)
    assert when(refusing(1, 9.0), alone) == NOW_S
    assert when(refusing(1, 9.0), alone, is_fenced=True) is None
    # Half is not most: the two halves would depose each other in turn.
    assert when(refusing(1, 9.0), witnesses(are_refused=1), registered=4, is_fenced=True) is None
    assert when(refusing(1, 0.1), alone, registered=2) == pytest.approx(NOW_S - 0.1 + FENCED_WITHIN_S)


@given(st.integers(0, 6), st.integers(0, 6))
def test_two_sides_that_refuse_each_other_do_not_depose_each_other_in_turn(one: int, other: int) -> None:
    """Whoever holds the office has fenced the other side, or will; at most one side can depose it even so."""
    sides = [one + 1, other + 1]
    deposing = [
        side
        for side in sides
        if when(refusing(1, 9.0), witnesses(are_refused=side - 1), registered=sum(sides), is_fenced=True) is not None
    ]
    assert len(deposing) <= 1


def test_a_witness_says_what_it_heard_since_it_was_asked() -> None:
    asked_s = NOW_S - 0.1
    assert is_refusal_confirmed(heard(1, 0.05), asked_s, NOW_S) is False
    assert is_refusal_confirmed(heard(1, 0.2), asked_s, NOW_S) is None
    assert is_refusal_confirmed(refused(1, NOW_S - 0.08), asked_s, NOW_S) is None
    assert is_refusal_confirmed(refused(1, NOW_S - 0.08, NOW_S - 0.03), asked_s, NOW_S) is True
    assert is_refusal_confirmed(refusing(1, 0.2), asked_s, NOW_S) is None
    assert is_refusal_confirmed(refusing(1, 0.2).refused(NOW_S), asked_s, NOW_S) is True
    assert is_refusal_confirmed(refusing(1, 0.2, called_s=NOW_S).refused(NOW_S), asked_s, NOW_S) is False


def test_brokers_take_over_one_after_another() -> None:
    image = cluster_of(1, 2, 3, 4, fenced=(4,))
    assert [takeover_delay_s(image, broker_id) for broker_id in (2, 3, 4)] == pytest.approx([0.0, 0.1, 0.2])
