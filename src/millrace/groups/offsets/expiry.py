"""When committed offsets have outlived their retention (KIP-211). Pure.

Which topics a group holds on to, and from when its retention counts, is said by its kind (`classic.protocol`,
`modern.groups`).
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.groups.offsets.committed import CommittedOffset, Slot, TopicOffsets
from millrace.model import NO_TIMESTAMP


def expired(
    is_subscribed_to: Callable[[str], bool],
    offsets: TopicOffsets,
    now_ms: int,
    retention_ms: int,
    *,
    since_ms: int | None = None,
) -> list[Slot]:
    """Which offsets have expired: of topics that nobody subscribes to, counted from `since_ms`, or else their commit.

    A commit with an expiry of its own obeys that.
    """
    gone = []
    for topic, partitions in offsets.items():
        if is_subscribed_to(topic):
            continue
        for partition, committed in partitions.items():
            base_ms = committed.commit_timestamp_ms if since_ms is None else since_ms
            if now_ms >= _expiry_ms(committed, base_ms, retention_ms):
                gone.append((topic, partition))
    return gone


def _expiry_ms(committed: CommittedOffset, base_ms: int, retention_ms: int) -> int:
    if committed.expire_timestamp_ms != NO_TIMESTAMP:
        return committed.expire_timestamp_ms
    return base_ms + retention_ms
