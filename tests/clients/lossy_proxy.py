"""A TCP proxy in front of a broker that loses chosen Produce responses, and the connection with them.

The broker has appended the batch, the client does not know it: exactly the case idempotence is for.
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable

PRODUCE = 0


class LossyProxy:
    """Listens on a port of its own; `lose` is asked for the number of each Produce response, from 1."""

    def __init__(self, lose: Callable[[int], bool]) -> None:
        self.lost = 0
        self._lose = lose
        self._responses = 0
        self._target: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def forward_to(self, bootstrap: str) -> None:
        host, _, port = bootstrap.rpartition(":")
        self._target = (host, int(port))
        self._spawn(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            sockets = list(self._sockets)
        for one in sockets:
            _cut(one)
        for thread in self._threads:
            thread.join(10)

    def _spawn(self, work: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=work, args=args, name="lossy proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                inner, _ = self._listener.accept()
            except OSError:
                return
            assert self._target is not None
            try:
                outer = socket.create_connection(self._target)
            except OSError:  # the broker is gone
                inner.close()
                continue
            with self._lock:
                self._sockets += [inner, outer]
            produced: set[int] = set()
            self._spawn(self._requests, inner, outer, produced)
            self._spawn(self._answers, inner, outer, produced)

    def _requests(self, inner: socket.socket, outer: socket.socket, produced: set[int]) -> None:
        try:
            while frame := _read_frame(inner):
                key, _, correlation_id = struct.unpack_from(">hhi", frame, 4)
                if key == PRODUCE:
                    produced.add(correlation_id)
                outer.sendall(frame)
        except OSError:
            pass
        finally:
            _cut(outer)

    def _answers(self, inner: socket.socket, outer: socket.socket, produced: set[int]) -> None:
        try:
            while frame := _read_frame(outer):
                (correlation_id,) = struct.unpack_from(">i", frame, 4)
                if correlation_id in produced and self._is_lost():
                    return
                inner.sendall(frame)
        except OSError:
            pass
        finally:
            _cut(inner)
            _cut(outer)
            inner.close()
            outer.close()

    def _is_lost(self) -> bool:
        with self._lock:
            self._responses += 1
            if self._lose(self._responses):
                self.lost += 1
                return True
            return False


def _read_frame(source: socket.socket) -> bytes:
    head = _read_exactly(source, 4)
    return head + _read_exactly(source, int.from_bytes(head)) if head else b""


def _read_exactly(source: socket.socket, count: int) -> bytes:
    data = bytearray()
    while len(data) < count:
        chunk = source.recv(count - len(data))
        if not chunk:
            return b""
        data += chunk
    return bytes(data)


def _cut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
