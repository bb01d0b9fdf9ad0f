"""What is counted of a coordinator's groups: plain numbers, read when somebody asks; they outlive the shards."""

from __future__ import annotations


class GroupCounts:
    """The counts of one broker. Owner: the event loop."""

    __slots__ = ("classic_rebalances", "consumer_rebalances", "offset_commits", "share_rebalances")

    def __init__(self) -> None:
        self.classic_rebalances = 0
        """New generations."""
        self.consumer_rebalances = 0
        """New epochs."""
        self.share_rebalances = 0
        self.offset_commits = 0
        """One for each partition."""

    def __repr__(self) -> str:
        return f"GroupCounts({self.offset_commits} offsets committed)"
