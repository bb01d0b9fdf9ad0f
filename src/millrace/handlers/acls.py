"""DescribeAcls, CreateAcls and DeleteAcls: the rules of access over the wire.

What a rule is and what it decides is in `security.acls`; which may be made is in `cluster.access`.
"""

from __future__ import annotations

from collections.abc import Callable

from millrace.cluster.access import filter_problem, plan_create_acls, plan_delete_acls
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import on_controller
from millrace.handlers.needs import cluster
from millrace.handlers.registry import api
from millrace.security.acls import Acl, AclFilter, Operation, PatternKind, Permission, ResourceKind, known
from millrace.wire.keys import ApiKey
from millrace.wire.messages.acls import (
    CreateAclsRequest,
    CreateAclsResponse,
    DeleteAclsRequest,
    DeleteAclsResponse,
    DescribeAclsRequest,
    DescribeAclsResponse,
)


def _check_enabled(context: RequestContext) -> None:
    if not context.broker.authorizer.enabled:
        text = "no authorizer is on (authorizer.class.name), so rules would have no effect"
        raise ApiError(ErrorCode.SECURITY_DISABLED, text)


@api(ApiKey.DESCRIBE_ACLS, DescribeAclsRequest, "1-3", needs=cluster(Operation.DESCRIBE))
def describe_acls(context: RequestContext, request: DescribeAclsRequest) -> DescribeAclsResponse:
    """The rules that match a filter, by resource. With the pattern MATCH, all that take in the named one (KIP-290).

    A value that is not known is INVALID_REQUEST, where Kafka finds nothing, or for UNKNOWN itself hangs up.

    Versions: v2 is flexible; v3 adds USER resources (KIP-373).
    """
    try:
        _check_enabled(context)
        wanted = _filter(request)
        if (problem := filter_problem(wanted)) is not None:
            raise problem
    except ApiError as error:
        return DescribeAclsResponse(error_code=error.code, error_message=error.message)
    resources: dict[tuple[ResourceKind, str, PatternKind], DescribeAclsResponse.DescribeAclsResource] = {}
    for acl in context.broker.image.acls.matching(wanted):
        key = acl.resource, acl.name, acl.pattern
        if key not in resources:
            resources[key] = DescribeAclsResponse.DescribeAclsResource(
                resource_type=acl.resource, resource_name=acl.name, pattern_type=acl.pattern, acls=[]
            )
        resources[key].acls.append(
            DescribeAclsResponse.AclDescription(
                principal=acl.principal, host=acl.host, operation=acl.operation, permission_type=acl.permission
            )
        )
    return DescribeAclsResponse(error_message=None, resources=list(resources.values()))


def _filter(wanted: DescribeAclsRequest | DeleteAclsRequest.DeleteAclsFilter) -> AclFilter:
    return AclFilter(
        known(ResourceKind, wanted.resource_type_filter),
        wanted.resource_name_filter,
        known(PatternKind, wanted.pattern_type_filter),
        wanted.principal_filter,
        wanted.host_filter,
        known(Operation, wanted.operation),
        known(Permission, wanted.permission_type),
    )


# --- creation ---------------------------------------------------------------------------------------------------------


def _created(errors: list[ApiError | None]) -> CreateAclsResponse:
    return CreateAclsResponse(
        results=[
            CreateAclsResponse.AclCreationResult(error_message=None)
            if error is None
            else CreateAclsResponse.AclCreationResult(error_code=error.code, error_message=error.message)
            for error in errors
        ]
    )


def _refuse_creation(_context: RequestContext, request: CreateAclsRequest, error: ApiError) -> CreateAclsResponse:
    return _created([error] * len(request.creations))


def _have_come(request: CreateAclsRequest, response: CreateAclsResponse) -> Callable[[ClusterImage], bool]:
    results = zip(_acls(request), response.results, strict=True)
    made = [acl for acl, result in results if result.error_code == ErrorCode.NONE]
    return lambda image: all(acl in image.acls for acl in made)


def _acls(request: CreateAclsRequest) -> list[Acl]:
    return [
        Acl(
            known(ResourceKind, each.resource_type),
            each.resource_name,
            known(PatternKind, each.resource_pattern_type),
            each.principal,
            each.host,
            known(Operation, each.operation),
            known(Permission, each.permission_type),
        )
        for each in request.creations
    ]


@api(ApiKey.CREATE_ACLS, CreateAclsRequest, "1-3", needs=cluster(Operation.ALTER))
@on_controller(_refuse_creation, shown_when=_have_come)
async def create_acls(context: RequestContext, request: CreateAclsRequest) -> CreateAclsResponse:
    """Add rules, each for itself; one that is there already is a success. They hold on this broker when it answers.

    One request may add 10,000 rules, as in Kafka; there may be 50,000 in all. A host that is neither an address nor `*`
    is INVALID_REQUEST, and a network (`10.0.0.0/8`, which Kafka takes from 4.4 on) UNSUPPORTED_VERSION: Kafka keeps
    such rules, and they never match.

    Versions: v2 is flexible; v3 adds USER resources.
    """
    _check_enabled(context)
    acls = _acls(request)
    return _created(await context.broker.controller.change(lambda image: plan_create_acls(image, acls)))


# --- deletion ---------------------------------------------------------------------------------------------------------


def _refuse_deletion(_context: RequestContext, request: DeleteAclsRequest, error: ApiError) -> DeleteAclsResponse:
    return DeleteAclsResponse(filter_results=[_filter_result(error) for _ in request.filters])


def _filter_result(result: tuple[Acl, ...] | ApiError) -> DeleteAclsResponse.DeleteAclsFilterResult:
    if isinstance(result, ApiError):
        return DeleteAclsResponse.DeleteAclsFilterResult(error_code=result.code, error_message=result.message)
    return DeleteAclsResponse.DeleteAclsFilterResult(
        error_message=None,
        matching_acls=[
            DeleteAclsResponse.DeleteAclsMatchingAcl(
                error_message=None,
                resource_type=acl.resource,
                resource_name=acl.name,
                pattern_type=acl.pattern,
                principal=acl.principal,
                host=acl.host,
                operation=acl.operation,
                permission_type=acl.permission,
            )
            for acl in result
        ],
    )


def _have_gone(_request: DeleteAclsRequest, response: DeleteAclsResponse) -> Callable[[ClusterImage], bool]:
    gone = {
        Acl(
            ResourceKind(each.resource_type),
            each.resource_name,
            PatternKind(each.pattern_type),
            each.principal,
            each.host,
            Operation(each.operation),
            Permission(each.permission_type),
        )
        for result in response.filter_results
        for each in result.matching_acls
    }
    return lambda image: not any(acl in image.acls for acl in gone)


@api(ApiKey.DELETE_ACLS, DeleteAclsRequest, "1-3", needs=cluster(Operation.ALTER))
@on_controller(_refuse_deletion, shown_when=_have_gone)
async def delete_acls(context: RequestContext, request: DeleteAclsRequest) -> DeleteAclsResponse:
    """Remove the rules that match filters, all in one step; the answer lists them per filter.

    A rule that several filters match is in the result of each. One request may remove 10,000 rules, as in Kafka; a
    request that would remove more removes none.

    Versions: v2 is flexible; v3 adds USER resources.
    """
    _check_enabled(context)
    filters = [_filter(each) for each in request.filters]
    results = await context.broker.controller.change(lambda image: plan_delete_acls(image, filters))
    return DeleteAclsResponse(filter_results=[_filter_result(each) for each in results])
