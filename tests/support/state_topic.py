"""A partition of an internal topic in memory: commits at once, when told to, or never.

It knows its transactions: the epochs of producers, which transactions are open, and that the first batch of one needs
what was given out by `begin_verification`.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import STAMP, BatchHeader, read_header
from millrace.records.control import EndMarker, MarkerType, decode_end_marker, encode_end_marker
from millrace.records.decode import Record, decode_records, iter_records
from millrace.records.encode import encode_batch
from millrace.replication.state_topic import StateTopic
from millrace.replication.watermark import Reached, Watermark

MAX_BATCH_BYTES = 1_048_588


@dataclass(frozen=True)
class FakeAppend:
    base_offset: int
    last_offset: int


@dataclass(frozen=True)
class FakeRead:
    data: bytes


@dataclass(frozen=True)
class LogBatch:
    """A batch as a reader of the whole log sees it."""

    base_offset: int
    producer_id: int
    records: list[Record]
    commits: bool | None
    """Of a marker: whether it commits."""
    fate: str
    """Of the batch's transaction: open, committed or aborted; without one it is plain."""


class FakeLog:
    def __init__(self) -> None:
        self.start_offset = 0
        self.stored: list[tuple[int, bytes]] = []
        """The first offset of every batch, and its bytes."""
        self.end_offset = 0

    def batches(self, end_offset: int | None = None) -> list[LogBatch]:
        """Everything below `end_offset`, or all there is, and what became of it there."""
        found: list[LogBatch] = []
        ends: dict[int, str] = {}
        for base, data in reversed(self.stored):
            header = read_header(data)
            if end_offset is not None and base >= end_offset:
                continue
            marker = decode_end_marker(data) if header.is_control else None
            commits = None if marker is None else marker.type is MarkerType.COMMIT
            if commits is not None:
                ends[header.producer_id] = "committed" if commits else "aborted"
            fate = ends.get(header.producer_id, "open") if header.is_transactional else "plain"
            found.append(LogBatch(base, header.producer_id, decode_records(data), commits, fate))
        return found[::-1]

    def compact(self, end_offset: int, *, drops_tombstones: bool) -> None:
        """Keep the last record of every key below `end_offset` and the first open transaction, and nothing aborted."""
        batches = self.batches(end_offset)
        limit = min((each.base_offset for each in batches if each.fate == "open"), default=end_offset)
        counts = [each for each in batches if each.base_offset < limit and each.fate != "aborted"]
        last = {record.key: record.offset for each in counts if each.commits is None for record in each.records}
        kept: list[tuple[int, bytes]] = []
        stored = dict(self.stored)
        for each in batches:
            if each.base_offset >= limit or each.commits is not None:
                kept.append((each.base_offset, stored[each.base_offset]))
                continue
            records = [
                record
                for record in each.records
                if each.fate != "aborted"
                and last[record.key] == record.offset
                and not (drops_tombstones and record.value is None)
            ]
            if records:
                header = read_header(stored[each.base_offset])
                batch = encode_batch(
                    records,
                    producer_id=header.producer_id,
                    producer_epoch=header.producer_epoch,
                    base_sequence=header.base_sequence,
                    transactional=header.is_transactional,
                )
                kept.append((records[0].offset, batch))
        self.stored = kept + [(base, data) for base, data in self.stored if base >= end_offset]

    @property
    def end(self) -> int:
        return self.end_offset

    def read(self, offset: int, max_bytes: int, *, limit: int, at_least_one: bool) -> FakeRead:
        found = b""
        for base, batch in self.stored:
            if read_header(batch).last_offset < offset or base >= limit:
                continue
            if found and len(found) + len(batch) > max_bytes:
                break
            found += batch
        return FakeRead(found)


