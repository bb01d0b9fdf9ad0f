"""The map of committed offsets."""

from __future__ import annotations

import uuid

import pytest

from millrace.groups.offsets.committed import CommittedOffset, CommittedOffsets
from millrace.model import ZERO_UUID


def test_the_map_counts_and_forgets() -> None:
    offsets = CommittedOffsets()
    offsets.put("g", "t", 0, CommittedOffset(1))
    offsets.put("g", "t", 0, CommittedOffset(2))
    offsets.put("g", "u", 1, CommittedOffset(3))
    offsets.put("h", "t", 0, CommittedOffset(4))
    assert offsets.count == 3
    assert offsets.of_group("g")["t"][0].offset == 2
    assert {(group, partition) for group, partition, _ in offsets.of_topic("t")} == {("g", 0), ("h", 0)}
    offsets.remove("g", "t", 0)
    offsets.remove("g", "t", 0)
    offsets.remove("g", "nothing", 0)
    offsets.remove("nobody", "t", 0)
    assert offsets.count == 2
    assert set(offsets.of_group("g")) == {"u"}
    offsets.remove("g", "u", 1)
    assert offsets.of_group("g") == {}


@pytest.mark.parametrize(
    ("committed_for", "asked_for", "belongs"),
    [(0, 0, True), (0, 1, True), (1, 0, True), (1, 1, True), (1, 2, False)],
)
def test_an_offset_belongs_to_one_incarnation_of_a_topic(committed_for: int, asked_for: int, belongs: bool) -> None:
    assert CommittedOffset(1, topic_id=uuid.UUID(int=committed_for)).belongs_to(uuid.UUID(int=asked_for)) is belongs


def test_the_defaults_say_unknown() -> None:
    assert CommittedOffset(1).topic_id == ZERO_UUID
    assert repr(CommittedOffsets()) == "CommittedOffsets(0 of 0 groups)"
