"""A PostgreSQL server of the test's own, when the machine has one installed: temporary data, a Unix socket, no port.

Not here: installing one. `find` returns None on a machine without the server programs, and tests say so and skip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = "nobody"


def find() -> Path | None:
    """The folder with initdb and pg_ctl; Debian keeps them out of PATH."""
    found = shutil.which("pg_ctl")
    folders = [Path(found).resolve().parent] if found else []
    folders += sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    return next((one for one in folders if (one / "initdb").exists() and (one / "pg_ctl").exists()), None)


@contextmanager
def server(programs: Path) -> Iterator[str]:
    """A running server; yields the URL of its database."""
    # The server refuses to run as root, which is what a container's tests often are.
    user = NOBODY if os.geteuid() == 0 else None
    home = Path(tempfile.mkdtemp(prefix="millrace-pg-", dir="/tmp"))
    try:
        if user is not None:
            shutil.chown(home, user)
        data = home / "data"
        _run([programs / "initdb", "-D", data, "-U", "millrace", "-A", "trust", "--no-sync"], user, home)
        options = f"-c listen_addresses='' -c unix_socket_directories='{home}' -c fsync=off"
        _run([programs / "pg_ctl", "-D", data, "-l", home / "log", "-w", "-o", options, "start"], user, home)
        try:
            yield f"postgresql://millrace@/postgres?host={home}"
        finally:
            _run([programs / "pg_ctl", "-D", data, "-m", "immediate", "-w", "stop"], user, home)
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _run(command: list[str | Path], user: str | None, home: Path) -> None:
    subprocess.run(
        [str(part) for part in command], check=True, user=user, cwd=home, stdout=subprocess.DEVNULL, timeout=60
    )
