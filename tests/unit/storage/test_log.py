"""The log: append, read, roll, time, retention, truncation, reopening."""

from __future__ import annotations

import errno
from dataclasses import replace
from pathlib import Path

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.records.batch import TimestampType, crc_matches, read_header, split
from millrace.records.compression import Codec
from millrace.records.control import EndMarker, MarkerType, encode_end_marker
from millrace.records.decode import Record, decode_records
from millrace.records.encode import encode_batch
from millrace.storage.files import Files
from millrace.storage.host import Alone
from millrace.storage.log import LOAD_ATTEMPTS, Log
from millrace.storage.recovery import LogPosition, LogState
from millrace.storage.settings import FlushMode, LogConfig
from support.batches import NOW_MS, batch, from_producer, with_header
from support.disk import FaultyFiles

CONFIG = LogConfig(flush_mode=FlushMode.OS)
SMALL = replace(CONFIG, segment_bytes=1000, index_interval_bytes=200)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "topic-0"
    path.mkdir()
    return path


def open_log(directory: Path, config: LogConfig = CONFIG, *, state: LogState | None = None) -> Log:
    return Log.open(directory, config, clock=ManualClock(), files=Files(sync=False), state=state)


def add(log: Log, data: bytes, *, epoch: int = 0, now_ms: int = NOW_MS) -> int:
    return log.append(data, leader_epoch=epoch, now_ms=now_ms).base_offset


def read_all(log: Log, max_bytes: int = 1 << 20) -> list[bytes | None]:
    values: list[bytes | None] = []
    offset = log.start_offset
    while offset < log.end_offset:
        result = log.read(offset, max_bytes)
        assert result.next_offset > offset
        for _, data in split(result.data):
            assert crc_matches(data)
            values += [r.value for r in decode_records(data) if r.offset >= offset]
        offset = result.next_offset
    return values


def code(error: pytest.ExceptionInfo[ApiError]) -> ErrorCode:
    return error.value.code


class TestRecompression:
    @pytest.mark.parametrize(
        ("codec", "little", "much"), [("gzip", 1, 9), ("lz4", 9, 12), ("lz4", 3, 12), ("zstd", -50, 19)]
    )
    def test_the_level_is_obeyed(self, directory: Path, codec: str, little: int, much: int) -> None:
        words = b" ".join(b"%d of the words" % (number * number % 977) for number in range(4000))
        data = encode_batch([Record(0, NOW_MS, b"k", words)])
        log = open_log(directory)
        sizes = []
        for level in (little, much):
            log.apply_config(replace(CONFIG, compression_type=codec, compression_level=level))
            before = log.size_bytes
            add(log, data)
            sizes.append(log.size_bytes - before)
        assert sizes[0] > sizes[1] * 1.02
        assert read_all(log) == [words, words]


