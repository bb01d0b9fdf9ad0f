"""What a change of the cluster is, and how a set of changes is written down.

A delta is one change-set: changes that happen together or not at all. It is stored as UTF-8 JSON,
`{"v": 1, "changes": [["topic_created", {...}], ...]}`, so that a person can read the log. A snapshot has the same
form: the changes that build the image from nothing. Not here: what a change does to the image (`cluster.image`), and
where deltas are kept (`metadata.store`).

Invariants: `decode(encode(x)) == x`; a delta from a later format version or with an unknown change is refused, never
half applied; unknown fields of a known change are refused too, because skipping one could mean a different image.
"""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from sys import intern
from typing import Any, Final, TypeAlias, cast

from millrace.errors import StorageError
from millrace.model import UNASSIGNED_DIRECTORY
from millrace.security.acls import Acl, Operation, PatternKind, Permission, ResourceKind
from millrace.security.quotas import QuotaEntity
from millrace.security.scram import ScramCredential, ScramMechanism
from millrace.security.tokens import DelegationToken

FORMAT_VERSION: Final = 1


class ResourceType(IntEnum):
    """What a config belongs to; the numbers are the protocol's."""

    TOPIC = 2
    BROKER = 4
    BROKER_LOGGER = 8
    CLIENT_METRICS = 16
    GROUP = 32


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a broker can be reached by clients of one listener."""

    listener: str
    host: str
    port: int
    security_protocol: str = "PLAINTEXT"


@dataclass(frozen=True, slots=True)
class Directories:
    """The log directories of a broker, by id. A broker that names none says nothing about its directories."""

    online: tuple[str, ...] = ()
    full: tuple[str, ...] = ()
    """Those of `online` that take no more records until there is space again."""
    some_offline: bool = False
    """Whether there is one that cannot be used: what lies in a directory unknown to the broker may lie there."""


NO_DIRECTORIES: Final = Directories()


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Who holds a partition, where, and who leads it. `leader` is -1 where nobody can.

    While a reassignment is under way, `replicas` are those of the target, in its order, followed by those that will go.
    """

    replicas: tuple[int, ...]
    isr: tuple[int, ...]
    leader: int
    leader_epoch: int = 0
    partition_epoch: int = 0
    adding: tuple[int, ...] = ()
    removing: tuple[int, ...] = ()
    elr: tuple[int, ...] = ()
    """Eligible leader replicas: not in the ISR, but nothing was committed since they were (KIP-966)."""
    directories: tuple[str, ...] = ()
    """The id of the directory in which each of `replicas` lies; empty where none is known."""

    @property
    def is_reassigning(self) -> bool:
        return bool(self.adding or self.removing)

    def directory_of(self, broker_id: int) -> str:
        """Where the replica of a broker lies; UNASSIGNED_DIRECTORY where that is not known."""
        if not self.directories:
            return UNASSIGNED_DIRECTORY
        return self.directories[self.replicas.index(broker_id)]


@dataclass(frozen=True, slots=True)
class ClusterCreated:
    """The very first change: the cluster has a name from now on."""

    cluster_id: str


@dataclass(frozen=True, slots=True)
class ControllerChanged:
    """The first change of every controller, so that the image says who wrote what follows."""

    broker_id: int
    controller_epoch: int


@dataclass(frozen=True, slots=True)
class BrokerRegistered:
    """A broker came, or came back as a new incarnation with a new epoch."""

    broker_id: int
    broker_epoch: int
    endpoints: tuple[Endpoint, ...]
    rack: str | None = None
    fenced: bool = False
    directories: Directories = NO_DIRECTORIES
    boot_id: str = ""
    """Of the machine, since it was last started."""
    clean_epoch: int = -1
    """The incarnation after which everything was put on disk, or that still goes on; -1 after a crash."""


@dataclass(frozen=True, slots=True)
class DirectoriesChanged:
    """A directory of a broker failed, is full, or has room again."""

    broker_id: int
    broker_epoch: int
    directories: Directories


@dataclass(frozen=True, slots=True)
class BrokerFenced:
    """A broker may not lead and counts as gone (`fenced`), or counts again."""

    broker_id: int
    broker_epoch: int
    fenced: bool


@dataclass(frozen=True, slots=True)
class BrokerUnregistered:
    """A broker left for good."""

    broker_id: int


@dataclass(frozen=True, slots=True)
class TopicCreated:
    """A topic with all its partitions, in the order of their numbers; its configs are a change of their own."""

    name: str
    topic_id: uuid.UUID
    partitions: tuple[PartitionState, ...]


