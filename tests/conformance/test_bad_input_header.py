"""Bad input, request headers: keys and versions that are not served, client ids, tagged fields, varints."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.wire.frame import decode_response
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from millrace.wire.primitives import uvarint
from support.raw import MIB, PeerClosed, WatchedBroker, framed, request_header, served_versions


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        yield running


SOFTWARE = b"\x04raw\x021\0"
"""The body of an ApiVersions request from v3 on."""


@pytest.mark.parametrize("api_key", [-1, -32768, 4, 5, 6, 7, 52, 58, 62, 93, 999, 32767])
@pytest.mark.parametrize("version", [0, 3, 32767])
def test_an_unknown_api_key_is_refused(broker: WatchedBroker, api_key: int, version: int) -> None:
    broker.refuses(framed(api_key, version))


def test_versions_that_are_not_served_are_refused(broker: WatchedBroker) -> None:
    """For every API: below the lowest, above the highest and far off; ApiVersions has a test of its own."""
    with broker.connect() as client:
        served = served_versions(client)
    with broker.unharmed():
        for key, (low, high) in served.items():
            if key == ApiKey.API_VERSIONS:
                continue
            for version in {low - 1, high + 1, -1, -32768, 32767}:
                with broker.connect() as client:
                    client.alive()
                    client.send(framed(key, version))
                    assert client.expect_close() == [], (key, version)


@pytest.mark.parametrize("version", [5, 6, 100, 32767, -1, -32768])
@pytest.mark.parametrize("body", [SOFTWARE, b"", b"\xff" * 100], ids=["known-body", "no-body", "unknown-body"])
def test_an_unknown_version_of_api_versions_is_answered_in_v0(broker: WatchedBroker, version: int, body: bytes) -> None:
    with broker.unharmed(), broker.connect() as client:
        client.send(framed(ApiKey.API_VERSIONS, version, body, correlation_id=99))
        correlation_id, response = decode_response(ApiVersionsResponse, 0, client.read_frame())
        assert correlation_id == 99
        assert response.error_code == ErrorCode.UNSUPPORTED_VERSION
        listed = {item.api_key: (item.min_version, item.max_version) for item in response.api_keys}
        assert listed[ApiKey.API_VERSIONS] == (0, 4)
        client.alive()


BAD_CLIENT_IDS: dict[str, dict[str, Any]] = {
    "length-minus-2": {"client_id_length": -2},
    "length-minimum": {"client_id_length": -32768},
    "length-over-the-rest": {"client_id_length": 100},
    "length-maximum": {"client_id_length": 32767},
    "overlong-utf8": {"client_id": b"\xc0\x80"},
    "surrogate": {"client_id": b"\xed\xa0\x80"},
    "cut-utf8": {"client_id": b"abc\xe2\x82"},
    "latin-1": {"client_id": b"caf\xe9"},
    "utf-16": {"client_id": b"\xff\xfeh\0i\0"},
}


@pytest.mark.parametrize("case", BAD_CLIENT_IDS)
@pytest.mark.parametrize("version", [0, 3])
def test_a_client_id_that_is_no_text_is_refused(broker: WatchedBroker, case: str, version: int) -> None:
    header = request_header(ApiKey.API_VERSIONS, version, **BAD_CLIENT_IDS[case])
    raw = header + (SOFTWARE if version >= 3 else b"")
    broker.refuses(struct.pack(">i", len(raw)) + raw)


ODD_CLIENT_IDS = {
    "null": None,
    "empty": b"",
    "huge": b"x" * 32767,
    "newline": b"evil\n2026-01-01 00:00:00 ERROR forged line",
    "carriage-return": b"evil\r\nforged",
    "escape": b"\x1b[2J\x1b]0;owned\x07",
    "nul": b"a\0b",
    "format": b"%s%s%n{0}{__class__}",
    "unicode": "ключ-日本語-\U0001f600".encode(),
    "line-separator": "a\u2028b\u2029c\u0085d".encode(),
    "path": b"../../etc/passwd",
}


@pytest.mark.parametrize("case", ODD_CLIENT_IDS)
def test_an_odd_client_id_is_served_and_never_reaches_the_log(broker: WatchedBroker, case: str) -> None:
    client_id = ODD_CLIENT_IDS[case]
    log_start = broker.log_path.stat().st_size
    with broker.unharmed(), broker.connect() as client:
        for version, body in ((0, b""), (3, SOFTWARE)):
            client.send(framed(ApiKey.API_VERSIONS, version, body, client_id=client_id, correlation_id=5))
            correlation_id, response = decode_response(ApiVersionsResponse, version, client.read_frame())
            assert (correlation_id, response.error_code) == (5, 0)
        # A failure is where a name would be logged.
        client.send(framed(ApiKey.METADATA, 1, b"\0", client_id=client_id))
        client.expect_close()
    log = broker.log_text(log_start)
    assert "\x1b" not in log and "\0" not in log
    assert not any(line.startswith(("forged", "2026-01-01 00:00:00 ERROR")) for line in log.splitlines())


@pytest.mark.parametrize("name", ["", "-", "a b", "x\n", "%s", "a" * 30000, "\u00e9"])
def test_a_software_name_that_could_not_be_logged_is_an_invalid_request(broker: WatchedBroker, name: str) -> None:
    request = ApiVersionsRequest(client_software_name=name, client_software_version="1")
    with broker.unharmed(), broker.connect() as client:
        assert client.call(request, 3, within_s=1).error_code in {0, ErrorCode.INVALID_REQUEST}
        if name != "a" * 30000:
            assert client.call(request, 3, within_s=1).error_code == ErrorCode.INVALID_REQUEST
        client.alive()


def tag(number: int, value: bytes = b"") -> bytes:
    return uvarint(number) + uvarint(len(value)) + value


OVERLONG_5 = b"\x80\x80\x80\x80\x80\x00"
"""Zero in six bytes: an unsigned varint has five."""
OVERLONG_10 = b"\x80" * 10 + b"\x00"

BAD_TAGS = {
    "flood": uvarint(20_000_000) + b"\x01\x00" * 1_000_000,
    "flood-that-fits": uvarint(20_000) + b"".join(map(tag, range(20_000))),
    "count-maximum": uvarint(2**32 - 1),
    "count-without-tags": uvarint(3),
    "duplicate": uvarint(2) + tag(1000) + tag(1000),
    "unsorted": uvarint(2) + tag(1001) + tag(1000),
    "size-over-the-rest": uvarint(1) + uvarint(1000) + uvarint(10_000),
    "size-maximum": uvarint(1) + uvarint(1000) + uvarint(2**32 - 1),
    "size-2-63": uvarint(1) + uvarint(1000) + uvarint(2**63 - 1),
    "count-varint-of-6-bytes": OVERLONG_5,
    "count-varint-of-11-bytes": OVERLONG_10,
    "tag-varint-of-6-bytes": uvarint(1) + OVERLONG_5 + b"\0",
    "size-varint-of-11-bytes": uvarint(1) + uvarint(1000) + OVERLONG_10,
    "varint-without-end": b"\xff" * 64,
    "cut": b"\x80",
}

FLEXIBLE_REQUESTS = {
    "api-versions": (ApiKey.API_VERSIONS, 3, SOFTWARE),
    "produce": (ApiKey.PRODUCE, 9, struct.pack(">bhibb", 0, 1, 1000, 1, 0)),
    "fetch": (ApiKey.FETCH, 12, struct.pack(">iiiibiibbbb", -1, 0, 0, 0, 0, 0, -1, 1, 1, 1, 0)),
    "metadata": (ApiKey.METADATA, 9, b"\x01\0\0\0\0"),
}


@pytest.mark.parametrize("api", FLEXIBLE_REQUESTS)
def test_the_requests_that_carry_bad_tags_are_good_without_them(broker: WatchedBroker, api: str) -> None:
    key, version, body = FLEXIBLE_REQUESTS[api]
    with broker.unharmed(), broker.connect() as client:
        client.send(framed(key, version, body, tags=b"\0"))
        assert client.read_frame()[:4] == struct.pack(">i", 7)
        # A few tags that nobody knows are what tomorrow's clients send.
        client.send(framed(key, version, body, tags=uvarint(2) + tag(1000, b"abc") + tag(70_000)))
        assert client.read_frame()[:4] == struct.pack(">i", 7)


@pytest.mark.parametrize("api", FLEXIBLE_REQUESTS)
@pytest.mark.parametrize("case", BAD_TAGS)
def test_bad_tags_in_a_header_are_refused(broker: WatchedBroker, case: str, api: str) -> None:
    key, version, body = FLEXIBLE_REQUESTS[api]
    broker.refuses(framed(key, version, body, tags=BAD_TAGS[case]))


@pytest.mark.parametrize("api", FLEXIBLE_REQUESTS)
@pytest.mark.parametrize("case", BAD_TAGS)
def test_bad_tags_at_the_end_of_a_body_are_refused(broker: WatchedBroker, case: str, api: str) -> None:
    key, version, body = FLEXIBLE_REQUESTS[api]
    broker.refuses(framed(key, version, body[:-1] + BAD_TAGS[case]))


def test_cve_2026_111115_tagged_fields_before_login(broker: WatchedBroker) -> None:
    """Tagged fields of two bytes each, in many connections, before anything else is known of the peer."""
    flood = framed(ApiKey.API_VERSIONS, 3, SOFTWARE, tags=uvarint(500_000) + b"".join(map(tag, range(500_000))))
    assert len(flood) > MIB
    with broker.unharmed():
        for _ in range(10):
            with broker.connect() as client:
                try:
                    client.send(flood)
                except PeerClosed:
                    continue
                client.expect_close()
