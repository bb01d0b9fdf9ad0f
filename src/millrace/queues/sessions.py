"""Share sessions: which partitions a member reads from this broker, so that a request names only what changes.

Pure. A session belongs to a group and a member; its epoch counts their requests, so that a request that got lost, or
comes twice, is noticed. Epoch 0 begins a session anew, -1 ends it. It is bound to the connection on which it began:
with that it is over. Not here: records (`share_partition`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final
from uuid import UUID

from millrace.errors import ApiError, ErrorCode

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_MAX_EPOCH: Final = 2**31 - 1

TopicPartitionId = tuple[UUID, int]
SessionKey = tuple[str, str]
"""Group and member."""


@dataclass(slots=True)
class ShareSession:
    """The partitions of one member, in the order in which it named them."""

    epoch: int
    partitions: dict[TopicPartitionId, None] = field(default_factory=dict)
    connection: object = None
    """On which it began; identity is what counts."""


class ShareSessions:
    """All sessions of a broker, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._sessions: dict[SessionKey, ShareSession] = {}
        self._members: dict[str, int] = {}
        """How many sessions each group has."""

    def __repr__(self) -> str:
        return f"ShareSessions({len(self._sessions)} of at most {self._limit})"

    def __len__(self) -> int:
        return len(self._sessions)

    def fetch(
        self,
        group_id: str,
        member_id: str,
        epoch: int,
        *,
        added: Sequence[TopicPartitionId] = (),
        forgotten: Iterable[TopicPartitionId] = (),
        acknowledges: bool = False,
        connection: object = None,
    ) -> list[TopicPartitionId]:
        """What a ShareFetch reads: every partition of the session, each time beginning at another; ApiError.

        Nothing at the end of a session, which `end` removes once its acknowledgements are dealt with.
        """
        key = group_id, member_id
        if epoch == INITIAL_EPOCH:
            if acknowledges:
                raise ApiError(ErrorCode.INVALID_REQUEST, "a new session has nothing to acknowledge")
            if len(self._sessions) >= self._limit and key not in self._sessions:
                raise ApiError(ErrorCode.SHARE_SESSION_LIMIT_REACHED, f"there are {self._limit} sessions")
            if key not in self._sessions:
                self._members[group_id] = self._members.get(group_id, 0) + 1
            session = self._sessions[key] = ShareSession(INITIAL_EPOCH + 1, dict.fromkeys(added), connection)
            return list(session.partitions)
        session = self._known(key, epoch)
        if epoch == FINAL_EPOCH:
            return []
        session.partitions.update(dict.fromkeys(added))
        for partition in forgotten:
            session.partitions.pop(partition, None)
        partitions = list(session.partitions)
        begin = epoch % len(partitions) if partitions else 0
        return partitions[begin:] + partitions[:begin]

    def acknowledge(self, group_id: str, member_id: str, epoch: int) -> None:
        """A ShareAcknowledge, which needs a session that a fetch began; ApiError."""
        if epoch == INITIAL_EPOCH:
            raise ApiError(ErrorCode.INVALID_SHARE_SESSION_EPOCH, "an acknowledgement does not begin a session")
        self._known((group_id, member_id), epoch)

    def end(self, group_id: str, member_id: str) -> bool:
        """Forget a session; whether there was one."""
        if self._sessions.pop((group_id, member_id), None) is None:
            return False
        self._members[group_id] -= 1
        if not self._members[group_id]:
            del self._members[group_id]
        return True

    def has_members(self, group_id: str) -> bool:
        """Whether anybody of a group has a session here."""
        return group_id in self._members

    def is_bound(self, group_id: str, member_id: str, connection: object) -> bool:
        """Whether a session is there that began on this connection."""
        session = self._sessions.get((group_id, member_id))
        return session is not None and session.connection is connection

    def _known(self, key: SessionKey, epoch: int) -> ShareSession:
        session = self._sessions.get(key)
        if session is None:
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, "this broker has no such session")
        if epoch == FINAL_EPOCH:
            return session
        if session.epoch != epoch:
            raise ApiError(ErrorCode.INVALID_SHARE_SESSION_EPOCH, f"the session is at epoch {session.epoch}")
        session.epoch = 1 if epoch == _MAX_EPOCH else epoch + 1
        return session
