"""The folder of `millrace up`: what lies in it, and who uses it now.

    DATA/up.lock                        held (flock) by the process that runs the folder's brokers, and says which it is
    DATA/log                            what a process in the background printed
    DATA/broker-N/data                  the log directory of broker N
    DATA/broker-N/pid                   its process, from the moment it answers
    DATA/broker-N/server.properties,    of a broker that is a process of its own, in a cluster
    DATA/broker-N/log
    DATA/security/                      certificates, users and settings of clients, if it is secured (`local.secured`)
    DATA/zookeeper/                     the cluster's ZooKeeper, unless it is the user's, and its password

Invariants
- The kernel says who uses a folder: by its lock, and by when a process began. A process id that was written down is
  believed only if that fits. An id that a dead process left behind is nobody's.
- Where the metadata is decides what the folder is (`cluster.migration`): of a single broker if broker 1 has it in a
  file, of a cluster otherwise, and then it has to be started with that cluster's ZooKeeper.
- A start that fails takes back what it made, if no record is in it, and nothing else.
"""

from __future__ import annotations

import fcntl
import json
import os
import shlex
import shutil
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, Self

from millrace.clock import SystemClock
from millrace.cluster.migration import MIGRATED_NAME, is_single
from millrace.config.files import parse_properties
from millrace.errors import ConfigError, MillraceError
from millrace.local import DEFAULT_FOLDER
from millrace.local.children import StartTimeout
from millrace.local.processes import is_alive, start_ticks
from millrace.storage.names import partition_named

_LOCK: Final = "up.lock"
_PREFIX: Final = "broker-"
_PATIENCE_S: Final = 1.0
"""How long a lock is tried for: whoever asks for the holder has it for a moment."""
_POLL_S: Final = 0.02
_ROUNDING_MS: Final = 2000
"""The kernel tells in whole seconds when it began."""


class Kind(Enum):
    """What a folder holds."""

    NOTHING = "nothing"
    SINGLE = "the data of a single broker"
    CLUSTER = "the data of a cluster"
    LOGS_ALONE = "logs whose metadata is in a ZooKeeper that is not named here"


class InUse(MillraceError):
    """Another process runs the brokers of the folder."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that uses a folder, in its own words."""

    pid: int
    start_ticks: int | None
    """When the process began, as the kernel counts; two processes of one id differ in it."""
    since_ms: int
    brokers: Mapping[str, str] = field(default_factory=dict)
    """Where the brokers answer, by id; empty until they do."""

    @property
    def bootstrap(self) -> str:
        return ",".join(self.brokers.values())

    @property
    def lives(self) -> bool:
        """Whether this very process has not ended; another one may have its id by now."""
        return is_alive(self.pid) and start_ticks(self.pid) == self.start_ticks

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """None for what a process that was just killed, or is just starting, has left."""
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError):
            return None


@dataclass(frozen=True, slots=True)
class BrokerState:
    """One broker of the folder, as its files and locks tell."""

    broker_id: int
    pid: int | None
    """Its process, if it runs and has answered."""
    since_ms: int | None
    data_bytes: int


class Use:
    """That this process uses the folder."""

    def __init__(self, fd: int, holder: Holder) -> None:
        self._fd = fd
        self._holder = holder
        self.is_ready = False
        self._write(holder)

    def ready(self, brokers: Mapping[int, str]) -> None:
        """Say where the brokers answer."""
        self.is_ready = True
        self._write(
            Holder(
                self._holder.pid,
                self._holder.start_ticks,
                self._holder.since_ms,
                {str(broker_id): address for broker_id, address in brokers.items()},
            )
        )

    def end(self) -> None:
        os.ftruncate(self._fd, 0)
        os.close(self._fd)

    def _write(self, holder: Holder) -> None:
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(asdict(holder)).encode() + b"\n", 0)


