"""Rules of access as client libraries make, find and remove them; aiokafka's admin client has no such calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from confluent_kafka import KafkaException
from confluent_kafka import admin as confluent
from kafka import KafkaAdminClient
from kafka import admin as python
from kafka.errors import NoError, SecurityDisabledError

from clients.guarded import guarded_cluster
from millrace.testing import Cluster


@pytest.fixture(scope="module")
def guarded() -> Iterator[Cluster]:
    with guarded_cluster(brokers=3) as running:
        yield running


def librdkafka(cluster: Cluster) -> confluent.AdminClient:
    return confluent.AdminClient({"bootstrap.servers": cluster.bootstrap_servers})


def test_librdkafka(guarded: Cluster, fresh: Callable[[str], str]) -> None:
    admin, topic = librdkafka(guarded), fresh("acls")
    literal, prefixed = confluent.ResourcePatternType.LITERAL, confluent.ResourcePatternType.PREFIXED
    read, write = confluent.AclOperation.READ, confluent.AclOperation.WRITE
    allow, deny = confluent.AclPermissionType.ALLOW, confluent.AclPermissionType.DENY
    kind = confluent.ResourceType.TOPIC
    rules = [
        confluent.AclBinding(kind, topic, literal, "User:alice", "*", read, allow),
        confluent.AclBinding(kind, topic[:-1], prefixed, "User:bob", "10.0.0.1", write, deny),
    ]
    wrong = confluent.AclBinding(kind, topic, literal, "alice", "*", read, allow)
    for _ in range(2):  # the second time they are there
        made = admin.create_acls([*rules, wrong])
        assert [made[rule].result(20) for rule in rules] == [None, None]
        with pytest.raises(KafkaException, match="INVALID_REQUEST"):
            made[wrong].result(20)

    def found(name: str | None, pattern: confluent.ResourcePatternType) -> list[confluent.AclBinding]:
        any_op, any_perm = confluent.AclOperation.ANY, confluent.AclPermissionType.ANY
        wanted = confluent.AclBindingFilter(kind, name, pattern, None, None, any_op, any_perm)
        return sorted(admin.describe_acls(wanted).result(20), key=lambda rule: rule.principal)

    assert found(topic, confluent.ResourcePatternType.MATCH) == rules
    assert found(topic, literal) == rules[:1]
    assert found(topic, prefixed) == []
    any_op, any_perm = confluent.AclOperation.ANY, confluent.AclPermissionType.ANY
    mine = confluent.AclBindingFilter(kind, topic, confluent.ResourcePatternType.MATCH, None, None, any_op, any_perm)
    (removed,) = admin.delete_acls([mine]).values()
    assert sorted(removed.result(20), key=lambda rule: rule.principal) == rules
    assert found(topic, confluent.ResourcePatternType.MATCH) == []


def test_kafka_python(guarded: Cluster, fresh: Callable[[str], str]) -> None:
    topic = fresh("acls")
    admin = KafkaAdminClient(bootstrap_servers=guarded.bootstrap_servers)
    try:
        resource = python.ResourcePattern(python.ResourceType.TOPIC, topic, python.ACLResourcePatternType.LITERAL)
        allow = python.ACLPermissionType.ALLOW
        rules = [
            python.ACL("User:alice", "*", operation, allow, resource)
            for operation in (python.ACLOperation.READ, python.ACLOperation.WRITE)
        ]
        assert admin.create_acls(rules)["succeeded"] == rules
        every = python.ACLFilter(
            None,
            None,
            python.ACLOperation.ANY,
            python.ACLPermissionType.ANY,
            python.ResourcePatternFilter(python.ResourceType.TOPIC, topic, python.ACLResourcePatternType.MATCH),
        )
        found, error = admin.describe_acls(every)
        assert error is NoError
        assert sorted(found, key=str) == sorted(rules, key=str)
        ((_, removed, failure),) = admin.delete_acls([every])
        assert failure is NoError
        assert sorted(removed, key=str) == sorted(rules, key=str)
        assert admin.describe_acls(every)[0] == []
    finally:
        admin.close()


def test_without_an_authorizer(cluster: Cluster) -> None:
    asked = librdkafka(cluster)
    literal, kind = confluent.ResourcePatternType.LITERAL, confluent.ResourceType.TOPIC
    allow, read = confluent.AclPermissionType.ALLOW, confluent.AclOperation.READ
    wanted = confluent.AclBinding(kind, "t", literal, "User:a", "*", read, allow)
    # Asked for the rules, the library takes the same refusal for an empty list.
    with pytest.raises(KafkaException, match="SECURITY_DISABLED"):
        asked.create_acls([wanted])[wanted].result(20)
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap_servers)
    try:
        resource = python.ResourcePattern(python.ResourceType.TOPIC, "t", python.ACLResourcePatternType.LITERAL)
        rule = python.ACL("User:a", "*", python.ACLOperation.READ, python.ACLPermissionType.ALLOW, resource)
        assert admin.create_acls([rule])["failed"] == [SecurityDisabledError]
    finally:
        admin.close()
