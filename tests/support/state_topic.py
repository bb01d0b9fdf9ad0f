"""A partition of an internal topic in memory: commits at once, when told to, or never.

It knows its transactions: the epochs of producers, which transactions are open, and that the first batch of one needs
what was given out by `begin_verification`.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import STAMP, BatchHeader, read_header
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.records.decode import iter_records
from millrace.replication.state_topic import StateTopic
from millrace.replication.watermark import Watermark

MAX_BATCH_BYTES = 1_048_588


@dataclass(frozen=True)
class FakeAppend:
    base_offset: int
    last_offset: int


@dataclass(frozen=True)
class FakeRead:
    data: bytes


class FakeLog:
    def __init__(self) -> None:
        self.start_offset = 0
        self.batches: list[tuple[int, bytes]] = []
        self.end_offset = 0

    @property
    def end(self) -> int:
        return self.end_offset

    def read(self, offset: int, max_bytes: int, *, limit: int, at_least_one: bool) -> FakeRead:
        found = b""
        for base, batch in self.batches:
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
        self.log.batches.append((base, stamped))
        self.log.end_offset = base + header.count
        if self.commit_at_once:
            self.commit()
        return FakeAppend(base, self.log.end_offset - 1)

    def commit(self, offset: int | None = None) -> None:
        """Everything below `offset` (all there is, if not said) is durable."""
        self.high_watermark.advance(self.log.end_offset if offset is None else offset)

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
