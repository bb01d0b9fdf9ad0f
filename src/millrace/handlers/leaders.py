"""Who leads: what a client is told that came to the wrong broker (KIP-951)."""

from __future__ import annotations

from typing import Final

from millrace.errors import ErrorCode
from millrace.handlers.context import RequestContext
from millrace.wire.hot import LeaderHint, TopicKey

_MOVED: Final = frozenset({ErrorCode.NOT_LEADER_OR_FOLLOWER, ErrorCode.FENCED_LEADER_EPOCH})


def leader_hint(context: RequestContext, key: TopicKey, index: int, code: int) -> LeaderHint | None:
    """The leader of a partition and where this client reaches it, if the error says that it should go there."""
    if code not in _MOVED:
        return None
    found = context.broker.replicas.leader_of(key, index)
    if found is None:
        return None
    leader_id, leader_epoch = found
    broker = context.broker.image.brokers[leader_id]
    endpoint = broker.endpoint(context.listener)
    return None if endpoint is None else LeaderHint(leader_id, leader_epoch, endpoint.host, endpoint.port, broker.rack)
