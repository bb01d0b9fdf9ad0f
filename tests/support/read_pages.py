"""Reads pages (`support.page_reader`) in one folder, one after the other, where the ports that they name are free.

    PYTHONPATH=tests python -m support.read_pages README.md docs/quickstart.md

The ports are free in a network namespace of one's own. Where the system does not allow that, pages are read one at a
time, and not at all while somebody else has a port.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from support.page_reader import Reader

ROOT = Path(__file__).resolve().parents[2]
PORTS = range(9092, 9097)
NOTHING_RUN = 77
"""The exit code where nothing was run, because the ports that pages name are taken."""


def in_a_network_of_its_own() -> list[str] | None:
    """What to put before a command so that every port is free for it; None where the system does not allow that."""
    for prefix in (["unshare", "--net"], ["unshare", "--net", "--map-root-user"]):
        with suppress(FileNotFoundError):
            if subprocess.run([*prefix, "true"], capture_output=True, check=False).returncode == 0:
                return prefix
    return None


def bring_loopback_up() -> None:
    """A new network has one device, which is off."""
    get_flags, set_flags, up = 0x8913, 0x8914, 1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, get_flags, struct.pack("16sH14x", b"lo", 0))
        (flags,) = struct.unpack_from("H", answer, 16)
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sH14x", b"lo", flags | up))


@contextmanager
def the_ports() -> Iterator[str | None]:
    """Holds the ports that pages name against others who run pages; yields why not, if somebody else has one."""
    with (Path(tempfile.gettempdir()) / "millrace-pages.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield next((f"port {port} is taken" for port in PORTS if not _is_free(port)), None)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def adopt_orphans() -> None:
    """Whatever a page leaves running becomes a child of this process, which can then find it."""
    set_child_subreaper = 36
    if ctypes.CDLL(None, use_errno=True).prctl(set_child_subreaper, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def main(arguments: list[str]) -> int:
    """The number of failures as an exit code of 0 or 1; NOTHING_RUN where nothing could be run."""
    parser = argparse.ArgumentParser(prog="python -m support.read_pages", description=__doc__, add_help=True)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("pages", nargs="+", metavar="PAGE")
    options = parser.parse_args(arguments)
    if options.inside:
        bring_loopback_up()
        # The name of the machine is an address that this network does not have.
        os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
        return _read(options.pages)
    prefix = in_a_network_of_its_own()
    if prefix is not None:
        command = [*prefix, sys.executable, "-m", "support.read_pages", "--inside", *options.pages]
        return subprocess.run(command, check=False).returncode
    with the_ports() as taken:
        if taken is not None:
            print(f"nothing was run: no network of one's own here, and {taken}", flush=True)
            return NOTHING_RUN
        return _read(options.pages)


def _read(pages: list[str]) -> int:
    adopt_orphans()
    # Java and the brokers it leaves behind for a moment may still write; what remains is temporary anyway.
    with tempfile.TemporaryDirectory(prefix="millrace-pages-", ignore_cleanup_errors=True) as folder:
        reader = Reader(Path(folder), tell=lambda text: print(text, flush=True))
        for page in pages:
            reader.read(ROOT / page, page)
    print(f"{len(reader.failures)} failures", flush=True)
    return 1 if reader.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
