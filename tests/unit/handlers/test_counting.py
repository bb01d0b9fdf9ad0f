"""What is counted of requests, and how errors are found in every kind of answer."""

from __future__ import annotations

import pytest

from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.counting import STAGES, ApiCounts, RequestCounts
from millrace.handlers.registry import Api
from millrace.wire.keys import ApiKey
from millrace.wire.messages import response_class
from millrace.wire.messages.cluster import MetadataResponse
from millrace.wire.messages.share_groups import ShareFetchResponse
from millrace.wire.schema import Array, Nested, Struct

registry.load()


def test_a_time_of_zero_is_in_the_first_bucket() -> None:
    counts = ApiCounts()
    counts.answered_at_once(0.0, 0.0003, 100, 10)
    counts.answered(0.002, 0.0003, 0.7, 0.0001, 1000, 20)
    assert (counts.requests, counts.request_bytes, counts.response_bytes) == (2, 1100, 30)
    stages = dict(counts.stages())
    assert [*stages] == [*STAGES]
    for value in stages.values():
        assert sum(value.counts) == 2
    assert stages["queue"].counts[0] == 1 and stages["queue"].total == 0.002
    assert stages["local"].counts[0] == 0 and stages["local"].total == pytest.approx(0.0006)
    assert stages["remote"].counts[0] == 1 and stages["remote"].total == 0.7


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


@pytest.mark.parametrize(
    "api", [api for api in registry.served() if not api.counts_errors], ids=lambda api: api.key.name
)
def test_the_errors_of_every_api_are_found(api: Api) -> None:
    response, errors = _with_errors(response_class(api.key))
    counts = RequestCounts()
    counts.note_errors(api.key, response)
    assert errors > 0
    assert counts[api.key].errors == {ErrorCode.UNKNOWN_SERVER_ERROR: errors}
    counts.note_errors(api.key, response_class(api.key)())
    assert counts[api.key].errors == {ErrorCode.UNKNOWN_SERVER_ERROR: errors}


def test_only_the_hot_ones_count_for_themselves() -> None:
    assert {api.key for api in registry.served() if api.counts_errors} == {ApiKey.PRODUCE, ApiKey.FETCH}


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
