"""Reading and changing the settings of topics, brokers, groups and clients."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, int8, int16, int32, string


class DescribeConfigsRequest(Request, key=ApiKey.DESCRIBE_CONFIGS, versions="1-4", flexible="4+"):
    """Asks for settings with their sources and synonyms."""

    class DescribeConfigsResource(Struct):
        resource_type: int = int8()
        resource_name: str = string()
        configuration_keys: list[str] | None = array(string, nullable=True)

    resources: list[DescribeConfigsResource] = array(DescribeConfigsResource)
    include_synonyms: bool = boolean()
    include_documentation: bool = boolean("3+")


class DescribeConfigsResponse(Response, key=ApiKey.DESCRIBE_CONFIGS, versions="1-4", flexible="4+"):
    """Settings per resource."""

    class DescribeConfigsSynonym(Struct):
        name: str = string()
        value: str | None = string(nullable=True)
        source: int = int8()

    class DescribeConfigsResourceResult(Struct):
        name: str = string()
        value: str | None = string(nullable=True)
        read_only: bool = boolean()
        config_source: int = int8(default=-1)
        is_sensitive: bool = boolean()
        synonyms: list[DescribeConfigsResponse.DescribeConfigsSynonym] = array("DescribeConfigsSynonym")
        config_type: int = int8("3+", ignorable=True)
        documentation: str | None = string("3+", nullable=True, ignorable=True)

    class DescribeConfigsResult(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        resource_type: int = int8()
        resource_name: str = string()
        configs: list[DescribeConfigsResponse.DescribeConfigsResourceResult] = array("DescribeConfigsResourceResult")

    throttle_time_ms: int = int32()
    results: list[DescribeConfigsResult] = array(DescribeConfigsResult)


class AlterConfigsRequest(Request, key=ApiKey.ALTER_CONFIGS, versions="0-2", flexible="2+"):
    """Replaces all settings of resources; superseded by IncrementalAlterConfigs."""

    class AlterableConfig(Struct):
        name: str = string()
        value: str | None = string(nullable=True)

    class AlterConfigsResource(Struct):
        resource_type: int = int8()
        resource_name: str = string()
        configs: list[AlterConfigsRequest.AlterableConfig] = array("AlterableConfig")

    resources: list[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = boolean()


class AlterConfigsResponse(Response, key=ApiKey.ALTER_CONFIGS, versions="0-2", flexible="2+"):
    """The outcome per resource."""

    class AlterConfigsResourceResponse(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        resource_type: int = int8()
        resource_name: str = string()

    throttle_time_ms: int = int32()
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)


class IncrementalAlterConfigsRequest(Request, key=ApiKey.INCREMENTAL_ALTER_CONFIGS, versions="0-1", flexible="1+"):
    """Sets, deletes, appends to or subtracts from single settings."""

    class AlterableConfig(Struct):
        name: str = string()
        config_operation: int = int8()
        value: str | None = string(nullable=True)

    class AlterConfigsResource(Struct):
        resource_type: int = int8()
        resource_name: str = string()
        configs: list[IncrementalAlterConfigsRequest.AlterableConfig] = array("AlterableConfig")

    resources: list[AlterConfigsResource] = array(AlterConfigsResource)
    validate_only: bool = boolean()


class IncrementalAlterConfigsResponse(Response, key=ApiKey.INCREMENTAL_ALTER_CONFIGS, versions="0-1", flexible="1+"):
    """The outcome per resource."""

    class AlterConfigsResourceResponse(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        resource_type: int = int8()
        resource_name: str = string()

    throttle_time_ms: int = int32()
    responses: list[AlterConfigsResourceResponse] = array(AlterConfigsResourceResponse)


class ListConfigResourcesRequest(Request, key=ApiKey.LIST_CONFIG_RESOURCES, versions="0-1", flexible="0+"):
    """Asks which resources have settings."""

    resource_types: list[int] = array(int8, "1+")


class ListConfigResourcesResponse(Response, key=ApiKey.LIST_CONFIG_RESOURCES, versions="0-1", flexible="0+"):
    """Names by resource type."""

    class ConfigResource(Struct):
        resource_name: str = string()
        resource_type: int = int8("1+", default=16, ignorable=True)

    throttle_time_ms: int = int32()
    error_code: int = int16()
    config_resources: list[ConfigResource] = array(ConfigResource)
