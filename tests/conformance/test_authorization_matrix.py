"""Every API, each right that it needs taken away in turn: refused in the right place, nothing told, nothing changed.

The rows are in `support.authorization_rows`; which APIs there are, and which rights they ask for, says the registry.
One broker serves all of them. Everybody is `User:ANONYMOUS`; the rules are put into the metadata log directly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final, Literal, get_args

import pytest

from millrace.cluster.planning import Plan
from millrace.config.setting import LONG_MAX
from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.needs import CODES, NOTHING, Right
from millrace.metadata.deltas import ResourceType, TokenChanged
from millrace.security.acls import (
    EVERYBODY,
    WILDCARD,
    Acl,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
)
from millrace.security.sessions import ANONYMOUS_PRINCIPAL
from millrace.security.tokens import DelegationToken
from millrace.testing import Cluster
from millrace.wire.codec import encode
from millrace.wire.keys import ApiKey
from millrace.wire.schema import Struct
from support.authorization_rows import (
    GONE,
    HERE,
    READER,
    TOKEN_ID,
    TOKEN_OWNER,
    WAYS,
    Names,
    Way,
    commit,
    open_transaction,
    request_of,
)
from support.raw import batch
from support.ruled_broker import AUTHORIZER, EVERYTHING, RuledBroker
from support.sasl import SaslClient

HOUR_MS: Final = "3600000"
SETTINGS: Final = {
    **AUTHORIZER,
    "auto.create.topics.enable": "true",
    "group.consumer.max.session.timeout.ms": HOUR_MS,
    "group.consumer.session.timeout.ms": HOUR_MS,
    "group.share.max.session.timeout.ms": HOUR_MS,
    "group.share.session.timeout.ms": HOUR_MS,
    "offsets.topic.num.partitions": "1",
    "share.coordinator.state.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "delegation.token.secret.key": "s3cret",
    "telemetry.receiver": "file:/dev/null",
    "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0",
    "sasl.enabled.mechanisms": "PLAIN",
    # A name like any other, for somebody who has logged in: the rules are about the same principal.
    "plain.sasl.jaas.config": 'PlainLoginModule required user_ANONYMOUS="secret";',
}
PAYLOAD: Final = b"what only readers are to see"
Style = Literal["literal", "prefixed", "wildcard"]
STYLES: Final[tuple[Style, ...]] = get_args(Style)
IMPLYING: Final = frozenset({Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER})
REFUSALS: Final = frozenset(CODES.values())
TOKEN: Final = DelegationToken(TOKEN_ID, TOKEN_OWNER, TOKEN_OWNER, (), 0, LONG_MAX, LONG_MAX)
WITHOUT_RIGHTS: Final = frozenset({
    ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE,
    ApiKey.RENEW_DELEGATION_TOKEN, ApiKey.EXPIRE_DELEGATION_TOKEN,  # for whoever has the token
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY,  # of one's own metrics, where there is a receiver
})  # fmt: skip
SERVED: Final = sorted(registry.load())


def rule(right: Right, names: Names, style: Style, permission: Permission = Permission.ALLOW) -> Acl:
    """A rule about what the names name."""
    operation, kind = right
    name = names.of(kind)
    pattern = PatternKind.PREFIXED if style == "prefixed" else PatternKind.LITERAL
    told = {"literal": name, "prefixed": name[: -len(HERE)], "wildcard": WILDCARD}[style]
    principal = ANONYMOUS_PRINCIPAL if permission is Permission.ALLOW else EVERYBODY
    return Acl(kind, told, pattern, principal, WILDCARD, operation, permission)


class World(RuledBroker):
    """The broker, two connections to it, and what exists there."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(cluster)
        host, port = cluster.bootstrap_servers_of("SASL_PLAINTEXT").split(":")
        self.logged_in = SaslClient((host, int(port)))
        assert self.logged_in.log_in("PLAIN", "ANONYMOUS", "secret").error_code == ErrorCode.NONE

    def names(self, way: Way) -> Names:
        topic = f"{way.topic}-{GONE if way.new_topic else HERE}"
        return Names(topic, f"{way.group}-{HERE}", f"txn-{HERE}")

    def arrange(self, way: Way, names: Names) -> Names:
        """Have the topic exist or not, as its name says, and whatever else the way wants."""
        self.rules(EVERYTHING)
        image = self.services.image
        if names.topic.endswith(HERE) and names.topic not in image.topics:
            self.cluster.create_topic(names.topic)
        if names.topic.endswith(GONE) and names.topic in image.topics:
            self.call(ApiKey.DELETE_TOPICS, 5, topic_names=[names.topic], timeout_ms=5000)
        topic = self.services.image.topics.get(names.topic)
        if topic is not None:
            names = replace(names, topic_id=topic.topic_id)
        way.prepare(self, names)
        return names

    def ask(self, way: Way, names: Names, acls: Iterable[Acl]) -> Any:
        self.rules(acls)
        client = self.logged_in if way.logged_in else self.client
        return client.call(request_of(way.key, way.ask(names)), way.version)

    def state(self) -> object:
        """Everything that a request could have changed."""

        async def look() -> object:
            services = self.services
            logs = {
                (each.topic, each.index): (each.log.start_offset, each.log.end_offset) for each in services.replicas
            }
            groups = services.groups.list_groups()[1]
            return services.image.index, logs, groups, logging.getLogger("millrace.broker").level

        return self.cluster._on_loop(look())


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with Cluster(settings=SETTINGS) as cluster:
        found = World(cluster)
        with found.client, found.logged_in:
            cluster._on_loop(found.services.controller.change(lambda _: Plan(None, (TokenChanged(TOKEN),))))
            found.rules(EVERYTHING)
            for kind, key in ((0, "any"), (1, "any"), (2, f"any:{'A' * 22}:0")):
                while (
                    found.call(ApiKey.FIND_COORDINATOR, 6, key_type=kind, coordinator_keys=[key])
                    .coordinators[0]
                    .error_code
                ):
                    pass
            cluster.create_topic(f"matrix-{HERE}")
            found.client.find_coordinator("any")
            assert found.client.produce(f"matrix-{HERE}", batch(PAYLOAD)).error_code == 0
            earliest = [{"name": "share.auto.offset.reset", "config_operation": 0, "value": "earliest"}]
            group = {"resource_type": ResourceType.GROUP, "resource_name": f"share-{HERE}", "configs": earliest}
            found.call(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, resources=[group])
            names = Names(f"matrix-{HERE}", f"group-{HERE}", f"txn-{HERE}")
            commit(found, names)
            open_transaction(found, names)
            member = {"member_id": READER, "member_epoch": 0, "subscribed_topic_names": [names.topic]}
            modern = {"rebalance_timeout_ms": 60_000, "topic_partitions": []}
            found.call(ApiKey.CONSUMER_GROUP_HEARTBEAT, 1, group_id=f"modern-{HERE}", **member, **modern)
            found.call(ApiKey.SHARE_GROUP_HEARTBEAT, 1, group_id=f"share-{HERE}", **member)
            yield found