class FakePartition:
    """What `StateTopic` needs of a partition."""

    def __init__(self, *, commit_at_once: bool = True) -> None:
        self.leader_epoch = 0
        self.log = FakeLog()
        self.high_watermark = Watermark(0)
        self.commit_at_once = commit_at_once
        self.refuse: ErrorCode | None = None
        self.refused_keys: set[bytes | None] = set()
        """Keys whose last append was refused."""
        self.epochs: dict[int, int] = {}
        """Of every producer, the last that was seen."""
        self.open: set[int] = set()
        """The producers that have a transaction open."""
        self.verifications: dict[int, object] = {}

    def check_in_sync(self) -> None:
        """Always."""

    def begin_verification(self, producer_id: int, epoch: int, sequence: int, *, bumps_epoch: bool) -> object | None:
        assert sequence == 0
        self._check_epoch(producer_id, epoch)
        if producer_id in self.open and self.epochs[producer_id] == epoch:
            return None
        return self.verifications.setdefault(producer_id, object())

    def _check_epoch(self, producer_id: int, epoch: int) -> None:
        if epoch < self.epochs.get(producer_id, 0):
            raise ApiError(ErrorCode.INVALID_PRODUCER_EPOCH)

    def _check_producer(self, header: BatchHeader, verification: object | None) -> None:
        producer_id = header.producer_id
        if producer_id < 0:
            return
        self._check_epoch(producer_id, header.producer_epoch)
        if header.is_control:
            self.open.discard(producer_id)
            self.verifications.pop(producer_id, None)
        else:
            assert header.is_transactional
            if producer_id not in self.open and verification is not self.verifications.get(producer_id, self):
                raise ApiError(ErrorCode.INVALID_TXN_STATE)
            self.open.add(producer_id)
        self.epochs[producer_id] = header.producer_epoch

    def end_transaction(self, producer_id: int, epoch: int, *, commit: bool) -> FakeAppend:
        """Write a marker, as the leader does for a coordinator."""
        marker = EndMarker(MarkerType.COMMIT if commit else MarkerType.ABORT, 0)
        batch = encode_end_marker(marker, producer_id=producer_id, producer_epoch=epoch, timestamp_ms=0)
        return self.append(batch, from_client=False)

    def append(self, records: bytes, *, from_client: bool, verification: object | None = None) -> FakeAppend:
        assert not from_client
        keys = {record.key for record in iter_records(records)}
        refuse = ErrorCode.MESSAGE_TOO_LARGE if len(records) > MAX_BATCH_BYTES else self.refuse
        if refuse is not None:
            self.refused_keys |= keys
            raise ApiError(refuse)
        header = read_header(records)
        self._check_producer(header, verification)
        self.refused_keys -= keys
        base = self.log.end_offset
        stamped = STAMP.pack(base, header.batch_length, self.leader_epoch) + bytes(records)[STAMP.size :]
        self.log.stored.append((base, stamped))
        self.log.end_offset = base + header.count
        if self.commit_at_once:
            self.commit()
        return FakeAppend(base, self.log.end_offset - 1)

    def commit(self, offset: int | None = None) -> None:
        """Everything below `offset` (all there is, if not said) is durable."""
        self.high_watermark.advance(self.log.end_offset if offset is None else offset)

    def truncate(self) -> None:
        """Lose the leadership, and what is not committed: nobody who waits for it hears of it any more."""
        end = self.high_watermark.offset
        self.high_watermark.fail(ApiError(ErrorCode.NOT_LEADER_OR_FOLLOWER))
        self.log.stored = [(base, data) for base, data in self.log.stored if base < end]
        self.log.end_offset = end
        self.open = {each.producer_id for each in self.log.batches() if each.fate == "open"}
        self.verifications.clear()

    def when_committed(self, last_offset: int, reached: Reached) -> bool:
        return self.high_watermark.when(last_offset + 1, reached)

    def is_committed(self, last_offset: int) -> bool:
        return self.high_watermark.offset > last_offset

    async def wait_committed(self, last_offset: int) -> None:
        future = self.high_watermark.reach(last_offset + 1)
        if future is not None:
            await future


class FakeTopic:
    """An internal topic of `count` partitions, all led here unless a test takes some away."""

    def __init__(self, count: int = 1, *, commit_at_once: bool = True) -> None:
        self.partitions: list[FakePartition | None] = [
            FakePartition(commit_at_once=commit_at_once) for _ in range(count)
        ]
        self.topic = StateTopic("__consumer_offsets", self._get, lambda: count)

    def _get(self, index: int) -> FakePartition | None:
        return self.partitions[index]

    def __getitem__(self, index: int) -> FakePartition:
        partition = self.partitions[index]
        assert partition is not None
        return partition
