"""Which version of a request is sent."""

from __future__ import annotations

import pytest

from millrace.client.versions import VersionRange, known_code, version_for
from millrace.errors import ApiError, ErrorCode
from millrace.wire.keys import ApiKey
from millrace.wire.messages.fetch import FetchRequest


@pytest.mark.parametrize(
    ("low", "high", "at_most", "version"), [(0, 99, None, 18), (0, 99, 12, 12), (0, 7, 12, 7), (12, 12, 12, 12)]
)
def test_the_newest_that_both_know(low: int, high: int, at_most: int | None, version: int) -> None:
    assert version_for(FetchRequest, {ApiKey.FETCH: VersionRange(low, high)}, at_most=at_most) == version


@pytest.mark.parametrize(("low", "high", "at_most"), [(13, 99, 12), (0, 3, None), (19, 20, None)])
def test_no_version_in_common(low: int, high: int, at_most: int | None) -> None:
    with pytest.raises(ApiError, match=f"serves {low} to {high}, this client speaks 4 to {at_most or 18}") as caught:
        version_for(FetchRequest, {ApiKey.FETCH: VersionRange(low, high)}, at_most=at_most)
    assert caught.value.code is ErrorCode.UNSUPPORTED_VERSION


def test_errors_of_the_future() -> None:
    assert known_code(3) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert known_code(9999) is ErrorCode.UNKNOWN_SERVER_ERROR
