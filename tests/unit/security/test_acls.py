"""The rules of access, as Kafka decides them."""

from __future__ import annotations

import itertools
import random

import pytest

from millrace.security.acls import (
    Acl,
    AclFilter,
    AclTable,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
    decide,
    decide_for_any,
)

ALICE = "User:alice"


def rule(
    operation: Operation,
    name: str = "orders",
    *,
    pattern: PatternKind = PatternKind.LITERAL,
    permission: Permission = Permission.ALLOW,
    principal: str = ALICE,
    host: str = "*",
    kind: ResourceKind = ResourceKind.TOPIC,
) -> Acl:
    return Acl(kind, name, pattern, principal, host, operation, permission)


def may(*rules: Acl, operation: Operation = Operation.READ, name: str = "orders", **options: object) -> bool:
    return decide(AclTable(rules), ALICE, "10.0.0.1", operation, ResourceKind.TOPIC, name, **options).allowed  # type: ignore[arg-type]


def test_nobody_may_what_no_rule_allows() -> None:
    assert not may()
    assert not may(rule(Operation.READ, principal="User:bob"))
    assert not may(rule(Operation.READ, host="10.0.0.2"))
    assert not may(rule(Operation.READ, "orders-2"))
    assert not may(rule(Operation.READ, "orders", kind=ResourceKind.GROUP))
    assert not may(rule(Operation.WRITE))


@pytest.mark.parametrize(
    "allowing",
    [
        rule(Operation.READ),
        rule(Operation.ALL),
        rule(Operation.READ, "*"),
        rule(Operation.READ, "ord", pattern=PatternKind.PREFIXED),
        rule(Operation.READ, "orders", pattern=PatternKind.PREFIXED),
        rule(Operation.READ, principal="User:*"),
        rule(Operation.READ, host="10.0.0.1"),
    ],
    ids=str,
)
def test_a_rule_allows_and_any_that_denies_wins(allowing: Acl) -> None:
    assert may(allowing)
    for name, pattern in (("orders", PatternKind.LITERAL), ("*", PatternKind.LITERAL), ("o", PatternKind.PREFIXED)):
        for operation in (Operation.READ, Operation.ALL):
            denying = rule(operation, name, pattern=pattern, permission=Permission.DENY)
            assert not may(allowing, denying)
            assert not may(denying, allowing)


@pytest.mark.parametrize("written", ["2001:db8::1", "2001:DB8:0:0:0:0:0:1", "2001:0db8::0001"])
def test_an_address_is_the_same_however_it_is_written(written: str) -> None:
    asked = ("2001:db8::1", Operation.READ, ResourceKind.TOPIC, "orders")
    deny = rule(Operation.READ, host=written, permission=Permission.DENY)
    assert decide(AclTable([rule(Operation.READ, host=written)]), ALICE, *asked).allowed
    assert not decide(AclTable([rule(Operation.READ), deny]), ALICE, *asked).allowed
    assert not decide_for_any(
        AclTable([rule(Operation.READ), rule(Operation.READ, "*", host=written, permission=Permission.DENY)]),
        ALICE,
        *asked[:3],
    ).allowed
    assert not decide(AclTable([rule(Operation.READ, host=written)]), ALICE, "2001:db8::2", *asked[1:]).allowed


def test_a_star_is_a_wildcard_only_as_a_literal() -> None:
    assert not may(rule(Operation.READ, "*", pattern=PatternKind.PREFIXED))


def test_what_allows_implies_and_what_denies_does_not() -> None:
    for stronger in (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.ALTER):
        assert may(rule(stronger), operation=Operation.DESCRIBE)
        denied = rule(stronger, permission=Permission.DENY)
        assert may(rule(Operation.DESCRIBE), denied, operation=Operation.DESCRIBE)
    assert may(rule(Operation.ALTER_CONFIGS), operation=Operation.DESCRIBE_CONFIGS)
    assert not may(rule(Operation.DESCRIBE_CONFIGS), operation=Operation.ALTER_CONFIGS)
    assert not may(rule(Operation.DESCRIBE), operation=Operation.READ)
    assert not may(rule(Operation.CREATE), operation=Operation.DESCRIBE)


def test_super_users_may_even_what_is_denied() -> None:
    denied = rule(Operation.ALL, permission=Permission.DENY)
    assert may(denied, super_users=frozenset({ALICE}))


def test_everyone_may_where_no_rule_names_the_resource() -> None:
    assert may(allow_if_no_acl=True)
    assert not may(rule(Operation.READ, principal="User:bob"), allow_if_no_acl=True)
    assert not may(rule(Operation.READ, "*", principal="User:bob"), allow_if_no_acl=True)
    assert may(rule(Operation.READ, "other"), allow_if_no_acl=True)


