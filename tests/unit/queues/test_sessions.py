"""Share sessions: epochs, what they read, and how many there may be."""

from __future__ import annotations

import uuid

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.queues.sessions import ShareSessions

TOPIC = uuid.UUID(int=1)
A, B, C = (TOPIC, 0), (TOPIC, 1), (TOPIC, 2)


def refused(code: ErrorCode) -> pytest.RaisesExc[ApiError]:
    return pytest.raises(ApiError, check=lambda error: error.code is code)


def test_a_session_remembers_its_partitions_and_begins_at_another_each_time() -> None:
    sessions = ShareSessions(10)
    assert sessions.fetch("g", "m", 0, added=[A, B, C]) == [A, B, C]
    assert sessions.fetch("g", "m", 1) == [B, C, A]
    assert sessions.fetch("g", "m", 2, forgotten=[B]) == [A, C]
    assert sessions.fetch("g", "m", 3, added=[B, A]) == [A, C, B]
    sessions.acknowledge("g", "m", 4)
    assert sessions.fetch("g", "m", 5, forgotten=[A, B, C, A]) == []


def test_a_wrong_epoch_is_noticed_and_changes_nothing() -> None:
    sessions = ShareSessions(10)
    sessions.fetch("g", "m", 0, added=[A])
    for epoch in (2, 7):
        with refused(ErrorCode.INVALID_SHARE_SESSION_EPOCH):
            sessions.fetch("g", "m", epoch, added=[B])
        with refused(ErrorCode.INVALID_SHARE_SESSION_EPOCH):
            sessions.acknowledge("g", "m", epoch)
    with refused(ErrorCode.INVALID_SHARE_SESSION_EPOCH):
        sessions.acknowledge("g", "m", 0)
    assert sessions.fetch("g", "m", 1) == [A]


def test_epochs_go_round() -> None:
    sessions = ShareSessions(10)
    sessions.fetch("g", "m", 0, added=[A])
    sessions._sessions["g", "m"].epoch = 2**31 - 1
    sessions.fetch("g", "m", 2**31 - 1)
    assert sessions.fetch("g", "m", 1) == [A]


def test_epoch_zero_begins_anew_with_nothing_to_acknowledge() -> None:
    sessions = ShareSessions(1)
    sessions.fetch("g", "m", 0, added=[A])
    assert sessions.fetch("g", "m", 0, added=[B]) == [B]
    with refused(ErrorCode.INVALID_REQUEST):
        sessions.fetch("g", "m", 0, added=[B], acknowledges=True)
    assert sessions.fetch("g", "m", 1) == [B]


def test_the_last_epoch_ends_what_there_is() -> None:
    sessions = ShareSessions(10)
    for unknown in (lambda: sessions.fetch("g", "m", -1), lambda: sessions.acknowledge("g", "m", -1)):
        with refused(ErrorCode.SHARE_SESSION_NOT_FOUND):
            unknown()
    sessions.fetch("g", "m", 0, added=[A, B])
    assert sessions.fetch("g", "m", -1) == []
    assert sessions.end("g", "m")
    assert not sessions.end("g", "m")
    with refused(ErrorCode.SHARE_SESSION_NOT_FOUND):
        sessions.fetch("g", "m", 1)


def test_there_are_only_so_many() -> None:
    sessions = ShareSessions(2)
    for member in "ab":
        sessions.fetch("g", member, 0)
    with refused(ErrorCode.SHARE_SESSION_LIMIT_REACHED):
        sessions.fetch("g", "c", 0)
    sessions.fetch("g", "a", 0)
    sessions.end("g", "b")
    sessions.fetch("g", "c", 0)
    assert len(sessions) == 2


def test_a_session_belongs_to_the_connection_on_which_it_began() -> None:
    sessions = ShareSessions(10)
    first, second = object(), object()
    sessions.fetch("g", "m", 0, added=[A], connection=first)
    sessions.fetch("g", "m", 1, connection=second)
    assert sessions.is_bound("g", "m", first)
    assert not sessions.is_bound("g", "m", second)
    assert not sessions.is_bound("g", "n", first)
    sessions.fetch("g", "m", 0, added=[A], connection=second)
    assert sessions.is_bound("g", "m", second)


def test_a_group_has_members_until_its_last_session_ends() -> None:
    sessions = ShareSessions(10)
    for member in ("a", "b", "a"):
        sessions.fetch("g", member, 0)
    sessions.end("g", "a")
    assert sessions.has_members("g")
    sessions.end("g", "b")
    assert not sessions.has_members("g")
    assert not sessions._members
