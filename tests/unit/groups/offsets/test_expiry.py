"""When the offsets of a group expire."""

from __future__ import annotations

import pytest

from millrace.groups.classic.group import ClassicGroup, GroupState
from millrace.groups.classic.protocol import expired_offsets
from millrace.groups.offsets.committed import CommittedOffset

DAY_MS = 86_400_000
WEEK_MS = 7 * DAY_MS
NOW_MS = 100 * DAY_MS


def _held(**commit_ages_ms: int) -> dict[str, dict[int, CommittedOffset]]:
    return {topic: {0: CommittedOffset(1, commit_timestamp_ms=NOW_MS - age)} for topic, age in commit_ages_ms.items()}


def test_offsets_of_a_simple_group_expire_by_their_commit() -> None:
    gone = expired_offsets(ClassicGroup("g"), _held(old=WEEK_MS, young=WEEK_MS - 1), NOW_MS, WEEK_MS)
    assert gone == [("old", 0)]


def test_offsets_of_an_empty_group_expire_together() -> None:
    group = ClassicGroup("g", protocol_type="consumer", subscribed_topics=frozenset())
    held = _held(old=90 * DAY_MS, young=1)
    group.state_timestamp_ms = NOW_MS - WEEK_MS + 1
    assert expired_offsets(group, held, NOW_MS, WEEK_MS) == []
    group.state_timestamp_ms = NOW_MS - WEEK_MS
    assert expired_offsets(group, held, NOW_MS, WEEK_MS) == [("old", 0), ("young", 0)]


def test_an_empty_group_of_an_old_record_uses_the_commits() -> None:
    group = ClassicGroup("g", protocol_type="consumer", subscribed_topics=frozenset())
    assert expired_offsets(group, _held(old=WEEK_MS, young=0), NOW_MS, WEEK_MS) == [("old", 0)]


def test_a_stable_group_loses_only_what_it_no_longer_subscribes_to() -> None:
    group = ClassicGroup("g", protocol_type="consumer", state=GroupState.STABLE, subscribed_topics=frozenset({"kept"}))
    held = _held(kept=90 * DAY_MS, dropped=WEEK_MS, fresh=1)
    assert expired_offsets(group, held, NOW_MS, WEEK_MS) == [("dropped", 0)]
    group.state = GroupState.PREPARING_REBALANCE
    assert expired_offsets(group, held, NOW_MS, WEEK_MS) == []


@pytest.mark.parametrize("protocol_type", ["consumer", "connect"])
def test_a_group_that_cannot_tell_its_topics_loses_nothing(protocol_type: str) -> None:
    group = ClassicGroup("g", protocol_type=protocol_type, state=GroupState.STABLE)
    assert expired_offsets(group, _held(any=90 * DAY_MS), NOW_MS, WEEK_MS) == []


def test_an_expiry_of_its_own_outranks_the_retention() -> None:
    held = {
        "t": {
            0: CommittedOffset(1, commit_timestamp_ms=NOW_MS, expire_timestamp_ms=NOW_MS),
            1: CommittedOffset(1, commit_timestamp_ms=0, expire_timestamp_ms=NOW_MS + 1),
        }
    }
    assert expired_offsets(ClassicGroup("g"), held, NOW_MS, WEEK_MS) == [("t", 0)]
