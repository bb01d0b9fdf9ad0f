"""Looking at the brokers of a `Cluster` from a test, on the thread that they belong to.

What looks like reading may be more: `Partition.log` opens the log at its first use. On the test's own thread that
happens beside the broker, and one of the two overwrites what the other has done since.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from millrace.testing import Cluster

T = TypeVar("T")


def on_loop(cluster: Cluster, look: Callable[[], T]) -> T:
    """What `look` returns on the cluster's thread, between two turns of its loop."""

    async def looked() -> T:
        return look()

    return cluster._on_loop(looked())
