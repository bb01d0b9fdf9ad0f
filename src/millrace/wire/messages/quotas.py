"""Client quotas."""

from __future__ import annotations

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, Struct, array, boolean, float64, int8, int16, int32, string


class DescribeClientQuotasRequest(Request, key=ApiKey.DESCRIBE_CLIENT_QUOTAS, versions="0-1", flexible="1+"):
    """Asks for the quotas that match an entity filter."""

    class ComponentData(Struct):
        entity_type: str = string()
        match_type: int = int8()
        match: str | None = string(nullable=True)

    components: list[ComponentData] = array(ComponentData)
    strict: bool = boolean()


class DescribeClientQuotasResponse(Response, key=ApiKey.DESCRIBE_CLIENT_QUOTAS, versions="0-1", flexible="1+"):
    """Quotas per entity."""

    class EntityData(Struct):
        entity_type: str = string()
        entity_name: str | None = string(nullable=True)

    class ValueData(Struct):
        key: str = string()
        value: float = float64()

    class EntryData(Struct):
        entity: list[DescribeClientQuotasResponse.EntityData] = array("EntityData")
        values: list[DescribeClientQuotasResponse.ValueData] = array("ValueData")

    throttle_time_ms: int = int32()
    error_code: int = int16()
    error_message: str | None = string(nullable=True)
    entries: list[EntryData] | None = array(EntryData, nullable=True)


class AlterClientQuotasRequest(Request, key=ApiKey.ALTER_CLIENT_QUOTAS, versions="0-1", flexible="1+"):
    """Changes quotas."""

    class EntityData(Struct):
        entity_type: str = string()
        entity_name: str | None = string(nullable=True)

    class OpData(Struct):
        key: str = string()
        value: float = float64()
        remove: bool = boolean()

    class EntryData(Struct):
        entity: list[AlterClientQuotasRequest.EntityData] = array("EntityData")
        ops: list[AlterClientQuotasRequest.OpData] = array("OpData")

    entries: list[EntryData] = array(EntryData)
    validate_only: bool = boolean()


class AlterClientQuotasResponse(Response, key=ApiKey.ALTER_CLIENT_QUOTAS, versions="0-1", flexible="1+"):
    """The outcome per entity."""

    class EntityData(Struct):
        entity_type: str = string()
        entity_name: str | None = string(nullable=True)

    class EntryData(Struct):
        error_code: int = int16()
        error_message: str | None = string(nullable=True)
        entity: list[AlterClientQuotasResponse.EntityData] = array("EntityData")

    throttle_time_ms: int = int32()
    entries: list[EntryData] = array(EntryData)
