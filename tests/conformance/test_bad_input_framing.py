"""Bad input, framing: sizes that lie, peers that are slow, silent, gone, greedy, or speak something else.

Not here: plaintext sent to a TLS port (`test_tls`).
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from millrace.wire.frame import RequestHeader, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.messages.configs import DescribeConfigsRequest
from millrace.wire.messages.fetch import FetchRequest
from support.raw import (
    MIB,
    PROMPT_S,
    PeerClosed,
    RawClient,
    WatchedBroker,
    api_versions_frame,
    batch,
    fetch_request,
    file_limit,
    framed,
)

MAX_FRAME_BYTES = 100 * MIB
IDLE_MS = 400


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with WatchedBroker() as running:
        yield running


@pytest.fixture(scope="module")
def impatient() -> Iterator[WatchedBroker]:
    """Closes what is idle after a moment."""
    with WatchedBroker({"connections.max.idle.ms": str(IDLE_MS)}) as running:
        yield running


@pytest.fixture
def crowded() -> Iterator[WatchedBroker]:
    """Takes few connections."""
    with WatchedBroker({"max.connections.per.ip": "120"}) as running:
        yield running


def size(value: int) -> bytes:
    return struct.pack(">i", value)


CLIENT_HELLO = bytes.fromhex("16030100c8010000c40303") + random.Random(1).randbytes(192)

NOT_FRAMES = {
    "size-minus-1": size(-1),
    "size-minimum": size(-(2**31)),
    "size-0": size(0),
    "size-3": size(3) + b"\0\x12\0",
    "size-9": size(9) + bytes(9),
    "size-maximum": size(2**31 - 1) + bytes(64),
    "size-over-limit": size(MAX_FRAME_BYTES + 1) + bytes(64),
    "size-shorter-than-the-request": size(12) + api_versions_frame()[4:],
    "tls-client-hello": CLIENT_HELLO,
    "http-get": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "http2-preface": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "ssh-banner": b"SSH-2.0-OpenSSH_9.6\r\n",
    "text": b"hello broker, are you there?\n" * 10,
    "zeros": bytes(4096),
    "ones": b"\xff" * 4096,
    "half-of-a-body": framed(ApiKey.METADATA, 1, b"\0\0"),
    "no-body-at-all": framed(ApiKey.PRODUCE, 9),
}


@pytest.mark.parametrize("case", NOT_FRAMES)
def test_what_is_no_request_is_refused(broker: WatchedBroker, case: str) -> None:
    broker.refuses(NOT_FRAMES[case])


FOLLOWED_BY_GARBAGE = {
    "api-versions": framed(ApiKey.API_VERSIONS, 0, b"garbage"),
    "api-versions-v3": framed(ApiKey.API_VERSIONS, 3, b"\x04raw\x021\0" + b"garbage"),
    "metadata": framed(ApiKey.METADATA, 1, size(0) + b"garbage"),
    "produce": framed(ApiKey.PRODUCE, 3, struct.pack(">hhii", -1, 1, 1000, 0) + b"garbage"),
    "fetch": framed(ApiKey.FETCH, 4, struct.pack(">iiiibi", -1, 0, 0, 0, 0, 0) + b"garbage"),
    "a-megabyte": framed(ApiKey.METADATA, 1, size(0) + bytes(MIB)),
}


@pytest.mark.parametrize("case", FOLLOWED_BY_GARBAGE)
def test_bytes_behind_a_body_are_ignored(broker: WatchedBroker, case: str) -> None:
    """As in Kafka: they are inside the frame, so nothing is out of step, and librdkafka does send some."""
    with broker.unharmed(), broker.connect() as client:
        for _ in range(2):
            client.send(FOLLOWED_BY_GARBAGE[case])
            assert client.read_frame()[:4] == size(7)
        client.alive()


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_are_refused_or_waited_for(broker: WatchedBroker, seed: int) -> None:
    """A random size may be in range; then the broker rightly waits for more, holding only what has come."""
    with broker.unharmed(), broker.connect() as client:
        client.try_send(random.Random(seed).randbytes(10_000))
        client.socket.shutdown(socket.SHUT_WR)
        with contextlib.suppress(PeerClosed):
            client.expect_close()


def test_valid_requests_before_a_bad_one_are_answered(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        client.try_send(api_versions_frame(1) + api_versions_frame(2) + size(-1))
        frames = client.expect_close()
    assert [frame[:4] for frame in frames] == [size(1), size(2)]


def test_one_byte_segments_are_put_together(broker: WatchedBroker) -> None:
    with broker.unharmed(), broker.connect() as client:
        for frame in (api_versions_frame(41), api_versions_frame(42, 3)):
            for byte in frame:
                client.send(bytes([byte]))
                time.sleep(0.0005)  # so that the kernel does not join them
        assert client.read_frame()[:4] == size(41)
        assert client.read_frame()[:4] == size(42)


@pytest.mark.parametrize("declared_bytes", [64, MAX_FRAME_BYTES])
def test_a_declared_size_alone_takes_no_memory(broker: WatchedBroker, declared_bytes: int) -> None:
    with broker.unharmed(max_growth_bytes=8 * MIB), contextlib.ExitStack() as stack:
        for _ in range(100):
            client = stack.enter_context(broker.connect())
            client.send(size(declared_bytes) + api_versions_frame()[4:])


@pytest.mark.parametrize("cut", ["in-size", "after-size", "in-header", "in-body"])
@pytest.mark.parametrize("ending", ["fin", "rst"])
def test_a_peer_that_goes_away_in_a_frame(broker: WatchedBroker, cut: str, ending: str) -> None:
    frame = encode_request(RequestHeader(ApiKey.FETCH, 12, 1, "raw"), fetch_request("bystander", 0))
    stop = {"in-size": 2, "after-size": 4, "in-header": 9, "in-body": len(frame) - 5}[cut]
    with broker.unharmed():
        for used in (False, True) * 10:
            client = broker.connect()
            if used:
                client.alive()
            client.send(frame[:stop])
            client.reset() if ending == "rst" else client.close()


def test_a_peer_that_goes_away_while_it_waits(broker: WatchedBroker) -> None:
    """Long polls of a client that is gone leave nothing behind."""
    with broker.unharmed():
        with broker.connect() as client:
            end = client.produce("gone", batch()).base_offset if client.topic("gone").error_code == 0 else 0
            client.topic("gone", auto_create=True)
        for number in range(100):
            waiting = broker.connect()
            waiting.request(fetch_request("gone", end, max_wait_ms=2**31 - 1), 12)
            waiting.reset() if number % 2 else waiting.close()
        with broker.connect() as client:
            assert client.produce("gone", batch()).error_code == 0


def test_connections_without_bytes(broker: WatchedBroker) -> None:
    """10,000 in the catalogue; 2,000 here, because both ends of each are files of this machine's two processes, and
    the usual limit on open files is lower than what 10,000 would need."""
    count = min(2000, file_limit() - 200)
    clients: list[RawClient] = []
    with broker.unharmed():
        try:
            clients.extend(broker.connect() for _ in range(count))
            with broker.connect() as client:
                client.alive()
            for client in clients[:: count // 10]:
                client.alive()
        finally:
            for client in clients:
                client.close()


def pipelined(request: DescribeConfigsRequest | FetchRequest | ApiVersionsRequest, version: int, count: int) -> bytes:
    return b"".join(
        encode_request(RequestHeader(type(request).api_key, version, number, "raw"), request) for number in range(count)
    )


def send_until_blocked(client: RawClient, data: bytes, patience_s: float = 0.5) -> int:
    """Send without reading until the broker takes no more; how many bytes went out."""
    view = memoryview(data)
    sent = 0
    client.socket.settimeout(patience_s)
    try:
        while sent < len(view):
            sent += client.socket.send(view[sent : sent + 65536])
    except TimeoutError:
        pass
    finally:
        client.socket.settimeout(10)
    return sent


def test_10_000_pipelined_requests_are_answered_in_order(broker: WatchedBroker) -> None:
    count = 10_000
    data = pipelined(ApiVersionsRequest(), 0, count)
    with broker.unharmed(), broker.connect(receive_buffer_bytes=16 * 1024) as client:
        sent = send_until_blocked(client, data)
        answered = 0
        while answered < count:
            if sent < len(data):
                sent += send_until_blocked(client, data[sent:], 0.001)
            frame = client.read_frame(10)
            assert struct.unpack_from(">i", frame) == (answered,)
            answered += 1
        client.request(ApiVersionsRequest(), 0)
        client.response(ApiKey.API_VERSIONS, 0)


EVERY_BROKER_SETTING = DescribeConfigsRequest(
    resources=[DescribeConfigsRequest.DescribeConfigsResource(resource_type=4, resource_name="1")],
    include_synonyms=True,
    include_documentation=True,
)


def test_answers_that_nobody_reads_stop_the_reading(broker: WatchedBroker) -> None:
    """Each answer is some thousand times its request: the broker must stop reading, not buffer."""
    data = pipelined(EVERY_BROKER_SETTING, 4, 10_000)
    with broker.unharmed(), broker.connect(receive_buffer_bytes=16 * 1024) as client:
        send_until_blocked(client, data)
        assert struct.unpack_from(">i", client.read_frame()) == (0,)
        client.reset()


def test_fetches_that_nobody_reads_stop_the_reading(broker: WatchedBroker) -> None:
    """A few bytes of request for a megabyte of answer, thousands of times in one segment."""
    with broker.connect() as client:
        client.create_topic("large")
        assert client.produce("large", batch(random.Random(1).randbytes(1_000_000))).error_code == 0
    data = pipelined(fetch_request("large", 0), 12, 10_000)
    with broker.unharmed(), broker.connect(receive_buffer_bytes=16 * 1024) as client:
        send_until_blocked(client, data)
        client.reset()


def test_pipelined_long_polls_are_bounded(broker: WatchedBroker) -> None:
    with broker.connect() as client:
        client.create_topic("quiet")
    data = pipelined(fetch_request("quiet", 0, max_wait_ms=2**31 - 1), 12, 10_000)
    with broker.unharmed():
        with broker.connect() as client:
            send_until_blocked(client, data)
            client.reset()
        with broker.connect() as client:
            assert client.produce("quiet", batch()).error_code == 0


# --- the slow and the silent, with a clock ----------------------------------------------------------------------------


def closed_within(client: RawClient, within_s: float) -> float:
    started = time.monotonic()
    client.expect_close(within_s)
    return time.monotonic() - started


SILENT = {
    "nothing": b"",
    "half-a-size": b"\0\0",
    "half-a-frame": api_versions_frame()[:-3],
    "size-of-100-mib": size(MAX_FRAME_BYTES),
}


@pytest.mark.parametrize("case", SILENT)
@pytest.mark.parametrize("used", [False, True], ids=["fresh", "after-valid"])
def test_the_silent_are_closed_when_idle(impatient: WatchedBroker, case: str, used: bool) -> None:
    """Also what a half-open connection looks like: the peer is gone without a word, and nothing ever comes."""
    with impatient.unharmed(), impatient.connect() as client:
        if used:
            client.alive()
        client.send(SILENT[case])
        waited_s = closed_within(client, IDLE_MS / 1000 * 2 + PROMPT_S)
    assert waited_s >= IDLE_MS / 1000 / 2


def test_a_slow_loris_does_not_live_by_single_bytes(impatient: WatchedBroker) -> None:
    """One byte now and then of a frame of 100 MiB is not activity; a whole request would be."""
    with impatient.unharmed(max_growth_bytes=8 * MIB):
        clients = [impatient.connect() for _ in range(50)]
        for client in clients:
            client.send(size(MAX_FRAME_BYTES))
        deadline = time.monotonic() + IDLE_MS / 1000 * 2 + PROMPT_S
        living = list(clients)
        while living and time.monotonic() < deadline:
            time.sleep(0.02)
            for client in tuple(living):
                client.socket.setblocking(False)
                try:
                    client.socket.send(b"\0")
                    if client.socket.recv(1) == b"":
                        living.remove(client)
                except BlockingIOError:
                    pass
                except OSError:
                    living.remove(client)
        for client in clients:
            client.close()
        assert not living, f"{len(living)} of {len(clients)} slow connections live on"


def test_an_answered_client_is_not_idle(impatient: WatchedBroker) -> None:
    with impatient.unharmed(), impatient.connect() as client:
        deadline = time.monotonic() + IDLE_MS / 1000 * 3
        while time.monotonic() < deadline:
            client.alive()
            time.sleep(0.05)


def wait_until_served(broker: WatchedBroker) -> None:
    """Until the broker has noticed that earlier connections are gone."""
    deadline = time.monotonic() + 5
    while True:
        try:
            with broker.connect() as client:
                client.alive()
                return
        except PeerClosed:
            assert time.monotonic() < deadline, "closed connections still count"


def test_connections_over_the_limit_are_closed_and_others_stay(crowded: WatchedBroker) -> None:
    with crowded.unharmed():
        clients = [crowded.connect() for _ in range(100)]
        for client in clients:
            client.alive()
        refused = 0
        for _ in range(60):
            extra = crowded.connect()
            clients.append(extra)
            try:
                extra.alive()
            except PeerClosed:
                refused += 1
        for client in clients[:100]:
            client.alive()
        for client in clients:
            client.close()
        assert 30 <= refused <= 60
        wait_until_served(crowded)