def test_any_resource_of_a_kind() -> None:
    def anywhere(*rules: Acl, **options: object) -> bool:
        table = AclTable(rules)
        return decide_for_any(table, ALICE, "h", Operation.WRITE, ResourceKind.TOPIC, **options).allowed  # type: ignore[arg-type]

    deny = Permission.DENY
    assert not anywhere()
    assert anywhere(rule(Operation.WRITE))
    assert anywhere(rule(Operation.WRITE, "*"))
    assert anywhere(rule(Operation.ALL, "a", pattern=PatternKind.PREFIXED))
    assert not anywhere(rule(Operation.WRITE), rule(Operation.WRITE, permission=deny))
    assert not anywhere(rule(Operation.WRITE), rule(Operation.ALL, "*", permission=deny))
    assert not anywhere(
        rule(Operation.WRITE), rule(Operation.WRITE, "o", pattern=PatternKind.PREFIXED, permission=deny)
    )
    assert anywhere(rule(Operation.WRITE, "*"), rule(Operation.WRITE, permission=deny))
    assert anywhere(rule(Operation.WRITE), rule(Operation.WRITE, "other", permission=deny))
    assert not anywhere(rule(Operation.READ))
    assert anywhere(super_users=frozenset({ALICE}))
    assert anywhere(allow_if_no_acl=True)
    dominated = rule(Operation.WRITE), rule(Operation.WRITE, permission=deny)
    assert anywhere(*dominated, allow_if_no_acl=True), "there are other topics"
    assert not anywhere(rule(Operation.ALL, "*", permission=deny), allow_if_no_acl=True)


def test_cve_2024_27309_removing_a_rule_never_takes_another_along() -> None:
    """Every order in which rules of one resource and its neighbours can go leaves exactly the others in force."""
    rules = [
        rule(Operation.READ),
        rule(Operation.WRITE),
        rule(Operation.READ, principal="User:bob"),
        rule(Operation.READ, "ord", pattern=PatternKind.PREFIXED),
        rule(Operation.READ, permission=Permission.DENY, host="10.0.0.2"),
    ]
    for order in itertools.permutations(rules):
        table = AclTable(rules)
        left = set(rules)
        for each in order:
            table = table.edited(removed=[each])
            left.discard(each)
            assert set(table) == left
            assert set(table.about(ResourceKind.TOPIC, "orders")) == left
            assert table == AclTable(left)


def test_edits_agree_with_a_table_made_anew() -> None:
    chance = random.Random(18)
    names = ["a", "ab", "abc", "b", "*"]
    table, kept = AclTable(), set[Acl]()
    for _ in range(2000):
        acl = rule(
            chance.choice([Operation.READ, Operation.WRITE, Operation.ALL]),
            chance.choice(names),
            pattern=chance.choice([PatternKind.LITERAL, PatternKind.PREFIXED]),
            permission=chance.choice([Permission.ALLOW, Permission.DENY]),
            principal=chance.choice([ALICE, "User:*"]),
        )
        if chance.random() < 0.5:
            table, kept = table.edited(added=[acl]), kept | {acl}
        else:
            table, kept = table.edited(removed=[acl]), kept - {acl}
        name = chance.choice(["a", "abcd", "c", "*"])
        answers = {
            decide(each, ALICE, "h", Operation.READ, ResourceKind.TOPIC, name).allowed
            for each in (table, AclTable(kept))
        }
        assert len(answers) == 1
    assert set(table) == kept


def test_filters() -> None:
    literal, prefixed, wildcard = (
        rule(Operation.READ),
        rule(Operation.READ, "ord", pattern=PatternKind.PREFIXED),
        rule(Operation.READ, "*"),
    )
    every = [literal, prefixed, wildcard]

    def found(**fields: object) -> list[Acl]:
        wanted = AclFilter(**fields)  # type: ignore[arg-type]
        return [acl for acl in every if wanted.matches(acl)]

    assert found() == every
    assert found(name="orders") == [literal]
    assert found(name="orders", pattern=PatternKind.MATCH) == every
    assert found(name="ord", pattern=PatternKind.PREFIXED) == [prefixed]
    assert found(pattern=PatternKind.LITERAL) == [literal, wildcard]
    assert found(principal="User:bob") == []
    assert found(operation=Operation.WRITE) == []
    assert found(host="*", permission=Permission.ALLOW, resource=ResourceKind.TOPIC) == every
