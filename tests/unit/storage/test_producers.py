"""Idempotence rules (KIP-98) one by one, and the snapshot file."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import ApiError, ErrorCode
from millrace.records.batch import read_header
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.storage.producers import BATCHES_KEPT, Producers
from support.batches import NOW_MS, batch, from_producer


def write(state: Producers, data: bytes, offset: int, now_ms: int = NOW_MS) -> None:
    header = read_header(data)
    assert state.check(header) is None
    state.record(header, offset, now_ms)


def refused(state: Producers, data: bytes) -> ErrorCode:
    with pytest.raises(ApiError) as error:
        state.check(read_header(data))
    return error.value.code


def mark(state: Producers, kind: MarkerType, offset: int, *, epoch: int = 0, coordinator: int = 0):  # type: ignore[no-untyped-def]
    marker = EndMarker(kind, coordinator)
    header = read_header(encode_end_marker(marker, producer_id=1, producer_epoch=epoch, timestamp_ms=NOW_MS))
    state.check_marker(1, epoch, marker)
    return state.record_marker(header, offset, marker, NOW_MS)


def transactional(sequence: int, *, epoch: int = 0) -> bytes:
    return batch(1, producer_id=1, producer_epoch=epoch, sequence=sequence, transactional=True)


class TestSequences:
    def test_an_unknown_producer_may_start_anywhere(self) -> None:
        state = Producers()
        write(state, from_producer(1, 500, 3), 0)
        write(state, from_producer(1, 503), 3)

    def test_gaps_and_steps_back_are_out_of_order(self) -> None:
        state = Producers()
        write(state, from_producer(1, 0, 10), 0)
        for sequence in (11, 5, 100, 9):
            assert refused(state, from_producer(1, sequence)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def test_a_duplicate_has_exactly_the_same_range(self) -> None:
        state = Producers()
        write(state, from_producer(1, 0, 5), 100)
        mark_of = state.check(read_header(from_producer(1, 0, 5)))
        assert mark_of is not None and (mark_of.first_offset, mark_of.last_offset) == (100, 104)
        assert refused(state, from_producer(1, 0, 4)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert refused(state, from_producer(1, 1, 4)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER

    def test_sequences_wrap(self) -> None:
        state = Producers()
        top = 2**31 - 1
        write(state, from_producer(1, top - 1, 2), 0)
        write(state, from_producer(1, 0, 3), 2)
        state = Producers()
        write(state, from_producer(1, top - 1, 4), 0)
        write(state, from_producer(1, 2, 1), 4)
        assert state.check(read_header(from_producer(1, top - 1, 4))) is not None

    def test_epochs(self) -> None:
        state = Producers()
        write(state, from_producer(1, 0, 3, epoch=5), 0)
        assert refused(state, from_producer(1, 3, epoch=4)) is ErrorCode.INVALID_PRODUCER_EPOCH
        assert refused(state, from_producer(1, 3, epoch=6)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        write(state, from_producer(1, 0, 3, epoch=6), 3)
        assert refused(state, from_producer(1, 3, epoch=5)) is ErrorCode.INVALID_PRODUCER_EPOCH
        duplicate = state.check(read_header(from_producer(1, 0, 3, epoch=6)))
        assert duplicate is not None and duplicate.first_offset == 3

    def test_five_batches_are_kept(self) -> None:
        state = Producers()
        for i in range(8):
            write(state, from_producer(1, i), i)
        known = [i for i in range(8) if _is_known(state, i)]
        assert known == [3, 4, 5, 6, 7] and len(known) == BATCHES_KEPT

    def test_the_number_of_producers_is_bounded(self) -> None:
        state = Producers(max_producers=10)
        for producer_id in range(100):
            write(state, from_producer(producer_id, 0), producer_id)
            write(state, from_producer(producer_id, 1), producer_id)
        assert sorted(state.entries) == list(range(90, 100))


def _is_known(state: Producers, sequence: int) -> bool:
    try:
        return state.check(read_header(from_producer(1, sequence))) is not None
    except ApiError:
        return False


class TestTransactions:
    def test_open_and_close(self) -> None:
        state = Producers()
        write(state, transactional(0), 10)
        write(state, transactional(1), 11)
        assert state.first_open_offset == 10
        assert refused(state, from_producer(1, 2)) is ErrorCode.INVALID_TXN_STATE
        aborted = mark(state, MarkerType.ABORT, 12)
        assert aborted is not None
        assert (aborted.producer_id, aborted.first_offset, aborted.last_offset, aborted.last_stable_offset) == (
            1,
            10,
            12,
            13,
        )
        assert state.first_open_offset is None
        write(state, transactional(2), 13)
        assert mark(state, MarkerType.COMMIT, 14) is None
        assert mark(state, MarkerType.ABORT, 15) is None, "an empty transaction leaves no trace"

    def test_a_batch_of_a_transaction_that_has_ended_is_not_acknowledged_again(self) -> None:
        state = Producers()
        write(state, transactional(0), 10)
        assert state.check(read_header(transactional(0))) is not None, "a retry"
        mark(state, MarkerType.ABORT, 11)
        assert refused(state, transactional(0)) is ErrorCode.UNKNOWN_PRODUCER_ID
        write(state, transactional(1), 12)
        assert state.check(read_header(transactional(1))) is not None
        assert refused(state, transactional(0)) is ErrorCode.UNKNOWN_PRODUCER_ID
        restored = Producers.from_bytes(state.to_bytes())
        assert restored is not None
        assert refused(restored, transactional(0)) is ErrorCode.UNKNOWN_PRODUCER_ID
        assert restored.check(read_header(transactional(1))) is not None

    def test_markers_are_fenced(self) -> None:
        state = Producers()
        write(state, transactional(0, epoch=3), 0)
        with pytest.raises(ApiError) as error:
            mark(state, MarkerType.ABORT, 1, epoch=2)
        assert error.value.code is ErrorCode.INVALID_PRODUCER_EPOCH
        mark(state, MarkerType.ABORT, 1, epoch=3, coordinator=7)
        with pytest.raises(ApiError) as error:
            mark(state, MarkerType.ABORT, 2, epoch=3, coordinator=6)
        assert error.value.code is ErrorCode.TRANSACTION_COORDINATOR_FENCED
        mark(state, MarkerType.ABORT, 2, epoch=4, coordinator=7)
        assert refused(state, transactional(1, epoch=3)) is ErrorCode.INVALID_PRODUCER_EPOCH
        write(state, transactional(0, epoch=4), 3)

    def test_an_open_transaction_does_not_expire(self) -> None:
        state = Producers(max_producers=1)
        write(state, transactional(0), 0)
        state.expire(NOW_MS + 10**9, 1)
        assert len(state) == 1
        mark(state, MarkerType.COMMIT, 1)
        state.expire(NOW_MS + 10**9, 1)
        assert len(state) == 0


class TestExpiry:
    OLD_MS = NOW_MS - 40 * 86_400_000

    def backfill(self) -> Producers:
        state = Producers()
        data = batch(1, producer_id=5, producer_epoch=0, sequence=0, timestamp_ms=self.OLD_MS)
        write(state, data, 0)
        return state

    def test_a_producer_of_old_data_is_not_an_old_producer(self) -> None:
        state = self.backfill()
        state.expire(NOW_MS + 999, 1000)
        assert len(state) == 1
        state.expire(NOW_MS + 1000, 1000)
        assert len(state) == 0

    def test_a_snapshot_says_when_it_was_heard_of(self) -> None:
        again = Producers.from_bytes(self.backfill().to_bytes())
        assert again is not None
        assert again.entries[5].heard_ms == NOW_MS


class TestSnapshots:
    def make(self) -> Producers:
        state = Producers()
        for i in range(7):
            write(state, from_producer(5, i * 2, 2), i * 2)
        write(state, from_producer(6, 2**31 - 2, 5, epoch=9), 14)
        write(state, transactional(0), 19)
        return state

    def test_the_bytes_are_kafkas(self) -> None:
        state = Producers()
        write(state, from_producer(5, 40, 3, epoch=2), 100, NOW_MS + 77)
        body = struct.pack(">iqhiqiqiq", 1, 5, 2, 42, 102, 2, NOW_MS + 77, -1, -1)
        assert state.to_bytes() == struct.pack(">hI", 1, crc32c(body)) + body

    def test_round_trip(self) -> None:
        state = self.make()
        again = Producers.from_bytes(state.to_bytes())
        assert again is not None
        assert again.to_bytes() == state.to_bytes()
        assert again.first_open_offset == 19
        for sequence in range(4, 14, 2):
            found = again.check(read_header(from_producer(5, sequence, 2)))
            assert found is not None and found.first_offset == sequence
        assert again.check(read_header(from_producer(6, 2**31 - 2, 5, epoch=9))) is not None

    def test_a_producer_with_only_a_marker(self) -> None:
        state = Producers()
        mark(state, MarkerType.COMMIT, 0, epoch=3, coordinator=4)
        again = Producers.from_bytes(state.to_bytes())
        assert again is not None
        entry = again.entries[1]
        assert (entry.epoch, entry.coordinator_epoch, entry.batches) == (3, 4, [])

    def test_every_cut_and_flip_is_noticed(self) -> None:
        data = self.make().to_bytes()
        for size in range(len(data)):
            assert Producers.from_bytes(data[:size]) is None
        for position in range(len(data)):
            damaged = bytearray(data)
            damaged[position] ^= 0x10
            assert Producers.from_bytes(bytes(damaged)) is None
        assert Producers.from_bytes(data + b"\x00") is None


@settings(deadline=None, max_examples=100)
@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(-1, 12), st.integers(1, 3)), min_size=1, max_size=40
    )
)
def test_accepted_sequences_never_have_gaps(steps: list[tuple[int, int, int, int]]) -> None:
    """Whatever is sent, what is accepted per producer and epoch is gap-free, and replay gives the same state."""
    state, replayed = Producers(), Producers()
    accepted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    offset = 0
    for producer_id, epoch, sequence, count in steps:
        if sequence < 0:
            continue
        header = read_header(from_producer(producer_id, sequence, count, epoch=epoch))
        try:
            duplicate = state.check(header)
        except ApiError:
            continue
        if duplicate is not None:
            assert (sequence, count) in [(s, c) for s, c, *_ in accepted[producer_id, epoch]]
            continue
        history = accepted.setdefault((producer_id, epoch), [])
        if history:
            assert sequence == history[-1][0] + history[-1][1]
        history.append((sequence, count))
        state.record(header, offset, NOW_MS)
        replayed.record(header._replace(base_offset=offset), offset, NOW_MS)
        offset += count
    assert replayed.to_bytes() == state.to_bytes()
