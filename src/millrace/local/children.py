"""What all child processes have in common: how they are started, and that they do not outlive their parent.

A child runs in a session of its own, so that Ctrl-C reaches the parent alone, which then ends its children in its own
order. Linux ends a child with its parent even if the parent is killed. That is bound to the *thread* that started the
child, so all children are started from one thread of this module, which lives as long as the process.

The child asks for that itself, in a small program that then becomes the command. Asking in `preexec_fn` would run
Python in a copy of this process. The other threads are gone there, the locks they held are not, and what belonged to
them is finalized: py4j shuts down its connections, which the copy shares, and the parent's Spark session loses them.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, Final

from millrace.errors import MillraceError

_starter: Final = ThreadPoolExecutor(max_workers=1, thread_name_prefix="millrace-children")
_END_WITH_PARENT: Final = """
import ctypes, os, signal, sys
parent, program, *command = sys.argv[1:]
PR_SET_PDEATHSIG = 1
ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
if os.getppid() != int(parent):  # it has gone already
    os.kill(os.getpid(), signal.SIGKILL)
for ignored_by_python in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(ignored_by_python, signal.SIG_DFL)
os.execv(program, command)
"""
"""A part of every start, so it imports little; `-I -S` keep the environment of the command away from it."""


class StartTimeout(MillraceError):
    """A child lives but did not become ready; its log is all there is to say why."""


def spawn(
    command: Sequence[str],
    *,
    log: IO[bytes],
    stdout: int | IO[bytes] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> subprocess.Popen[bytes]:
    """Start `command`; what it prints goes to `log`, its standard output to `stdout` if that is given."""

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(  # noqa: S603  # our own command lines
            _bound_to_us(command),
            stdin=subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            start_new_session=True,
            cwd=cwd,
            env=None if env is None else dict(env),
        )

    return _starter.submit(start).result()


def _bound_to_us(command: Sequence[str]) -> list[str]:
    """The command that becomes `command` and ends with this process, where the system can do that."""
    if sys.platform != "linux":
        return list(command)
    program = shutil.which(command[0])
    if program is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), command[0])
    return [sys.executable, "-I", "-S", "-c", _END_WITH_PARENT, str(os.getpid()), program, *command]


def last_line(path: Path) -> str:
    """The last line of a log, for an error of one line."""
    try:
        lines = path.read_text(errors="replace").strip().splitlines()
    except OSError:
        return ""
    return lines[-1].strip() if lines else ""
