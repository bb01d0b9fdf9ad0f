"""What the simulated cluster has promised to its clients, and the invariants that every step must leave.

Letters as in the list of what a simulation of replication has to hold:
(a) at most one leader, in one incarnation, per partition and leader epoch;
(b) what is below a high watermark is, byte for byte, in the log of every live member of the ISR, and in every other
    live log as far as that one takes it for committed;
(c) what a client has seen as committed, a later leader does not take back;
(d) a partition changes one epoch at a time, its leader is in its ISR, and its ISR among its replicas;
(e) what is acknowledged is committed, at the offset that the producer is told;
(g) the committed batches of a producer, in each of its epochs, follow each other without a gap or a repetition.
(f), about transactions, is in `simulated_transactions`.

A check looks only at what has changed since the last one: each log is read once, from where it was found to agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.cluster.image import ClusterImage
from millrace.metadata.deltas import PartitionState
from millrace.model import NO_BROKER, NO_SEQUENCE, TopicPartition
from millrace.records.batch import BatchHeader, split
from millrace.replication.partition import Partition
from millrace.storage.log import Log
from support.simulated_broker import SimBroker

_EVERYTHING = 1 << 20


class BrokenPromise(AssertionError):
    """An invariant does not hold; the text begins with its letter."""


@dataclass(slots=True)
class _Agreed:
    """How far a log was compared, and the state of it in which it was."""

    log: Log
    truncations: int
    offset: int


class Committed:
    """One partition: every byte that was ever committed, and who was told so."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.end = 0
        self.seen = 0
        """The largest high watermark that a client was told by the leader of the day."""
        self._data = bytearray()
        self._positions = {0: 0}
        self._batches: dict[int, BatchHeader] = {}
        self._sequences: dict[tuple[int, int], int] = {}
        self._leaders: dict[int, tuple[int, int]] = {}
        self._agreed: dict[int, _Agreed] = {}

    def extend(self, log: Log, mark: int) -> None:
        """A leader takes everything in `log` below `mark` for committed."""
        while self.end < mark:
            for header, data in split(log.read(self.end, _EVERYTHING).data):
                if header.base_offset >= mark:
                    break
                if header.base_offset != self.end or header.next_offset > mark:
                    raise BrokenPromise(f"(b) {mark} is no boundary between batches: {header}")
                self._note(header, data)

    def _note(self, header: BatchHeader, data: memoryview) -> None:
        if header.base_sequence != NO_SEQUENCE:  # the broker's own batches have none
            producer = (header.producer_id, header.producer_epoch)
            expected = self._sequences.get(producer, -1) + 1
            if header.base_sequence != expected:
                raise BrokenPromise(
                    f"(g) partition {self.index} has sequence {header.base_sequence} of producer {producer}"
                    f" at offset {header.base_offset}, where {expected} should follow"
                )
            self._sequences[producer] = header.last_sequence
        self._batches[header.base_offset] = header
        self._data += data
        self.end = header.next_offset
        self._positions[self.end] = len(self._data)

    def check_acknowledged(self, producer_id: int, sequence: int, offset: int) -> None:
        """A producer is told that its batch is committed at `offset`."""
        header = self._batches.get(offset)
        if header is None or (header.producer_id, header.base_sequence) != (producer_id, sequence):
            raise BrokenPromise(
                f"(e) sequence {sequence} of producer {producer_id} is acknowledged at offset {offset} of partition"
                f" {self.index}, where {'nothing' if header is None else header} is committed"
            )

    def check_holds(self, broker: SimBroker, partition: Partition, upto: int) -> None:
        """The replica has what is committed below `upto`; one that knows that its log is of no use need not."""
        place = TopicPartition(partition.topic, partition.index)
        log = broker.disks.get(place)
        if log is None or log.failure is not None:
            if upto and log is None and partition.index not in broker.disks.missing:
                raise BrokenPromise(f"(b) {broker} has no log of {partition!r}, {upto} is committed")
            return
        agreed = self._agreed.get(broker.broker_id)
        if agreed is None or agreed.log is not log or agreed.truncations != log.truncations:
            agreed = self._agreed[broker.broker_id] = _Agreed(log, log.truncations, log.start_offset)
        while agreed.offset < upto:
            offset = agreed.offset
            if offset >= log.end_offset:
                raise BrokenPromise(f"(b) {broker} ends at {offset} in {partition!r}, {upto} is committed")
            read = log.read(offset, _EVERYTHING)
            position, stop = self._positions.get(offset, -1), self._positions[upto]
            stop = min(position + len(read.data), stop)
            if position < 0 or bytes(read.data[: stop - position]) != self._data[position:stop]:
                raise BrokenPromise(f"(b) {broker} has other bytes after {offset} in {partition!r} than were committed")
            agreed.offset = min(read.next_offset, upto)

    def check_leader(self, state: PartitionState, image: ClusterImage) -> None:
        if state.leader == NO_BROKER:
            return
        leader = (state.leader, image.brokers[state.leader].broker_epoch)
        if self._leaders.setdefault(state.leader_epoch, leader) != leader:
            raise BrokenPromise(f"(a) {leader} leads {self.index} in the epoch of {self._leaders[state.leader_epoch]}")

    def check_seen(self, mark: int) -> None:
        """The leader of the day tells a client how far the partition is committed."""
        if mark < self.seen:
            raise BrokenPromise(f"(c) a client was told that {self.seen} is committed in {self.index}, and now {mark}")
        self.seen = mark


def check_change(before: PartitionState, after: PartitionState) -> None:
    """(d), for one change of one partition."""
    right = (
        after.partition_epoch == before.partition_epoch + 1
        and before.leader_epoch <= after.leader_epoch <= before.leader_epoch + 1
        and (after.leader == before.leader or after.leader_epoch > before.leader_epoch)
        and after.leader in (NO_BROKER, *after.isr)
        and set(after.isr) <= set(after.replicas)
        and bool(after.isr)
    )
    if not right:
        raise BrokenPromise(f"(d) {before} became {after}")
