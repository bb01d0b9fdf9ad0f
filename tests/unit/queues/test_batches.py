"""State batches laid over each other, compared with a dictionary that knows every offset."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from millrace.queues.batches import RecordState, StateBatch, combine, join

AVAILABLE, ACKNOWLEDGED, ARCHIVED = RecordState.AVAILABLE, RecordState.ACKNOWLEDGED, RecordState.ARCHIVED

a_batch = st.builds(
    lambda first, size, state, count: StateBatch(first, first + size, state, count),
    st.integers(0, 40),
    st.integers(0, 15),
    st.sampled_from(RecordState),
    st.integers(1, 5),
)


def flat(batches: list[StateBatch], start: int = -1) -> dict[int, tuple[int, RecordState]]:
    found: dict[int, tuple[int, RecordState]] = {}
    for batch in batches:
        for offset in range(max(batch.first_offset, start), batch.last_offset + 1):
            found[offset] = max(found.get(offset, (0, AVAILABLE)), (batch.delivery_count, batch.state))
    return found


@given(st.lists(a_batch, max_size=12), st.lists(a_batch, max_size=12), st.integers(-1, 60))
def test_the_further_state_counts_whatever_the_order(
    before: list[StateBatch], new: list[StateBatch], start: int
) -> None:
    so_far = combine((), before, -1)
    result = combine(so_far, new, start)
    assert flat(result) == flat([*before, *new], start)
    for one, other in itertools.pairwise(result):
        assert one.last_offset < other.first_offset
        assert one.last_offset + 1 < other.first_offset or one[2:] != other[2:], "could be one"
    assert combine(combine((), new, -1), before, start) == result


def test_a_later_delivery_counts_more_than_an_end_that_was_never_heard_of() -> None:
    stored = [StateBatch(0, 9, ACKNOWLEDGED, 1)]
    assert combine(stored, [StateBatch(4, 5, AVAILABLE, 2)], 2) == [
        StateBatch(2, 3, ACKNOWLEDGED, 1),
        StateBatch(4, 5, AVAILABLE, 2),
        StateBatch(6, 9, ACKNOWLEDGED, 1),
    ]


def test_join_keeps_what_differs() -> None:
    batches = [StateBatch(0, 1, ARCHIVED, 1), StateBatch(2, 3, ARCHIVED, 1), StateBatch(4, 4, ARCHIVED, 2)]
    assert join(batches) == [StateBatch(0, 3, ARCHIVED, 1), StateBatch(4, 4, ARCHIVED, 2)]