class Folder:
    """See the module's text."""

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        """As whoever asks called it."""
        self.path = path.absolute()
        self.log_path = self.path / "log"
        self.zookeeper = self.path / "zookeeper"
        self.security = self.path / "security"
        self._lock_path = self.path / _LOCK
        self._clock = SystemClock()
        self._pause = threading.Event()  # never set: a wait on it is a pause

    def __repr__(self) -> str:
        return f"Folder({self.path})"

    @property
    def option(self) -> str:
        """What to add to a command that is about this folder."""
        return "" if self.name == DEFAULT_FOLDER else f" --data {shlex.quote(self.name)}"

    def home(self, broker_id: int) -> Path:
        return self.path / f"{_PREFIX}{broker_id}"

    def data(self, broker_id: int) -> Path:
        return self.home(broker_id) / "data"

    # --- what is in it ------------------------------------------------------------------------------------------------

    @property
    def kind(self) -> Kind:
        if is_single(self.data(1)):
            return Kind.SINGLE
        if self.zookeeper.is_dir() or self._settings(1):
            return Kind.CLUSTER
        return Kind.LOGS_ALONE if _holds_logs(self.data(1)) else Kind.NOTHING

    @property
    def broker_ids(self) -> list[int]:
        """The brokers that have run here."""
        names = [path.name.removeprefix(_PREFIX) for path in self.path.glob(f"{_PREFIX}*") if (path / "data").is_dir()]
        return sorted(int(name) for name in names if name.isdecimal())

    @property
    def zookeeper_hosts(self) -> str | None:
        """The user's own ZooKeeper that the cluster was started with; None where it has one of its own."""
        return None if self.zookeeper.is_dir() else self._settings(1).get("zookeeper.connect")

    def _settings(self, broker_id: int) -> Mapping[str, str]:
        """The settings of a broker that is a process of its own and has run; empty for any other."""
        path = self.home(broker_id) / "server.properties"
        return parse_properties(path.read_text()) if path.exists() and self.data(broker_id).is_dir() else {}

    def brokers(self) -> list[BrokerState]:
        """How the brokers are that have run here."""
        return [self._broker(broker_id) for broker_id in self.broker_ids]

    def _broker(self, broker_id: int) -> BrokerState:
        pid = since_ms = None
        pid_path = self.home(broker_id) / "pid"
        with suppress(OSError, ValueError):
            written_ms = pid_path.stat().st_mtime_ns // 1_000_000
            found = int(pid_path.read_text())
            began_ms = _began_ms(found)
            # A process that began after its id was written down is another one.
            if is_alive(found) and (began_ms is None or began_ms <= written_ms + _ROUNDING_MS):
                pid, since_ms = found, written_ms
        return BrokerState(broker_id, pid, since_ms, _size(self.data(broker_id)))

    # --- who uses it --------------------------------------------------------------------------------------------------

    def holder(self) -> Holder | None:
        """The process that uses it, if there is one."""
        deadline_s = self._clock.monotonic() + _PATIENCE_S
        while _is_locked(self._lock_path):
            if (holder := self._live_holder()) is not None:
                return holder
            if self._clock.monotonic() > deadline_s:
                raise ConfigError(f"{self._lock_path} is held by a process that does not say which it is")
            self._pause.wait(_POLL_S)
        return None

    def _live_holder(self) -> Holder | None:
        """Whoever the lock file names, if that is the very process that wrote it."""
        with suppress(OSError):
            holder = Holder.parse(self._lock_path.read_bytes())
            if holder is not None and holder.lives:
                return holder
        return None

    def last_holder(self) -> Holder | None:
        """Who was killed while it used it; None where it ended as it should, or runs."""
        try:
            return None if _is_locked(self._lock_path) else Holder.parse(self._lock_path.read_bytes())
        except OSError:
            return None

    @contextmanager
    def use(self) -> Iterator[Use]:
        """Use it in this process; InUse where another one does.

        If that ends without `Use.ready`, the folders that it made are removed again, unless there is a record in them.
        """
        there = self._parts()
        use = self._acquire()
        keep = False
        try:
            yield use
        except StartTimeout:
            keep = True  # its log is what is left to look at
            raise
        finally:
            if not use.is_ready and not keep:
                self._take_back(there)
            use.end()

    def _acquire(self) -> Use:
        self.path.mkdir(parents=True, exist_ok=True)
        deadline_s = self._clock.monotonic() + _PATIENCE_S
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(fd), self._lock_path.stat()):
                    return Use(fd, Holder(os.getpid(), start_ticks(os.getpid()), self._clock.wall_ms()))
            except BlockingIOError:
                # Held for a moment by somebody who asks, or for long by somebody who says so.
                holder = self._live_holder()
                if holder is not None or self._clock.monotonic() > deadline_s:
                    os.close(fd)
                    raise InUse(self.in_use_text(holder)) from None
            except FileNotFoundError:
                pass  # whoever had it took it away with the folder
            os.close(fd)
            self._pause.wait(_POLL_S)

    def in_use_text(self, holder: Holder | None) -> str:
        who = "" if holder is None else f" (pid {holder.pid}{f', {holder.bootstrap}' if holder.brokers else ''})"
        advice = f"see: millrace status{self.option}, stop it with: millrace down{self.option}"
        return f"millrace runs in {self.name} already{who}; {advice}"

    def _parts(self) -> set[Path]:
        """The folder, and what a start may make in it."""
        parts = {self.zookeeper, self.security, *self.path.glob(f"{_PREFIX}*"), self.path}
        return {part for part in parts if part.exists()}

    def _take_back(self, there: set[Path]) -> None:
        made = self._parts() - there
        holds_any = any(_holds_logs(part / "data") for part in self._parts()) or (self.data(1) / MIGRATED_NAME).exists()
        if holds_any and not is_single(self.data(1)):
            made -= {self.zookeeper}  # what the logs are is written there
        for part in made - {self.path}:
            if not _holds_logs(part / "data"):
                shutil.rmtree(part, ignore_errors=True)
        if self.path in made:
            self.remove_if_empty()

    def remove_if_empty(self) -> None:
        """Remove the folder if nothing is in it but what a start writes about itself."""
        if {path.name for path in self.path.iterdir()} <= {_LOCK, self.log_path.name}:
            self._lock_path.unlink(missing_ok=True)
            self.log_path.unlink(missing_ok=True)
            with suppress(OSError):  # somebody put something there at this moment
                self.path.rmdir()


# --- processes and locks ----------------------------------------------------------------------------------------------


def _is_locked(path: Path) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def _began_ms(pid: int) -> int | None:
    ticks = start_ticks(pid)
    if ticks is None:
        return None
    lines = Path("/proc/stat").read_text().splitlines()
    boot_s = next(int(line.split()[1]) for line in lines if line.startswith("btime "))
    return boot_s * 1000 + ticks * 1000 // os.sysconf("SC_CLK_TCK")


# --- data -------------------------------------------------------------------------------------------------------------


def _holds_logs(data: Path) -> bool:
    return data.is_dir() and any(partition_named(path.name) is not None and path.is_dir() for path in data.iterdir())


def _size(directory: Path) -> int:
    """The bytes in a directory; what goes away meanwhile does not count."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.stat(Path(parent, name)).st_size  # noqa: PTH116 - a path object per file is slow
    return total