@dataclass(frozen=True, slots=True)
class TopicDeleted:
    """The topic, its partitions and its configs are gone."""

    name: str
    topic_id: uuid.UUID


@dataclass(frozen=True, slots=True)
class PartitionsAdded:
    """More partitions, numbered on from those the topic has."""

    topic_id: uuid.UUID
    partitions: tuple[PartitionState, ...]


@dataclass(frozen=True, slots=True)
class PartitionChanged:
    """A new leader, ISR or set of replicas of one partition, complete with its new epochs."""

    topic_id: uuid.UUID
    index: int
    state: PartitionState


@dataclass(frozen=True, slots=True)
class ConfigChanged:
    """Settings of one resource that were set (to a text) or removed (None); the others stay."""

    resource_type: ResourceType
    name: str
    values: tuple[tuple[str, str | None], ...] = field(repr=False)


@dataclass(frozen=True, slots=True)
class ProducerIdsAllocated:
    """Producer ids below `next_id` are taken; the last `count` of them belong to `broker_id`."""

    broker_id: int
    next_id: int
    count: int


@dataclass(frozen=True, slots=True)
class ScramChanged:
    """A user has another password for one mechanism, or (None) none any more."""

    user: str
    mechanism: ScramMechanism
    credential: ScramCredential | None


@dataclass(frozen=True, slots=True)
class AclsChanged:
    """Rules that came and rules that went."""

    added: tuple[Acl, ...] = ()
    removed: tuple[Acl, ...] = ()


@dataclass(frozen=True, slots=True)
class QuotaChanged:
    """Quotas of one entity that were set or removed (None); the others stay."""

    entity: QuotaEntity
    values: tuple[tuple[str, float | None], ...]


@dataclass(frozen=True, slots=True)
class TokenChanged:
    """A delegation token came, or was renewed."""

    token: DelegationToken


@dataclass(frozen=True, slots=True)
class TokenRemoved:
    """A delegation token has expired or was withdrawn."""

    token_id: str


Change: TypeAlias = (
    ClusterCreated
    | ControllerChanged
    | BrokerRegistered
    | DirectoriesChanged
    | BrokerFenced
    | BrokerUnregistered
    | TopicCreated
    | TopicDeleted
    | PartitionsAdded
    | PartitionChanged
    | ConfigChanged
    | ProducerIdsAllocated
    | ScramChanged
    | AclsChanged
    | QuotaChanged
    | TokenChanged
    | TokenRemoved
)
ChangeSet: TypeAlias = tuple[Change, ...]


def encode(changes: Iterable[Change]) -> bytes:
    """One delta as bytes."""
    body = {
        "v": FORMAT_VERSION,
        "changes": [[_TAGS[type(change)], _WRITERS[type(change)](change)] for change in changes],
    }
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")


