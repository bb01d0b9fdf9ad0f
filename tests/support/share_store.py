"""The share coordinator of one share-partition without a loop: its plans, its log, and what is live."""

from __future__ import annotations

from uuid import UUID

from millrace.queues import records, state
from millrace.queues.records import ShareKey, Snapshot, Update
from millrace.queues.state import SharePartitionState, Write

KEY = ShareKey("g", UUID(int=7), 0)
UPDATES_PER_SNAPSHOT = 4


class Store:
    """The share coordinator: its log, and what is live."""

    def __init__(self) -> None:
        self.log: list[tuple[bytes, bytes | None]] = []
        self.live: SharePartitionState | None = None
        self.append(state.plan_initialize(None, 0, 0, 0))

    @property
    def snapshot(self) -> Snapshot:
        assert self.live is not None
        return self.live.snapshot

    def append(self, record: Snapshot | Update) -> None:
        self.log.append(records.entry(KEY, record))
        self.live = state.apply(self.live, record)

    def read(self, leader_epoch: int) -> Snapshot:
        update = state.plan_read(self.live, leader_epoch)
        if update is not None:
            self.append(update)
        return self.snapshot

    def write(self, write: Write) -> None:
        self.append(state.plan_write(self.live, write, UPDATES_PER_SNAPSHOT, 0))

    def replayed(self) -> SharePartitionState | None:
        found: SharePartitionState | None = None
        for entry in self.log:
            read = records.read_record(*entry)
            assert read is not None
            assert read[0] == KEY
            found = state.apply(found, read[1])
        return found
