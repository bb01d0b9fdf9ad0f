"""In which log directory a replica lies: pure decisions, from what brokers say of their directories.

A replica is a log in a directory (docs/coordination.md, 15). The controller says where a new one is to lie, so that the
image knows before there is a record in it. A broker says where one lies that was moved, and that one is lost or cannot
be used. Not here: what follows for leaders and ISRs (`elections`), moving (`storage.moves`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from millrace.cluster.image import BrokerImage, ClusterImage
from millrace.metadata.deltas import BrokerRegistered, PartitionState
from millrace.model import FAILED_DIRECTORY, LOST_DIRECTORY, UNASSIGNED_DIRECTORY


class DirectoryChoice:
    """Directories for new replicas: of those of a broker that have room, the one with the fewest replicas."""

    def __init__(self, image: ClusterImage) -> None:
        self._image = image
        self._counts: Counter[str] | None = None

    def __call__(self, broker: BrokerImage | None) -> str:
        """A directory of `broker`; UNASSIGNED_DIRECTORY where it has not said which it has."""
        if broker is None or not broker.directories.online:
            return UNASSIGNED_DIRECTORY
        directories = broker.directories
        candidates = [each for each in directories.online if each not in directories.full] or directories.online
        if len(candidates) == 1:
            return candidates[0]
        if self._counts is None:
            self._counts = Counter(each for _, _, state in self._image.partitions() for each in state.directories)
        chosen = min(candidates, key=lambda each: (self._counts or Counter())[each])
        self._counts[chosen] += 1
        return chosen

    def for_replicas(self, replicas: tuple[int, ...], before: PartitionState | None = None) -> tuple[str, ...]:
        """Directories for `replicas`: those that they have in `before`, and chosen ones for the others."""
        known = {} if before is None else directories_by_replica(before)
        chosen = tuple(known.get(each) or self(self._image.brokers.get(each)) for each in replicas)
        return () if all(each == UNASSIGNED_DIRECTORY for each in chosen) else chosen


def directories_by_replica(state: PartitionState) -> dict[int, str]:
    """Where each replica lies, as far as it is known."""
    return dict(zip(state.replicas, state.directories, strict=False))


def located(state: PartitionState) -> Iterable[tuple[int, str]]:
    """Each replica and where it lies; UNASSIGNED_DIRECTORY where that is not known."""
    return zip(state.replicas, state.directories or (UNASSIGNED_DIRECTORY,) * len(state.replicas), strict=True)


def with_directory(state: PartitionState, broker_id: int, directory: str) -> tuple[str, ...]:
    """`state.directories` with another one for one replica."""
    known = directories_by_replica(state)
    known[broker_id] = directory
    return tuple(known.get(replica, UNASSIGNED_DIRECTORY) for replica in state.replicas)


def directory_after_restart(directory: str, known: BrokerImage, registered: BrokerRegistered) -> str:
    """Where a replica lies whose broker has come back.

    A log that could not be used gets another chance. Of a replica whose directory was never told only this much is
    known: it lay in one of those that the broker had. If one of them is missing, it may have been that one.
    """
    before, now = known.directories.online, registered.directories.online
    if directory == FAILED_DIRECTORY:
        directory = UNASSIGNED_DIRECTORY
    if directory != UNASSIGNED_DIRECTORY:
        return directory
    if not set(before) <= set(now):
        return LOST_DIRECTORY
    return now[0] if len(now) == 1 and not registered.directories.some_offline else UNASSIGNED_DIRECTORY


def is_gone(broker: BrokerImage, directory: str) -> bool:
    """Whether what lay in `directory` will not come back by itself, so that the replica may be made anew elsewhere."""
    if directory == LOST_DIRECTORY:
        return True
    if directory == FAILED_DIRECTORY or broker.has_directory(directory):
        return False
    return not broker.directories.some_offline