def decode(data: bytes) -> ChangeSet:
    """The change-set in `data`; StorageError where it is damaged or from a later version."""
    try:
        body = json.loads(data.decode("utf-8", "surrogatepass"))
        version = body["v"]
        if version != FORMAT_VERSION:
            raise StorageError(f"metadata delta has format {version}, this version reads {FORMAT_VERSION}")
        return tuple(_READERS[tag](fields) for tag, fields in body["changes"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        # What is written there, and what an error says about it, may be a secret.
        raise StorageError(f"damaged metadata delta of {len(data)} bytes ({type(error).__name__})") from None


# --- one writer and one reader per change -----------------------------------------------------------------------------


def _write_partition(state: PartitionState) -> list[Any]:
    row = [
        list(state.replicas),
        list(state.isr),
        state.leader,
        state.leader_epoch,
        state.partition_epoch,
        list(state.adding),
        list(state.removing),
        list(state.elr),
        list(state.directories),
    ]
    while row[-1] == []:
        row.pop()
    return row


def _read_partition(row: list[Any]) -> PartitionState:
    row = row + [[]] * (9 - len(row))
    replicas, isr, leader, leader_epoch, partition_epoch, adding, removing, elr, directories = row
    return PartitionState(
        _ints(replicas),
        _ints(isr),
        _int(leader),
        _int(leader_epoch),
        _int(partition_epoch),
        _ints(adding),
        _ints(removing),
        _ints(elr),
        tuple(map(intern, directories)),
    )


def _ints(row: Iterable[Any]) -> tuple[int, ...]:
    return tuple(map(_int, row))


def _int(number: Any) -> int:
    """A whole number; what is none is damage, and not rounded to one."""
    if type(number) is not int:
        raise TypeError(f"{number!r} is not a whole number")
    return number


def _float(number: Any) -> float:
    """A number as it is written."""
    if type(number) is not float:
        raise TypeError(f"{number!r} is not how a number is written")
    return number


def _text(text: Any) -> str:
    if type(text) is not str:
        raise TypeError(f"{text!r} is not a text")
    return text


def _bytes(text: str) -> bytes:
    """Bytes in base64, in the one form in which they are written."""
    found = base64.b64decode(text, validate=True)
    if base64.b64encode(found).decode() != text:
        raise ValueError("not how bytes are written")
    return found


def _uuid(text: str) -> uuid.UUID:
    """An id in the one form in which ids are written; Python would take others for it, too."""
    found = uuid.UUID(text)
    if found.hex != text:
        raise ValueError(f"{text!r} is not how an id is written")
    return found


def _write_endpoint(endpoint: Endpoint) -> list[Any]:
    return [endpoint.listener, endpoint.host, endpoint.port, endpoint.security_protocol]


def _write_broker(change: BrokerRegistered) -> dict[str, Any]:
    return {
        "broker_id": change.broker_id,
        "broker_epoch": change.broker_epoch,
        "endpoints": [_write_endpoint(endpoint) for endpoint in change.endpoints],
        "rack": change.rack,
        "fenced": change.fenced,
        "directories": write_directories(change.directories),
        "boot_id": change.boot_id,
        "clean_epoch": change.clean_epoch,
    }


def _read_broker(fields: dict[str, Any]) -> BrokerRegistered:
    endpoints = tuple(
        Endpoint(listener, host, _int(port), sec) for listener, host, port, sec in fields.pop("endpoints")
    )
    directories = read_directories(fields.pop("directories", []))
    return BrokerRegistered(endpoints=endpoints, directories=directories, **fields)


def write_directories(directories: Directories) -> list[Any]:
    """As a row, of a delta or of a registration."""
    return [list(directories.online), list(directories.full), directories.some_offline]


def read_directories(row: list[Any]) -> Directories:
    """What `write_directories` wrote; an empty row is of a broker that says nothing about them."""
    if not row:
        return NO_DIRECTORIES
    online, full, some_offline = row
    return Directories(tuple(map(intern, online)), tuple(map(intern, full)), bool(some_offline))


def _write_directories_changed(change: DirectoriesChanged) -> dict[str, Any]:
    directories = write_directories(change.directories)
    return {"broker_id": change.broker_id, "broker_epoch": change.broker_epoch, "directories": directories}


def _read_directories_changed(fields: dict[str, Any]) -> DirectoriesChanged:
    return DirectoriesChanged(directories=read_directories(fields.pop("directories")), **fields)


def _write_topic(change: TopicCreated) -> dict[str, Any]:
    partitions = [_write_partition(state) for state in change.partitions]
    return {"name": change.name, "topic_id": change.topic_id.hex, "partitions": partitions}


def _read_topic(fields: dict[str, Any]) -> TopicCreated:
    partitions = tuple(map(_read_partition, fields.pop("partitions")))
    return TopicCreated(topic_id=_uuid(fields.pop("topic_id")), partitions=partitions, **fields)


def _read_deleted(fields: dict[str, Any]) -> TopicDeleted:
    return TopicDeleted(topic_id=_uuid(fields.pop("topic_id")), **fields)


def _write_added(change: PartitionsAdded) -> dict[str, Any]:
    return {"topic_id": change.topic_id.hex, "partitions": [_write_partition(state) for state in change.partitions]}


def _read_added(fields: dict[str, Any]) -> PartitionsAdded:
    partitions = tuple(map(_read_partition, fields.pop("partitions")))
    return PartitionsAdded(topic_id=_uuid(fields.pop("topic_id")), partitions=partitions, **fields)


def _write_changed(change: PartitionChanged) -> dict[str, Any]:
    return {"topic_id": change.topic_id.hex, "index": change.index, "state": _write_partition(change.state)}


def _read_changed(fields: dict[str, Any]) -> PartitionChanged:
    state = _read_partition(fields.pop("state"))
    return PartitionChanged(topic_id=_uuid(fields.pop("topic_id")), state=state, **fields)


def _write_config(change: ConfigChanged) -> dict[str, Any]:
    return {"type": change.resource_type.name, "name": change.name, "values": [list(pair) for pair in change.values]}


def _read_config(fields: dict[str, Any]) -> ConfigChanged:
    values = tuple((str(name), None if value is None else str(value)) for name, value in fields.pop("values"))
    return ConfigChanged(resource_type=ResourceType[fields.pop("type")], values=values, **fields)


def _write_scram(change: ScramChanged) -> dict[str, Any]:
    credential = change.credential
    row = None
    if credential is not None:
        secrets = (credential.salt, credential.stored_key, credential.server_key)
        row = [*(base64.b64encode(secret).decode() for secret in secrets), credential.iterations]
    return {"user": change.user, "mechanism": change.mechanism.name, "credential": row}


def _read_scram(fields: dict[str, Any]) -> ScramChanged:
    row = fields.pop("credential")
    credential = None
    if row is not None:
        salt, stored_key, server_key, iterations = row
        credential = ScramCredential(_bytes(salt), _bytes(stored_key), _bytes(server_key), _int(iterations))
    return ScramChanged(mechanism=ScramMechanism[fields.pop("mechanism")], credential=credential, **fields)


def _write_acl(acl: Acl) -> list[Any]:
    words = (acl.resource.name, acl.name, acl.pattern.name, acl.principal, acl.host)
    return [*words, acl.operation.name, acl.permission.name]


def _read_acl(row: list[Any]) -> Acl:
    resource, name, pattern, principal, host, operation, permission = row
    return Acl(
        ResourceKind[resource],
        _text(name),
        PatternKind[pattern],
        _text(principal),
        _text(host),
        Operation[operation],
        Permission[permission],
    )


def _write_acls(change: AclsChanged) -> dict[str, Any]:
    return {"added": list(map(_write_acl, change.added)), "removed": list(map(_write_acl, change.removed))}


def _read_acls(fields: dict[str, Any]) -> AclsChanged:
    added, removed = (tuple(map(_read_acl, fields.pop(name))) for name in ("added", "removed"))
    return AclsChanged(added, removed, **fields)


def _write_quota(change: QuotaChanged) -> dict[str, Any]:
    return {"entity": [list(part) for part in change.entity], "values": [list(pair) for pair in change.values]}


def _read_quota(fields: dict[str, Any]) -> QuotaChanged:
    entity = tuple((_text(kind), None if name is None else _text(name)) for kind, name in fields.pop("entity"))
    values = tuple((_text(key), None if value is None else _float(value)) for key, value in fields.pop("values"))
    return QuotaChanged(entity, values, **fields)


def _write_token(change: TokenChanged) -> dict[str, Any]:
    return _write_flat(change.token)


def _read_token(fields: dict[str, Any]) -> TokenChanged:
    return TokenChanged(DelegationToken(renewers=tuple(map(_text, fields.pop("renewers"))), **fields))


def _write_flat(change: Any) -> dict[str, Any]:
    return {name: getattr(change, name) for name in type(change).__slots__}


_CODEC: Final[Mapping[type[Any], tuple[str, Callable[[Any], dict[str, Any]], Callable[[dict[str, Any]], Change]]]] = {
    ClusterCreated: ("cluster_created", _write_flat, lambda fields: ClusterCreated(**fields)),
    ControllerChanged: ("controller_changed", _write_flat, lambda fields: ControllerChanged(**fields)),
    BrokerRegistered: ("broker_registered", _write_broker, _read_broker),
    DirectoriesChanged: ("directories_changed", _write_directories_changed, _read_directories_changed),
    BrokerFenced: ("broker_fenced", _write_flat, lambda fields: BrokerFenced(**fields)),
    BrokerUnregistered: ("broker_unregistered", _write_flat, lambda fields: BrokerUnregistered(**fields)),
    TopicCreated: ("topic_created", _write_topic, _read_topic),
    TopicDeleted: (
        "topic_deleted",
        lambda change: {"name": change.name, "topic_id": change.topic_id.hex},
        _read_deleted,
    ),
    PartitionsAdded: ("partitions_added", _write_added, _read_added),
    PartitionChanged: ("partition_changed", _write_changed, _read_changed),
    ConfigChanged: ("config_changed", _write_config, _read_config),
    ProducerIdsAllocated: ("producer_ids_allocated", _write_flat, lambda fields: ProducerIdsAllocated(**fields)),
    ScramChanged: ("scram_changed", _write_scram, _read_scram),
    AclsChanged: ("acls_changed", _write_acls, _read_acls),
    QuotaChanged: ("quota_changed", _write_quota, _read_quota),
    TokenChanged: ("token_changed", _write_token, _read_token),
    TokenRemoved: ("token_removed", _write_flat, lambda fields: TokenRemoved(**fields)),
}
_TAGS: Final = {kind: tag for kind, (tag, _, _) in _CODEC.items()}
_WRITERS: Final = {kind: writer for kind, (_, writer, _) in _CODEC.items()}
_READERS: Final = cast(
    "dict[str, Callable[[dict[str, Any]], Change]]", {tag: reader for tag, _, reader in _CODEC.values()}
)
