"""What a log knows of its idempotent and transactional producers (KIP-98), and the snapshots of it.

    <offset>.snapshot: int16 version = 1 | uint32 CRC-32C of the rest | int32 count | per entry 46 bytes:
        int64 producer id | int16 epoch | int32 last sequence | int64 last offset | int32 offset delta of that batch |
        int64 timestamp | int32 coordinator epoch | int64 first offset of the open transaction (-1 none)

The state covers every batch below <offset>. The format is Kafka's, with one use of it that Kafka does not make: a
producer has up to five entries, oldest first, so that a retry of any of its five batches in flight is still recognised
after a restart. Kafka reads such a file too: for it the last entry of a producer counts.

A producer is forgotten when this broker has had nothing of it for `producer.id.expiration.ms` of its own clock. Kafka
compares the timestamps of the records, so that a backfill of last month's data loses its de-duplication at the next
sweep. In a snapshot the timestamp of a producer's last entry is when it was last heard of; a batch that is only found
in the log (after a crash, on a truncation) counts as heard of when it is read, the latest that it can have been.

A snapshot is written when a segment is rolled and at a clean close, without a sync: one that is missing, torn or
damaged is replaced by the previous one and a replay of the batch headers behind it.

A transaction is open from its first batch to its marker, and is remembered as ended from there until its marker is
committed (`forget_ended`): until then the marker may still be cut off, and what became of its records is not known for
good. A snapshot has the open ones; the ended ones are found again in the log (`recovery.replay`, from `ended_from` on).

Before a producer's first batch of a transaction the leader asks the transaction coordinator whether there is such a
transaction (KIP-890). The question is kept here (`Verification`) while it is asked. A marker that comes meanwhile takes
it away, and the batch that it was asked for is refused: it would open a transaction that nobody ends.

A batch with the sequences of one whose transaction has ended is no retry: a producer ends a transaction when it waits
for no answer any more. It is a late copy, or a new batch of a producer that has lost count: librdkafka (2.16) forgets a
batch that it has to abort and wants to send again, and gives its sequences to the next one. Acknowledged as a
duplicate, that one would be missing in a transaction that is committed. The answer is UNKNOWN_PRODUCER_ID, after which
clients abort the transaction and go on with a new epoch (KIP-360).

Invariants: per producer and epoch the sequences are gap-free; a duplicate of one of the last five batches is recognised
by its exact (epoch, first, last) sequence range, and acknowledged only within its transaction; the number of producers
is bounded, but for those whose transaction is open: they are never forgotten.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_PRODUCER_EPOCH, NO_SEQUENCE, NO_TIMESTAMP
from millrace.records.batch import MAX_SEQUENCE, TRANSACTIONAL_BIT, BatchHeader
from millrace.records.control import EndMarker, MarkerType
from millrace.storage.txnindex import AbortedTransaction

MAX_EPOCH: Final = 2**15 - 1
EPOCH_BUMP_FROM: Final = 2
"""From this transaction version on every end of a transaction has a producer epoch of its own (KIP-890)."""

BATCHES_KEPT: Final = 5
"""As many as a producer may have in flight (max.in.flight.requests.per.connection)."""
DEFAULT_EXPIRATION_MS: Final = 86_400_000
DEFAULT_MAX_PRODUCERS: Final = 10_000

_PREFIX: Final = struct.Struct(">hI")
_COUNT: Final = struct.Struct(">i")
_ENTRY: Final = struct.Struct(">qhiqiqiq")
_VERSION: Final = 1


class BatchMark(NamedTuple):
    """A batch that a producer wrote: enough to recognise it again."""

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp_ms: int


class EndedTransaction(NamedTuple):
    """A transaction that has a marker, of which it is not known yet that it is committed."""

    first_offset: int
    marker_offset: int


class Verification:
    """A question to the transaction coordinator about one producer: whether its transaction has this partition.

    Whoever asks holds on to it; it is the answer's only if it is still the one that is kept for the producer.
    """

    __slots__ = ("asked_ms", "bumps_epoch", "epoch", "lowest_sequence")

    def __init__(self, epoch: int, sequence: int, *, bumps_epoch: bool, asked_ms: int) -> None:
        self.epoch = epoch
        self.lowest_sequence = sequence
        """The first one that the producer has tried: a later one must not be let in before it."""
        self.bumps_epoch = bumps_epoch
        """Whether the producer gets a new epoch with every transaction, so that sequences begin with 0."""
        self.asked_ms = asked_ms

    def __repr__(self) -> str:
        return f"Verification(epoch {self.epoch}, from sequence {self.lowest_sequence})"

    def note(self, epoch: int, sequence: int) -> None:
        """The producer asks again, with another batch."""
        if epoch > self.epoch:
            self.epoch, self.lowest_sequence = epoch, sequence
        elif epoch == self.epoch:
            self.lowest_sequence = min(self.lowest_sequence, sequence)


UNVERIFIED: Final = Verification(NO_PRODUCER_EPOCH, NO_SEQUENCE, bumps_epoch=False, asked_ms=NO_TIMESTAMP)
"""In the place of one where nobody has to be asked: the broker's own writes, and where the check is switched off."""


