"""How long failures are waited for, on a manual clock."""

from __future__ import annotations

import pytest

from millrace.client.retrying import RETRIABLE, UNKNOWN, UNKNOWN_GRACE_MS, Attempts
from millrace.client.settings import ClientSettings
from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode


def attempts(clock: ManualClock, pauses: list[float], **settings: int) -> Attempts:
    def pause(seconds: float) -> None:
        pauses.append(seconds)
        clock.advance(seconds)

    return Attempts("the thing", ClientSettings((("h", 1),), **settings), clock, pause)


def fail_until_raised(tried: Attempts, code: ErrorCode) -> ApiError:
    with pytest.raises(ApiError) as caught:
        for _ in range(10_000):
            tried.failed(ApiError(code, "why"), about="t-0")
    return caught.value


def test_pauses_double_up_to_a_limit() -> None:
    pauses: list[float] = []
    clock = ManualClock()
    error = fail_until_raised(attempts(clock, pauses, retry_timeout_ms=5_000), ErrorCode.NETWORK_EXCEPTION)
    assert pauses[:6] == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert 5.0 <= clock.monotonic() < 6.0
    assert error.code is ErrorCode.NETWORK_EXCEPTION
    assert error.message == "the thing t-0: gave up after 5 s; the last cause: NETWORK_EXCEPTION: why"


def test_what_will_not_pass_is_raised_at_once() -> None:
    pauses: list[float] = []
    error = fail_until_raised(attempts(ManualClock(), pauses), ErrorCode.TOPIC_AUTHORIZATION_FAILED)
    assert pauses == []
    assert str(error) == "TOPIC_AUTHORIZATION_FAILED: the thing t-0: why"


@pytest.mark.parametrize("code", sorted(UNKNOWN))
def test_a_topic_that_is_missing_gets_a_short_grace(code: ErrorCode) -> None:
    clock = ManualClock()
    error = fail_until_raised(attempts(clock, []), code)
    assert UNKNOWN_GRACE_MS <= clock.monotonic() * 1000 < UNKNOWN_GRACE_MS + 1000
    assert str(error) == f"{code.name}: the thing t-0: why"


def test_time_counts_from_the_first_failure_after_a_success() -> None:
    clock = ManualClock()
    pauses: list[float] = []
    tried = attempts(clock, pauses, retry_timeout_ms=1_000, retry_backoff_ms=300)
    clock.advance(100)
    tried.failed(ApiError(ErrorCode.NETWORK_EXCEPTION))
    tried.failed(ApiError(ErrorCode.NETWORK_EXCEPTION))
    tried.succeeded()
    clock.advance(100)
    tried.failed(ApiError(ErrorCode.NETWORK_EXCEPTION))
    assert pauses == [0.3, 0.6, 0.3]
    with pytest.raises(ApiError):
        clock.advance(1)
        tried.failed(ApiError(ErrorCode.NETWORK_EXCEPTION))


def test_the_grace_starts_anew_when_the_topic_was_seen() -> None:
    clock = ManualClock()
    tried = attempts(clock, [])
    tried.count(ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    clock.advance(2.9)
    tried.count(ApiError(ErrorCode.LEADER_NOT_AVAILABLE))  # it exists now, and is being elected a leader
    clock.advance(2.9)
    tried.count(ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
    clock.advance(2.9)
    tried.count(ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))


def test_errors_of_bad_requests_are_not_retriable() -> None:
    for code in (
        ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.CORRUPT_MESSAGE,
        ErrorCode.SASL_AUTHENTICATION_FAILED, ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER, ErrorCode.UNSUPPORTED_VERSION,
    ):  # fmt: skip
        assert code not in RETRIABLE | UNKNOWN