class TestAppendAndRead:
    def test_offsets_and_epoch_are_stamped_and_the_rest_is_untouched(self, directory: Path) -> None:
        log = open_log(directory)
        data = batch(3)
        first = log.append(data, leader_epoch=7, now_ms=NOW_MS)
        second = log.append(memoryview(data), leader_epoch=7, now_ms=NOW_MS)
        assert (first.base_offset, first.last_offset, first.duplicate) == (0, 2, False)
        assert (second.base_offset, second.last_offset) == (3, 5)
        stored = log.read(3, 1 << 20).data
        header = read_header(stored)
        assert (header.base_offset, header.leader_epoch) == (3, 7)
        assert bytes(stored[16:]) == data[16:]
        assert log.end == LogPosition(6, 0, 2 * len(data))

    def test_reads_start_with_the_batch_that_holds_the_offset(self, directory: Path) -> None:
        log = open_log(directory)
        for _ in range(10):
            add(log, batch(5))
        result = log.read(12, 1)
        assert read_header(result.data).base_offset == 10
        assert result.next_offset == 15

    def test_only_whole_batches_are_read(self, directory: Path) -> None:
        log = open_log(directory)
        size = len(batch(2))
        for _ in range(10):
            add(log, batch(2))
        for max_bytes in range(4 * size):
            result = log.read(4, max_bytes, at_least_one=False)
            assert len(result.data) == max_bytes // size * size
            assert result.next_offset == 4 + 2 * (max_bytes // size)
            assert len(log.read(4, max_bytes).data) == max(max_bytes // size, 1) * size

    def test_a_limit_hides_what_lies_above_it(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        limits = []
        for _ in range(40):
            limits.append(log.end)
            add(log, batch(1))
        for limit in limits:
            seen, offset = [], 0
            while True:
                result = log.read(offset, 1 << 20, limit=limit)
                if not result.data:
                    break
                seen += [h.base_offset for h, _ in split(result.data)]
                offset = result.next_offset
            assert seen == list(range(limit.offset))

    @pytest.mark.parametrize("offset", [-1, 6, 2**63 - 1])
    def test_offsets_outside_are_refused(self, directory: Path, offset: int) -> None:
        log = open_log(directory)
        add(log, batch(5))
        with pytest.raises(ApiError) as error:
            log.read(offset, 100)
        assert code(error) is ErrorCode.OFFSET_OUT_OF_RANGE
        assert log.read(5, 100).data == b""

    def test_segments_roll_by_size(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        for i in range(100):
            assert add(log, batch(1, size=50)) == i
        assert log.segment_count > 10
        assert len(read_all(log)) == 100
        names = sorted(p.name for p in directory.glob("*.log"))
        assert names[0] == "00000000000000000000.log" and len(names) == log.segment_count
        assert all(p.stat().st_size <= 1000 for p in directory.glob("*.log"))

    def test_segments_roll_by_age(self, directory: Path) -> None:
        log = open_log(directory, replace(CONFIG, segment_ms=1000, timestamp_after_max_ms=10**9))
        add(log, batch(1))
        add(log, batch(1, timestamp_ms=NOW_MS + 1000))
        assert log.segment_count == 1
        add(log, batch(1, timestamp_ms=NOW_MS + 1001))
        assert log.segment_count == 2

    def test_each_segment_has_an_age_of_its_own(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        drawn = iter([0, 400, 999])
        asked: list[int] = []
        monkeypatch.setattr("random.randrange", lambda limit: (asked.append(limit), next(drawn))[1])
        config = replace(CONFIG, segment_ms=1000, segment_jitter_ms=5000, timestamp_after_max_ms=10**9)
        log = open_log(directory, config)
        now_ms = NOW_MS
        for longest_ms, count in ((1000, 1), (600, 2), (1, 3)):
            add(log, batch(1, timestamp_ms=now_ms))
            add(log, batch(1, timestamp_ms=now_ms + longest_ms))
            assert log.segment_count == count
            now_ms += longest_ms + 1
        assert asked == [1000] * 3, "never more than the age itself"

    def test_segments_without_timestamps_roll_by_the_clock(self, directory: Path) -> None:
        clock = ManualClock()
        log = Log.open(directory, replace(CONFIG, segment_ms=1000), clock=clock, files=Files(sync=False))
        data = encode_batch([Record(0, -1, b"k", b"v")])
        add(log, data, now_ms=clock.wall_ms())
        add(log, data, now_ms=clock.wall_ms() + 1000)
        assert log.segment_count == 1
        add(log, data, now_ms=clock.wall_ms() + 1001)
        assert log.segment_count == 2

    def test_segments_roll_when_the_index_is_full(self, directory: Path) -> None:
        log = open_log(directory, replace(CONFIG, index_interval_bytes=1, segment_index_bytes=12 * 4))
        for _ in range(20):
            add(log, batch(1))
        assert log.segment_count == 4

    def test_a_batch_larger_than_a_segment_is_refused(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        with pytest.raises(ApiError) as error:
            add(log, batch(1, size=2000))
        assert code(error) is ErrorCode.RECORD_LIST_TOO_LARGE
        assert log.end_offset == 0

    def test_few_descriptors_serve_many_segments(self, directory: Path) -> None:
        files = Files(max_open=4, sync=False)
        log = Log.open(directory, SMALL, clock=ManualClock(), files=files)
        for _ in range(200):
            add(log, batch(1, size=50))
        assert len(read_all(log)) == 200
        assert files.open_count <= 4


class TestSettings:
    def test_log_append_time_is_stamped_with_a_valid_crc(self, directory: Path) -> None:
        log = open_log(directory, replace(CONFIG, timestamp_type=TimestampType.LOG_APPEND))
        appended = log.append(batch(3, codec=Codec.ZSTD), leader_epoch=1, now_ms=NOW_MS + 77)
        assert appended.log_append_time_ms == NOW_MS + 77
        stored = log.read(0, 1 << 20).data
        header = read_header(stored)
        assert crc_matches(stored)
        assert header.timestamp_type is TimestampType.LOG_APPEND and header.max_timestamp_ms == NOW_MS + 77
        assert [r.timestamp_ms for r in decode_records(stored)] == [NOW_MS + 77] * 3

    def test_log_append_time_ignores_the_producers_clock(self, directory: Path) -> None:
        log = open_log(directory, replace(CONFIG, timestamp_type=TimestampType.LOG_APPEND))
        first = log.append(with_header(from_producer(1, 0), max_timestamp_ms=2**62), leader_epoch=0, now_ms=NOW_MS)
        again = log.append(with_header(from_producer(1, 0), max_timestamp_ms=2**62), leader_epoch=0, now_ms=NOW_MS + 5)
        assert again.duplicate and again.log_append_time_ms == first.log_append_time_ms == NOW_MS

    @pytest.mark.parametrize("name", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
    def test_a_topic_may_have_a_codec_of_its_own(self, directory: Path, name: str) -> None:
        log = open_log(directory, replace(CONFIG, compression_type=name))
        for sent in Codec:
            add(log, batch(20, codec=sent))
        for header, data in split(log.read(0, 1 << 20).data):
            assert header.codec is (Codec.NONE if name == "uncompressed" else Codec[name.upper()])
            assert crc_matches(data)
        assert len(read_all(log)) == 100

    def test_a_compacted_topic_wants_keys(self, directory: Path) -> None:
        log = open_log(directory, replace(CONFIG, compact=True))
        add(log, batch(3, codec=Codec.GZIP))
        with pytest.raises(ApiError) as error:
            add(log, encode_batch([Record(0, NOW_MS, b"k", b"v"), Record(1, NOW_MS, None, b"v")]))
        assert code(error) is ErrorCode.INVALID_RECORD
        assert log.end_offset == 3

    def test_records_are_walked_only_where_asked(self, directory: Path) -> None:
        lying = with_header(batch(3), count=2, last_offset_delta=1)
        log = open_log(directory)
        add(log, lying)
        log.apply_config(replace(CONFIG, validate_records=True))
        with pytest.raises(ApiError) as error:
            add(log, lying)
        assert code(error) is ErrorCode.INVALID_RECORD

    def test_limits_follow_the_config(self, directory: Path) -> None:
        log = open_log(directory)
        log.apply_config(replace(CONFIG, max_message_bytes=100))
        with pytest.raises(ApiError) as error:
            add(log, batch(1, size=200))
        assert code(error) is ErrorCode.MESSAGE_TOO_LARGE

    def test_the_broker_may_write_control_batches(self, directory: Path) -> None:
        log = open_log(directory)
        marker = encode_end_marker(
            EndMarker(MarkerType.COMMIT, 3), producer_id=1, producer_epoch=0, timestamp_ms=NOW_MS
        )
        with pytest.raises(ApiError):
            add(log, marker)
        assert log.append(marker, leader_epoch=0, now_ms=NOW_MS, from_client=False).base_offset == 0
        assert [p.coordinator_epoch for p in log.producers] == [3]


class TestIdempotence:
    def test_the_last_five_batches_are_recognised(self, directory: Path) -> None:
        log = open_log(directory)
        for i in range(10):
            add(log, from_producer(1, i * 3, 3))
        for i in range(5, 10):
            again = log.append(from_producer(1, i * 3, 3), leader_epoch=0, now_ms=NOW_MS)
            assert again.duplicate and (again.base_offset, again.last_offset) == (i * 3, i * 3 + 2)
        with pytest.raises(ApiError) as error:
            add(log, from_producer(1, 4 * 3, 3))
        assert code(error) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert log.end_offset == 30

    @pytest.mark.parametrize("clean", [True, False])
    def test_they_are_recognised_after_a_restart(self, directory: Path, clean: bool) -> None:
        log = open_log(directory, SMALL)
        for i in range(30):
            add(log, from_producer(1, i, size=60))
            add(log, from_producer(2, i, size=60))
        if clean:
            log.close()
            state = LogState(0, 60, clean=True)
        else:
            log.release()
            state = LogState()
        log = open_log(directory, SMALL, state=state)
        for i in range(25, 30):
            again = log.append(from_producer(2, i, size=60), leader_epoch=0, now_ms=NOW_MS)
            assert again.duplicate and again.base_offset == 2 * i + 1
        assert add(log, from_producer(1, 30, size=60)) == 60

    def test_truncation_rolls_the_state_back(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        for i in range(40):
            add(log, from_producer(1, i, size=60))
        for end in (33, 20, 7):
            log.truncate_to(end)
            assert [p.last_sequence for p in log.producers] == [end - 1]
            assert add(log, from_producer(1, end, size=60)) == end

    def test_a_failed_write_is_not_remembered(self, directory: Path) -> None:
        files = FaultyFiles(directory)
        log = Log.open(directory, CONFIG, clock=ManualClock(), files=files)
        add(log, from_producer(1, 0))
        files.fail("pwritev", errno.ENOSPC)
        with pytest.raises(StorageError):
            add(log, from_producer(1, 1))
        retried = log.append(from_producer(1, 1), leader_epoch=0, now_ms=NOW_MS)
        assert not retried.duplicate and retried.base_offset == 1

    def test_silent_producers_are_forgotten(self, directory: Path) -> None:
        log = open_log(directory, replace(CONFIG, producer_expiration_ms=1000, retention_ms=-1))
        add(log, from_producer(1, 0))
        log.enforce_retention(NOW_MS + 999)
        assert len(log.producers) == 1
        log.enforce_retention(NOW_MS + 1000)
        assert not log.producers

    @pytest.mark.parametrize("stop", ["clean", "crash", "none"])
    def test_a_backfill_keeps_its_deduplication(self, directory: Path, stop: str) -> None:
        config = replace(CONFIG, producer_expiration_ms=1000, retention_ms=-1)
        clock = ManualClock(NOW_MS)
        log = Log.open(directory, config, clock=clock, files=Files(sync=False))
        old = batch(2, producer_id=1, producer_epoch=0, sequence=0, timestamp_ms=NOW_MS - 90 * 86_400_000)
        add(log, old)
        if stop != "none":
            if stop == "clean":
                log.close()
            else:
                log.release()
            state = LogState(0, 2, clean=True) if stop == "clean" else LogState()
            log = Log.open(directory, config, clock=clock, files=Files(sync=False), state=state)
        log.enforce_retention(NOW_MS + 999)
        assert log.append(old, leader_epoch=0, now_ms=NOW_MS).duplicate

    def test_aborted_transactions_are_indexed(self, directory: Path) -> None:
        log = open_log(directory, SMALL)

        def transactional(producer_id: int, sequence: int) -> bytes:
            return batch(2, producer_id=producer_id, producer_epoch=0, sequence=sequence, transactional=True)

        def end(producer_id: int, kind: MarkerType) -> None:
            marker = encode_end_marker(
                EndMarker(kind, 0), producer_id=producer_id, producer_epoch=0, timestamp_ms=NOW_MS
            )
            log.append(marker, leader_epoch=0, now_ms=NOW_MS, from_client=False)

        add(log, transactional(1, 0))
        add(log, transactional(2, 0))
        assert log.first_unstable_offset(log.end_offset) == 0
        end(1, MarkerType.ABORT)
        assert log.first_unstable_offset(log.end_offset) == 2
        end(2, MarkerType.COMMIT)
        assert log.first_unstable_offset(log.end_offset) is None
        for _ in range(3):
            expected = log.aborted_transactions(0, log.end_offset)
            assert [(a.producer_id, a.first_offset, a.last_offset, a.last_stable_offset) for a in expected] == [
                (1, 0, 4, 2)
            ]
            log.release()
            log = open_log(directory, SMALL)
        with pytest.raises(ApiError) as error:
            add(log, transactional(1, 2))
            add(log, from_producer(1, 4))
        assert code(error) is ErrorCode.INVALID_TXN_STATE


class TestTime:
    def make(self, directory: Path) -> Log:
        log = open_log(directory, replace(SMALL, timestamp_after_max_ms=10**9))
        for i in range(60):
            add(log, batch(4, timestamp_ms=NOW_MS + 10 * i, codec=Codec(i % 5)))
        return log

    @pytest.mark.parametrize("reopen", [None, True, False])
    def test_the_first_record_at_or_after_a_time(self, directory: Path, reopen: bool | None) -> None:
        log = self.make(directory)
        if reopen is not None:
            end = log.end_offset
            log.close() if reopen else log.release()
            log = open_log(directory, SMALL, state=LogState(0, end, clean=True) if reopen else None)
        for i in range(60):
            for delta, offset, found_ms in ((0, 0, 0), (1, 1, 1), (3, 3, 3), (4, 4, 10), (9, 4, 10)):
                found = log.offset_for_time(NOW_MS + 10 * i + delta)
                if i == 59 and delta > 3:
                    assert found is None
                else:
                    assert found is not None
                    assert (found.offset, found.timestamp_ms) == (4 * i + offset, NOW_MS + 10 * i + found_ms)
        assert log.offset_for_time(0) is not None

    def test_limit_and_start_are_respected(self, directory: Path) -> None:
        log = self.make(directory)
        log.delete_records_before(42)
        found = log.offset_for_time(0)
        assert found is not None and found.offset == 42
        assert log.offset_for_time(NOW_MS + 103, LogPosition(43, 0, 0)) is None
        latest = log.max_timestamp()
        assert latest is not None and (latest.offset, latest.timestamp_ms) == (239, NOW_MS + 593)
        below = log.max_timestamp(LogPosition(100, 0, 0))
        assert below is not None and below.offset == 99

    def test_an_empty_log_has_no_times(self, directory: Path) -> None:
        log = open_log(directory)
        assert log.offset_for_time(0) is None
        assert log.max_timestamp() is None

    def test_records_that_cannot_be_read_stand_for_their_batch(self, directory: Path) -> None:
        log = open_log(directory)
        add(log, with_header(batch(3), count=2, last_offset_delta=1))
        found = log.offset_for_time(NOW_MS)
        assert found is not None and found.offset == 0


class TestRetention:
    def fill(self, directory: Path, config: LogConfig) -> Log:
        log = open_log(directory, replace(config, timestamp_after_max_ms=10**12))
        for i in range(100):
            add(log, batch(1, size=50, timestamp_ms=NOW_MS + i * 1000))
        return log

    def test_by_time(self, directory: Path) -> None:
        log = self.fill(directory, replace(SMALL, retention_ms=50_000))
        assert log.enforce_retention(NOW_MS + 50_000) == 0
        assert log.enforce_retention(NOW_MS + 99_000) > 0
        assert 40 <= log.start_offset <= 50
        assert read_all(log)[0] == b"v0 ".ljust(50, b".")
        assert log.enforce_retention(NOW_MS + 10**9) > 0
        assert log.start_offset == log.end_offset == 100
        assert add(log, batch(1)) == 100

    def test_everything_deleted_still_knows_its_offsets(self, directory: Path) -> None:
        log = self.fill(directory, replace(SMALL, retention_ms=1))
        log.enforce_retention(NOW_MS + 10**9)
        assert [p.name for p in directory.glob("*.log")] == [f"{100:020d}.log"]
        log.release()
        log = open_log(directory, SMALL)
        assert (log.start_offset, log.end_offset) == (100, 100)

    def test_by_size(self, directory: Path) -> None:
        log = self.fill(directory, replace(SMALL, retention_bytes=4000, retention_ms=-1))
        log.enforce_retention(NOW_MS)
        assert 4000 <= log.size_bytes < 5000

    def test_not_above_the_high_watermark(self, directory: Path) -> None:
        log = self.fill(directory, replace(SMALL, retention_bytes=0, retention_ms=-1))
        log.enforce_retention(NOW_MS, deletable_below=33)
        assert 25 <= log.start_offset <= 33

    def test_a_compacted_topic_deletes_by_neither(self, directory: Path) -> None:
        log = self.fill(directory, replace(SMALL, retention_bytes=0, retention_ms=0, compact=True, delete=False))
        assert log.enforce_retention(NOW_MS + 10**9) == 0

    def test_delete_records(self, directory: Path) -> None:
        log = self.fill(directory, SMALL)
        segments = log.segment_count
        assert log.delete_records_before(50) == 50
        assert log.segment_count < segments
        assert log.delete_records_before(10) == 50
        with pytest.raises(ApiError) as error:
            log.read(49, 100)
        assert code(error) is ErrorCode.OFFSET_OUT_OF_RANGE
        with pytest.raises(ApiError):
            log.delete_records_before(101)
        assert log.delete_records_before(100) == 100
        assert add(log, batch(1, timestamp_ms=NOW_MS)) == 100
        log.release()
        again = open_log(directory, SMALL, state=LogState(start_offset=100))
        assert (again.start_offset, again.end_offset) == (100, 101)

    def test_a_start_above_the_end_goes_on_from_the_start(self, directory: Path) -> None:
        log = self.fill(directory, SMALL)
        log.release()
        again = open_log(directory, SMALL, state=LogState(start_offset=500))
        assert (again.start_offset, again.end_offset) == (500, 500)
        assert add(again, batch(2)) == 500


class TestEpochs:
    def test_epochs_are_found_and_kept(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        for epoch in (0, 0, 3, 3, 5):
            add(log, batch(2, size=50), epoch=epoch)
        answers = {0: (0, 4), 1: (0, 4), 3: (3, 8), 4: (3, 8), 5: (5, 10), 6: (-1, -1), -1: (-1, -1)}
        assert {epoch: log.end_offset_for_epoch(epoch) for epoch in answers} == answers
        log.close()
        assert (directory / "leader-epoch-checkpoint").read_text() == "0\n3\n0 0\n3 4\n5 8\n"
        for damage in (None, b"", b"0\n3\n0 0\n", b"\xff\xfe"):
            if damage is not None:
                (directory / "leader-epoch-checkpoint").write_bytes(damage)
            again = open_log(directory, SMALL, state=LogState(0, 10, clean=True))
            assert {epoch: again.end_offset_for_epoch(epoch) for epoch in answers} == answers
            assert again.latest_epoch == 5
            again.close()

    def test_an_epoch_without_records_is_kept_at_a_clean_close(self, directory: Path) -> None:
        log = open_log(directory)
        add(log, batch(1), epoch=1)
        log.assign_epoch(4)
        log.close()
        again = open_log(directory, state=LogState(0, 1, clean=True))
        assert again.end_offset_for_epoch(1) == (1, 1)

    def test_truncation_takes_epochs_along(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        for epoch in range(20):
            add(log, batch(1, size=50), epoch=epoch)
        log.truncate_to(7)
        assert log.latest_epoch == 6
        log.delete_records_before(3)
        assert log.end_offset_for_epoch(1) == (1, 3)


class TestFollower:
    def test_batches_keep_their_offsets(self, directory: Path, tmp_path: Path) -> None:
        leader = open_log(directory, SMALL)
        for epoch in range(30):
            add(leader, batch(2, size=30), epoch=epoch // 10)
        other = tmp_path / "follower"
        other.mkdir()
        follower = open_log(other, replace(SMALL, segment_bytes=700))
        while follower.end_offset < leader.end_offset:
            follower.append_as_follower(leader.read(follower.end_offset, 300).data)
        assert read_all(follower) == read_all(leader)
        assert follower.end_offset_for_epoch(1) == leader.end_offset_for_epoch(1) == (1, 40)

    def test_bad_batches_are_refused(self, directory: Path) -> None:
        log = open_log(directory)
        good = batch(2, base_offset=0, leader_epoch=1)
        log.append_as_follower(good)
        for bad in (good, batch(1, base_offset=2)[:-1], with_header(batch(1, base_offset=2), crc=1)):
            with pytest.raises(ApiError) as error:
                log.append_as_follower(bad)
            assert code(error) is ErrorCode.CORRUPT_MESSAGE
        assert log.append_as_follower(batch(1, base_offset=9, leader_epoch=1)) == 10
        assert log.append_as_follower(b"") == 10

    def test_reset(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        for _ in range(20):
            add(log, batch(1, size=50))
        log.reset_to(1000)
        assert (log.start_offset, log.end_offset, log.latest_epoch) == (1000, 1000, -1)
        assert log.append_as_follower(batch(1, base_offset=1000, leader_epoch=2)) == 1001
        log.release()
        assert open_log(directory).start_offset == 1000

    def test_a_truncation_forgets_where_readers_were(self, directory: Path) -> None:
        log = open_log(directory)
        for _ in range(6):
            add(log, batch(1))
        for offset in range(6):
            log.read(offset, 1)
        log.truncate_to(2)
        add(log, batch(3, size=50))
        add(log, batch(1))
        assert [read_header(log.read(offset, 1).data).base_offset for offset in range(6)] == [0, 1, 2, 2, 2, 5]

    def test_truncate_in_the_middle_of_a_batch_drops_it_whole(self, directory: Path) -> None:
        log = open_log(directory)
        for _ in range(5):
            add(log, batch(10))
        log.truncate_to(25)
        assert log.end_offset == 20
        assert len(read_all(log)) == 20
        log.truncate_to(0)
        assert (log.end_offset, log.size_bytes) == (0, 0)


class TestDiskFaults:
    @pytest.mark.parametrize("partial", [0, 1, 15, 16, 17, 60, 100])
    @pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
    def test_a_failed_append_changes_nothing(self, directory: Path, number: int, partial: int) -> None:
        files = FaultyFiles(directory)
        log = Log.open(directory, SMALL, clock=ManualClock(), files=files)
        for _ in range(3):
            add(log, batch(2))
        before = (log.end, log.size_bytes, log.end_offset)
        files.fail("pwritev", number, partial_bytes=partial, match=".log", times=3)
        for _ in range(3):
            with pytest.raises(StorageError):
                add(log, batch(2, size=80))
            assert (log.end, log.size_bytes, log.end_offset) == before
        assert add(log, batch(1)) == 6
        assert len(read_all(log)) == 7
        log.release()
        assert len(read_all(open_log(directory, SMALL))) == 7

    def test_a_tail_that_cannot_be_cut_is_overwritten(self, directory: Path) -> None:
        files = FaultyFiles(directory)
        log = Log.open(directory, CONFIG, clock=ManualClock(), files=files)
        add(log, batch(1))
        files.fail("pwritev", errno.ENOSPC, partial_bytes=500)
        files.fail("truncate", errno.EIO)
        with pytest.raises(StorageError):
            add(log, batch(1, size=1000))
        add(log, batch(1))
        log.close()
        assert (directory / f"{0:020d}.log").stat().st_size == 2 * len(batch(1))
        assert open_log(directory, state=LogState(0, 2, clean=True)).end.offset == 2

    def test_a_roll_survives_a_full_disk(self, directory: Path) -> None:
        files = FaultyFiles(directory)
        log = Log.open(directory, SMALL, clock=ManualClock(), files=files)
        files.fail("pwritev", errno.ENOSPC, match="index", times=-1)
        files.fail("pwritev", errno.ENOSPC, match="snapshot", times=-1)
        for _ in range(50):
            add(log, batch(1, size=50))
        files.heal()
        assert len(read_all(log)) == 50

    def test_a_read_error_is_a_storage_error(self, directory: Path) -> None:
        files = FaultyFiles(directory)
        log = Log.open(directory, CONFIG, clock=ManualClock(), files=files)
        add(log, batch(1))
        files.fail("pread", errno.EIO)
        with pytest.raises(StorageError):
            log.read(0, 100)
        assert log.read(0, 100).data

    def test_a_failed_sync_takes_the_log_offline(self, directory: Path) -> None:
        files = FaultyFiles(directory)
        log = Log.open(directory, CONFIG, clock=ManualClock(), files=files)
        add(log, batch(1))
        log.flush()
        assert log.flushed_offset == 1
        add(log, batch(1))
        files.fail("datasync", errno.EIO)
        with pytest.raises(StorageError):
            log.flush()
        assert log.flushed_offset == 1
        with pytest.raises(StorageError):
            add(log, batch(1))
        with pytest.raises(StorageError):
            log.read(0, 1)
        assert (log.start_offset, log.end_offset) == (0, 2), "what was said of it stays"
        log.release()
        assert files.open_count == 0
        with pytest.raises(StorageError):
            log.read(0, 1)

    def test_a_file_removed_behind_our_back_is_not_made_again_by_a_read(self, directory: Path) -> None:
        files = Files(sync=False)
        log = Log.open(directory, CONFIG, clock=ManualClock(), files=files)
        add(log, batch(1))
        files.close_all()
        path = directory / f"{0:020d}.log"
        path.unlink()
        with pytest.raises(StorageError):
            log.read(0, 100)
        assert not path.exists()

    def test_a_file_cut_behind_our_back_is_not_served(self, directory: Path) -> None:
        log = open_log(directory)
        add(log, batch(1))
        with (directory / f"{0:020d}.log").open("r+b") as file:
            file.truncate(50)
        with pytest.raises(StorageError):
            log.read(0, 100)


class Asked(Alone):
    """A host that counts how often its log went offline."""

    failures = 0

    def log_failed(self) -> None:
        self.failures += 1


class TestLaziness:
    def test_a_clean_log_opens_nothing_until_used(self, directory: Path) -> None:
        log = open_log(directory, SMALL)
        for _ in range(50):
            add(log, batch(1, size=50))
        log.close()
        files = FaultyFiles(directory)
        again = Log.open(directory, SMALL, clock=ManualClock(), files=files, state=LogState(0, 50, clean=True))
        assert (again.start_offset, again.end_offset, again.flushed_offset) == (0, 50, 50)
        assert not again.dirty and again.begin_flush(final=True) is None
        assert (again.bytes_after(50), again.bytes_after(49)) == (0, None)
        again.apply_config(replace(SMALL, max_producers=1))
        again.prepare_close()
        again.close()
        assert files.calls == {}
        assert again.size_bytes == sum(p.stat().st_size for p in directory.glob("*.log"))

    def test_a_log_that_was_closed_is_used_again(self, directory: Path) -> None:
        files = Files(sync=False)
        log = Log.open(directory, SMALL, clock=ManualClock(), files=files)
        for round_number in range(3):
            for _ in range(20):
                add(log, batch(1, size=50))
            log.close()
            assert files.open_count == 0
            assert len(read_all(log)) == log.end_offset == log.flushed_offset == 20 * (round_number + 1)
        log.release()

    @pytest.mark.parametrize("failures", [LOAD_ATTEMPTS - 1, LOAD_ATTEMPTS])
    def test_a_log_that_cannot_be_read_is_tried_again_a_few_times(self, directory: Path, failures: int) -> None:
        log = open_log(directory)
        add(log, batch(1))
        log.close()
        files = FaultyFiles(directory)
        host = Asked(files)
        state = LogState(0, 1, clean=True)
        again = Log.open(directory, CONFIG, clock=ManualClock(), files=files, state=state, host=host)
        files.fail("read_file", errno.EIO, match="leader-epoch", times=failures)
        for _ in range(failures):
            with pytest.raises(StorageError):
                again.read(0, 100)
        if failures < LOAD_ATTEMPTS:
            assert again.read(0, 100).data and again.failure is None
        else:
            with pytest.raises(StorageError):
                again.read(0, 100)
            assert again.failure is not None
        assert host.failures == (failures == LOAD_ATTEMPTS)
        again.release()
        assert files.open_count == 0

    def test_a_wrong_promise_is_checked(self, directory: Path) -> None:
        log = open_log(directory)
        for _ in range(5):
            add(log, batch(1))
        log.close()
        again = open_log(directory, state=LogState(0, 3, clean=True))
        assert again.end.offset == 5
