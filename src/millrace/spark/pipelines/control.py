"""Starting a run of a pipeline in the background, and stopping one, whoever started it. Nothing here needs Spark.

A run that is started here outlives whoever asked for it: it is in a session of its own and nobody's child. Its options
go through a pipe, and so neither a password nor anything that somebody typed is ever part of a command line.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from millrace.clock import Clock, SystemClock
from millrace.errors import ConfigError
from millrace.installing import install_hint
from millrace.local.children import last_line
from millrace.local.processes import is_alive, send_signal
from millrace.security.hiding import without_passwords
from millrace.spark.pipelines.contract import BUILT_IN, CLIENT_PREFIX, Pipeline, find
from millrace.spark.pipelines.status import RunStatus, log_path, new_run_id, prepare, read_run

START_S: Final = 30.0
"""How long a run may take to say that it is there; Spark comes later, and takes its own time."""
MAX_OPTION_BYTES: Final = 32 * 1024
"""What a pipe holds, with room to spare, before anybody reads it."""
LOG_BYTES: Final = 64 * 1024
_POLL_S: Final = 0.05
_NOT_FOR_CHILDREN: Final = ("MILLRACE_CONSOLE_TOKEN", "MILLRACE_PROFILE", "MILLRACE_BOOTSTRAP")
_DETACH: Final = """
import os, sys
os.setsid()
child = os.fork()
if child == 0:
    os.dup2(2, 1)  # the log; what was stdout is for the line below alone
    os.execv(sys.argv[1], sys.argv[1:])
print(child)
"""
"""The run's parent for a moment: says its process id, ends, and leaves it to the system. `-I -S` keep that short."""


def missing_package() -> str:
    """What to do before any pipeline can run; empty if nothing is missing."""
    if importlib.util.find_spec("pyspark") is not None:
        return ""
    return f"pipelines need PySpark: {install_hint('spark')}"


def start_run(
    pipeline: Pipeline,
    options: Mapping[str, str],
    *,
    bootstrap: str,
    client: Mapping[str, str],
    folder: Path,
    once: bool = False,
    clock: Clock | None = None,
) -> str:
    """Start a run and return its name once it keeps a status. ConfigError with the reason if it does not come to that.

    `options` are those of the pipeline, `client` the settings with which it reaches the brokers, by their own names.
    """
    clock = clock or SystemClock()
    if missing := missing_package():
        raise ConfigError(missing)
    given = {**options, **{CLIENT_PREFIX + name: value for name, value in client.items()}}
    pipeline.resolve(given)
    handed = json.dumps(given).encode()
    if len(handed) > MAX_OPTION_BYTES:
        raise ConfigError(f"the options of a run are at most {MAX_OPTION_BYTES} bytes")
    prepare(folder)
    run_id = new_run_id(pipeline.name, clock)
    command = [
        *(sys.executable, "-m", "millrace", "pipeline", "run", _word_for(pipeline)),
        *("--bootstrap", bootstrap, "--option-file", "-", "--quiet", "--runs", str(folder), "--run-id", run_id),
        *(("--once",) if once else ()),
    ]
    log = log_path(folder, run_id)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
    number = os.open(log, flags, stat.S_IRUSR | stat.S_IWUSR)
    try:
        pid = _detached(command, handed, number)
    finally:
        os.close(number)
    deadline = clock.monotonic() + START_S
    pause = threading.Event()
    while read_run(folder, run_id) is None:
        if not is_alive(pid):
            if read_run(folder, run_id) is not None:  # it came, and has ended
                break
            said = without_passwords(last_line(log).removeprefix("millrace: error: "))
            log.unlink(missing_ok=True)
            raise ConfigError(said or "the run ended at once, and did not say why")
        if clock.monotonic() > deadline:
            raise ConfigError(f"the run does not come to its start (pid {pid}); what it says is in {log}")
        pause.wait(_POLL_S)
    return run_id


def _word_for(pipeline: Pipeline) -> str:
    """The one word by which `millrace pipeline run` finds it again."""
    is_ours = pipeline.name in BUILT_IN and pipeline.path == find(pipeline.name).path
    return pipeline.name if is_ours else str(pipeline.path)


def stop_run(run: RunStatus, *, kill: bool = False) -> bool:
    """Have a run stop as Ctrl-C does, or end at once; False if it was over already. Never another process of its id."""
    return not run.state.is_over and send_signal(run.pid, run.process, signal.SIGKILL if kill else signal.SIGTERM)


def log_tail(folder: Path, run_id: str, lines: int = 200) -> str | None:
    """The newest lines of what a run in the background said; None if it was not started in the background."""
    try:
        with log_path(folder, run_id).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - LOG_BYTES, 0))
            text = file.read().decode(errors="replace")
    except FileNotFoundError:
        return None
    kept = text.splitlines()[-lines:]
    return without_passwords("\n".join(kept))


def _detached(command: list[str], handed: bytes, log: int) -> int:
    """The id of a process that reads `handed` from stdin, writes to `log`, and is nobody's child."""
    started = subprocess.run(  # noqa: S603  # our own command line
        [sys.executable, "-I", "-S", "-c", _DETACH, *command],
        input=handed,
        stdout=subprocess.PIPE,
        stderr=log,
        env={
            **{name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN},
            "PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry),
        },
        check=True,
    )
    return int(started.stdout)
