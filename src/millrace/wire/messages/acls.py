"""Access control lists."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, int8, int16, int32, string


class DescribeAclsRequest(Request, key=ApiKey.DESCRIBE_ACLS, versions="1-3", flexible="2+"):
    """Asks for the ACLs that match a filter."""

    resource_type_filter: int = int8()
    resource_name_filter: str | None = string(nullable=True)
    pattern_type_filter: int = int8(default=3)
    principal_filter: str | None = string(nullable=True)
    host_filter: str | None = string(nullable=True)
    operation: int = int8()
    permission_type: int = int8()


class DescribeAclsResponse(Response, key=ApiKey.DESCRIBE_ACLS, versions="1-3", flexible="2+"):
    """Matching ACLs by resource."""

    class AclDescription(Struct):
        principal: str = string()
        host: str = string()
        operation: int = int8()
        permission_type: int = int8()

    class DescribeAclsResource(Struct):
        resource_type: int = int8()
        resource_name: str = string()
        pattern_type: int = int8(default=3)
        acls: list[DescribeAclsResponse.AclDescription] = array("AclDescription")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    resources: list[DescribeAclsResource] = array(DescribeAclsResource)


class CreateAclsRequest(Request, key=ApiKey.CREATE_ACLS, versions="1-3", flexible="2+"):
    """Creates ACLs."""

    class AclCreation(Struct):
        resource_type: int = int8()
        resource_name: str = string()
        resource_pattern_type: int = int8(default=3)
        principal: str = string()
        host: str = string()
        operation: int = int8()
        permission_type: int = int8()

    creations: list[AclCreation] = array(AclCreation)


class CreateAclsResponse(Response, key=ApiKey.CREATE_ACLS, versions="1-3", flexible="2+"):
    """The outcome per ACL."""

    class AclCreationResult(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)

    throttle_time_ms: int = int32()
    results: list[AclCreationResult] = array(AclCreationResult)


class DeleteAclsRequest(Request, key=ApiKey.DELETE_ACLS, versions="1-3", flexible="2+"):
    """Deletes the ACLs that match filters."""

    class DeleteAclsFilter(Struct):
        resource_type_filter: int = int8()
        resource_name_filter: str | None = string(nullable=True)
        pattern_type_filter: int = int8(default=3)
        principal_filter: str | None = string(nullable=True)
        host_filter: str | None = string(nullable=True)
        operation: int = int8()
        permission_type: int = int8()

    filters: list[DeleteAclsFilter] = array(DeleteAclsFilter)


class DeleteAclsResponse(Response, key=ApiKey.DELETE_ACLS, versions="1-3", flexible="2+"):
    """What each filter matched and removed."""

    class DeleteAclsMatchingAcl(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        resource_type: int = int8()
        resource_name: str = string()
        pattern_type: int = int8(default=3)
        principal: str = string()
        host: str = string()
        operation: int = int8()
        permission_type: int = int8()

    class DeleteAclsFilterResult(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        matching_acls: list[DeleteAclsResponse.DeleteAclsMatchingAcl] = array("DeleteAclsMatchingAcl")

    throttle_time_ms: int = int32()
    filter_results: list[DeleteAclsFilterResult] = array(DeleteAclsFilterResult)
