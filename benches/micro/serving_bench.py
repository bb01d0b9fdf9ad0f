"""Ways from a file to a socket: `python benches/micro/serving_bench.py [--gigabytes 4]`.

Two processes on one machine: one sends answers of 2 MiB out of the page cache, the other receives them. Prints the CPU
of both, in seconds per GB, and the speed. Decision 0008 rests on this.
"""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import socket
import tempfile
import time
from collections.abc import Callable
from typing import Final

ANSWER_BYTES: Final = 2 << 20
FILE_BYTES: Final = 256 << 20

Send = Callable[[socket.socket, int], None]
"""Sends the answer that lies at a position of the file."""


def pread(fd: int) -> Send:
    return lambda peer, at: peer.sendall(os.pread(fd, ANSWER_BYTES, at))


def preadv(fd: int) -> Send:
    reused = bytearray(ANSWER_BYTES)

    def send(peer: socket.socket, at: int) -> None:
        os.preadv(fd, [reused], at)
        peer.sendall(reused)

    return send


def sendfile(fd: int) -> Send:
    def send(peer: socket.socket, at: int) -> None:
        end = at + ANSWER_BYTES
        while at < end:
            at += os.sendfile(peer.fileno(), fd, at, end - at)

    return send


def mapping_each(fd: int) -> Send:
    def send(peer: socket.socket, at: int) -> None:
        with mmap.mmap(fd, ANSWER_BYTES, access=mmap.ACCESS_READ, offset=at) as view:
            peer.sendall(view)

    return send


def mapping_kept(fd: int) -> Send:
    whole = memoryview(mmap.mmap(fd, FILE_BYTES, access=mmap.ACCESS_READ))
    return lambda peer, at: peer.sendall(whole[at : at + ANSWER_BYTES])


WAYS: Final = {
    "pread, then send": pread,
    "preadv into one buffer, then send": preadv,
    "sendfile": sendfile,
    "mmap of each answer, then send": mapping_each,
    "mmap of the file, kept, then send": mapping_kept,
}


def cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def receive(port: int, total_bytes: int) -> None:
    buffer = bytearray(ANSWER_BYTES)
    with socket.create_connection(("127.0.0.1", port)) as peer:
        while total_bytes > 0:
            total_bytes -= peer.recv_into(buffer)


def measure(send: Send, answers: int) -> tuple[float, float, float]:
    """CPU seconds of the sender, of the receiver, and the time it took."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        child = os.fork()
        if child == 0:
            receive(server.getsockname()[1], answers * ANSWER_BYTES)
            os._exit(0)
        peer, _ = server.accept()
        with peer:
            began, own_s, children_s = time.monotonic(), cpu_s(resource.RUSAGE_SELF), cpu_s(resource.RUSAGE_CHILDREN)
            for number in range(answers):
                send(peer, number * ANSWER_BYTES % FILE_BYTES)
            os.waitpid(child, 0)
            took_s = time.monotonic() - began
    return cpu_s(resource.RUSAGE_SELF) - own_s, cpu_s(resource.RUSAGE_CHILDREN) - children_s, took_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--gigabytes", type=int, default=4, help="sent in each way (4)")
    answers = parser.parse_args().gigabytes * 10**9 // ANSWER_BYTES
    gigabytes = answers * ANSWER_BYTES / 1e9
    print(f"{'way':36} {'sender':>7} {'receiver':>9} {'together':>9} {'GB/s':>6}")
    with tempfile.TemporaryFile() as file:
        for _ in range(FILE_BYTES >> 20):
            file.write(os.urandom(1 << 20))
        file.flush()
        for name, way in WAYS.items():
            send = way(file.fileno())
            measure(send, FILE_BYTES // ANSWER_BYTES)
            sender, receiver, took_s = measure(send, answers)
            costs = sender / gigabytes, receiver / gigabytes, (sender + receiver) / gigabytes
            print(f"{name:36} {costs[0]:7.2f} {costs[1]:9.2f} {costs[2]:9.2f} {gigabytes / took_s:6.1f}")


if __name__ == "__main__":
    main()
