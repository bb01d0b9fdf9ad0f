"""How each API is used, what each use needs, and how a lack of it shows: the rows of the authorization matrix.

A row (`Way`) is one request and all rights that it takes. Where one of several rights does, as CREATE on the cluster or
on the topic, each has a row of its own. Together the rows of an API have to need exactly what its handler declares.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from millrace.errors import ErrorCode
from millrace.handlers import needs
from millrace.handlers.needs import Right
from millrace.metadata.deltas import ResourceType
from millrace.model import ZERO_UUID
from millrace.security.acls import CLUSTER_NAME, Operation, Permission, ResourceKind
from millrace.wire.frame import RequestHeader, encode_request
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.schema import Array, Nested, Request, Struct
from support.raw import batch

HERE: Final = "here"
GONE: Final = "gone"
"""How names of what exists and of what does not end; of the same length, so that answers can be compared."""
TOKEN_ID: Final = f"token-{HERE}"
TOKEN_OWNER: Final = f"User:owner-{HERE}"
"""A delegation token of somebody else."""
READER: Final = str(uuid.UUID(int=7))
"""A member of groups."""
_CONCURRENT: Final = ErrorCode.CONCURRENT_TRANSACTIONS
NAMED: Final = frozenset({ResourceKind.TOPIC, ResourceKind.GROUP, ResourceKind.TRANSACTIONAL_ID})


@dataclass(frozen=True)
class Names:
    """What a request is about."""

    topic: str
    group: str
    transactional_id: str
    topic_id: uuid.UUID = ZERO_UUID

    def of(self, kind: ResourceKind) -> str:
        return {
            ResourceKind.TOPIC: self.topic,
            ResourceKind.GROUP: self.group,
            ResourceKind.TRANSACTIONAL_ID: self.transactional_id,
            ResourceKind.CLUSTER: CLUSTER_NAME,
            ResourceKind.DELEGATION_TOKEN: TOKEN_ID,
            ResourceKind.USER: TOKEN_OWNER,
        }[kind]


class Setting(Protocol):
    """The broker, with all rights."""

    def call(self, api_key: ApiKey, version: int, /, **fields: Any) -> Any: ...


Refusal = Callable[[Any, Names], bool]
"""Whether a response shows that the right is missing."""


@dataclass(frozen=True)
class Way:
    key: ApiKey
    version: int
    ask: Callable[[Names], dict[str, Any]]
    needs: Mapping[Right, Refusal] = field(default_factory=dict)
    title: str = ""
    prepare: Callable[[Setting, Names], None] = lambda _setting, _names: None
    topic: str = "matrix"
    group: str = "group"
    new_topic: bool = False
    """It is about a topic that does not exist."""
    compared: frozenset[ResourceKind] = NAMED
    """Of these, the request names one by its name: what does not exist must be refused in the same words."""
    logged_in: bool = False
    """It is nothing for those of whom nobody knows who they are."""
    denied_everywhere: bool = False
    """It takes a right on any resource of a kind, so that only a denial of all of them takes it away."""

    def __str__(self) -> str:
        return f"{self.key.name}-v{self.version}{'-' + self.title if self.title else ''}"


def request_of(key: ApiKey, fields: Mapping[str, Any]) -> Request:
    """A request from plain lists and dicts."""
    made = _struct(request_class(key), fields)
    assert isinstance(made, Request)
    return made


def _struct(cls: type[Struct], fields: Mapping[str, Any]) -> Struct:
    types = {each.name: each.type for each in cls.declaration.fields}
    return cls(**{name: _value(types[name], value) for name, value in fields.items()})


def _value(type_: Any, value: Any) -> Any:
    if isinstance(type_, Array) and isinstance(type_.element, Nested) and value is not None:
        return [_struct(type_.element.resolved(), each) for each in value]
    return _struct(type_.resolved(), value) if isinstance(type_, Nested) else value


def values_at(response: Any, path: str) -> Iterator[Any]:
    """Everything at a place, through all lists."""
    name, _, rest = path.partition(".")
    value = getattr(response, name)
    if not rest:
        yield value
        return
    for each in value if isinstance(value, list) else [value]:
        yield from values_at(each, rest)


def at(path: str, code: ErrorCode) -> Refusal:
    """The code, at every place of the path."""

    def shows(response: Any, _names: Names) -> bool:
        found = list(values_at(response, path))
        return bool(found) and all(each == code for each in found)

    return shows


def without(path: str, kind: ResourceKind) -> Refusal:
    """The resource is missing from a list."""
    return lambda response, names: names.of(kind) not in values_at(response, path)


def _topic(path: str) -> Refusal:
    return at(path, ErrorCode.TOPIC_AUTHORIZATION_FAILED)


def _group(path: str) -> Refusal:
    return at(path, ErrorCode.GROUP_AUTHORIZATION_FAILED)


def _cluster(path: str = "error_code") -> Refusal:
    return at(path, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)


def _transactional_id(path: str) -> Refusal:
    return at(path, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)


# --- what requests are made of ----------------------------------------------------------------------------------------


def _produce(names: Names, **changes: Any) -> dict[str, Any]:
    return {
        "acks": -1,
        "timeout_ms": 5000,
        "topic_data": [{"name": names.topic, "partition_data": [{"index": 0, "records": batch(b"v", **changes)}]}],
    }


def _transactional(names: Names) -> dict[str, Any]:
    asked = _produce(names, producer_id=4711, producer_epoch=0, base_sequence=0, transactional=True)
    return asked | {"transactional_id": names.transactional_id}


def _fetch(names: Names, **changes: Any) -> dict[str, Any]:
    partition = {"partition": 0, "partition_max_bytes": 1000}
    return {"max_bytes": 1000, "topics": [{"topic": names.topic, "partitions": [partition]}]} | changes


def _created(names: Names, **changes: Any) -> dict[str, Any]:
    topic = {"name": names.topic, "num_partitions": 1, "replication_factor": 1}
    return {"topics": [topic], "timeout_ms": 5000} | changes


def _altered(kind: ResourceType, name: str, setting: str, value: str) -> dict[str, Any]:
    configs = [{"name": setting, "value": value}]
    return {"resources": [{"resource_type": kind, "resource_name": name, "configs": configs}]}


def _described(kind: ResourceType, name: str) -> dict[str, Any]:
    return {"resources": [{"resource_type": kind, "resource_name": name, "configuration_keys": None}]}


def _markers(names: Names) -> dict[str, Any]:
    topics = [{"name": names.topic, "partition_indexes": [0]}]
    return {"markers": [{"producer_id": 9, "producer_epoch": 0, "transaction_result": True, "topics": topics}]}


def _share_state(names: Names, **partition: Any) -> dict[str, Any]:
    partitions = [{"partition": 0, **partition}]
    return {"group_id": names.group, "topics": [{"topic_id": names.topic_id, "partitions": partitions}]}


def _share_fetch(names: Names) -> dict[str, Any]:
    return {
        "group_id": names.group,
        "member_id": READER,
        "share_session_epoch": 0,
        "min_bytes": 1,
        "max_bytes": 1000,
        "max_records": 10,
        "topics": [{"topic_id": names.topic_id, "partitions": [{"partition_index": 0}]}],
    }


def _acknowledged(names: Names) -> dict[str, Any]:
    batches = [{"first_offset": 0, "last_offset": 0, "acknowledge_types": [1]}]
    partitions = [{"partition_index": 0, "acknowledgement_batches": batches}]
    return {
        "group_id": names.group,
        "member_id": READER,
        "share_session_epoch": 1,
        "topics": [{"topic_id": names.topic_id, "partitions": partitions}],
    }


def _begin_share_session(setting: Setting, names: Names) -> None:
    setting.call(ApiKey.SHARE_FETCH, 2, **_share_fetch(names))


def _committed(names: Names, **changes: Any) -> dict[str, Any]:
    partitions = [{"partition_index": 0, "committed_offset": 1}]
    return {"group_id": names.group, "topics": [{"name": names.topic, "partitions": partitions}]} | changes


def commit(setting: Setting, names: Names) -> None:
    """A group of offsets, without members."""
    if names.group.endswith(HERE) and names.topic.endswith(HERE):
        setting.call(ApiKey.OFFSET_COMMIT, 9, **_committed(names, generation_id_or_member_epoch=-1))


def open_transaction(setting: Setting, names: Names) -> None:
    """A transaction that has the topic, and nothing in it."""
    if not names.transactional_id.endswith(HERE):
        return
    asked = {"transactional_id": names.transactional_id, "transaction_timeout_ms": 600_000}
    while (begun := setting.call(ApiKey.INIT_PRODUCER_ID, 5, **asked)).error_code == _CONCURRENT:
        pass
    assert begun.error_code == 0, ErrorCode(begun.error_code)
    setting.call(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        3,
        v3_and_below_transactional_id=names.transactional_id,
        v3_and_below_producer_id=begun.producer_id,
        v3_and_below_producer_epoch=begun.producer_epoch,
        v3_and_below_topics=[{"name": names.topic, "partitions": [0]}],
    )


def _enveloped(names: Names) -> dict[str, Any]:
    inner = request_of(ApiKey.CREATE_TOPICS, _created(names))
    frame = encode_request(RequestHeader(ApiKey.CREATE_TOPICS, 7, 1, "app"), inner)
    principal = b"\0\0\x05User\x06alice\0\0"
    return {"request_data": frame[4:], "request_principal": principal, "client_host_address": bytes((10, 0, 0, 1))}


_MEMBER: Final = {"member_id": READER, "member_epoch": 0}
_TXN: Final = {"producer_id": 4711, "producer_epoch": 0}

_ACL: Final = {
    "resource_type": ResourceKind.TOPIC,
    "resource_name": "some",
    "principal": "User:nobody",
    "host": "*",
    "operation": Operation.READ,
    "permission_type": Permission.ALLOW,
}
_ACL_FILTER: Final = {
    "resource_type_filter": ResourceKind.TOPIC,
    "resource_name_filter": None,
    "principal_filter": "User:nobody",
    "host_filter": None,
    "operation": Operation.ANY,
    "permission_type": Permission.ANY,
}

WAYS: Final = (
    Way(ApiKey.PRODUCE, 12, _produce, {needs.WRITE_TOPIC: _topic("responses.partition_responses.error_code")}),
    Way(
        ApiKey.PRODUCE,
        13,
        lambda n: {
            "acks": -1,
            "timeout_ms": 5000,
            "topic_data": [{"topic_id": n.topic_id, "partition_data": [{"index": 0, "records": batch(b"v")}]}],
        },
        {needs.WRITE_TOPIC: _topic("responses.partition_responses.error_code")},
        compared=frozenset(),
    ),
    Way(
        ApiKey.PRODUCE,
        12,
        _transactional,
        {
            needs.WRITE_TOPIC: _topic("responses.partition_responses.error_code"),
            needs.WRITE_TRANSACTIONAL_ID: _transactional_id("responses.partition_responses.error_code"),
        },
        "transactional",
    ),
    Way(ApiKey.FETCH, 12, _fetch, {needs.READ_TOPIC: _topic("responses.partitions.error_code")}),
    Way(
        ApiKey.FETCH,
        17,
        lambda n: _fetch(n, topics=[{"topic_id": n.topic_id, "partitions": [{"partition": 0}]}]),
        {needs.READ_TOPIC: _topic("responses.partitions.error_code")},
        compared=frozenset(),
    ),
    Way(
        ApiKey.FETCH,
        17,
        lambda n: _fetch(
            n,
            replica_state={"replica_id": 1, "replica_epoch": 1 << 40},
            topics=[{"topic_id": n.topic_id, "partitions": [{"partition": 0}]}],
        ),
        {needs.CLUSTER_ACTION: _topic("responses.partitions.error_code")},
        "follower",
    ),
    Way(
        ApiKey.LIST_OFFSETS,
        9,
        lambda n: {
            "replica_id": -1,
            "topics": [{"name": n.topic, "partitions": [{"partition_index": 0, "timestamp": -1}]}],
        },
        {needs.DESCRIBE_TOPIC: _topic("topics.partitions.error_code")},
    ),
    Way(
        ApiKey.METADATA,
        13,
        lambda n: {"topics": [{"name": n.topic}], "allow_auto_topic_creation": False},
        {needs.DESCRIBE_TOPIC: _topic("topics.error_code")},
    ),
    Way(
        ApiKey.METADATA,
        13,
        lambda n: {"topics": [{"topic_id": n.topic_id, "name": None}], "allow_auto_topic_creation": False},
        {needs.DESCRIBE_TOPIC: _topic("topics.error_code")},
        "by-id",
        compared=frozenset(),
    ),
    Way(
        ApiKey.METADATA,
        13,
        lambda _: {"topics": None},
        {needs.DESCRIBE_TOPIC: without("topics.name", ResourceKind.TOPIC)},
        "all",
        compared=frozenset(),
    ),
    Way(
        ApiKey.METADATA,
        13,
        lambda n: {"topics": [{"name": n.topic}], "allow_auto_topic_creation": True},
        {needs.DESCRIBE_TOPIC: _topic("topics.error_code"), needs.CREATE_TOPIC: _topic("topics.error_code")},
        "creation",
        topic="auto",
        new_topic=True,
    ),
    Way(
        ApiKey.METADATA,
        13,
        lambda n: {"topics": [{"name": n.topic}], "allow_auto_topic_creation": True},
        {needs.DESCRIBE_TOPIC: _topic("topics.error_code"), needs.CREATE_CLUSTER: _topic("topics.error_code")},
        "creation-by-cluster",
        topic="auto",
        new_topic=True,
    ),
    Way(
        ApiKey.METADATA,
        10,
        lambda _: {"topics": [], "include_cluster_authorized_operations": True},
        {needs.DESCRIBE_CLUSTER: lambda response, _: response.cluster_authorized_operations == 0},
        "operations",
    ),
    Way(
        ApiKey.OFFSET_COMMIT,
        9,
        lambda n: _committed(n, generation_id_or_member_epoch=-1),
        {
            needs.READ_GROUP: _group("topics.partitions.error_code"),
            needs.READ_TOPIC: _topic("topics.partitions.error_code"),
        },
    ),
    Way(
        ApiKey.OFFSET_FETCH,
        9,
        lambda n: {"groups": [{"group_id": n.group, "topics": [{"name": n.topic, "partition_indexes": [0]}]}]},
        {
            needs.DESCRIBE_GROUP: _group("groups.error_code"),
            needs.DESCRIBE_TOPIC: _topic("groups.topics.partitions.error_code"),
        },
    ),
    Way(
        ApiKey.OFFSET_FETCH,
        9,
        lambda n: {"groups": [{"group_id": n.group, "topics": None}]},
        {
            needs.DESCRIBE_TOPIC: without("groups.topics.name", ResourceKind.TOPIC),
            needs.DESCRIBE_GROUP: _group("groups.error_code"),
        },
        "all",
        compared=frozenset(),
    ),
    Way(
        ApiKey.FIND_COORDINATOR,
        4,
        lambda n: {"key_type": 0, "coordinator_keys": [n.group]},
        {needs.DESCRIBE_GROUP: _group("coordinators.error_code")},
    ),
    Way(
        ApiKey.FIND_COORDINATOR,
        3,
        lambda n: {"key_type": 1, "key": n.transactional_id},
        {needs.DESCRIBE_TRANSACTIONAL_ID: _transactional_id("error_code")},
    ),
    Way(
        ApiKey.FIND_COORDINATOR,
        6,
        lambda n: {"key_type": 2, "coordinator_keys": [f"{n.group}:AAAAAAAAAAAAAAAAAAAAAQ:0"]},
        {needs.CLUSTER_ACTION: _cluster("coordinators.error_code")},
    ),
    Way(
        ApiKey.JOIN_GROUP,
        9,
        lambda n: {
            "group_id": n.group,
            "session_timeout_ms": 10_000,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": b""}],
        },
        {needs.READ_GROUP: _group("error_code")},
        group="joined",
    ),
    Way(
        ApiKey.HEARTBEAT,
        4,
        lambda n: {"group_id": n.group, "member_id": READER, "generation_id": 1},
        {needs.READ_GROUP: _group("error_code")},
    ),
    Way(
        ApiKey.LEAVE_GROUP,
        5,
        lambda n: {"group_id": n.group, "members": [{"member_id": READER}]},
        {needs.READ_GROUP: _group("error_code")},
    ),
    Way(
        ApiKey.SYNC_GROUP,
        5,
        lambda n: {
            "group_id": n.group,
            "member_id": READER,
            "generation_id": 1,
            "protocol_type": "consumer",
            "protocol_name": "range",
        },
        {needs.READ_GROUP: _group("error_code")},
    ),
    Way(
        ApiKey.DESCRIBE_GROUPS,
        6,
        lambda n: {"groups": [n.group]},
        {needs.DESCRIBE_GROUP: _group("groups.error_code")},
    ),
    Way(
        ApiKey.LIST_GROUPS,
        5,
        lambda _: {},
        {needs.DESCRIBE_GROUP: without("groups.group_id", ResourceKind.GROUP)},
        compared=frozenset(),
    ),
    Way(
        ApiKey.LIST_GROUPS,
        5,
        lambda _: {},
        {needs.DESCRIBE_CLUSTER: without("groups.group_id", ResourceKind.GROUP)},
        "by-cluster",
    ),
    Way(
        ApiKey.CREATE_DELEGATION_TOKEN,
        3,
        lambda n: {
            "owner_principal_type": "User",
            "owner_principal_name": n.of(ResourceKind.USER).removeprefix("User:"),
            "max_lifetime_ms": -1,
        },
        {needs.CREATE_USER_TOKENS: at("error_code", ErrorCode.DELEGATION_TOKEN_AUTHORIZATION_FAILED)},
        compared=frozenset(),
        logged_in=True,
    ),
    Way(ApiKey.RENEW_DELEGATION_TOKEN, 2, lambda _: {"hmac": b"unknown", "renew_period_ms": -1}, logged_in=True),
    Way(ApiKey.EXPIRE_DELEGATION_TOKEN, 2, lambda _: {"hmac": b"unknown", "expiry_time_period_ms": -1}, logged_in=True),
    Way(
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
        3,
        lambda _: {"owners": None},
        {needs.DESCRIBE_TOKEN: without("tokens.token_id", ResourceKind.DELEGATION_TOKEN)},
        compared=frozenset(),
        logged_in=True,
    ),
    Way(
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
        3,
        lambda _: {"owners": None},
        {needs.DESCRIBE_USER_TOKENS: without("tokens.token_id", ResourceKind.DELEGATION_TOKEN)},
        "by-owner",
        compared=frozenset(),
        logged_in=True,
    ),
    Way(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, 0, lambda _: {}),
    Way(ApiKey.PUSH_TELEMETRY, 0, lambda _: {"client_instance_id": uuid.UUID(int=7)}),
    Way(ApiKey.API_VERSIONS, 4, lambda _: {"client_software_name": "raw", "client_software_version": "1"}),
    Way(
        ApiKey.CREATE_TOPICS,
        4,
        _created,
        {needs.CREATE_TOPIC: _topic("topics.error_code")},
        topic="new",
        new_topic=True,
    ),
    Way(
        ApiKey.CREATE_TOPICS,
        7,
        lambda n: _created(n, validate_only=True),
        {
            needs.CREATE_TOPIC: _topic("topics.error_code"),
            needs.DESCRIBE_TOPIC_CONFIGS: _topic("topics.topic_config_error_code"),
        },
        "settings",
        topic="new",
        new_topic=True,
    ),
    Way(ApiKey.CREATE_TOPICS, 4, _created, {needs.CREATE_TOPIC: _topic("topics.error_code")}, "existing"),
    Way(
        ApiKey.CREATE_TOPICS,
        4,
        _created,
        {needs.CREATE_CLUSTER: _topic("topics.error_code")},
        "by-cluster",
        topic="new",
        new_topic=True,
    ),
    Way(
        ApiKey.DELETE_TOPICS,
        5,
        lambda n: {"topic_names": [n.topic], "timeout_ms": 5000},
        {needs.DELETE_TOPIC: _topic("responses.error_code"), needs.DESCRIBE_TOPIC: _topic("responses.error_code")},
        topic="doomed",
    ),
    Way(
        ApiKey.DELETE_TOPICS,
        6,
        lambda n: {"topics": [{"name": None, "topic_id": n.topic_id}], "timeout_ms": 5000},
        {needs.DELETE_TOPIC: _topic("responses.error_code")},
        "by-id",
        topic="doomed",
        compared=frozenset(),
    ),
    Way(
        ApiKey.DELETE_TOPICS,
        5,
        lambda n: {"topic_names": [n.topic], "timeout_ms": 5000},
        {needs.DELETE_CLUSTER: _topic("responses.error_code")},
        "by-cluster",
        topic="doomed",
    ),
    Way(
        ApiKey.DELETE_RECORDS,
        2,
        lambda n: {
            "timeout_ms": 5000,
            "topics": [{"name": n.topic, "partitions": [{"partition_index": 0, "offset": -1}]}],
        },
        {needs.DELETE_TOPIC: _topic("topics.partitions.error_code")},
        topic="trimmed",
        prepare=lambda setting, n: setting.call(ApiKey.PRODUCE, 12, **_produce(n)),
    ),
    Way(
        ApiKey.INIT_PRODUCER_ID,
        5,
        lambda n: {"transactional_id": n.transactional_id, "transaction_timeout_ms": 60_000},
        {needs.WRITE_TRANSACTIONAL_ID: _transactional_id("error_code")},
    ),
    Way(
        ApiKey.INIT_PRODUCER_ID,
        5,
        lambda _: {"transactional_id": None, "transaction_timeout_ms": 60_000},
        {needs.IDEMPOTENT_WRITE: _cluster()},
        "idempotent",
    ),
    Way(
        ApiKey.INIT_PRODUCER_ID,
        5,
        lambda _: {"transactional_id": None, "transaction_timeout_ms": 60_000},
        {needs.WRITE_TOPIC: _cluster()},
        "idempotent-by-topic",
        compared=frozenset(),
        denied_everywhere=True,
    ),
    Way(
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        4,
        lambda n: {
            "replica_id": -1,
            "topics": [{"topic": n.topic, "partitions": [{"partition": 0, "leader_epoch": 0}]}],
        },
        {needs.DESCRIBE_TOPIC: _topic("topics.partitions.error_code")},
    ),
    Way(
        ApiKey.OFFSET_FOR_LEADER_EPOCH,
        4,
        lambda n: {
            "replica_id": -1,
            "topics": [{"topic": n.topic, "partitions": [{"partition": 0, "leader_epoch": 0}]}],
        },
        {needs.CLUSTER_ACTION: _topic("topics.partitions.error_code")},
        "by-cluster",
    ),
    Way(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        3,
        lambda n: {
            "v3_and_below_transactional_id": n.transactional_id,
            "v3_and_below_producer_id": 4711,
            "v3_and_below_topics": [{"name": n.topic, "partitions": [0]}],
        },
        {
            needs.WRITE_TRANSACTIONAL_ID: _transactional_id(
                "results_by_topic_v3_and_below.results_by_partition.partition_error_code"
            ),
            needs.WRITE_TOPIC: _topic("results_by_topic_v3_and_below.results_by_partition.partition_error_code"),
        },
    ),
    Way(
        ApiKey.ADD_PARTITIONS_TO_TXN,
        5,
        lambda n: {
            "transactions": [
                {"transactional_id": n.transactional_id, **_TXN, "topics": [{"name": n.topic, "partitions": [0]}]}
            ]
        },
        {needs.CLUSTER_ACTION: _cluster()},
    ),
    Way(
        ApiKey.ADD_OFFSETS_TO_TXN,
        3,
        lambda n: {"transactional_id": n.transactional_id, "group_id": n.group, **_TXN},
        {needs.WRITE_TRANSACTIONAL_ID: _transactional_id("error_code"), needs.READ_GROUP: _group("error_code")},
    ),
    Way(
        ApiKey.END_TXN,
        5,
        lambda n: {"transactional_id": n.transactional_id, "committed": False, **_TXN},
        {needs.WRITE_TRANSACTIONAL_ID: _transactional_id("error_code")},
    ),
    Way(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        _markers,
        {needs.ALTER_CLUSTER: _cluster("markers.topics.partitions.error_code")},
    ),
    Way(
        ApiKey.WRITE_TXN_MARKERS,
        1,
        _markers,
        {needs.CLUSTER_ACTION: _cluster("markers.topics.partitions.error_code")},
        "by-broker",
    ),
    Way(
        ApiKey.TXN_OFFSET_COMMIT,
        3,
        lambda n: _committed(n, transactional_id=n.transactional_id, **_TXN),
        {
            needs.WRITE_TRANSACTIONAL_ID: _transactional_id("topics.partitions.error_code"),
            needs.READ_GROUP: _group("topics.partitions.error_code"),
            needs.READ_TOPIC: _topic("topics.partitions.error_code"),
        },
    ),
    Way(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        lambda n: _described(ResourceType.TOPIC, n.topic),
        {needs.DESCRIBE_TOPIC_CONFIGS: _topic("results.error_code")},
        "topic",
    ),
    Way(
        ApiKey.DESCRIBE_CONFIGS,
        4,
        lambda n: _described(ResourceType.GROUP, n.group),
        {needs.DESCRIBE_GROUP_CONFIGS: _group("results.error_code")},
        "group",
    ),
    *(
        Way(
            ApiKey.DESCRIBE_CONFIGS,
            4,
            lambda _, kind=kind: _described(kind, "1"),  # type: ignore[misc]
            {needs.DESCRIBE_CLUSTER_CONFIGS: _cluster("results.error_code")},
            kind.name.lower(),
        )
        for kind in (ResourceType.BROKER, ResourceType.BROKER_LOGGER, ResourceType.CLIENT_METRICS)
    ),
    *(
        way
        for key, version, more in (
            (ApiKey.ALTER_CONFIGS, 2, ()),
            (ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, ((ResourceType.BROKER_LOGGER, "millrace.broker", "DEBUG"),)),
        )
        for way in (
            Way(
                key,
                version,
                lambda n: _altered(ResourceType.TOPIC, n.topic, "retention.ms", "123456"),
                {needs.ALTER_TOPIC_CONFIGS: _topic("responses.error_code")},
                "topic",
            ),
            Way(
                key,
                version,
                lambda n: _altered(ResourceType.GROUP, n.group, "consumer.session.timeout.ms", "50000"),
                {needs.ALTER_GROUP_CONFIGS: _group("responses.error_code")},
                "group",
            ),
            *(
                Way(
                    key,
                    version,
                    lambda _, kind=kind, name=name, value=value: _altered(kind, "1", name, value),  # type: ignore[misc]
                    {needs.ALTER_CLUSTER_CONFIGS: _cluster("responses.error_code")},
                    kind.name.lower(),
                )
                for kind, name, value in (
                    (ResourceType.BROKER, "log.retention.ms", "654321"),
                    (ResourceType.CLIENT_METRICS, "interval.ms", "60000"),
                    *more,
                )
            ),
        )
    ),
    Way(
        ApiKey.ALTER_REPLICA_LOG_DIRS,
        2,
        lambda n: {"dirs": [{"path": "/nowhere", "topics": [{"name": n.topic, "partitions": [0]}]}]},
        {needs.ALTER_CLUSTER: _cluster("results.partitions.error_code")},
    ),
    Way(ApiKey.DESCRIBE_LOG_DIRS, 4, lambda _: {"topics": None}, {needs.DESCRIBE_CLUSTER: _cluster()}),
    Way(
        ApiKey.DESCRIBE_LOG_DIRS,
        1,
        lambda _: {"topics": None},
        {needs.DESCRIBE_CLUSTER: lambda response, _: not response.results},
    ),
    Way(
        ApiKey.CREATE_PARTITIONS,
        3,
        lambda n: {"topics": [{"name": n.topic, "count": 2, "assignments": None}], "timeout_ms": 5000},
        {needs.ALTER_TOPIC: _topic("results.error_code")},
        topic="grown",
    ),
    Way(
        ApiKey.DELETE_GROUPS,
        2,
        lambda n: {"groups_names": [n.group]},
        {needs.DELETE_GROUP: _group("results.error_code")},
        group="doomed",
        prepare=commit,
    ),
    Way(
        ApiKey.ELECT_LEADERS,
        2,
        lambda n: {"topic_partitions": [{"topic": n.topic, "partitions": [0]}], "timeout_ms": 5000},
        {needs.ALTER_CLUSTER: _cluster()},
    ),
    Way(
        ApiKey.ELECT_LEADERS,
        0,
        lambda n: {"topic_partitions": [{"topic": n.topic, "partitions": [0]}], "timeout_ms": 5000},
        {needs.ALTER_CLUSTER: _cluster("replica_election_results.partition_result.error_code")},
    ),
    Way(
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        0,
        lambda n: {"topics": [{"name": n.topic, "partitions": [{"partition_index": 0, "replicas": [1]}]}]},
        {needs.ALTER_CLUSTER: _cluster()},
    ),
    Way(
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        0,
        lambda _: {"topics": None, "timeout_ms": 5000},
        {needs.DESCRIBE_CLUSTER: _cluster()},
    ),
    Way(
        ApiKey.OFFSET_DELETE,
        0,
        lambda n: {"group_id": n.group, "topics": [{"name": n.topic, "partitions": [{"partition_index": 0}]}]},
        {needs.DELETE_GROUP: _group("error_code"), needs.READ_TOPIC: _topic("topics.partitions.error_code")},
        group="doomed",
        prepare=commit,
    ),
    Way(
        ApiKey.DESCRIBE_QUORUM,
        2,
        lambda _: {"topics": [{"topic_name": "__cluster_metadata", "partitions": [{"partition_index": 0}]}]},
        {needs.DESCRIBE_CLUSTER: _cluster()},
    ),
    Way(ApiKey.ALTER_PARTITION, 3, lambda _: {"broker_id": 1}, {needs.CLUSTER_ACTION: _cluster()}),
    Way(ApiKey.ENVELOPE, 0, _enveloped, {needs.CLUSTER_ACTION: _cluster()}, topic="new", new_topic=True),
    Way(
        ApiKey.DESCRIBE_CLUSTER,
        2,
        lambda _: {"include_cluster_authorized_operations": True, "endpoint_type": 1},
        {needs.DESCRIBE_CLUSTER: lambda response, _: response.cluster_authorized_operations == 0},
    ),
    Way(
        ApiKey.DESCRIBE_PRODUCERS,
        0,
        lambda n: {"topics": [{"name": n.topic, "partition_indexes": [0]}]},
        {needs.READ_TOPIC: _topic("topics.partitions.error_code")},
    ),
    Way(ApiKey.BROKER_HEARTBEAT, 0, lambda _: {"broker_id": 1}, {needs.CLUSTER_ACTION: _cluster()}),
    Way(ApiKey.UNREGISTER_BROKER, 0, lambda _: {"broker_id": 99}, {needs.ALTER_CLUSTER: _cluster()}),
    Way(
        ApiKey.DESCRIBE_TRANSACTIONS,
        0,
        lambda n: {"transactional_ids": [n.transactional_id]},
        {
            needs.DESCRIBE_TRANSACTIONAL_ID: _transactional_id("transaction_states.error_code"),
            needs.DESCRIBE_TOPIC: without("transaction_states.topics.topic", ResourceKind.TOPIC),
        },
        compared=frozenset({ResourceKind.TRANSACTIONAL_ID}),
        prepare=open_transaction,
    ),
    Way(
        ApiKey.LIST_TRANSACTIONS,
        2,
        lambda _: {},
        {
            needs.DESCRIBE_TRANSACTIONAL_ID: without(
                "transaction_states.transactional_id", ResourceKind.TRANSACTIONAL_ID
            )
        },
        compared=frozenset(),
    ),
    Way(ApiKey.ALLOCATE_PRODUCER_IDS, 0, lambda _: {"broker_id": 1}, {needs.CLUSTER_ACTION: _cluster()}),
    Way(
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        1,
        lambda n: {
            "group_id": n.group,
            **_MEMBER,
            "rebalance_timeout_ms": 60_000,
            "subscribed_topic_names": [n.topic],
            "topic_partitions": [],
        },
        {needs.READ_GROUP: _group("error_code"), needs.DESCRIBE_TOPIC: _topic("error_code")},
        group="joining",
    ),
    Way(
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        1,
        lambda n: {"group_ids": [n.group]},
        {needs.DESCRIBE_GROUP: _group("groups.error_code"), needs.DESCRIBE_TOPIC: _topic("groups.error_code")},
        group="modern",
        compared=frozenset({ResourceKind.GROUP}),
    ),
    Way(
        ApiKey.ASSIGN_REPLICAS_TO_DIRS,
        0,
        lambda n: {
            "broker_id": 1,
            "directories": [{"topics": [{"topic_id": n.topic_id, "partitions": [{"partition_index": 0}]}]}],
        },
        {needs.CLUSTER_ACTION: _cluster()},
    ),
    Way(
        ApiKey.LIST_CONFIG_RESOURCES, 1, lambda _: {"resource_types": []}, {needs.DESCRIBE_CLUSTER_CONFIGS: _cluster()}
    ),
    Way(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        0,
        lambda n: {"topics": [{"name": n.topic}], "response_partition_limit": 10},
        {needs.DESCRIBE_TOPIC: _topic("topics.error_code")},
    ),
    Way(
        ApiKey.DESCRIBE_TOPIC_PARTITIONS,
        0,
        lambda _: {"topics": [], "response_partition_limit": 1000},
        {needs.DESCRIBE_TOPIC: without("topics.name", ResourceKind.TOPIC)},
        "all",
        compared=frozenset(),
    ),
    Way(
        ApiKey.SHARE_GROUP_HEARTBEAT,
        1,
        lambda n: {"group_id": n.group, **_MEMBER, "subscribed_topic_names": [n.topic]},
        {needs.READ_GROUP: _group("error_code"), needs.DESCRIBE_TOPIC: _topic("error_code")},
        group="sharing",
    ),
    Way(
        ApiKey.SHARE_GROUP_DESCRIBE,
        1,
        lambda n: {"group_ids": [n.group]},
        {needs.DESCRIBE_GROUP: _group("groups.error_code"), needs.DESCRIBE_TOPIC: _topic("groups.error_code")},
        group="share",
        compared=frozenset({ResourceKind.GROUP}),
    ),
    Way(
        ApiKey.SHARE_FETCH,
        2,
        _share_fetch,
        {needs.READ_GROUP: _group("error_code"), needs.READ_TOPIC: _topic("responses.partitions.error_code")},
        group="share",
        compared=frozenset({ResourceKind.GROUP}),
    ),
    Way(
        ApiKey.SHARE_ACKNOWLEDGE,
        2,
        _acknowledged,
        {needs.READ_GROUP: _group("error_code"), needs.READ_TOPIC: _topic("responses.partitions.error_code")},
        group="share",
        prepare=_begin_share_session,
        compared=frozenset({ResourceKind.GROUP}),
    ),
    *(
        Way(
            key,
            0,
            lambda n, partition=partition: _share_state(n, **partition),  # type: ignore[misc]
            {needs.CLUSTER_ACTION: _cluster("results.partitions.error_code")},
            group="stored",
        )
        for key, partition in (
            (ApiKey.INITIALIZE_SHARE_GROUP_STATE, {"state_epoch": 1, "start_offset": 0}),
            (ApiKey.READ_SHARE_GROUP_STATE, {"leader_epoch": 0}),
            (ApiKey.WRITE_SHARE_GROUP_STATE, {"state_epoch": 1, "leader_epoch": 0, "start_offset": 0}),
            (ApiKey.READ_SHARE_GROUP_STATE_SUMMARY, {"leader_epoch": 0}),
            (ApiKey.DELETE_SHARE_GROUP_STATE, {}),
        )
    ),
    Way(
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
        1,
        lambda n: {"groups": [{"group_id": n.group, "topics": [{"topic_name": n.topic, "partitions": [0]}]}]},
        {
            needs.DESCRIBE_GROUP: _group("groups.error_code"),
            needs.DESCRIBE_TOPIC: _topic("groups.topics.partitions.error_code"),
        },
        group="share",
    ),
    Way(
        ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS,
        1,
        lambda n: {"groups": [{"group_id": n.group, "topics": None}]},
        {
            needs.DESCRIBE_GROUP: _group("groups.error_code"),
            needs.DESCRIBE_TOPIC: without("groups.topics.topic_name", ResourceKind.TOPIC),
        },
        "all",
        group="share",
        compared=frozenset({ResourceKind.GROUP}),
    ),
    Way(
        ApiKey.ALTER_SHARE_GROUP_OFFSETS,
        0,
        lambda n: {
            "group_id": n.group,
            "topics": [{"topic_name": n.topic, "partitions": [{"partition_index": 0, "start_offset": 0}]}],
        },
        {needs.READ_GROUP: _group("error_code"), needs.READ_TOPIC: _topic("responses.partitions.error_code")},
        group="moved",
    ),
    Way(
        ApiKey.DELETE_SHARE_GROUP_OFFSETS,
        0,
        lambda n: {"group_id": n.group, "topics": [{"topic_name": n.topic}]},
        {needs.DELETE_GROUP: _group("error_code"), needs.READ_TOPIC: _topic("responses.error_code")},
        group="moved",
    ),
    Way(
        ApiKey.GET_REPLICA_LOG_INFO,
        0,
        lambda n: {"topic_partitions": [{"topic_id": n.topic_id, "partitions": [0]}]},
        {needs.CLUSTER_ACTION: _cluster("topic_partition_log_info_list.partition_log_info.error_code")},
    ),
    Way(ApiKey.SASL_HANDSHAKE, 1, lambda _: {"mechanism": "PLAIN"}),
    Way(ApiKey.SASL_AUTHENTICATE, 2, lambda _: {"auth_bytes": b""}),
    Way(ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS, 0, lambda _: {"users": None}, {needs.DESCRIBE_CLUSTER: _cluster()}),
    Way(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        0,
        lambda _: {"deletions": [{"name": "nobody", "mechanism": 1}]},
        {needs.ALTER_CLUSTER: _cluster("results.error_code")},
    ),
    Way(ApiKey.DESCRIBE_ACLS, 3, lambda _: _ACL_FILTER, {needs.DESCRIBE_CLUSTER: _cluster()}),
    Way(
        ApiKey.CREATE_ACLS,
        3,
        lambda _: {"creations": [_ACL]},
        {needs.ALTER_CLUSTER: _cluster("results.error_code")},
    ),
    Way(
        ApiKey.DELETE_ACLS,
        3,
        lambda _: {"filters": [_ACL_FILTER]},
        {needs.ALTER_CLUSTER: _cluster("filter_results.error_code")},
    ),
    Way(
        ApiKey.DESCRIBE_CLIENT_QUOTAS,
        1,
        lambda _: {"components": [], "strict": False},
        {needs.DESCRIBE_CLUSTER_CONFIGS: _cluster()},
    ),
    Way(
        ApiKey.ALTER_CLIENT_QUOTAS,
        1,
        lambda _: {
            "entries": [
                {
                    "entity": [{"entity_type": "user", "entity_name": "nobody"}],
                    "ops": [{"key": "producer_byte_rate", "value": 1e9}],
                }
            ]
        },
        {needs.ALTER_CLUSTER_CONFIGS: _cluster("entries.error_code")},
    ),
)
