"""What the log of decisions says, whatever is appended to it and in which order, and the topic that it lies in."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.client.cluster import LATEST, ClusterClient
from millrace.client.fetching import FetchRange, read_range
from millrace.client.settings import ClientSettings
from millrace.client.transactions import Transaction
from millrace.errors import ConfigError
from millrace.model import TopicPartition
from millrace.records.batch import split
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.spark.decisions import (
    MAX_FORMER,
    Claim,
    Decision,
    DecisionLog,
    Series,
    State,
    after,
    entries_of,
    key_of,
    read_entry,
    value_of,
)
from millrace.testing import Cluster

A, B, C = Series("a", 0), Series("b", 1), Series("c", 2)


def decision(series: Series, batch_id: int, *, closes: bool = False) -> Decision:
    return Decision(series, batch_id, (Transaction(f"{series}-{batch_id}", 4, 1),), closes)


def folded(*records: Claim | Decision) -> State:
    state = State()
    for record in records:
        state = after(state, record)
    return state


def test_a_decision_counts_for_the_last_series_that_was_claimed() -> None:
    first = decision(A, 0)
    assert folded(Claim(A), first).decided == first
    assert folded(Claim(A), Claim(B), first).decided is None
    assert folded(Claim(A), first, Claim(B)) == State(B, (A,), first)
    assert folded(first).decided is None


def test_what_comes_twice_or_late_changes_nothing() -> None:
    first, second = decision(A, 0), decision(A, 1)
    assert folded(Claim(A), first, second, first).decided == second
    assert folded(Claim(A), Claim(B), Claim(A)) == State(B, (A,))
    assert folded(Claim(A), Claim(A)) == State(A)


def test_a_claim_carries_what_was_before_it() -> None:
    before = folded(Claim(A), decision(A, 3), Claim(B))
    now = after(before, Claim(C))
    assert folded(before.claim(C)) == now == State(C, (A, B), decision(A, 3))
    # Confirmed, it is all that counts of the past, but not of its own series.
    assert folded(Claim(A), decision(A, 4), now.claim(C)) == now
    assert after(after(now, decision(C, 5)), now.claim(C)) == State(C, (A, B), decision(C, 5))
    assert after(after(now, Claim(Series("d", 7))), now.claim(C)).series == Series("d", 7)


def test_a_series_goes_on_until_it_is_closed_or_another_run_comes() -> None:
    assert folded(Claim(A), decision(A, 0)).is_going_on("a")
    closed = folded(Claim(A), decision(A, 0, closes=True))
    assert not closed.is_going_on("a") and not closed.has_passed("a")
    next_one = after(closed, Claim(Series("a", 1)))
    assert next_one.is_going_on("a") and not next_one.has_passed("a")
    taken = after(next_one, Claim(B))
    assert taken.has_passed("a") and taken.is_going_on("b") and not taken.has_passed("c")


def test_only_so_many_series_are_remembered() -> None:
    claims = [Claim(Series("r", number)) for number in range(MAX_FORMER + 5)]
    state = folded(*claims)
    assert len(state.former) == MAX_FORMER and state.former[-1] == Series("r", MAX_FORMER + 3)


RECORDS = st.one_of(
    st.builds(Claim, st.sampled_from([A, B, C])),
    st.builds(decision, st.sampled_from([A, B, C]), st.integers(0, 3), closes=st.booleans()),
)


@given(st.lists(RECORDS, max_size=20))
def test_what_is_decided_is_never_undone(records: list[Claim | Decision]) -> None:
    state, decided, passed = State(), -1, set[Series]()
    for record in records:
        state = after(state, record)
        now = -1 if state.decided is None else state.decided.batch_id
        assert now >= decided
        assert state.series not in passed and passed <= set(state.former)
        decided, passed = now, set(state.former)


@given(st.lists(RECORDS, max_size=20), st.integers(0, 1000))
def test_a_compacted_log_says_the_same(records: list[Claim | Decision], seed: int) -> None:
    """With records as `DecisionLog` writes them, by what somebody knew; claims are confirmed at once, late or never."""
    chance = random.Random(seed)
    states, log = [State()], list[tuple[bytes, bytes | None]]()

    def append(record: Claim | Decision, known: State) -> State:
        log.extend(entries_of("s", record, known))
        states.append(after(states[-1], record))
        return states[-1]

    confirmations: list[tuple[Claim, State]] = []
    made: set[tuple[Series, int]] = set()
    for wish in records:
        if confirmations and chance.random() < 0.4:
            append(*confirmations.pop())
        if isinstance(wish, Decision):
            # Whoever decides knows its own last decision, decides on a batch once, and is idempotent.
            is_first = (wish.series, wish.batch_id) not in made
            made.add((wish.series, wish.batch_id))
            if is_first and any(each.series == wish.series for each in states):
                append(wish, next(each for each in reversed(states) if each.series == wish.series))
            continue
        known = chance.choice(states[-3:])
        if (
            not any(wish.series == each.series for each in states)
            and append(known.claim(wish.series), known).series == wish.series
        ):
            confirmations.append((states[-1].claim(wish.series), states[-1]))
            if chance.random() < 0.5:
                append(*confirmations.pop())
        if chance.random() < 0.3:
            last = {key: index for index, (key, _) in enumerate(log)}
            log[:] = [entry for index, entry in enumerate(log) if last[entry[0]] == index]
            entries = [read_entry(*entry) for entry in log]
            found = folded(*[entry[1] for entry in entries if entry is not None])
            assert (found.series, found.decided) == (states[-1].series, states[-1].decided)


def test_records_have_a_form_and_whatever_else_is_there_is_refused() -> None:
    record = Claim(B, (A,), decision(A, 3, closes=True))
    assert read_entry(key_of("q/s", record), value_of(record)) == ("q/s", record)
    assert read_entry(key_of("q", decision(A, 1)), value_of(decision(A, 1))) == ("q", decision(A, 1))
    assert read_entry(key_of("q", record), None) is None
    for key, value in ((None, b"x"), (b"k", b"{}"), (b'["q", "a.0", "claim"]', b'{"claim": {}}'), (b"1", b"1")):
        with pytest.raises(ValueError, match="not a record of the sink"):
            read_entry(key, value)


# --- the topic --------------------------------------------------------------------------------------------------------


def client_of(cluster: Cluster) -> ClusterClient:
    properties = {"bootstrap.servers": cluster.bootstrap_servers, "retry.backoff.ms": "5"}
    return ClusterClient(ClientSettings.from_properties(properties))


def test_the_log_of_a_topic_that_two_read_and_write() -> None:
    with Cluster() as cluster, client_of(cluster) as client, client_of(cluster) as other_client:
        log, other = DecisionLog(client, "decisions"), DecisionLog(other_client, "decisions")
        assert log.state("q") == State()
        assert log.claim("q", A) == State(A)
        first = decision(A, 0)
        assert log.decide("q", first)
        assert other.state("q") == State(A, (), first)
        assert other.state("p") == State()
        assert other.claim("q", B) == State(B, (A,), first)
        assert not log.decide("q", decision(A, 1))
        assert log.state("q") == State(B, (A,), first)
        assert log.claim("q", A) == State(B, (A,), first)
        assert other.decide("q", decision(B, 1))
        # Who is new reads the same.
        assert DecisionLog(client, "decisions").state("q") == log.state("q") == State(B, (A,), decision(B, 1))


def test_a_claim_says_what_came_between_in_a_second_record() -> None:
    with Cluster() as cluster, client_of(cluster) as client, client_of(cluster) as other_client:
        log, other = DecisionLog(client, "decisions"), DecisionLog(other_client, "decisions")
        log.claim("q", A)
        append = other._append

        def late(entries: list[tuple[bytes, bytes | None]]) -> int:
            other._append = append  # type: ignore[method-assign]
            log.decide("q", decision(A, 0))
            return append(entries)

        other._append = late  # type: ignore[method-assign, assignment]
        assert other.claim("q", B) == State(B, (A,), decision(A, 0))
        claims = [read_entry(each.key, each.value) for each in raw(client)]
        assert ("q", Claim(B, (A,), decision(A, 0), confirmed=True)) in claims


def raw(client: ClusterClient) -> list[Record]:
    partition = TopicPartition("decisions", 0)
    end = client.list_offsets({partition: LATEST})[partition] or 0
    return [
        record
        for fetched in read_range(client, FetchRange(partition, 0, end))
        for batch in split(fetched.records, partial_end=True)
        for record in decode_records(batch.data)
    ]


def test_a_topic_that_was_made_anew_is_read_from_its_start() -> None:
    with Cluster() as cluster, client_of(cluster) as client:
        log = DecisionLog(client, "decisions")
        log.claim("q", A)
        log.decide("q", decision(A, 0))
        log._next_offset = 1000
        assert log.state("q") == State(A, (), decision(A, 0))


def test_a_topic_of_somebody_else_is_refused() -> None:
    with Cluster() as cluster, client_of(cluster) as client:
        cluster.create_topic("decisions")
        batch = encode_batch([Record(0, 1, None, b"hello")], base_offset=0)
        client.produce({TopicPartition("decisions", 0): batch})
        with pytest.raises(ConfigError, match="decisionsTopic"):
            DecisionLog(client, "decisions").state("q")
