"""The interface behind which the metadata log is kept: one writer, many followers, fenced by an epoch.

Two implementations: `embedded` (SQLite, one process) and `zookeeper`. Not here: what the bytes of a delta mean
(`metadata.deltas`).

What every store promises, and what it is in ZooKeeper:

- **Sessions.** A store object is one broker's session. Registration and controllership end with it: they are ephemeral
  znodes. Everything else stays.
- **register** makes `/brokers/ids/N`. The broker epoch it returns (the znode's czxid) is larger than every epoch given
  before, to any broker. A broker that registers while an older session of the same id still lives replaces it.
- **elect** makes `/controller` and raises `/controller_epoch` in one `multi`, if nobody is controller, or if the
  controller is the one the caller saw and wants to replace (`replacing` is its epoch: the `multi` checks the version of
  `/controller_epoch`). It returns the new controller epoch, which no one else ever gets, or None for the loser.
- **append** adds one delta with the next number, in a `multi` that checks `/controller_epoch`. When it returns, the
  delta survives the loss of power. It raises `Fenced` if the epoch has moved on, or if the session that was elected has
  expired. A lost connection does not end it: it waits for the connection and finds out whether its delta is there, so
  after `Fenced` it is not, except where a later controller has already folded that number into a snapshot. If it fails
  in another way or is cancelled, the delta may or may not be in the log; the caller learns which by following.
- **follow** yields every delta after an index, in order, without gaps, first those that exist, then those to come.
  It raises `Trimmed` when the delta after that index is gone: the follower starts again from the snapshot.
- **end** is the index of the newest delta, 0 where there was none yet: how far a follower has to come to be current.
- **write_snapshot** (fenced) keeps the image as of an index and lets older deltas go; nothing happens if there is one
  of that index or a later one. A snapshot and its trim are never seen half: whoever reads a snapshot can follow from
  its index.
- **sessions** yields how the session is, now and after each change; EXPIRED is never skipped. After it the registration
  and the controllership are gone, and a new session begins by itself: CONNECTED follows, and the owner may call
  `register` and `elect` again.
- **membership** yields who is registered and who is controller, now and after each change; states may be skipped, the
  last one is never missed.

While the store cannot be reached the calls wait; whoever cannot wait cancels. The generators go on across lost
connections and new sessions and end when the store is closed. All calls are made on one event loop. A cancelled call
may have happened.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from millrace.errors import MillraceError
from millrace.metadata.deltas import NO_DIRECTORIES, Directories, Endpoint


class Fenced(MillraceError):
    """The controller epoch has moved on: whoever holds the older one must stop writing."""


class Trimmed(MillraceError):
    """The deltas asked for were folded into a snapshot and are gone."""


class SessionState(Enum):
    """How a broker's session with the store is."""

    CONNECTED = "connected"
    SUSPENDED = "suspended"
    """The connection is lost; the session, and with it registration and controllership, may live on."""
    EXPIRED = "expired"
    """The session has ended, and registration and controllership with it."""


@dataclass(frozen=True, slots=True)
class BrokerRegistration:
    """What a broker says of itself when it comes."""

    broker_id: int
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None
    directories: Directories = NO_DIRECTORIES
    boot_id: str = ""
    clean_epoch: int = -1
    """See `BrokerRegistered`."""


@dataclass(frozen=True, slots=True)
class Member:
    """A registered broker, alive as far as the store knows."""

    registration: BrokerRegistration
    broker_epoch: int


@dataclass(frozen=True, slots=True)
class Membership:
    """Who is there. `controller_id` is None while nobody is controller; `controller_epoch` is the last one given."""

    members: tuple[Member, ...]
    controller_id: int | None
    controller_epoch: int


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The image after delta `index`, as a change-set."""

    index: int
    data: bytes


class MetadataStore(Protocol):
    """See the module's text for what each call promises."""

    async def open(self) -> None:
        """Begin the session; StorageError with a clear text where the store cannot be used."""

    async def close(self) -> None:
        """End the session; its registration and its controllership go. Closing twice is harmless."""

    async def register(self, registration: BrokerRegistration) -> int:
        """Announce this broker; returns its epoch."""

    async def elect(self, broker_id: int, *, replacing: int | None = None) -> int | None:
        """Try to become controller; returns the controller epoch, or None where another one is."""

    async def append(self, delta: bytes, controller_epoch: int) -> int:
        """Add a delta; returns its index (the first is 1). Raises Fenced."""

    async def end(self) -> int:
        """The index of the newest delta."""

    def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Every delta with an index above `after`, for ever. Raises Trimmed."""

    async def read_snapshot(self) -> Snapshot | None:
        """The newest snapshot, if there is one."""

    async def write_snapshot(self, snapshot: Snapshot, controller_epoch: int) -> None:
        """Keep a snapshot and let the deltas up to its index go. Raises Fenced."""

    def membership(self) -> AsyncGenerator[Membership, None]:
        """The membership now, and again after changes, for ever."""

    def sessions(self) -> AsyncGenerator[SessionState, None]:
        """The state of this session now, and after each change, until the store is closed."""