def refusals(response: Any) -> set[ErrorCode]:
    """Every refusal in a response, at any depth."""
    found: set[ErrorCode] = set()
    for name in response.field_names():
        value = getattr(response, name)
        if name.endswith("error_code") and value in REFUSALS:
            found.add(ErrorCode(value))
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, Struct):
                found |= refusals(each)
    return found


def is_implied(taken: Right, rest: Iterable[Right]) -> bool:
    """Whether what is left of the rights brings along the one that was taken: then only a denial takes it."""
    operation, kind = taken
    return operation is Operation.DESCRIBE and any(other in IMPLYING and of is kind for other, of in rest)


def cells() -> Iterator[Any]:
    for way in WAYS:
        if way.key in SERVED:
            for taken in way.needs:
                operation, kind = taken
                yield pytest.param(way, taken, id=f"{way}-{operation.name}-{kind.name}")


def ways() -> Iterator[Any]:
    return (pytest.param(way, id=str(way)) for way in WAYS if way.key in SERVED)


@pytest.mark.parametrize(("way", "taken"), list(cells()))
def test_a_right_that_is_missing(world: World, way: Way, taken: Right) -> None:
    names = world.names(way)
    rest = [right for right in way.needs if right != taken]
    for style in STYLES:
        if not is_implied(taken, rest):
            check_refused(world, way, taken, names, [(right, style) for right in rest], None)
    for denied in ("wildcard",) if way.denied_everywhere else STYLES:
        check_refused(world, way, taken, names, [(right, "wildcard") for right in way.needs], denied)


def check_refused(
    world: World, way: Way, taken: Right, names: Names, granted: list[tuple[Right, Style]], denied: Style | None
) -> None:
    def ask(names: Names) -> Any:
        names = world.arrange(way, names)
        acls = [rule(right, names, style) for right, style in granted]
        if denied is not None:
            acls.append(rule(taken, names, denied, Permission.DENY))
        world.rules(acls)
        before = world.state()
        response = world.ask(way, names, acls)
        assert way.needs[taken](response, names), (granted, denied, response)
        assert PAYLOAD not in encode(response, way.version), (granted, denied, response)
        assert world.state() == before, (granted, denied, response)
        return response

    response = ask(names)
    kind = taken[1]
    may_know = (Operation.DESCRIBE, kind) in way.needs and taken[0] is not Operation.DESCRIBE
    if kind in way.compared and not way.new_topic and not may_know:
        field = {
            ResourceKind.TOPIC: "topic",
            ResourceKind.GROUP: "group",
            ResourceKind.TRANSACTIONAL_ID: "transactional_id",
        }[kind]
        stranger = replace(names, **{field: names.of(kind).replace(HERE, GONE)})
        told = encode(ask(stranger), way.version).replace(GONE.encode(), HERE.encode())
        assert told == encode(response, way.version), "whether it exists must not be told"


@pytest.mark.parametrize("way", list(ways()))
def test_with_all_rights_nothing_is_refused(world: World, way: Way) -> None:
    for style in STYLES:
        names = world.arrange(way, world.names(way))
        response = world.ask(way, names, [rule(right, names, style) for right in way.needs])
        assert not refusals(response), response
        for taken, shows in way.needs.items():
            assert not shows(response, names), (taken, response)


@pytest.mark.parametrize("key", SERVED, ids=lambda key: ApiKey(key).name)
def test_redpanda_cve_2023_50976_every_api_is_authorized(key: int) -> None:
    """Every API needs a right, and has a row for each that its handler declares, and no other."""
    served = registry.load()[key]
    declared = set(served.needs.judged)
    if served.needs.whole is not None:
        declared.add((served.needs.whole, ResourceKind.CLUSTER))
    rows = [way for way in WAYS if way.key == key]
    assert rows, "how is it used, and what does it need?"
    assert {right for way in rows for right in way.needs} == declared
    assert declared or served.needs is NOTHING
    assert declared or key in WITHOUT_RIGHTS
