"""Incremental fetch sessions: what is remembered, what is mentioned, who makes room for whom."""

from __future__ import annotations

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.fetch_sessions import EVICTION_IDLE_S, MAX_EPOCH, FetchSessions
from millrace.wire.hot import FetchCall, FetchPartition, FetchResult, TopicKey


def asked(index: int, offset: int = 0) -> FetchPartition:
    return FetchPartition(index, -1, offset, -1, -1, 1000)


def call(
    session_id: int = 0,
    epoch: int = 0,
    topics: list[tuple[TopicKey, list[FetchPartition]]] | None = None,
    forgotten: list[tuple[TopicKey, list[int]]] | None = None,
) -> FetchCall:
    return FetchCall(-1, 500, 1, 1000, 0, session_id, epoch, topics or [], forgotten or [], "")


def opened(sessions: FetchSessions, partitions: int = 2, now: float = 0.0) -> int:
    topics: list[tuple[TopicKey, list[FetchPartition]]] = [("t", [asked(index) for index in range(partitions)])]
    return sessions.begin(call(topics=topics), by_topic_id=False, now=now).session_id


def test_a_session_remembers_updates_and_forgets() -> None:
    sessions = FetchSessions(10)
    session_id = opened(sessions)
    fetching = sessions.begin(
        call(session_id, 1, [("t", [asked(1, 7)]), ("u", [asked(0)])], [("t", [0])]), by_topic_id=False, now=0
    )
    assert fetching.incremental
    assert [(item.key, item.index, item.fetch_offset) for item in fetching.wanted] == [("t", 1, 7), ("u", 0, 0)]


def test_no_session_for_an_empty_or_a_final_fetch() -> None:
    sessions = FetchSessions(10)
    assert sessions.begin(call(), by_topic_id=False, now=0).session_id == 0
    assert sessions.begin(call(epoch=-1, topics=[("t", [asked(0)])]), by_topic_id=False, now=0).session_id == 0
    assert len(sessions) == 0


def test_a_final_fetch_closes_its_session() -> None:
    sessions = FetchSessions(10)
    session_id = opened(sessions)
    sessions.begin(call(session_id, -1), by_topic_id=False, now=0)
    assert len(sessions) == 0


@pytest.mark.parametrize(
    ("session_offset", "epoch", "by_topic_id", "code"),
    [
        (1, 1, False, ErrorCode.FETCH_SESSION_ID_NOT_FOUND),
        (0, 5, False, ErrorCode.INVALID_FETCH_SESSION_EPOCH),
        (0, 1, True, ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR),
    ],
)
def test_a_session_that_does_not_match_is_an_error(
    session_offset: int, epoch: int, by_topic_id: bool, code: ErrorCode
) -> None:
    sessions = FetchSessions(10)
    session_id = opened(sessions)
    with pytest.raises(ApiError) as caught:
        sessions.begin(call(session_id + session_offset, epoch), by_topic_id=by_topic_id, now=0)
    assert caught.value.code is code


def test_the_epoch_wraps_to_one() -> None:
    sessions = FetchSessions(10)
    fetching = sessions.begin(call(topics=[("t", [asked(0)])]), by_topic_id=False, now=0)
    assert fetching.session is not None
    fetching.session.epoch = MAX_EPOCH
    sessions.begin(call(fetching.session_id, MAX_EPOCH), by_topic_id=False, now=0)
    assert fetching.session.epoch == 1


def test_only_news_is_mentioned() -> None:
    sessions = FetchSessions(10)
    item = sessions.begin(call(topics=[("t", [asked(0)])]), by_topic_id=False, now=0).wanted[0]
    quiet = FetchResult(0, 0, 10, 10, 0)
    assert item.must_mention(quiet)
    item.mentioned(quiet)
    assert not item.must_mention(quiet)
    assert item.must_mention(FetchResult(0, 0, 11, 11, 0))
    assert item.must_mention(FetchResult(0, 0, 10, 10, 1))
    assert item.must_mention(FetchResult(0, 0, 10, 10, 0, b"data"))
    error = FetchResult(0, ErrorCode.OFFSET_OUT_OF_RANGE)
    assert item.must_mention(error)
    item.mentioned(error)
    assert item.must_mention(quiet)


def test_where_logs_part_is_news_each_time_and_its_marks_do_not_count_as_told() -> None:
    sessions = FetchSessions(10)
    item = sessions.begin(call(topics=[("t", [asked(0)])]), by_topic_id=False, now=0).wanted[0]
    quiet = FetchResult(0, 0, 10, 10, 0)
    item.mentioned(quiet)
    parting = FetchResult(0, 0, 10, 10, 0, diverging=(3, 7))
    assert item.must_mention(parting)
    item.mentioned(parting)
    assert item.must_mention(parting)
    assert item.must_mention(quiet)


def test_a_nearer_replica_is_news() -> None:
    sessions = FetchSessions(10)
    item = sessions.begin(call(topics=[("t", [asked(0)])]), by_topic_id=False, now=0).wanted[0]
    item.mentioned(FetchResult(0, 0, 10, 10, 0))
    assert item.must_mention(FetchResult(0, 0, 10, 10, 0, preferred_read_replica=2))
    assert item.must_mention(FetchResult(0, 0, 10, 10, 0, preferred_read_replica=0)), "a broker may have the id 0"


def test_those_who_got_data_go_to_the_end_of_the_line() -> None:
    sessions = FetchSessions(10)
    session_id = opened(sessions, partitions=3)
    fetching = sessions.begin(call(session_id, 1), by_topic_id=False, now=0)
    assert fetching.session is not None
    fetching.session.served_data(fetching.wanted[:1])
    again = sessions.begin(call(session_id, 2), by_topic_id=False, now=0)
    assert [item.index for item in again.wanted] == [1, 2, 0]


def test_a_full_house_makes_room_for_the_larger_and_for_the_idle() -> None:
    sessions = FetchSessions(1)
    first = opened(sessions, partitions=2)
    assert opened(sessions, partitions=2, now=1.0) == 0
    assert opened(sessions, partitions=3, now=1.0) not in (0, first)
    assert opened(sessions, partitions=1, now=1.0 + EVICTION_IDLE_S) != 0
    assert len(sessions) == 1
