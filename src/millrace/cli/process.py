"""How the process of a command begins and ends, whatever the command is: Ctrl-C at any moment, streams that are closed.

Until a command's function is called, and once it has returned, Ctrl-C ends the process as the system does by default:
nothing has begun that would have to be left in order, and an exception in the middle of an import would be a traceback.
In between it is KeyboardInterrupt. A shell sees 130 either way.

What cannot be written to stdout is a failure: exit code 1, and one line, unless it is a pipe whose reader has gone,
who does not want to hear of it.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from millrace.cli.output import print_error


def end_at_ctrl_c() -> None:
    """From now on Ctrl-C ends the process at once; unless whoever started it wants it to be ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def interruptible() -> Iterator[None]:
    """Ctrl-C is KeyboardInterrupt, in a process in which `end_at_ctrl_c` was called."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Whoever stops a command politely wants what Ctrl-C gives: records delivered, groups left."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def open_closed_streams() -> None:
    """Streams that were closed when the process began (`>&-`) get a file, so that none is opened in their place.

    Reading finds nothing, errors go nowhere; stdout is a file that cannot be written to, because data that goes nowhere
    is a failure.
    """
    # In this order: what is opened takes the lowest number that is free.
    if sys.stdin is None:
        sys.stdin = open(os.open(os.devnull, os.O_RDONLY))  # noqa: PTH123, SIM115
    if sys.stdout is None:
        sys.stdout = open(os.open(os.devnull, os.O_RDONLY), "w")  # noqa: PTH123, SIM115
    if sys.stderr is None:
        sys.stderr = open(os.open(os.devnull, os.O_WRONLY), "w")  # noqa: PTH123, SIM115


def flushed(exit_code: int) -> int:
    """The exit code after everything that was printed has gone out, or could not."""
    for stream in (sys.stdout, sys.__stdout__):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError) as error:
            if not exit_code and isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
                print_error(f"standard output: {error.strerror}")
            exit_code = exit_code or 1
            _silence_stdout()
    return exit_code


def _silence_stdout() -> None:
    """Keep the interpreter from complaining when it flushes stdout once more, at its end."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
