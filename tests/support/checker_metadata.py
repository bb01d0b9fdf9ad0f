"""Judges the metadata log: every delta that controllers wrote, against the invariants of docs/coordination.md.

    one writer      controller epochs rise, and a delta carries the epoch of the controller that announced itself last
    one order       deltas are numbered without gaps
    one leader      a leader epoch of a partition names one leader; every new leader raises it
    from the ISR    a leader lives and is in the ISR, a new one was in it before, or eligible; the ISR is never empty
    on its disk     a leader's broker has the directory in which its replica lies
    no new trust    whoever joins an ISR lives; a new incarnation is in no ISR that has another live member
    no number twice partition epochs rise by one, blocks of producer ids do not overlap

Pure, but for `read_log`, which reads it from ZooKeeper. A log that was trimmed is judged from its snapshot on.
"""

from __future__ import annotations

import json
import struct
import uuid
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from kazoo.client import KazooClient

from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    BrokerUnregistered,
    Change,
    ChangeSet,
    ControllerChanged,
    DirectoriesChanged,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ProducerIdsAllocated,
    TopicCreated,
    TopicDeleted,
    decode,
)
from millrace.metadata.zookeeper_access import OPEN, ZooKeeperAccess
from millrace.model import UNASSIGNED_DIRECTORY
from support.zookeeper import looking_at

NOBODY: Final = -1
_PACKED: Final = struct.Struct(">cI")
_DELTAS: Final = "/metadata/deltas"


@dataclass(frozen=True, slots=True)
class Delta:
    """One entry of the log and the controller epoch it was written under."""

    number: int
    controller_epoch: int
    changes: ChangeSet


def read_log(hosts: str, access: ZooKeeperAccess = OPEN) -> list[Delta]:
    """Every delta that is still in ZooKeeper; behind the snapshot, if the first ones are gone."""
    with looking_at(hosts, access) as client:
        names = sorted(client.get_children(_DELTAS))
        log = [_unpack(int(name.removeprefix("d-")), client.get(f"{_DELTAS}/{name}")[0]) for name in names]
        if log and log[0].number == 1:
            return log
        snapshot = _read_snapshot(client)
        return [snapshot, *(delta for delta in log if delta.number > snapshot.number)]


def _read_snapshot(client: KazooClient) -> Delta:
    pointer = json.loads(client.get("/metadata/snapshot")[0])
    number = pointer["index"]
    chunks = [client.get(f"/metadata/snapshots/s-{number:010}-{part}")[0] for part in range(pointer["chunks"])]
    return _unpack(number, b"".join(chunks))


def _unpack(number: int, data: bytes) -> Delta:
    kind, controller_epoch = _PACKED.unpack_from(data)
    body = data[_PACKED.size :]
    return Delta(number, controller_epoch, decode(zlib.decompress(body) if kind == b"z" else body))


def check_log(log: Iterable[Delta]) -> list[str]:
    """What is wrong, in the order in which it happened."""
    judge = _Judge()
    for delta in log:
        judge.take(delta)
    return judge.problems


