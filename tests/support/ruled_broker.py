"""A broker in this process that asks for rights, whose rules a test changes at will. Everybody is `User:ANONYMOUS`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from millrace.cluster.planning import Plan
from millrace.handlers.context import Services
from millrace.metadata.deltas import AclsChanged
from millrace.security.acls import EVERYBODY, WILDCARD, Acl, Operation, PatternKind, Permission, ResourceKind
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from support.authorization_rows import request_of
from support.raw import RawClient

AUTHORIZER: Final = {"authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer"}


def acl(
    operation: Operation,
    kind: ResourceKind,
    name: str = WILDCARD,
    *,
    permission: Permission = Permission.ALLOW,
    pattern: PatternKind = PatternKind.LITERAL,
    principal: str = EVERYBODY,
) -> Acl:
    return Acl(kind, name, pattern, principal, WILDCARD, operation, permission)


EVERYTHING: Final = tuple(
    acl(Operation.ALL, kind)
    for kind in (ResourceKind.TOPIC, ResourceKind.GROUP, ResourceKind.CLUSTER, ResourceKind.TRANSACTIONAL_ID)
)


class RuledBroker:
    """Broker 1, and one connection to it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.client = self.connect()
        self._rules: tuple[Acl, ...] = ()

    def connect(self) -> RawClient:
        host, port = self.cluster.bootstrap_servers.split(",")[0].split(":")
        return RawClient((host, int(port)))

    @property
    def services(self) -> Services:
        services = self.cluster._brokers[1].services
        assert services is not None
        return services

    def rules(self, acls: Iterable[Acl]) -> None:
        """From now on these are in force, and no others."""
        wanted = tuple(acls)
        if wanted != self._rules:
            change = AclsChanged(added=wanted, removed=tuple(set(self._rules).difference(wanted)))
            self.cluster._on_loop(self.services.controller.change(lambda _: Plan(None, (change,))))
            self._rules = wanted

    def call(self, api_key: ApiKey, version: int, /, **fields: Any) -> Any:
        return self.client.call(request_of(api_key, fields), version)


@contextmanager
def ruled_broker(settings: Mapping[str, str] | None = None) -> Iterator[RuledBroker]:
    """A broker, for now with all rights for everybody."""
    with Cluster(settings={**AUTHORIZER, **(settings or {})}) as cluster:
        broker = RuledBroker(cluster)
        with broker.client:
            broker.rules(EVERYTHING)
            yield broker
