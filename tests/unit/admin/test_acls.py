"""Rules from what was typed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from millrace.admin.acls import (
    OPERATIONS,
    Entry,
    Settings,
    operation_of,
    principal_of,
    read_settings,
    role_rules,
)
from millrace.admin.errors import AdminError
from millrace.errors import ErrorCode
from millrace.security.acls import OPERATIONS_OF, Operation, PatternKind, Permission, ResourceKind
from millrace.wire.messages.configs import DescribeConfigsResponse

ENTRY = Entry(["User:a", "User:b"], ["*", "10.0.0.1"], Permission.ALLOW, prefixed=True)


def test_operations_are_named_in_several_ways() -> None:
    for name, operation in OPERATIONS.items():
        pascal = "".join(part.capitalize() for part in operation.name.split("_"))
        for text in (name, name.upper(), operation.name, pascal):
            assert operation_of(text) is operation
    assert set(OPERATIONS.values()) == set(Operation) - {Operation.UNKNOWN, Operation.ANY}
    for wrong in ("", "any", "unknown", "raed"):
        with pytest.raises(AdminError, match="no operation"):
            operation_of(wrong)


@pytest.mark.parametrize("text", ["User:alice", "User:*", "User:CN=a:b,O=c", "Group:x"])
def test_principals(text: str) -> None:
    assert principal_of(text) == text


@pytest.mark.parametrize("text", ["", "alice", "User:", ":alice", ":"])
def test_what_is_no_principal(text: str) -> None:
    with pytest.raises(AdminError, match="User:"):
        principal_of(text)


def test_one_rule_for_each_combination() -> None:
    resources = [(ResourceKind.TOPIC, "t"), (ResourceKind.CLUSTER, "kafka-cluster")]
    rules = ENTRY.rules(resources, [Operation.CREATE, Operation.ALL])
    assert len(set(rules)) == len(rules) == 2 * 2 * 2 * 2
    assert {(rule.resource, rule.pattern) for rule in rules} == {
        (ResourceKind.TOPIC, PatternKind.PREFIXED),
        (ResourceKind.CLUSTER, PatternKind.LITERAL),  # there is only one
    }


def test_an_operation_has_to_mean_something_for_the_resource() -> None:
    for kind in OPERATIONS_OF:
        for operation in OPERATIONS.values():
            if operation is Operation.ALL or operation in OPERATIONS_OF[kind]:
                assert ENTRY.rules([(kind, "x")], [operation])
            else:
                with pytest.raises(AdminError, match="means nothing"):
                    ENTRY.rules([(kind, "x")], [operation])


def test_who_produces_and_consumes_gets_each_rule_once() -> None:
    entry = Entry(["User:a"], ["*"], Permission.ALLOW, prefixed=False)
    resources = [(ResourceKind.TOPIC, "t"), (ResourceKind.GROUP, "g")]
    rules = role_rules(entry, resources, producer=True, consumer=True)
    assert [(rule.name, rule.operation.name) for rule in rules] == [
        ("t", "WRITE"),
        ("t", "DESCRIBE"),
        ("t", "CREATE"),
        ("t", "READ"),
        ("g", "READ"),
    ]


class OneBroker:
    """A cluster whose broker has these settings, None being a secret."""

    def __init__(self, settings: dict[str, str | None] | ErrorCode) -> None:
        self.settings = settings

    def broker_ids(self) -> list[int]:
        return [7]

    def ask_broker(self, node: int, _what: str, _message: Any, read: Callable[[Any], Any]) -> Any:
        assert node == 7
        result = DescribeConfigsResponse.DescribeConfigsResult(error_message=None)
        if isinstance(self.settings, ErrorCode):
            result.error_code = self.settings
        else:
            result.configs = [
                DescribeConfigsResponse.DescribeConfigsResourceResult(
                    name=name, value=value, is_sensitive=value is None
                )
                for name, value in self.settings.items()
            ]
        return read(DescribeConfigsResponse(results=[result]))


@pytest.mark.parametrize(
    ("told", "settings"),
    [
        ({}, Settings(7)),
        ({"super.users": ""}, Settings(7)),
        ({"super.users": "User:a;User:b"}, Settings(7, frozenset({"User:a", "User:b"}))),
        ({"allow.everyone.if.no.acl.found": "true"}, Settings(7, allow_if_no_acl=True)),
        ({"allow.everyone.if.no.acl.found": "false"}, Settings(7)),
        ({"super.users": None}, Settings(7, untold=("super.users",))),
        (
            ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
            Settings(7, untold=("super.users", "allow.everyone.if.no.acl.found")),
        ),
    ],
)
def test_what_a_broker_tells_of_its_settings(told: dict[str, str | None] | ErrorCode, settings: Settings) -> None:
    assert read_settings(OneBroker(told)) == settings  # type: ignore[arg-type]
