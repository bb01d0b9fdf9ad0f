"""One led partition of `__share_group_state`: its share-partitions, and the order in which changes take effect.

Plans are made on the state that everything appended so far leads to (`_ahead`), so that writes need not wait for each
other; readers see what is durable. Owner: the shard's task (`run`). Not here: loading and writing
(`replication.sharded`), which shard answers for a share-partition (`coordinator`), decisions (`state`), bytes
(`records`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from typing import Final
from uuid import UUID

from millrace.clock import Clock
from millrace.errors import ApiError, ErrorCode
from millrace.queues import records, state
from millrace.queues.records import ShareKey, Snapshot, Update
from millrace.queues.settings import CoordinatorSettings
from millrace.queues.state import SharePartitionState, Write
from millrace.replication.sharded import StateShard
from millrace.replication.state_topic import StateRecord, StateTopic

_PER_BATCH: Final = 500
"""Records that are written together when many share-partitions change at once."""


class QueueShard(StateShard):
    """The share-partitions of one partition of the state topic."""

    def __init__(
        self, index: int, leader_epoch: int, *, topic: StateTopic, settings: CoordinatorSettings, clock: Clock
    ) -> None:
        super().__init__(index, leader_epoch, topic=topic, clock=clock, write_timeout_ms=settings.write_timeout_ms)
        self.states: dict[ShareKey, SharePartitionState] = {}
        """What is durable."""
        self._ahead: dict[ShareKey, tuple[SharePartitionState | None, int]] = {}
        """What is appended and not durable yet: where it leads to, and how many records that takes."""
        self._snapshots: dict[ShareKey, int] = {}
        """The offset of each share-partition's latest snapshot: below the lowest of them the log is superfluous."""
        self._next_offset = 0
        """Where the log goes on after the last record that is in effect."""
        self._settings = settings

    def __repr__(self) -> str:
        return (
            f"QueueShard({self.index} epoch {self.leader_epoch} {self.state.value}, {len(self.states)} "
            f"share-partitions, {self._writer!r})"
        )

    # --- life ---------------------------------------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self.states

    def _records(self) -> AsyncIterator[StateRecord]:
        return self._topic.replay(self.index)  # an update builds on the snapshot before it

    def replay(self, key: bytes, value: bytes | None, record_offset: int) -> None:
        read = records.read_record(key, value)
        if read is not None:
            self._apply(*read, record_offset)

    # --- requests -----------------------------------------------------------------------------------------------------

    async def initialize(self, key: ShareKey, state_epoch: int, start_offset: int) -> None:
        """InitializeShareGroupState."""
        await self._write(key, state.plan_initialize(self._planned(key), state_epoch, start_offset, self.now_ms()))

    async def write(self, key: ShareKey, write: Write) -> None:
        """WriteShareGroupState; returns when it is durable. Cancellation does not take it back."""
        per_snapshot = self._settings.updates_per_snapshot
        await self._write(key, state.plan_write(self._planned(key), write, per_snapshot, self.now_ms()))

    async def read(self, key: ShareKey, leader_epoch: int) -> Snapshot:
        """ReadShareGroupState: the durable state. A newer leader's epoch is durable, too, before it is answered."""
        update = state.plan_read(self._planned(key), leader_epoch)
        if update is not None:
            await self._write(key, update)
        elif key in self._ahead:
            await self.wait_applied()
        return self._durable(key)

    def summary(self, key: ShareKey) -> SharePartitionState | None:
        """ReadShareGroupStateSummary."""
        return self.states.get(key)

    async def delete(self, key: ShareKey) -> None:
        """DeleteShareGroupState; what is not there is deleted already."""
        if self._planned(key) is not None:
            await self._write(key, None)

    # --- chores -------------------------------------------------------------------------------------------------------

    async def forget_topics(self, topic_ids: Collection[UUID]) -> None:
        """Delete the state of topics that are gone."""
        await self._write_many([(key, None) for key in self._known() if key.topic_id in topic_ids])

    async def rewrite_cold(self) -> None:
        """Write snapshots of what was not written for a while, so that they do not hold the start of the log."""
        now_ms = self.now_ms()
        cold: list[tuple[ShareKey, Snapshot | None]] = []
        for key in self._known():
            planned = self._planned(key)
            if planned is not None and now_ms - planned.snapshot.written_ms >= self._settings.snapshot_interval_ms:
                cold.append((key, state.plan_rewrite(planned, now_ms)))
        # Where everything is cold nothing holds anything back, and writing would only make the log longer.
        if len(cold) < len(self.states) or any(each.updates for each in self.states.values()):
            await self._write_many(cold)

    @property
    def superfluous_before(self) -> int:
        """Below this offset the log says nothing that a later record does not say."""
        return min(self._snapshots.values(), default=self._next_offset)

    # --- writing ------------------------------------------------------------------------------------------------------

    def _known(self) -> list[ShareKey]:
        return [*self.states, *(key for key in self._ahead if key not in self.states)]

    def _planned(self, key: ShareKey) -> SharePartitionState | None:
        ahead = self._ahead.get(key)
        return self.states.get(key) if ahead is None else ahead[0]

    def _durable(self, key: ShareKey) -> Snapshot:
        found = self.states.get(key)
        if found is None:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the share-partition was deleted")
        return found.snapshot

    async def _write(self, key: ShareKey, record: Snapshot | Update | None) -> None:
        await self.in_time(self._change([(key, record)]))

    async def _write_many(self, changes: list[tuple[ShareKey, Snapshot | None]]) -> None:
        pending = [self._change(changes[start : start + _PER_BATCH]) for start in range(0, len(changes), _PER_BATCH)]
        for done in pending:
            await self.in_time(done)

    def _change(
        self, changes: list[tuple[ShareKey, Snapshot | None]] | list[tuple[ShareKey, Snapshot | Update | None]]
    ) -> asyncio.Future[None]:
        """Append now: check and append happen without a wait between them."""

        def apply(base_offset: int) -> None:
            for position, (key, record) in enumerate(changes):
                self._apply(key, record, base_offset + position)
                planned, count = self._ahead.pop(key)
                if count > 1:
                    self._ahead[key] = planned, count - 1

        done = self.append([records.entry(key, record) for key, record in changes], apply)
        for key, record in changes:
            count = self._ahead[key][1] if key in self._ahead else 0
            self._ahead[key] = state.apply(self._planned(key), record), count + 1
        return done

    def _apply(self, key: ShareKey, record: Snapshot | Update | None, offset: int) -> None:
        self._next_offset = offset + 1
        after = state.apply(self.states.get(key), record)
        if after is None:
            self.states.pop(key, None)
            self._snapshots.pop(key, None)
            return
        self.states[key] = after
        if isinstance(record, Snapshot):
            self._snapshots[key] = offset
