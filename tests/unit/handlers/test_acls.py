"""DescribeAcls, CreateAcls and DeleteAcls, at every version, and over restarts."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.handlers.acls import _have_come, _have_gone, create_acls, delete_acls, describe_acls
from millrace.handlers.needs import cluster
from millrace.handlers.registry import load
from millrace.metadata.embedded import Database, EmbeddedStore
from millrace.metadata.store import MetadataStore
from millrace.security.acls import (
    Acl,
    AclFilter,
    AclTable,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
)
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer
from millrace.wire.keys import ApiKey
from millrace.wire.messages.acls import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DescribeAclsRequest,
)
from support.handling import Handling, handling
from support.metadata import cluster_of

READ = Acl(
    ResourceKind.TOPIC, "orders", PatternKind.LITERAL, "User:alice", "*", Operation.READ, Permission.ALLOW
)  # fmt: skip
PREFIX = replace(READ, name="ord", pattern=PatternKind.PREFIXED)
EVERY = replace(READ, name="*", permission=Permission.DENY, host="10.0.0.1")
TOKENS = replace(READ, resource=ResourceKind.USER, name="User:bob", operation=Operation.CREATE_TOKENS)
RULES = [READ, PREFIX, EVERY, TOKENS]

VERSIONS = pytest.mark.parametrize("version", [1, 2, 3])


@asynccontextmanager
async def guarded(store: MetadataStore | None = None, deltas_per_snapshot: int = 1000) -> AsyncIterator[Handling]:
    authorizer = Authorizer(enabled=True, acls=AclTable)
    async with handling(store=store, deltas_per_snapshot=deltas_per_snapshot, authorizer=authorizer) as on:
        yield on


def creation(acl: Acl) -> CreateAclsRequest.AclCreation:
    return CreateAclsRequest.AclCreation(
        resource_type=acl.resource,
        resource_name=acl.name,
        resource_pattern_type=acl.pattern,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission,
    )


def filter_fields(wanted: AclFilter) -> dict[str, Any]:
    return {
        "resource_type_filter": wanted.resource,
        "resource_name_filter": wanted.name,
        "pattern_type_filter": wanted.pattern,
        "principal_filter": wanted.principal,
        "host_filter": wanted.host,
        "operation": wanted.operation,
        "permission_type": wanted.permission,
    }


def exactly(acl: Acl) -> AclFilter:
    return AclFilter(acl.resource, acl.name, acl.pattern, acl.principal, acl.host, acl.operation, acl.permission)


async def create(on: Handling, *acls: Acl, version: int = 3) -> list[int]:
    request = CreateAclsRequest(creations=[creation(acl) for acl in acls])
    results = (await on.call(create_acls, request, version)).results
    assert all(bool(each.error_code) == bool(each.error_message) for each in results)
    return [each.error_code for each in results]


async def describe(on: Handling, wanted: AclFilter | None = None, version: int = 3) -> list[Acl]:
    request = DescribeAclsRequest(**filter_fields(wanted or AclFilter()))
    response = await on.call(describe_acls, request, version)
    assert (response.error_code, response.error_message) == (0, None)
    return [
        Acl(
            ResourceKind(each.resource_type),
            each.resource_name,
            PatternKind(each.pattern_type),
            acl.principal,
            acl.host,
            Operation(acl.operation),
            Permission(acl.permission_type),
        )
        for each in response.resources
        for acl in each.acls
    ]


def deletion(*filters: AclFilter) -> DeleteAclsRequest:
    return DeleteAclsRequest(filters=[DeleteAclsRequest.DeleteAclsFilter(**filter_fields(each)) for each in filters])


async def delete(on: Handling, *filters: AclFilter, version: int = 3) -> list[list[Acl] | int]:
    """Per filter, what was removed, or the error."""
    results = (await on.call(delete_acls, deletion(*filters), version)).filter_results
    assert all(bool(each.error_code) == bool(each.error_message) for each in results)
    return [
        each.error_code
        or [
            Acl(
                ResourceKind(acl.resource_type),
                acl.resource_name,
                PatternKind(acl.pattern_type),
                acl.principal,
                acl.host,
                Operation(acl.operation),
                Permission(acl.permission_type),
            )
            for acl in each.matching_acls
        ]
        for each in results
    ]


def test_what_they_need() -> None:
    apis = load()
    assert apis[ApiKey.DESCRIBE_ACLS].needs == cluster(Operation.DESCRIBE)
    assert apis[ApiKey.CREATE_ACLS].needs == cluster(Operation.ALTER)
    assert apis[ApiKey.DELETE_ACLS].needs == cluster(Operation.ALTER)


@VERSIONS
async def test_rules_are_made_found_and_removed(version: int) -> None:
    async with guarded() as on:
        assert await create(on, *RULES, version=version) == [0] * 4
        assert await create(on, *RULES, version=version) == [0] * 4, "there already"
        assert set(await describe(on, version=version)) == set(RULES)
        assert await describe(on, AclFilter(principal="User:nobody"), version) == []
        on_orders = AclFilter(ResourceKind.TOPIC, "orders", PatternKind.MATCH)
        assert await describe(on, on_orders, version) == [EVERY, PREFIX, READ]
        assert await describe(on, replace(on_orders, pattern=PatternKind.LITERAL), version) == [READ]
        assert await describe(on, replace(on_orders, pattern=PatternKind.ANY), version) == [READ]
        nothing = AclFilter(name="nothing")
        assert await delete(on, exactly(READ), nothing, on_orders, version=version) == [
            [READ],
            [],
            [EVERY, PREFIX, READ],
        ]
        assert await describe(on, version=version) == [TOKENS]
        assert set(on.controller.image.acls) == {TOKENS}


async def test_rules_of_one_resource_come_together() -> None:
    async with guarded() as on:
        write = replace(READ, operation=Operation.WRITE)
        await create(on, READ, write, PREFIX)
        response = await on.call(describe_acls, DescribeAclsRequest(**filter_fields(AclFilter())), 3)
        assert [(each.resource_name, len(each.acls)) for each in response.resources] == [("ord", 1), ("orders", 2)]


@VERSIONS
async def test_each_rule_has_its_own_result(version: int) -> None:
    async with guarded() as on:
        codes = await create(on, replace(READ, name=""), READ, replace(READ, principal="alice"), version=version)
        assert codes == [ErrorCode.INVALID_REQUEST, 0, ErrorCode.INVALID_REQUEST]
        assert await describe(on) == [READ]


async def test_numbers_that_mean_nothing_yet() -> None:
    """A later Kafka may know them; here they are refused, per item, and nothing else is."""
    fields = ["resource_type", "resource_pattern_type", "operation", "permission_type"]
    async with guarded() as on:
        for field, number in itertools.product(fields, (0, 1, 99, -1)):
            wrong = creation(READ)
            setattr(wrong, field, number)
            request = CreateAclsRequest(creations=[wrong, creation(PREFIX)])
            results = (await on.call(create_acls, request, 3)).results
            assert [each.error_code for each in results] == [ErrorCode.INVALID_REQUEST, 0], (field, number)
        assert await describe(on) == [PREFIX]
        for field, number in itertools.product(filter_fields(AclFilter()), (0, 99, -1)):
            if field.endswith(("name_filter", "principal_filter", "host_filter")):
                continue
            wanted = {**filter_fields(AclFilter()), field: number}
            response = await on.call(describe_acls, DescribeAclsRequest(**wanted), 3)
            assert (response.error_code, response.resources) == (ErrorCode.INVALID_REQUEST, [])
            request_ = DeleteAclsRequest(filters=[DeleteAclsRequest.DeleteAclsFilter(**wanted)])
            (result,) = (await on.call(delete_acls, request_, 3)).filter_results
            assert (result.error_code, result.matching_acls) == (ErrorCode.INVALID_REQUEST, [])
        assert await describe(on) == [PREFIX]


@VERSIONS
async def test_without_an_authorizer_there_are_no_rules(version: int) -> None:
    async with handling(authorizer=NO_AUTHORIZER) as on:
        assert await create(on, READ, PREFIX, version=version) == [ErrorCode.SECURITY_DISABLED] * 2
        assert await delete(on, AclFilter(), version=version) == [ErrorCode.SECURITY_DISABLED]
        response = await on.call(describe_acls, DescribeAclsRequest(**filter_fields(AclFilter())), version)
        assert response.error_code == ErrorCode.SECURITY_DISABLED
        assert len(on.controller.image.acls) == 0


async def test_a_broker_that_passed_it_on_waits_for_its_own_image() -> None:
    request = CreateAclsRequest(creations=[creation(READ), creation(replace(PREFIX, principal="x"))])
    failed = CreateAclsResponse.AclCreationResult(error_code=ErrorCode.INVALID_REQUEST)
    response = CreateAclsResponse(results=[CreateAclsResponse.AclCreationResult(), failed])
    async with guarded() as on:
        before = on.controller.image
        await create(on, READ)
        after = on.controller.image
        come = _have_come(request, response)
        assert (come(before), come(after)) == (False, True)
        removed = await on.call(delete_acls, deletion(AclFilter()), 3)
        gone = _have_gone(deletion(AclFilter()), removed)
        assert (gone(after), gone(on.controller.image), gone(cluster_of(1))) == (False, True, True)


async def test_cve_2024_27309_no_order_of_removals_takes_another_rule_along() -> None:
    """Over the API, with a restart after each removal: from a snapshot and the changes behind it."""
    rules = [
        READ,
        replace(READ, operation=Operation.WRITE),
        replace(READ, principal="User:bob"),
        PREFIX,
        replace(EVERY, name="orders"),
    ]
    for order, deltas_per_snapshot in zip(itertools.permutations(rules), itertools.cycle([1, 2, 3, 1000])):
        database = Database()
        keeper = EmbeddedStore(database)  # keeps the memory alive between two runs
        await keeper.open()
        left = set(rules)
        async with guarded(EmbeddedStore(database), deltas_per_snapshot) as on:
            assert await create(on, *rules) == [0] * 5
        for acl in order:
            left.discard(acl)
            async with guarded(EmbeddedStore(database), deltas_per_snapshot) as on:
                assert await delete(on, exactly(acl)) == [[acl]]
                assert set(await describe(on)) == left
        async with guarded(EmbeddedStore(database), deltas_per_snapshot) as on:
            assert await describe(on) == []
        await keeper.close()
