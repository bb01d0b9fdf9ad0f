"""Incremental fetch sessions (KIP-227): what a consumer asked for last time, so that it need not say it again.

Pure bookkeeping: which partitions a fetch is about, in which order, and which of them the reply must mention. Sessions
are bounded in number; when all places are taken, the one unused for longest makes room if it has been idle for two
minutes or is smaller than the newcomer, otherwise the newcomer simply gets no session.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from millrace.errors import ApiError, ErrorCode
from millrace.wire.hot import FetchCall, FetchPartition, FetchResult, TopicKey

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
MAX_EPOCH: Final = 2**31 - 1
EVICTION_IDLE_S: Final = 120.0

UNSENT: Final = -1


class Wanted:
    """One partition of a fetch: what is asked for, and what the client was last told."""

    __slots__ = (
        "current_leader_epoch", "fetch_offset", "index", "key", "last_fetched_epoch", "log_start_offset",
        "max_bytes", "sent_high_watermark", "sent_start_offset",
    )  # fmt: skip

    def __init__(self, key: TopicKey, asked: FetchPartition) -> None:
        self.key = key
        self.index = asked.partition
        self.sent_high_watermark = UNSENT
        self.sent_start_offset = UNSENT
        self.update(asked)

    def update(self, asked: FetchPartition) -> None:
        self.current_leader_epoch = asked.current_leader_epoch
        self.fetch_offset = asked.fetch_offset
        self.last_fetched_epoch = asked.last_fetched_epoch
        self.log_start_offset = asked.log_start_offset
        self.max_bytes = asked.max_bytes

    def must_mention(self, result: FetchResult) -> bool:
        """Whether an incremental reply has to carry `result`."""
        return bool(
            result.records
            or result.error_code
            or result.diverging is not None
            or result.preferred_read_replica >= 0
            or result.high_watermark != self.sent_high_watermark
            or result.log_start_offset != self.sent_start_offset
        )

    def mentioned(self, result: FetchResult) -> None:
        # After an error the client does not know the watermark, so the next good result is news whatever it says. The
        # same where a follower has to cut its log: it takes over no mark before the rest is known to be the leader's.
        is_taken = not result.error_code and result.diverging is None
        self.sent_high_watermark = result.high_watermark if is_taken else UNSENT
        self.sent_start_offset = result.log_start_offset if is_taken else UNSENT


@dataclass(slots=True)
class FetchSession:
    """What one consumer is fetching; `epoch` is the one its next request must carry."""

    session_id: int
    by_topic_id: bool
    epoch: int = INITIAL_EPOCH + 1
    wanted: OrderedDict[tuple[TopicKey, int], Wanted] = field(default_factory=OrderedDict)
    used_at: float = 0.0

    def next_epoch(self) -> None:
        self.epoch = 1 if self.epoch == MAX_EPOCH else self.epoch + 1

    def served_data(self, items: Iterable[Wanted]) -> None:
        """Send those who got data to the end of the line, so that a busy partition cannot starve the others."""
        for item in items:
            self.wanted.move_to_end((item.key, item.index))


@dataclass(slots=True)
class Fetching:
    """A fetch as understood: what to read and how to answer."""

    session_id: int
    incremental: bool
    wanted: list[Wanted]
    session: FetchSession | None


class FetchSessions:
    """All sessions of a broker, least recently used first."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._sessions: OrderedDict[int, FetchSession] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def begin(self, call: FetchCall, *, by_topic_id: bool, now: float) -> Fetching:
        """Understand a fetch; raises the session errors of KIP-227, after which the client starts anew."""
        if call.session_epoch in (INITIAL_EPOCH, FINAL_EPOCH):
            self._sessions.pop(call.session_id, None)
            # A partition named twice is wanted once, as the last mention says.
            named = {(key, asked.partition): asked for key, partitions in call.topics for asked in partitions}
            wanted = [Wanted(key, asked) for (key, _), asked in named.items()]
            session = None
            if call.session_epoch == INITIAL_EPOCH:
                session = self._create(wanted, by_topic_id=by_topic_id, now=now)
            return Fetching(session.session_id if session else NO_SESSION, False, wanted, session)
        session = self._sessions.get(call.session_id)
        if session is None:
            raise ApiError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND, f"no fetch session {call.session_id}")
        if session.epoch != call.session_epoch:
            raise ApiError(
                ErrorCode.INVALID_FETCH_SESSION_EPOCH, f"epoch {call.session_epoch}, expected {session.epoch}"
            )
        if session.by_topic_id != by_topic_id:
            raise ApiError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR, "the session names topics in the other way")
        self._sessions.move_to_end(call.session_id)
        session.used_at = now
        session.next_epoch()
        self._update(session, call)
        return Fetching(session.session_id, True, list(session.wanted.values()), session)

    def forget(self, session_id: int) -> None:
        """End a session that its client will not hear of."""
        self._sessions.pop(session_id, None)

    @staticmethod
    def _update(session: FetchSession, call: FetchCall) -> None:
        for key, partitions in call.topics:
            for asked in partitions:
                place = (key, asked.partition)
                known = session.wanted.get(place)
                if known is None:
                    session.wanted[place] = Wanted(key, asked)
                else:
                    known.update(asked)
        for key, indexes in call.forgotten:
            for index in indexes:
                session.wanted.pop((key, index), None)

    def _create(self, wanted: list[Wanted], *, by_topic_id: bool, now: float) -> FetchSession | None:
        if not wanted or not self._make_room(len(wanted), now):
            return None
        session_id = secrets.randbelow(MAX_EPOCH) + 1
        while session_id in self._sessions:
            session_id = secrets.randbelow(MAX_EPOCH) + 1
        session = FetchSession(session_id, by_topic_id, used_at=now)
        session.wanted.update(((item.key, item.index), item) for item in wanted)
        self._sessions[session_id] = session
        return session

    def _make_room(self, size: int, now: float) -> bool:
        if len(self._sessions) < self._slots:
            return True
        if not self._sessions:
            return False
        oldest = next(iter(self._sessions.values()))
        if now - oldest.used_at < EVICTION_IDLE_S and len(oldest.wanted) >= size:
            return False
        del self._sessions[oldest.session_id]
        return True
