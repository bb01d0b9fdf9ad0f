"""The network that can be cut, between a listener that echoes and callers."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from support.tcp_proxy import CLIENTS, ZOOKEEPER, Network

SILENCE_S = 0.15


class Echo:
    """A listener that answers each chunk with itself in capitals."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.heard: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(peer,))
            self._threads.append(thread)
            thread.start()

    def _serve(self, peer: socket.socket) -> None:
        with peer, suppress(ConnectionError):  # a caller may not wait for its echo
            while data := peer.recv(65536):
                self.heard.put(data)
                peer.sendall(data.upper())

    def stop_listening(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def close(self) -> None:
        try:
            self.stop_listening()
        except OSError:
            pass
        for thread in self._threads:
            thread.join(10)


@pytest.fixture
def echo() -> Iterator[Echo]:
    listener = Echo()
    yield listener
    listener.close()


@pytest.fixture
def network(echo: Echo) -> Iterator[Network]:
    with Network() as running:
        yield running


def called(port: int) -> socket.socket:
    """A connection that has sent something, and has read the echo of it."""
    peer = calling(port)
    assert receive(peer) == b"HELLO"
    return peer


def calling(port: int) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=10)
    try:
        peer.sendall(b"hello")
    except OSError:
        peer.close()
        raise
    return peer


def receive(peer: socket.socket, timeout_s: float = 10) -> bytes:
    peer.settimeout(timeout_s)
    return peer.recv(65536)


def silent(peer: socket.socket) -> bool:
    try:
        receive(peer, SILENCE_S)
    except TimeoutError:
        return True
    return False


def test_bytes_pass_both_ways_from_the_first_on(network: Network, echo: Echo) -> None:
    with called(network.link("1", "2", echo.port)) as peer:
        peer.sendall(b"more")
        assert receive(peer) == b"MORE"


@pytest.mark.parametrize(("source", "target"), [("1", "2"), ("2", "1")])
def test_a_block_holds_one_way_and_delivers_late(network: Network, echo: Echo, source: str, target: str) -> None:
    with called(network.link("1", "2", echo.port)) as peer:
        network.block(source, target)
        peer.sendall(b"held")
        assert silent(peer)
        network.heal()
        assert receive(peer) == b"HELD"


def test_a_block_is_for_one_pair(network: Network, echo: Echo) -> None:
    with (
        called(network.link("1", "2", echo.port)) as blocked,
        called(network.link("3", "2", echo.port)) as other,
    ):
        network.cut("1", ["2"])
        blocked.sendall(b"one")
        other.sendall(b"three")
        assert receive(other) == b"THREE"
        assert silent(blocked)


def test_a_new_connection_across_a_cut_is_accepted_and_silent(network: Network, echo: Echo) -> None:
    port = network.link("3", "2", echo.port)
    network.cut("2", ["1", "3"])
    with calling(port) as peer:
        assert silent(peer)
        network.heal()
        assert receive(peer) == b"HELLO"


def test_what_a_caller_sent_before_it_gave_up_arrives_late(network: Network, echo: Echo) -> None:
    network.block("1", "2")
    calling(network.link("1", "2", echo.port)).close()
    with pytest.raises(queue.Empty):
        echo.heard.get(timeout=SILENCE_S)
    network.heal()
    assert echo.heard.get(timeout=10) == b"hello"


def test_the_way_to_zookeeper_belongs_to_one_broker(network: Network, echo: Echo) -> None:
    links = {node: network.link(node, ZOOKEEPER, echo.port) for node in ("1", "2")}
    network.cut("1", [ZOOKEEPER])
    with calling(links["1"]) as cut, calling(links["2"]) as other:
        assert receive(other) == b"HELLO"
        assert silent(cut)


def test_a_refusal_is_a_real_one_for_one_caller_in_one_direction(network: Network, echo: Echo) -> None:
    links = {pair: network.link(*pair, echo.port) for pair in (("1", "2"), ("2", "1"), ("3", "2"))}
    with called(links["1", "2"]) as reset, called(links["2", "1"]) as back, called(links["3", "2"]) as other:
        network.refuse("1", "2")
        with pytest.raises(ConnectionResetError):
            receive(reset)
        with pytest.raises(ConnectionRefusedError):
            calling(links["1", "2"])
        for peer in (back, other):
            peer.sendall(b"on")
            assert receive(peer) == b"ON"
    network.heal()
    called(links["1", "2"]).close()


def test_a_refusal_both_ways_can_be_made_twice_and_healed_once(network: Network, echo: Echo) -> None:
    links = [network.link("1", "2", echo.port), network.link("2", "1", echo.port)]
    network.refuse_both_ways("1", ["2"])
    network.refuse("2", "1")
    for port in links:
        with pytest.raises(ConnectionRefusedError):
            calling(port)
    network.heal()
    for port in links:
        called(port).close()


def test_a_dead_target_is_a_reset(network: Network, echo: Echo) -> None:
    echo.stop_listening()
    # It may come as early as the call itself.
    with pytest.raises(ConnectionError), calling(network.link("1", "2", echo.port)) as peer:
        receive(peer)


def request(api_key: int, client: bytes) -> bytes:
    """A request without a body."""
    frame = struct.pack(">hhih", api_key, 0, 1, len(client)) + client
    return struct.pack(">i", len(frame)) + frame


def test_a_request_that_is_kept_back_arrives_after_the_one_that_was_sent_in_its_stead(
    network: Network, echo: Echo
) -> None:
    port = network.link(CLIENTS, "1", echo.port, framed=True)
    late = network.keep_back(0, most=1, client="mixer")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        for frame in (request(3, b"mixer-1"), request(0, b"other")):
            peer.sendall(frame)
            assert receive(peer) == frame.upper()
        peer.sendall(request(0, b"mixer-1"))
        with pytest.raises(ConnectionResetError):
            receive(peer)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(request(0, b"mixer-1"))
        assert receive(peer) == request(0, b"mixer-1").upper()
    heard = [echo.heard.get(timeout=10) for _ in range(3)]
    assert heard == [request(3, b"mixer-1"), request(0, b"other"), request(0, b"mixer-1")]
    assert network.deliver(late) == 1
    assert echo.heard.get(timeout=10) == request(0, b"mixer-1")
    assert network.deliver(late) == 0


def test_one_client_is_cut_off_and_the_others_are_not(network: Network, echo: Echo) -> None:
    port = network.link(CLIENTS, "1", echo.port, framed=True)
    with (
        socket.create_connection(("127.0.0.1", port), timeout=10) as one,
        socket.create_connection(("127.0.0.1", port), timeout=10) as other,
    ):
        one.sendall(request(3, b"mixer-1"))
        assert receive(one) == request(3, b"mixer-1").upper()
        network.cut_client("mixer-1")
        one.sendall(request(4, b"mixer-1"))
        other.sendall(request(3, b"mixer-10"))
        assert receive(other) == request(3, b"mixer-10").upper()
        assert silent(one)
        assert [echo.heard.get(timeout=10) for _ in range(2)] == [request(3, b"mixer-1"), request(3, b"mixer-10")]
        network.heal()
        assert receive(one) == request(4, b"mixer-1").upper()


def test_requests_pass_again_when_nobody_keeps_them_any_more(network: Network, echo: Echo) -> None:
    port = network.link(CLIENTS, "1", echo.port, framed=True)
    late = network.keep_back(0, most=100)
    network.let_pass(late)
    with socket.create_connection(("127.0.0.1", port), timeout=10) as peer:
        peer.sendall(request(0, b""))
        assert receive(peer) == request(0, b"").upper()
    assert late.kept == []
