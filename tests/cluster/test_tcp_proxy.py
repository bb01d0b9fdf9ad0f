"""The network that can be cut, between a listener that echoes and callers that introduce themselves."""

from __future__ import annotations

import queue
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from support.tcp_proxy import ZOOKEEPER, Network

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


def introduced(port: int, client_id: bytes) -> socket.socket:
    """A connection that has sent the beginning of a Kafka request, and has read the echo of it."""
    peer = introducing(port, client_id)
    assert receive(peer) != b""
    return peer


def introducing(port: int, client_id: bytes) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", port), timeout=10)
    peer.sendall(struct.pack(">ihhih", 10 + len(client_id), 1, 12, 7, len(client_id)) + client_id)
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
    with introducing(network.door_to_broker(2, echo.port), b"broker-1") as peer:
        assert receive(peer) == struct.pack(">ihhih", 18, 1, 12, 7, 8) + b"BROKER-1"
        peer.sendall(b"more")
        assert receive(peer) == b"MORE"


@pytest.mark.parametrize(("source", "target"), [("1", "2"), ("2", "1")])
def test_a_block_holds_one_way_and_delivers_late(network: Network, echo: Echo, source: str, target: str) -> None:
    with introduced(network.door_to_broker(2, echo.port), b"broker-1") as peer:
        network.block(source, target)
        peer.sendall(b"held")
        assert silent(peer)
        network.heal()
        assert receive(peer) == b"HELD"


def test_a_block_is_for_one_pair(network: Network, echo: Echo) -> None:
    door = network.door_to_broker(2, echo.port)
    with introduced(door, b"broker-1") as blocked, introduced(door, b"broker-3") as other:
        network.cut("1", ["2"])
        blocked.sendall(b"one")
        other.sendall(b"three")
        assert receive(other) == b"THREE"
        assert silent(blocked)


def test_a_new_connection_across_a_cut_is_accepted_and_silent(network: Network, echo: Echo) -> None:
    door = network.door_to_broker(2, echo.port)
    network.cut("2", ["1", "3"])
    with introducing(door, b"broker-3") as peer:
        assert silent(peer)
        network.heal()
        assert receive(peer).endswith(b"BROKER-3")


def test_what_a_caller_sent_before_it_gave_up_arrives_late(network: Network, echo: Echo) -> None:
    network.block("1", "2")
    introducing(network.door_to_broker(2, echo.port), b"broker-1").close()
    with pytest.raises(queue.Empty):
        echo.heard.get(timeout=SILENCE_S)
    network.heal()
    assert echo.heard.get(timeout=10).endswith(b"broker-1")


def test_a_caller_without_a_broker_name_is_not_blocked(network: Network, echo: Echo) -> None:
    network.cut("1", ["2"])
    with introduced(network.door_to_broker(2, echo.port), b"rdkafka") as peer:
        peer.sendall(b"x")
        assert receive(peer) == b"X"


def test_the_way_to_zookeeper_belongs_to_one_broker(network: Network, echo: Echo) -> None:
    doors = {broker_id: network.door_to_zookeeper(broker_id, echo.port) for broker_id in (1, 2)}
    network.cut("1", [ZOOKEEPER])
    with (
        socket.create_connection(("127.0.0.1", doors[1])) as cut,
        socket.create_connection(("127.0.0.1", doors[2])) as other,
    ):
        cut.sendall(b"ruok")
        other.sendall(b"ruok")
        assert receive(other) == b"RUOK"
        assert silent(cut)


def test_a_dead_target_is_a_reset(network: Network, echo: Echo) -> None:
    echo.stop_listening()
    with introducing(network.door_to_broker(2, echo.port), b"broker-1") as peer, pytest.raises(ConnectionError):
        receive(peer)
