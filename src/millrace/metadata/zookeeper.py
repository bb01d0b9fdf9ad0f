"""The metadata log in ZooKeeper: what several brokers share. Speaks in znodes, multis and epochs.

Not here: the connection, its threads and kazoo (`metadata.zookeeper_session`), the paths of the znodes and what is in
them (`metadata.znodes`), what a delta means (`metadata.deltas`), what the calls promise (`metadata.store`).

After a lost connection the author of a write looks whether it happened, by the number of a delta and by the random
`claim` in `/controller` and `/brokers/ids/N`.

Invariants
- Everything a controller writes is in a `multi` that checks the version of `/controller_epoch`.
- A controller writes only in the session in which it was elected.
- A write whose answer was lost is never repeated blindly: its author looks first. What it does not see then will not
  come, which the session promises.
- `/controller` is made and replaced together with `/controller_epoch`: a pair that was read with equal epochs is true.
- Watches are set before the state is read that they guard, and set again after every lost connection.
- Where znodes are closed to strangers (`metadata.zookeeper_access`), every znode of the cluster is, from `open` on:
  what is made is closed from its first moment, and what was there is closed before `open` returns.

Owner: the loop. Appends and snapshots, which have several steps, wait for each other.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from millrace.clock import Clock, SystemClock
from millrace.config import BrokerConfig
from millrace.errors import ConfigError, StorageError
from millrace.metadata import znodes
from millrace.metadata.store import (
    BrokerRegistration,
    Fenced,
    Member,
    Membership,
    SessionState,
    Snapshot,
    Trimmed,
)
from millrace.metadata.znodes import ControllerClaim
from millrace.metadata.zookeeper_access import OPEN, ZooKeeperAccess
from millrace.metadata.zookeeper_session import (
    BATCH,
    Alarm,
    Check,
    Children,
    Closed,
    Create,
    Delete,
    Exists,
    Get,
    InDoubt,
    IsOpen,
    Operation,
    Refusal,
    SetData,
    ZooKeeperSession,
)

MAX_VALUE_BYTES: Final = 900 * 1024
"""ZooKeeper refuses requests above 1 MiB (`jute.maxbuffer`)."""
_TRIM_AT_A_TIME: Final = 1000
_LAYOUT: Final = (
    Create(znodes.METADATA, znodes.to_json({"format": znodes.FORMAT})),
    Create(znodes.DELTAS),
    Create(znodes.SNAPSHOTS),
    Create(znodes.SNAPSHOT),
    Create(znodes.BROKERS),
    Create(znodes.BROKER_IDS),
    Create(znodes.CONTROLLER_EPOCH),
)

_TOP: Final = (znodes.METADATA, znodes.BROKERS, znodes.CONTROLLER_EPOCH, znodes.CONTROLLER)
_SERVER: Final = ("/", "/zookeeper", "/zookeeper/quota")

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Office:
    """That this session was elected controller."""

    controller_epoch: int
    session: int
    """Its number: the office ends with it."""
    next_delta: int | None = None
    """The number of the next delta, while it is known."""


class ZooKeeperStore:
    """One broker's session on an ensemble; see `metadata.store` for what the calls promise."""

    def __init__(
        self,
        hosts: str,
        *,
        session_timeout_ms: int = 6000,
        connection_timeout_ms: int | None = None,
        clock: Clock | None = None,
        access: ZooKeeperAccess = OPEN,
    ) -> None:
        self._session = ZooKeeperSession(
            hosts,
            session_timeout_ms=session_timeout_ms,
            connection_timeout_ms=connection_timeout_ms or session_timeout_ms,
            clock=clock or SystemClock(),
            access=access,
        )
        self._writing = asyncio.Lock()
        self._office: _Office | None = None

    @classmethod
    def from_config(cls, config: BrokerConfig, clock: Clock) -> ZooKeeperStore:
        """The store that a broker's settings name."""
        return cls(
            config.get_str("zookeeper.connect"),
            session_timeout_ms=config.session_timeout_ms,
            connection_timeout_ms=config.get("zookeeper.connection.timeout.ms"),
            clock=clock,
            access=ZooKeeperAccess.from_config(config),
        )

    def __repr__(self) -> str:
        return f"ZooKeeperStore({self.hosts}{self._session.root}, {self._session.state.name.lower()})"

    @property
    def hosts(self) -> str:
        """The servers, without the path."""
        return self._session.hosts

    # --- session ------------------------------------------------------------------------------------------------------

    async def open(self) -> None:
        await self._session.open()
        try:
            await self._make_layout()
            if self._session.access.closes:
                await self._close_znodes()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        await self._session.close()

    def sessions(self) -> AsyncGenerator[SessionState, None]:
        return self._session.states()

    async def _make_layout(self) -> None:
        place = f"{self.hosts}{self._session.root or '/'}"
        refusal: Refusal | None = None
        while (found := await self._session.get(znodes.METADATA)) is None:  # ours, or that of a broker that was quicker
            if refusal is not None:
                raise StorageError(
                    f"ZooKeeper at {place} holds something else ({refusal.value}); "
                    f"give the cluster a path of its own, such as {self.hosts}/millrace"
                )
            try:
                refusal = await self._session.multi(_LAYOUT)
            except InDoubt:
                continue
        stored = znodes.from_json(found.data, znodes.METADATA)
        if stored.get("format") != znodes.FORMAT:
            raise StorageError(
                f"the metadata in ZooKeeper at {place} has format {stored.get('format')}, "
                f"this version reads {znodes.FORMAT}"
            )

    async def _close_znodes(self) -> None:
        """Close what earlier starts left open, down to the last delta: a stranger needs nothing but its path."""
        if self._session.access.set_acl is None:
            await self._check_that_others_log_in()
        closed = 0
        level = list(_TOP)
        while level:
            below: list[str] = []
            for start in range(0, len(level), BATCH):
                paths = level[start : start + BATCH]
                closed += await self._session.close_to_strangers(paths)
                names = await self._session.read(*(Children(path) for path in paths))
                below += [f"{path}/{name}" for path, found in zip(paths, names, strict=True) for name in found or ()]
            level = below
        if self._session.root:
            closed += await self._session.close_to_strangers([""])
        if closed:
            logger.info("%d znodes at %s were open, and are closed now", closed, self.hosts)

    async def _check_that_others_log_in(self) -> None:
        """ConfigError where brokers run that leave their znodes open: they may be without a login, and be shut out."""
        (names,) = await self._session.read(Children(znodes.BROKER_IDS))
        ids = sorted(int(name) for name in names or () if name.isdigit())
        are_open = await self._session.read(*(IsOpen(znodes.broker_path(broker_id)) for broker_id in ids[:BATCH]))
        if any(are_open):
            brokers = ", ".join(str(broker_id) for broker_id, is_open in zip(ids, are_open, strict=False) if is_open)
            raise ConfigError(
                f"brokers {brokers} leave the znodes open, and closed ones might shut them out: set "
                "zookeeper.set.acl=false until every broker has the login, then true"
            )

    # --- members and controller ---------------------------------------------------------------------------------------

    async def register(self, registration: BrokerRegistration) -> int:
        path = znodes.broker_path(registration.broker_id)
        value = znodes.write_registration(registration, secrets.token_hex(8))
        registered = False
        while True:
            node = await self._session.get(path)
            if node is not None and node.data == value and self._session.owns(node):
                return node.czxid
            if node is not None and node.data != value and registered:
                raise StorageError(
                    f"another process has registered as broker {registration.broker_id} just now; "
                    "every broker needs a node.id of its own"
                )
            operations: list[Operation] = [] if node is None else [Delete(path, node.version)]
            operations.append(Create(path, value, ephemeral=True))
            try:
                registered = await self._session.multi(operations) is None
            except InDoubt:
                registered = False

    async def elect(self, broker_id: int, *, replacing: int | None = None) -> int | None:
        claim = secrets.token_hex(8)
        while True:
            epoch, holder, is_mine = await self._controller()
            if holder is not None:
                if holder.claim == claim and is_mine:
                    return self._take_office(epoch)
                if epoch != replacing:
                    return None
            value = znodes.write_claim(ControllerClaim(broker_id, epoch + 1, claim))
            operations: list[Operation] = [] if holder is None else [Delete(znodes.CONTROLLER)]
            operations.append(Create(znodes.CONTROLLER, value, ephemeral=True))
            operations.append(SetData(znodes.CONTROLLER_EPOCH, b"", epoch))
            session = self._session.number
            try:
                refusal = await self._session.multi(operations)
            except InDoubt:
                continue
            if refusal is None and session == self._session.number:  # otherwise it was won and lost at once
                return self._take_office(epoch + 1)

    def _take_office(self, controller_epoch: int) -> int:
        self._office = _Office(controller_epoch, self._session.number)
        return controller_epoch

    def _office_of(self, controller_epoch: int) -> _Office:
        """The office under that epoch; Fenced where this session does not hold it."""
        if self._session.closed:
            raise Closed
        office = self._office
        if office is None or (office.controller_epoch, office.session) != (controller_epoch, self._session.number):
            raise Fenced(f"controller epoch {controller_epoch} is over, or belongs to another session")
        return office

    async def _controller(self, alarm: Alarm | None = None) -> tuple[int, ControllerClaim | None, bool]:
        """The controller epoch, the controller, and whether it is this session; true together. `alarm`: for changes."""
        while True:
            counter, _, holder = await self._session.read(
                Get(znodes.CONTROLLER_EPOCH, alarm), Exists(znodes.CONTROLLER, alarm), Get(znodes.CONTROLLER)
            )
            epoch = _stored(counter, znodes.CONTROLLER_EPOCH).version
            if holder is None:
                return epoch, None, False
            claim = znodes.read_claim(holder.data)
            if claim.controller_epoch == epoch:
                return epoch, claim, self._session.owns(holder)

    async def membership(self) -> AsyncGenerator[Membership, None]:
        last: Membership | None = None
        with self._session.alarm() as alarm:
            while not self._session.closed:
                alarm.clear()
                try:
                    current = await self._read_membership(alarm)
                    if current != last:
                        last = current
                        yield current
                    await alarm.wait()
                except Closed:
                    return

    async def _read_membership(self, alarm: Alarm) -> Membership:
        epoch, holder, _ = await self._controller(alarm)
        (names,) = await self._session.read(Children(znodes.BROKER_IDS, alarm))
        ids = sorted(int(name) for name in _stored(names, znodes.BROKER_IDS) if name.isdigit())
        nodes = await self._session.get_all([znodes.broker_path(broker_id) for broker_id in ids])
        members = tuple(
            Member(znodes.read_registration(broker_id, node.data), node.czxid)
            for broker_id, node in zip(ids, nodes, strict=True)
            if node is not None  # gone since the list was read: the alarm has rung
        )
        return Membership(members, None if holder is None else holder.broker_id, epoch)

    async def _write(self, operations: Sequence[Operation], controller_epoch: int) -> Refusal | None:
        """Write as controller, all or nothing, in the session that was elected. Fenced, InDoubt."""
        fence = Check(znodes.CONTROLLER_EPOCH, controller_epoch)
        refusal = await self._session.multi([fence, *operations], partial(self._office_of, controller_epoch))
        if refusal is Refusal.BAD_VERSION:
            raise Fenced(f"controller epoch {controller_epoch} is over")
        return refusal

    # --- deltas -------------------------------------------------------------------------------------------------------

    async def append(self, delta: bytes, controller_epoch: int) -> int:
        value = znodes.pack(delta, controller_epoch)
        if len(value) > MAX_VALUE_BYTES:
            raise StorageError(
                f"a metadata delta of {len(value)} bytes is more than ZooKeeper takes ({MAX_VALUE_BYTES}); "
                "ask for less at a time"
            )
        async with self._writing:
            office = self._office_of(controller_epoch)
            number = office.next_delta or await self._end() + 1
            office.next_delta = None  # known again when this one's outcome is
            await self._append(znodes.delta_path(number), value, controller_epoch)
            office.next_delta = number + 1
            return number

    async def _append(self, path: str, value: bytes, controller_epoch: int) -> None:
        """Return when the delta is there; Fenced when it is not and cannot come any more."""
        doubt = False
        while True:
            if doubt:
                await self._session.sync()
                node = await self._session.get(path)
                if node is not None:
                    if node.data == value:
                        return
                    raise Fenced(f"controller epoch {controller_epoch} is over: another controller wrote {path}")
            try:
                refusal = await self._write([Create(path, value)], controller_epoch)
            except InDoubt:
                doubt = True
                continue
            if refusal is None:
                return
            if refusal is not Refusal.NODE_EXISTS or doubt:
                raise StorageError(f"ZooKeeper refuses {path}: {refusal.value}")
            doubt = True

    async def end(self) -> int:
        await self._session.sync()
        return await self._end()

    async def _end(self) -> int:
        numbers, index, _ = await self._positions()
        return max(index, *numbers) if numbers else index

    async def _positions(self) -> tuple[list[int], int, int]:
        """The numbers of the deltas there are; index and chunk count of the snapshot (0, 0 where there is none)."""
        # The list comes first: what is missing in it because it was trimmed is in the pointer, which is younger.
        names, pointer = await self._session.read(Children(znodes.DELTAS), Get(znodes.SNAPSHOT))
        numbers = sorted(int(name[2:]) for name in _stored(names, znodes.DELTAS) if name.startswith("d-"))
        return numbers, *znodes.read_pointer(_stored(pointer, znodes.SNAPSHOT).data)

    async def follow(self, after: int) -> AsyncGenerator[tuple[int, bytes], None]:
        index, window = after, 1
        with self._session.alarm() as alarm:
            while not self._session.closed:
                try:
                    paths = [znodes.delta_path(index + 1 + step) for step in range(window)]
                    nodes = await self._session.get_all(paths)
                    found = list(itertools.takewhile(lambda node: node is not None, nodes))
                    for node in found:
                        assert node is not None
                        index += 1
                        yield index, znodes.unpack(node.data)
                    if len(found) == window:
                        window = min(window * 2, BATCH)
                        continue
                    window = 1
                    alarm.clear()
                    if not await self._is_there(index + 1, alarm):
                        await alarm.wait()
                except Closed:
                    return

    async def _is_there(self, number: int, alarm: Alarm) -> bool:
        """Whether delta `number` exists; if not, `alarm` rings when it comes. Trimmed if it is gone already."""
        is_there, pointer = await self._session.read(Exists(znodes.delta_path(number), alarm), Get(znodes.SNAPSHOT))
        if not is_there and znodes.read_pointer(_stored(pointer, znodes.SNAPSHOT).data)[0] >= number:
            raise Trimmed(f"delta {number} is folded into a snapshot")
        return is_there

    # --- snapshots ----------------------------------------------------------------------------------------------------

    async def read_snapshot(self) -> Snapshot | None:
        while True:
            _, index, chunks = await self._positions()
            if not chunks:
                return None
            nodes = await self._session.get_all([znodes.chunk_path(index, number) for number in range(chunks)])
            parts = [node.data for node in nodes if node is not None]
            if len(parts) == chunks:
                return Snapshot(index, znodes.unpack(b"".join(parts), znodes.MAX_SNAPSHOT_BYTES))
            # A newer snapshot has taken its place between the two reads.

    async def write_snapshot(self, snapshot: Snapshot, controller_epoch: int) -> None:
        value = znodes.pack(snapshot.data, controller_epoch, znodes.MAX_SNAPSHOT_BYTES)
        async with self._writing:
            while True:
                try:
                    return await self._write_snapshot(snapshot.index, value, controller_epoch)
                except InDoubt:
                    continue  # every step looks first, so the whole may begin again

    async def _write_snapshot(self, index: int, value: bytes, controller_epoch: int) -> None:
        numbers, current, chunks = await self._positions()
        await self._remove_chunks(keep=current if chunks else None, controller_epoch=controller_epoch)
        trimmed = [Delete(znodes.delta_path(number)) for number in numbers if number <= max(index, current)]
        if not chunks or current < index:
            parts = [value[start : start + znodes.CHUNK_BYTES] for start in range(0, len(value), znodes.CHUNK_BYTES)]
            for number, part in enumerate(parts):
                await self._write_as_read([Create(znodes.chunk_path(index, number), part)], controller_epoch)
            pointer = SetData(znodes.SNAPSHOT, znodes.to_json({"index": index, "chunks": len(parts)}))
            await self._write_as_read([pointer, *trimmed[:_TRIM_AT_A_TIME]], controller_epoch)
            trimmed = trimmed[_TRIM_AT_A_TIME:]
            await self._remove_chunks(keep=index, controller_epoch=controller_epoch)
        for start in range(0, len(trimmed), _TRIM_AT_A_TIME):
            await self._write_as_read(trimmed[start : start + _TRIM_AT_A_TIME], controller_epoch)

    async def _remove_chunks(self, *, keep: int | None, controller_epoch: int) -> None:
        """Remove the chunks of every snapshot but `keep`: older ones, and what a dead controller left half written."""
        (names,) = await self._session.read(Children(znodes.SNAPSHOTS))
        stale = [name for name in sorted(_stored(names, znodes.SNAPSHOTS)) if znodes.snapshot_index(name) != keep]
        await self._write_as_read([Delete(f"{znodes.SNAPSHOTS}/{name}") for name in stale], controller_epoch)

    async def _write_as_read(self, operations: Sequence[Operation], controller_epoch: int) -> None:
        """Write as controller. InDoubt also where the znodes are not as they were read."""
        if await self._write(operations, controller_epoch) is not None:
            raise InDoubt


def _stored(found: T | None, path: str) -> T:
    """What was found at one of the znodes of every cluster."""
    if found is None:
        raise StorageError(f"ZooKeeper has lost the cluster's metadata: {path} is gone")
    return found


async def close_server(hosts: str, access: ZooKeeperAccess, *, connection_timeout_ms: int, clock: Clock) -> None:
    """Close a whole ZooKeeper to everybody but `access`, for one that is a cluster's own: its root, too."""
    session = ZooKeeperSession(
        hosts,
        session_timeout_ms=connection_timeout_ms,
        connection_timeout_ms=connection_timeout_ms,
        clock=clock,
        access=access,
    )
    await session.open()
    try:
        await session.close_to_strangers(_SERVER)
    finally:
        await session.close()
