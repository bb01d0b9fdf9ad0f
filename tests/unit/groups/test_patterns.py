"""Topic patterns: RE2, whole names, bounded."""

from __future__ import annotations

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.groups import patterns


def test_whole_names_match() -> None:
    assert patterns.matching("a.*|b", ["a", "ab", "b", "bc", "ca"]) == {"a", "ab", "b"}


@pytest.mark.parametrize("pattern", ["(a", "a**b)", r"(a)\1", "(?<=a)b", "x" * 1_025, "\ud800"])
def test_what_re2_does_not_take_is_refused(pattern: str) -> None:
    with pytest.raises(ApiError) as refused:
        patterns.check(pattern)
    assert refused.value.code is ErrorCode.INVALID_REGULAR_EXPRESSION


def test_a_pattern_that_grows_is_bounded() -> None:
    with pytest.raises(ApiError):
        patterns.check("((((a{100}){100}){100}){100})")


def test_a_pattern_from_the_log_that_cannot_be_read_matches_nothing() -> None:
    assert patterns.matching("(a", ["a"]) == set()


def test_no_pattern_takes_exponential_time() -> None:
    assert patterns.matching("(a+)+$", ["a" * 200 + "!"]) == set()
