"""What is counted of requests, and how errors are found in every kind of answer."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.counting import STAGES, ApiCounts, RequestCounts, count_answered
from millrace.handlers.registry import Api
from millrace.wire.keys import ApiKey
from millrace.wire.messages import response_class
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.share_groups import ShareFetchResponse
from millrace.wire.schema import Array, Nested, Struct

APIS = registry.load()


@dataclass
class Request:
    """One that was answered."""

    counts: ApiCounts
    came_at: float
    begun_at: float
    parked_at: float
    ready_at: float
    size_bytes: int
    told_bytes: int


def test_a_time_of_zero_is_in_the_first_bucket() -> None:
    counts = ApiCounts()
    counts.answered_at_once(0.0, 0.0003, 100, 10)
    count_answered([Request(counts, 10.0, 10.002, 10.0023, 10.7023, 1000, 20)], 10.70235)
    assert (counts.requests, counts.request_bytes, counts.response_bytes) == (2, 1100, 30)
    stages = dict(counts.stages())
    assert [*stages] == [*STAGES]
    for value in stages.values():
        assert sum(value.counts) == 2
    assert stages["queue"].counts[0] == 1 and stages["queue"].total == pytest.approx(0.002)
    assert stages["local"].counts[0] == 0 and stages["local"].total == pytest.approx(0.0006)
    assert stages["remote"].counts[0] == 1 and stages["remote"].total == pytest.approx(0.7)
    assert stages["response"].counts[0] == 2 and stages["response"].total == pytest.approx(0.00005)


def test_answers_that_leave_together_are_counted_apart() -> None:
    first, second = ApiCounts(), ApiCounts()
    requests = [
        Request(counts, 0.0, 0.0, 0.01 * number, 0.02 * number, number, 10 * number)
        for number, counts in enumerate((first, first, second, first, second), start=1)
    ]
    count_answered(requests, 1.0)
    assert [(each.requests, each.request_bytes, each.response_bytes) for each in (first, second)] == [
        (3, 1 + 2 + 4, 70),
        (2, 3 + 5, 80),
    ]
    # Two neighbours of one API count like the second of them.
    assert dict(first.stages())["local"].total == pytest.approx(2 * 0.02 + 0.04)
    assert dict(second.stages())["response"].total == pytest.approx(2 - 0.16)
    assert sum(dict(second.stages())["remote"].counts) == 2 and dict(second.stages())["remote"].counts[0] == 0


def _with_errors(cls: type[Struct]) -> tuple[Struct, int]:
    """A message in which everything that can be is an error, one of each kind in every list; and how many that are."""
    made, errors = cls(), 0
    for field in cls.declaration.fields:
        if field.name in ("error_code", "acknowledge_error_code"):
            setattr(made, field.name, int(ErrorCode.UNKNOWN_SERVER_ERROR))
            errors += 1
        element = field.type.element if isinstance(field.type, Array) else field.type
        if isinstance(element, Nested):
            inner, more = _with_errors(element.resolved())
            setattr(made, field.name, [inner] if isinstance(field.type, Array) else inner)
            errors += more
    return made, errors


@pytest.mark.parametrize("api", [api for api in APIS.values() if not api.counts_errors], ids=lambda api: api.key.name)
def test_the_errors_of_every_api_are_found(api: Api) -> None:
    response, errors = _with_errors(response_class(api.key))
    counts = RequestCounts()
    counts.note_errors(api.key, response)
    assert errors > 0
    assert counts[api.key].errors == {ErrorCode.UNKNOWN_SERVER_ERROR: errors}
    counts.note_errors(api.key, response_class(api.key)())
    assert counts[api.key].errors == {ErrorCode.UNKNOWN_SERVER_ERROR: errors}


def test_only_the_hot_ones_count_for_themselves() -> None:
    assert {api.key for api in APIS.values() if api.counts_errors} == {ApiKey.PRODUCE, ApiKey.FETCH}


def test_every_item_counts() -> None:
    topics = [
        MetadataResponse.MetadataResponseTopic(error_code=code)
        for code in (0, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.LEADER_NOT_AVAILABLE, 3)
    ]
    counts = RequestCounts()
    counts.note_errors(ApiKey.METADATA, MetadataResponse(topics=topics))
    assert counts[ApiKey.METADATA].errors == {3: 2, ErrorCode.LEADER_NOT_AVAILABLE: 1}
    counts.note_errors(ApiKey.METADATA, None)
    counts.note_errors(ApiKey.SHARE_FETCH, ShareFetchResponse(responses=[]))
    assert counts[ApiKey.SHARE_FETCH].errors == {}
