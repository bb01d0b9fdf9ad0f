"""What a dead letter says, how letters are packed, and which topics take them."""

from __future__ import annotations

from uuid import UUID

import pytest

from millrace.queues import dead_letters
from millrace.queues.acquisition import DeadLetter, DeadLetterReason
from millrace.queues.records import ShareKey
from millrace.queues.settings import DeadLetterSettings
from millrace.records.batch import read_header
from millrace.records.decode import Header, Record, decode_records
from support.batches import NOW_MS

KEY = ShareKey("group", UUID(int=3), 5)
LETTER = DeadLetter(10, 12, 4, DeadLetterReason.DELIVERY_COUNT_EXCEEDED)


def record(offset: int, size: int = 4) -> Record:
    return Record(offset, 1, b"k%d" % offset, b"v" * size, (Header("own", b"1"),))


def written(*originals: Record, copies: bool = True) -> list[Record]:
    return list(dead_letters.letters(KEY, "t", LETTER, originals, copies=copies, now_ms=NOW_MS))


def test_a_letter_says_where_its_record_lies_and_why_it_was_given_up() -> None:
    (letter,) = written(record(11), copies=False)
    assert (letter.key, letter.value, letter.timestamp_ms) == (None, None, NOW_MS)
    assert [(each.key, each.value) for each in letter.headers] == [
        ("__dlq.errors.topic", b"t"),
        ("__dlq.errors.partition", b"5"),
        ("__dlq.errors.offset", b"11"),
        ("__dlq.errors.group", b"group"),
        ("__dlq.errors.delivery.count", b"4"),
        ("__dlq.errors.message", b"released, and delivered as often as the group allows"),
    ]


def test_a_copy_has_what_its_record_had() -> None:
    (letter,) = written(record(11))
    assert (letter.key, letter.value) == (b"k11", b"vvvv")
    assert letter.headers[0] == Header("own", b"1")
    assert len(letter.headers) == 7


def test_only_records_of_the_range_get_a_letter() -> None:
    assert [each.offset for each in written(*(record(offset) for offset in (8, 9, 10, 12, 13)))] == [10, 12]


def test_letters_are_packed_into_batches_that_fit() -> None:
    letters = [Record(offset, NOW_MS, None, b"v" * 100) for offset in range(1_100)]
    packed = list(dead_letters.batches(letters, 4_096))
    assert all(len(each) <= 4_096 for each in packed)
    assert sum(read_header(each).count for each in packed) == 1_100
    assert all(read_header(each).base_offset == 0 for each in packed)
    assert len(list(dead_letters.batches(letters, 1 << 20))) == 3


def test_a_letter_that_is_too_long_loses_its_copy_and_nothing_else() -> None:
    packed = list(dead_letters.batches(written(record(10), record(11, 5_000), record(12)), 1_000))
    letters = [each for batch in packed for each in decode_records(batch)]
    assert [each.value for each in letters] == [b"vvvv", None, b"vvvv"]
    assert [each.headers[-4].value for each in letters] == [b"10", b"11", b"12"]
    assert letters[1].headers[0].key == "__dlq.errors.topic"


@pytest.mark.parametrize(
    ("topic", "exists", "is_enabled", "creates", "is_usable"),
    [
        ("dlq.t", True, True, False, True),
        ("dlq.t", True, False, True, False),
        ("dlq.t", False, False, False, False),
        ("dlq.t", False, False, True, True),
        ("orders", True, True, True, False),
        ("__consumer_offsets", True, True, True, False),
    ],
)
def test_which_topics_take_letters(topic: str, exists: bool, is_enabled: bool, creates: bool, is_usable: bool) -> None:
    settings = DeadLetterSettings(creates_topics=creates)
    reason = dead_letters.unusable_reason(topic, "t", exists=exists, is_enabled=is_enabled, settings=settings)
    assert (reason is None) == is_usable


def test_a_topic_does_not_take_its_own_letters() -> None:
    settings = DeadLetterSettings(name_prefix="")
    assert dead_letters.unusable_reason("t", "t", exists=True, is_enabled=True, settings=settings)
    assert not dead_letters.unusable_reason("u", "t", exists=True, is_enabled=True, settings=settings)
