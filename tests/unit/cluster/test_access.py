"""Plans for rules of access: which may be made, and that filters take away what they mean and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.cluster import access
from millrace.cluster.access import plan_create_acls, plan_delete_acls
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata import deltas
from millrace.security.acls import Acl, AclFilter, Operation, PatternKind, Permission, ResourceKind

GOOD = Acl(
    ResourceKind.TOPIC, "orders", PatternKind.LITERAL, "User:alice", "*", Operation.READ, Permission.ALLOW
)  # fmt: skip


def with_rules(*acls: Acl) -> ClusterImage:
    return ClusterImage().apply(plan_create_acls(ClusterImage(), acls).changes)


@pytest.mark.parametrize(
    "acl",
    [
        GOOD,
        replace(GOOD, name="*"),
        replace(GOOD, pattern=PatternKind.PREFIXED),
        replace(GOOD, principal="User:*"),
        replace(GOOD, principal="Group:"),
        replace(GOOD, host="fe80::1"),
        replace(GOOD, host="FE80:0:0:0:0:0:0:1"),
        replace(GOOD, host="10.0.0.1"),
        replace(GOOD, host="local"),
        replace(GOOD, operation=Operation.CLUSTER_ACTION),  # never asked of a topic, and Kafka takes it all the same
        replace(GOOD, resource=ResourceKind.CLUSTER, name="kafka-cluster", operation=Operation.ALL),
        replace(GOOD, resource=ResourceKind.USER, name="User:bob", operation=Operation.CREATE_TOKENS),
        replace(GOOD, resource=ResourceKind.TRANSACTIONAL_ID, operation=Operation.TWO_PHASE_COMMIT),
    ],
    ids=str,
)
def test_rules_that_may_be_made(acl: Acl) -> None:
    assert plan_create_acls(ClusterImage(), [acl]).results == [None]
    assert set(with_rules(acl).acls) == {acl}


@pytest.mark.parametrize(
    ("acl", "told"),
    [
        (replace(GOOD, name=""), "no name"),
        (replace(GOOD, host="app.example"), "app.example"),
        (replace(GOOD, host="10.0.0.300"), "10.0.0.300"),
        (replace(GOOD, resource=ResourceKind.CLUSTER), "kafka-cluster"),
        (replace(GOOD, resource=ResourceKind.ANY), "ANY"),
        (replace(GOOD, resource=ResourceKind.UNKNOWN), "UNKNOWN"),
        (replace(GOOD, pattern=PatternKind.ANY), "ANY"),
        (replace(GOOD, pattern=PatternKind.MATCH), "MATCH"),
        (replace(GOOD, pattern=PatternKind.UNKNOWN), "UNKNOWN"),
        (replace(GOOD, operation=Operation.ANY), "ANY"),
        (replace(GOOD, operation=Operation.UNKNOWN), "UNKNOWN"),
        (replace(GOOD, permission=Permission.ANY), "ANY"),
        (replace(GOOD, permission=Permission.UNKNOWN), "UNKNOWN"),
        (replace(GOOD, principal="alice"), "Type:name"),
        (replace(GOOD, principal=""), "Type:name"),
        (replace(GOOD, host=""), "host"),
        (replace(GOOD, name="x" * 4096), "longer"),
    ],
)
def test_a_rule_that_may_not_be_made_does_not_take_the_others_along(acl: Acl, told: str) -> None:
    other = replace(GOOD, name="other")
    plan = plan_create_acls(ClusterImage(), [GOOD, acl, other])
    first, problem, last = plan.results
    assert first is None
    assert last is None
    assert problem is not None
    assert problem.code == ErrorCode.INVALID_REQUEST
    assert told in problem.message
    assert set(ClusterImage().apply(plan.changes).acls) == {GOOD, other}


def test_a_network_is_not_kept_as_a_host_that_nobody_has() -> None:
    (problem,) = plan_create_acls(ClusterImage(), [replace(GOOD, host="10.0.0.0/8")]).results
    assert problem is not None
    assert problem.code == ErrorCode.UNSUPPORTED_VERSION


def test_what_is_there_is_created_without_a_change() -> None:
    image = with_rules(GOOD)
    assert plan_create_acls(image, [GOOD, GOOD]).results == [None, None]
    assert plan_create_acls(image, [GOOD, GOOD]).changes == ()
    deny = replace(GOOD, permission=Permission.DENY)
    assert plan_create_acls(image, [deny, GOOD, deny]).changes == (deltas.AclsChanged(added=(deny,)),)


def test_there_is_an_end_to_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_ACLS", 5)
    monkeypatch.setattr(access, "MAX_ACLS_PER_REQUEST", 3)
    rules = [replace(GOOD, name=f"t{number}") for number in range(6)]
    with pytest.raises(ApiError, match="3 rules at most") as refused:
        plan_create_acls(ClusterImage(), rules[:4])
    assert refused.value.code == ErrorCode.POLICY_VIOLATION
    image = with_rules(*rules[:3])
    image = image.apply(plan_create_acls(image, rules[:5]).changes)  # those that are there do not count again
    with pytest.raises(ApiError, match="5 rules at most") as refused:
        plan_create_acls(image, rules[5:])
    assert refused.value.code == ErrorCode.POLICY_VIOLATION
    assert plan_create_acls(image, rules[:5]).results == [None] * 5
    with pytest.raises(ApiError, match="3 rules at most") as refused:
        plan_delete_acls(image, [AclFilter(name=f"t{number}") for number in range(4)])
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert len(plan_delete_acls(image, [AclFilter(name=f"t{number}") for number in (0, 1, 2, 0)]).results) == 4


@pytest.mark.parametrize(
    "wanted",
    [
        AclFilter(resource=ResourceKind.UNKNOWN),
        AclFilter(pattern=PatternKind.UNKNOWN),
        AclFilter(operation=Operation.UNKNOWN),
        AclFilter(permission=Permission.UNKNOWN),
    ],
)
def test_a_filter_that_is_not_understood_removes_nothing(wanted: AclFilter) -> None:
    plan = plan_delete_acls(with_rules(GOOD), [wanted, AclFilter(name="nothing")])
    problem, found = plan.results
    assert isinstance(problem, ApiError)
    assert problem.code == ErrorCode.INVALID_REQUEST
    assert found == ()
    assert plan.changes == ()


def test_a_rule_that_two_filters_match_is_told_twice_and_removed_once() -> None:
    plan = plan_delete_acls(with_rules(GOOD), [AclFilter(name="orders"), AclFilter(principal="User:alice")])
    assert plan.results == [(GOOD,), (GOOD,)]
    assert plan.changes == (deltas.AclsChanged(removed=(GOOD,)),)


# --- against a list of rules ------------------------------------------------------------------------------------------

names = st.sampled_from(["a", "ab", "abc", "b", "*"])
principals = st.sampled_from(["User:a", "User:b", "User:*"])
hosts = st.sampled_from(["*", "10.0.0.1"])
kinds = st.sampled_from([ResourceKind.TOPIC, ResourceKind.GROUP, ResourceKind.USER])
rules = st.builds(
    Acl,
    kinds,
    names,
    st.sampled_from([PatternKind.LITERAL, PatternKind.PREFIXED]),
    principals,
    hosts,
    st.sampled_from([Operation.READ, Operation.ALL]),
    st.sampled_from([Permission.ALLOW, Permission.DENY]),
)
filters = st.builds(
    AclFilter,
    kinds | st.just(ResourceKind.ANY),
    st.none() | names,
    st.sampled_from([PatternKind.ANY, PatternKind.MATCH, PatternKind.LITERAL, PatternKind.PREFIXED]),
    st.none() | principals,
    st.none() | hosts,
    st.sampled_from([Operation.ANY, Operation.READ, Operation.ALL]),
    st.sampled_from([Permission.ANY, Permission.ALLOW, Permission.DENY]),
)


def means(wanted: AclFilter, acl: Acl) -> bool:
    """What Kafka's documentation says of a filter, without an index and without a shortcut."""
    fields = [
        (wanted.resource, ResourceKind.ANY, acl.resource),
        (wanted.principal, None, acl.principal),
        (wanted.host, None, acl.host),
        (wanted.operation, Operation.ANY, acl.operation),
        (wanted.permission, Permission.ANY, acl.permission),
    ]
    if any(value not in (all_of_them, actual) for value, all_of_them, actual in fields):
        return False
    if wanted.pattern is PatternKind.MATCH:
        if wanted.name is None:
            return True
        if acl.pattern is PatternKind.PREFIXED:
            return wanted.name.startswith(acl.name)
        return acl.name in (wanted.name, "*")
    return wanted.pattern in (PatternKind.ANY, acl.pattern) and wanted.name in (None, acl.name)