@dataclass(slots=True)
class _Judge:
    """The cluster as the log builds it, and what was wrong on the way."""

    problems: list[str] = field(default_factory=list)
    number: int = 0
    controller_epoch: int = -1
    live: set[int] = field(default_factory=set)
    directories: dict[int, tuple[str, ...]] = field(default_factory=dict)
    """Those that a broker has, as far as it has said."""
    partitions: dict[tuple[uuid.UUID, int], PartitionState] = field(default_factory=dict)
    leaders: dict[tuple[uuid.UUID, int, int], int] = field(default_factory=dict)
    next_producer_id: int = 0

    def take(self, delta: Delta) -> None:
        if self.number and delta.number != self.number + 1:
            self._wrong(delta, f"follows number {self.number}")
        self.number = delta.number
        anew = {change.broker_id for change in delta.changes if isinstance(change, BrokerRegistered)}
        for change in delta.changes:
            self._take_change(delta, change)
        if delta.controller_epoch != self.controller_epoch:
            text = f"was written under controller epoch {delta.controller_epoch}, not {self.controller_epoch}"
            self._wrong(delta, text if self.controller_epoch >= 0 else "")
            self.controller_epoch = max(self.controller_epoch, delta.controller_epoch)
        self._check_all(delta, anew)

    def _take_change(self, delta: Delta, change: Change) -> None:
        if isinstance(change, BrokerRegistered | DirectoriesChanged):
            self.directories[change.broker_id] = change.directories.online
        match change:
            case ControllerChanged(broker_id, epoch):
                # A controller that resigns says so in its own epoch.
                if epoch < self.controller_epoch or (epoch == self.controller_epoch and broker_id != NOBODY):
                    self._wrong(delta, f"begins controller epoch {epoch} after {self.controller_epoch}")
                self.controller_epoch = epoch
            case (
                BrokerRegistered(broker_id=broker_id, fenced=fenced) | BrokerFenced(broker_id=broker_id, fenced=fenced)
            ):
                (self.live.discard if fenced else self.live.add)(broker_id)
            case BrokerUnregistered(broker_id):
                self.live.discard(broker_id)
            case TopicCreated(_, topic_id, states) | PartitionsAdded(topic_id, states):
                first = sum(1 for known, _ in self.partitions if known == topic_id)
                for index, state in enumerate(states, first):
                    self._put(delta, (topic_id, index), state)
            case TopicDeleted(_, topic_id):
                for key in [key for key in self.partitions if key[0] == topic_id]:
                    del self.partitions[key]
            case PartitionChanged(topic_id, index, state):
                self._put(delta, (topic_id, index), state)
            case ProducerIdsAllocated(_, next_id, count):
                if next_id - count < self.next_producer_id:
                    self._wrong(
                        delta, f"gives producer ids from {next_id - count}, taken up to {self.next_producer_id}"
                    )
                self.next_producer_id = next_id
            case _:
                pass

    def _put(self, delta: Delta, key: tuple[uuid.UUID, int], state: PartitionState) -> None:
        """One delta may change a partition twice, so each step is judged for itself."""
        before = self.partitions.get(key)
        self.partitions[key] = state
        self._check_partition(delta, key, before, state)

    def _check_partition(
        self, delta: Delta, key: tuple[uuid.UUID, int], before: PartitionState | None, state: PartitionState
    ) -> None:
        place = f"partition {key[0].hex[:8]}-{key[1]}"
        if not state.isr or not set(state.isr) <= set(state.replicas):
            self._wrong(delta, f"{place} has ISR {state.isr} of replicas {state.replicas}")
        named = self.leaders.setdefault((*key, state.leader_epoch), state.leader)
        if named != state.leader:
            self._wrong(delta, f"{place} has leaders {named} and {state.leader} in epoch {state.leader_epoch}")
        if before is None:
            return
        if state.partition_epoch != before.partition_epoch + 1:
            text = f"{place} goes from partition epoch {before.partition_epoch} to {state.partition_epoch}"
            self._wrong(delta, text)
        if state.leader_epoch < before.leader_epoch:
            self._wrong(delta, f"{place} goes back from leader epoch {before.leader_epoch} to {state.leader_epoch}")
        able = {before.leader, NOBODY, *before.isr, *before.elr}
        if before.leader in set(before.removing) & self.live and not state.is_reassigning:
            able.update(before.adding)  # its leader let it in, and that was the end of the move
        if state.leader not in able:
            self._wrong(delta, f"{place} is led by {state.leader}, which was not in ISR {before.isr}")
        if before.leader == NOBODY != state.leader and len(state.isr) > 1:
            self._wrong(delta, f"{place} had no leader, and begins with ISR {state.isr}")
        for broker_id in set(state.isr) - set(before.isr) - self.live:
            self._wrong(delta, f"{place} has {broker_id} join its ISR, which does not live")

    def _check_all(self, delta: Delta, anew: set[int]) -> None:
        for key, state in self.partitions.items():
            place = f"partition {key[0].hex[:8]}-{key[1]}"
            if state.leader != NOBODY and (state.leader not in self.live or state.leader not in state.isr):
                self._wrong(delta, f"{place} is led by {state.leader}; live {sorted(self.live)}, ISR {state.isr}")
            elif state.leader != NOBODY and not self._present(state, state.leader):
                directory = state.directory_of(state.leader)
                self._wrong(delta, f"{place} is led by {state.leader}, which does not have directory {directory}")
            if state.leader == NOBODY:  # its ISR says who had everything, and nobody is trusted yet
                continue
            for broker_id in anew & set(state.isr):
                if any(self._present(state, each) for each in {*state.isr} - {broker_id} - anew):
                    self._wrong(delta, f"{place} trusts the new incarnation of {broker_id}, ISR {state.isr}")

    def _present(self, state: PartitionState, broker_id: int) -> bool:
        """Whether a replica is there: its broker lives, and has the directory in which it lies."""
        directory, online = state.directory_of(broker_id), self.directories.get(broker_id)
        return broker_id in self.live and (not online or directory == UNASSIGNED_DIRECTORY or directory in online)

    def _wrong(self, delta: Delta, text: str) -> None:
        if text:
            self.problems.append(f"delta {delta.number} {text}")