class ProducerEntry:
    """One producer's state in one partition."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "epoch",
        "heard_ms",
        "producer_id",
        "transaction_first_offset",
    )

    def __init__(self, producer_id: int, epoch: int = NO_PRODUCER_EPOCH) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.batches: list[BatchMark] = []
        self.heard_ms = NO_TIMESTAMP
        """When this broker last wrote something of it, by its own clock."""
        self.coordinator_epoch = -1
        self.transaction_first_offset = -1

    def __repr__(self) -> str:
        return f"ProducerEntry({self.producer_id}, epoch {self.epoch}, last sequence {self.last_sequence})"

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    @property
    def last_offset(self) -> int:
        return self.batches[-1].last_offset if self.batches else -1


class Producers:
    """All producers of one log, least recently heard of first."""

    def __init__(self, max_producers: int = DEFAULT_MAX_PRODUCERS) -> None:
        self.max_producers = max_producers
        self.entries: dict[int, ProducerEntry] = {}
        self.open_transactions: dict[int, int] = {}
        """First offset of each open transaction -> its producer, in the order of their offsets."""
        self.ended: deque[EndedTransaction] = deque()
        """Those whose marker may not be committed yet, in the order of their markers."""
        self.ended_from = 0
        """A marker below this offset may be missing among them, because a snapshot does not have it."""
        self._verifications: dict[int, Verification] = {}

    def __len__(self) -> int:
        return len(self.entries)

    def __iter__(self) -> Iterator[ProducerEntry]:
        return iter(self.entries.values())

    def __repr__(self) -> str:
        return f"Producers({len(self.entries)}, {len(self.open_transactions)} open transactions)"

    # --- transactions -------------------------------------------------------------------------------------------------

    @property
    def first_open_offset(self) -> int | None:
        """Where the oldest open transaction begins."""
        return next(iter(self.open_transactions), None)

    def first_unstable(self, high_watermark: int) -> int | None:
        """Where the oldest transaction begins that is open, or whose marker is not below `high_watermark`."""
        first = self.first_open_offset
        for transaction in self.ended:
            if transaction.marker_offset >= high_watermark and (first is None or transaction.first_offset < first):
                first = transaction.first_offset
        return first

    def forget_ended(self, high_watermark: int) -> None:
        """Transactions whose marker is below `high_watermark` are over for good."""
        ended = self.ended
        while ended and ended[0].marker_offset < high_watermark:
            ended.popleft()

    def begin_verification(
        self, producer_id: int, epoch: int, sequence: int, *, bumps_epoch: bool, now_ms: int
    ) -> Verification | None:
        """What to hold while the coordinator is asked about a batch; None where the transaction is open already."""
        entry = self.entries.get(producer_id)
        if entry is not None:
            if epoch < entry.epoch:
                raise _fenced(producer_id, epoch, entry.epoch)
            if epoch == entry.epoch and entry.transaction_first_offset >= 0:
                return None
        verification = self._verifications.get(producer_id)
        if verification is None:
            verification = Verification(epoch, sequence, bumps_epoch=bumps_epoch, asked_ms=now_ms)
            self._verifications[producer_id] = verification
        else:
            verification.note(epoch, sequence)
        return verification

    # --- batches ------------------------------------------------------------------------------------------------------

    def check(self, header: BatchHeader, verification: Verification | None = UNVERIFIED) -> BatchMark | None:
        """Judge a produced batch: None to append it, the mark of the original if it is a duplicate, else `ApiError`.

        The first batch of a transaction needs the `verification` that was begun for it.
        """
        entry = self.entries.get(header.producer_id)
        if header.attributes & TRANSACTIONAL_BIT and verification is not UNVERIFIED:
            original = _duplicate(entry, header)
            if original is not None:
                return original
            self._check_verified(entry, header, verification)
        if entry is None:
            # Nothing is known (a new producer, or its records are gone): any sequence may start.
            return None
        epoch, sequence = header.producer_epoch, header.base_sequence
        if epoch == entry.epoch:
            known = entry.last_sequence
            if sequence != known + 1 and not (sequence == 0 and known == MAX_SEQUENCE):
                original = _duplicate(entry, header)
                if original is not None:
                    return original
                raise ApiError(
                    ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                    f"producer {header.producer_id} sent sequence {sequence} after {known}",
                )
        elif epoch < entry.epoch:
            raise _fenced(header.producer_id, epoch, entry.epoch)
        elif sequence != 0:
            raise ApiError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} began epoch {epoch} with sequence {sequence}",
            )
        if entry.transaction_first_offset >= 0 and not header.attributes & TRANSACTIONAL_BIT:
            raise _outside(header.producer_id)
        return None

    def _check_verified(
        self, entry: ProducerEntry | None, header: BatchHeader, verification: Verification | None
    ) -> None:
        """Refuse a batch that would open a transaction of which the coordinator does not know."""
        if entry is not None:
            if header.producer_epoch < entry.epoch:
                raise _fenced(header.producer_id, header.producer_epoch, entry.epoch)
            if header.producer_epoch == entry.epoch and entry.transaction_first_offset >= 0:
                return
        if verification is None or self._verifications.get(header.producer_id) is not verification:
            raise ApiError(
                ErrorCode.INVALID_TXN_STATE,
                f"producer {header.producer_id} has no transaction that this partition is part of",
            )
        first = verification.lowest_sequence
        if verification.bumps_epoch and (entry is None or not entry.batches):
            first = 0
        if header.base_sequence > first:
            raise ApiError(
                ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER,
                f"producer {header.producer_id} sent sequence {header.base_sequence} before {first}",
            )

    def check_internal(self, header: BatchHeader, verification: Verification | None = UNVERIFIED) -> None:
        """Judge a batch that the broker writes for a producer, which has no sequences: commits of its offsets."""
        entry = self.entries.get(header.producer_id)
        if entry is not None and header.producer_epoch < entry.epoch:
            raise _fenced(header.producer_id, header.producer_epoch, entry.epoch)
        if header.is_transactional:
            if verification is not UNVERIFIED:
                self._check_verified(entry, header, verification)
        elif entry is not None and entry.transaction_first_offset >= 0:
            raise _outside(header.producer_id)

    def record(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Take note of a batch that was written at `base_offset`, from a client, a leader or the log's own past."""
        producer_id = header.producer_id
        # Out and in again keeps the dict in the order of last use, for `_make_room`.
        entry = self.entries.pop(producer_id, None)
        if entry is None:
            if len(self.entries) >= self.max_producers:
                self._make_room()
            entry = ProducerEntry(producer_id, header.producer_epoch)
        elif entry.epoch != header.producer_epoch:
            entry.batches.clear()
            entry.epoch = header.producer_epoch
        self.entries[producer_id] = entry
        batches = entry.batches
        if len(batches) == BATCHES_KEPT:
            del batches[0]
        batches.append(
            BatchMark(
                header.base_sequence,
                header.last_sequence,
                base_offset,
                base_offset + header.last_offset_delta,
                header.max_timestamp_ms,
            )
        )
        entry.heard_ms = now_ms
        if header.is_transactional:
            self._verifications.pop(producer_id, None)
            if entry.transaction_first_offset < 0:
                entry.transaction_first_offset = base_offset
                self.open_transactions[base_offset] = producer_id

    def check_marker(self, producer_id: int, epoch: int, marker: EndMarker, transaction_version: int = 0) -> None:
        """Refuse a marker from a fenced producer epoch or a deposed coordinator.

        From transaction version 2 on a marker has an epoch above that of the records it ends: one that has not is late,
        and would end the next transaction. The same marker again, when nothing is open, does no harm; nor is there an
        epoch above the last.
        """
        entry = self.entries.get(producer_id)
        if entry is None:
            return
        late = epoch < entry.epoch
        if transaction_version >= EPOCH_BUMP_FROM and epoch == entry.epoch:
            late = entry.transaction_first_offset >= 0 and epoch != MAX_EPOCH
        if late:
            raise ApiError(
                ErrorCode.INVALID_PRODUCER_EPOCH,
                f"a marker of producer {producer_id} has epoch {epoch}, known is {entry.epoch}",
            )
        if marker.coordinator_epoch < entry.coordinator_epoch:
            raise ApiError(
                ErrorCode.TRANSACTION_COORDINATOR_FENCED,
                f"a marker of coordinator epoch {marker.coordinator_epoch}, known is {entry.coordinator_epoch}",
            )

    def record_marker(
        self, header: BatchHeader, offset: int, marker: EndMarker, now_ms: int
    ) -> AbortedTransaction | None:
        """Close the producer's transaction; returns it if it held records and was aborted."""
        entry = self.entries.pop(header.producer_id, None)
        if entry is None:
            if len(self.entries) >= self.max_producers:
                self._make_room()
            entry = ProducerEntry(header.producer_id, header.producer_epoch)
        elif entry.epoch != header.producer_epoch:
            entry.batches.clear()
            entry.epoch = header.producer_epoch
        self.entries[header.producer_id] = entry
        self._verifications.pop(header.producer_id, None)
        entry.coordinator_epoch = marker.coordinator_epoch
        entry.heard_ms = now_ms
        first_offset, entry.transaction_first_offset = entry.transaction_first_offset, -1
        if first_offset < 0:
            return None
        self.open_transactions.pop(first_offset, None)
        self.ended.append(EndedTransaction(first_offset, offset))
        if marker.type is MarkerType.COMMIT:
            return None
        stable = self.first_open_offset
        return AbortedTransaction(header.producer_id, first_offset, offset, offset + 1 if stable is None else stable)

    def expire(self, now_ms: int, expiration_ms: int) -> None:
        """Forget producers that were silent for so long, unless they have a transaction open."""
        gone = [
            producer_id
            for producer_id, entry in self.entries.items()
            if entry.transaction_first_offset < 0 and now_ms - entry.heard_ms >= expiration_ms
        ]
        for producer_id in gone:
            del self.entries[producer_id]
        for producer_id, verification in tuple(self._verifications.items()):
            if now_ms - verification.asked_ms >= expiration_ms:
                del self._verifications[producer_id]

    def clear(self) -> None:
        """Begin anew: nothing was ever written."""
        self.entries.clear()
        self.open_transactions.clear()
        self.ended.clear()
        self.ended_from = 0
        self._verifications.clear()

    def _make_room(self) -> None:
        for producer_id, entry in self.entries.items():
            if entry.transaction_first_offset < 0:
                del self.entries[producer_id]
                return

    # --- snapshots ----------------------------------------------------------------------------------------------------

    def to_bytes(self) -> bytes:
        """The state as a snapshot file."""
        rows: list[bytes] = []
        for entry in self.entries.values():
            marks = entry.batches or [BatchMark(NO_SEQUENCE, NO_SEQUENCE, -1, -1, entry.heard_ms)]
            rows += [
                _ENTRY.pack(
                    entry.producer_id,
                    entry.epoch,
                    mark.last_sequence,
                    mark.last_offset,
                    mark.last_offset - mark.first_offset,
                    # The producer's own last sign of life (a marker may follow its last batch) is on its last row.
                    entry.heard_ms if mark is marks[-1] else mark.timestamp_ms,
                    entry.coordinator_epoch,
                    entry.transaction_first_offset,
                )
                for mark in marks
            ]
        body = b"".join((_COUNT.pack(len(rows)), *rows))
        return _PREFIX.pack(_VERSION, crc32c(body)) + body

    @classmethod
    def from_bytes(cls, data: bytes, max_producers: int = DEFAULT_MAX_PRODUCERS) -> Producers | None:
        """The state from a snapshot file, or None where it is torn or damaged."""
        if len(data) < _PREFIX.size + _COUNT.size:
            return None
        version, crc = _PREFIX.unpack_from(data)
        if version != _VERSION or crc32c(memoryview(data)[_PREFIX.size :]) != crc:
            return None
        (count,) = _COUNT.unpack_from(data, _PREFIX.size)
        if len(data) != _PREFIX.size + _COUNT.size + count * _ENTRY.size:
            return None
        state = cls(max_producers)
        for row in _ENTRY.iter_unpack(memoryview(data)[_PREFIX.size + _COUNT.size :]):
            producer_id, epoch, sequence, offset, delta, timestamp_ms, coordinator_epoch, transaction = row
            entry = state.entries.get(producer_id)
            if entry is None or entry.epoch != epoch:
                entry = state.entries[producer_id] = ProducerEntry(producer_id, epoch)
            entry.coordinator_epoch = coordinator_epoch
            entry.heard_ms = timestamp_ms
            entry.transaction_first_offset = transaction
            if offset >= 0:
                first = (sequence - delta) & MAX_SEQUENCE if sequence >= 0 else sequence
                entry.batches = [
                    *entry.batches[-BATCHES_KEPT + 1 :],
                    BatchMark(first, sequence, offset - delta, offset, timestamp_ms),
                ]
        for entry in sorted(state.entries.values(), key=lambda e: e.transaction_first_offset):
            if entry.transaction_first_offset >= 0:
                state.open_transactions[entry.transaction_first_offset] = entry.producer_id
        return state


def _fenced(producer_id: int, epoch: int, known: int) -> ApiError:
    return ApiError(
        ErrorCode.INVALID_PRODUCER_EPOCH, f"producer {producer_id} has epoch {epoch}, the last seen is {known}"
    )


def _outside(producer_id: int) -> ApiError:
    return ApiError(ErrorCode.INVALID_TXN_STATE, f"producer {producer_id} wrote outside its open transaction")


def _duplicate(entry: ProducerEntry | None, header: BatchHeader) -> BatchMark | None:
    """The mark of a batch with these very sequences, if it was one of the producer's last.

    ApiError where that one was part of a transaction that has ended: nobody sends it again and waits for the answer.
    """
    if entry is not None and entry.epoch == header.producer_epoch:
        sequence, last_sequence = header.base_sequence, header.last_sequence
        for mark in entry.batches:
            if mark.first_sequence == sequence and mark.last_sequence == last_sequence:
                if header.is_transactional and not 0 <= entry.transaction_first_offset <= mark.first_offset:
                    raise ApiError(
                        ErrorCode.UNKNOWN_PRODUCER_ID,
                        f"producer {header.producer_id} sent sequence {sequence} again, in another transaction",
                    )
                return mark
    return None