steps = st.lists(st.lists(rules, max_size=8) | st.lists(filters, max_size=3).map(tuple), max_size=12)
"""Rules to create, in lists; filters by which to delete, in tuples."""


@settings(max_examples=200, deadline=None)
@given(steps)
def test_creations_and_deletions_agree_with_a_list_of_rules(steps: list[list[Acl] | tuple[AclFilter, ...]]) -> None:
    """The image step by step, that of the encoded changes, and that of a snapshot are one with a plain list."""
    image, kept = ClusterImage(), list[Acl]()
    for step in steps:
        if isinstance(step, list):
            changes = plan_create_acls(image, step).changes
            kept += [each for each in dict.fromkeys(step) if each not in kept]
        else:
            plan = plan_delete_acls(image, step)
            changes = plan.changes
            for wanted, found in zip(step, plan.results, strict=True):
                assert not isinstance(found, ApiError)
                assert sorted(map(str, found)) == sorted(str(acl) for acl in kept if means(wanted, acl))
            kept = [acl for acl in kept if not any(means(wanted, acl) for wanted in step)]
        image = image.apply(deltas.decode(deltas.encode(changes)))
        assert set(image.acls) == set(kept)
        restored = ClusterImage().apply(deltas.decode(deltas.encode(image.as_changes())))
        assert restored.acls == image.acls
        for wanted in (AclFilter(), AclFilter(name="ab", pattern=PatternKind.MATCH), AclFilter(name="ab")):
            assert restored.acls.matching(wanted) == [acl for acl in image.acls if means(wanted, acl)]
