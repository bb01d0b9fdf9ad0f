"""Request and response headers against kio, for every declared API and version."""

from __future__ import annotations

import io

import pytest
from kio.index import load_entity_schema, load_request_schema, load_response_schema
from kio.serial import entity_reader, entity_writer
from kio.static.constants import EntityType
from kio.static.primitive import i16, i32

from millrace.wire.frame import (
    RequestHeader,
    encode_request,
    encode_response,
    read_request_header,
    read_response_header,
    response_header_version,
)
from millrace.wire.keys import ApiKey
from millrace.wire.messages import DECLARATIONS, request_class, response_class

EVERY_VERSION = [
    (key, version)
    for key in DECLARATIONS
    if key is not ApiKey.GET_REPLICA_LOG_INFO  # newer than kio
    for version in range(request_class(key).min_version, request_class(key).max_version + 1)
]


@pytest.mark.parametrize("client_id", [None, "", "gr\u00fc\u00dfe", "x" * 300])
def test_request_header_is_read_as_kio_writes_it(client_id: str | None) -> None:
    for key, version in EVERY_VERSION:
        schema = load_request_schema(key, version).__header_schema__
        buffer = io.BytesIO()
        header = schema(
            request_api_key=i16(key), request_api_version=i16(version), correlation_id=i32(-7), client_id=client_id
        )
        entity_writer(schema)(buffer, header)
        raw = buffer.getvalue()
        assert read_request_header(raw + b"body") == (RequestHeader(key, version, -7, client_id), len(raw))
        assert read_request_header(memoryview(raw)) == (RequestHeader(key, version, -7, client_id), len(raw))


@pytest.mark.parametrize("client_id", [None, "", "client"])
def test_request_header_is_written_as_kio_reads_it(client_id: str | None) -> None:
    for key, version in EVERY_VERSION:
        framed = encode_request(RequestHeader(key, version, 99, client_id), request_class(key)())
        assert int.from_bytes(framed[:4], "big") == len(framed) - 4
        schema = load_request_schema(key, version).__header_schema__
        header, size = entity_reader(schema)(framed, 4)
        assert (int(header.request_api_key), int(header.request_api_version)) == (int(key), version)
        assert (header.correlation_id, header.client_id) == (99, client_id)
        assert read_request_header(memoryview(framed)[4:])[1] == size


def test_response_header_is_kios() -> None:
    for key, version in EVERY_VERSION:
        framed = encode_response(-3, version, response_class(key)())
        assert int.from_bytes(framed[:4], "big") == len(framed) - 4
        schema = load_response_schema(key, version).__header_schema__
        header, size = entity_reader(schema)(framed, 4)
        assert header.correlation_id == -3
        assert read_response_header(memoryview(framed)[4:], key, version) == (-3, size)
        assert schema is load_entity_schema("response_header", response_header_version(key, version), EntityType.header)
