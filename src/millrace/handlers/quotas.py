"""DescribeClientQuotas, AlterClientQuotas, and the quota on changes of metadata as other handlers keep it.

What may be asked and changed is `cluster.quotas`; what clients have used is `security.metering`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import MAX_PARTITIONS_PER_REQUEST, Plan, TopicOutcome
from millrace.cluster.quotas import QuotaAlteration, QuotaFilter, matching, plan_alter_quotas
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext
from millrace.handlers.forwarding import is_from_broker, on_controller
from millrace.handlers.needs import cluster
from millrace.handlers.registry import api
from millrace.security.acls import Operation
from millrace.wire.keys import ApiKey
from millrace.wire.messages.quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
)

T = TypeVar("T")


@api(
    ApiKey.DESCRIBE_CLIENT_QUOTAS,
    DescribeClientQuotasRequest,
    "0-1",
    needs=cluster(Operation.DESCRIBE_CONFIGS),
)
def describe_client_quotas(
    context: RequestContext, request: DescribeClientQuotasRequest
) -> DescribeClientQuotasResponse:
    """The quotas that were set, of the entities that a filter means.

    A part of the filter wants an entity to have a user, client id or address of a certain name, the default, or any;
    `strict` those that have no other parts.
    """
    parts = tuple((each.entity_type, each.match_type, each.match) for each in request.components)
    try:
        found = sorted(matching(context.broker.image.quotas, QuotaFilter(parts, request.strict)), key=repr)
    except ApiError as error:
        return DescribeClientQuotasResponse(error_code=error.code, error_message=error.message, entries=None)
    return DescribeClientQuotasResponse(
        error_message=None,
        entries=[
            DescribeClientQuotasResponse.EntryData(
                entity=[
                    DescribeClientQuotasResponse.EntityData(entity_type=kind, entity_name=name) for kind, name in entity
                ],
                values=[DescribeClientQuotasResponse.ValueData(key=key, value=value) for key, value in values.items()],
            )
            for entity, values in found
        ],
    )


def _alterations(request: AlterClientQuotasRequest) -> list[QuotaAlteration]:
    return [
        QuotaAlteration(
            tuple((part.entity_type, part.entity_name) for part in entry.entity),
            tuple((each.key, None if each.remove else each.value) for each in entry.ops),
        )
        for entry in request.entries
    ]


def _outcome(entry: AlterClientQuotasRequest.EntryData, error: ApiError | None) -> AlterClientQuotasResponse.EntryData:
    return AlterClientQuotasResponse.EntryData(
        error_code=ErrorCode.NONE if error is None else error.code,
        error_message=None if error is None else error.message,
        entity=[
            AlterClientQuotasResponse.EntityData(entity_type=part.entity_type, entity_name=part.entity_name)
            for part in entry.entity
        ],
    )


def _refuse(_context: RequestContext, request: AlterClientQuotasRequest, error: ApiError) -> AlterClientQuotasResponse:
    return AlterClientQuotasResponse(entries=[_outcome(entry, error) for entry in request.entries])


def _are_altered(
    request: AlterClientQuotasRequest, response: AlterClientQuotasResponse
) -> Callable[[ClusterImage], bool] | None:
    if request.validate_only:
        return None
    done = [
        alteration
        for alteration, entry in zip(_alterations(request), response.entries, strict=False)
        if entry.error_code == ErrorCode.NONE
    ]

    def condition(image: ClusterImage) -> bool:
        found = ((image.quotas.get(each.entity) or {}, each.operations) for each in done)
        return all(values.get(key) == value for values, operations in found for key, value in operations)

    return condition


@api(
    ApiKey.ALTER_CLIENT_QUOTAS,
    AlterClientQuotasRequest,
    "0-1",
    needs=cluster(Operation.ALTER_CONFIGS),
)
@on_controller(_refuse, shown_when=_are_altered)
async def alter_client_quotas(context: RequestContext, request: AlterClientQuotasRequest) -> AlterClientQuotasResponse:
    """Set and remove quotas of users, client ids, both together, and addresses; each entity with its own outcome.

    A name that is null is the default. INVALID_REQUEST if the entity cannot be, a quota does not belong to it, or a
    value is not greater than 0. `validate_only` says what would happen and changes nothing. An address has to be a
    number: host names, which Kafka resolves, are refused.
    """
    alterations = _alterations(request)

    def plan(image: ClusterImage) -> Plan[list[ApiError | None]]:
        return plan_alter_quotas(image, alterations)

    controller = context.broker.controller
    results = plan(controller.image).results if request.validate_only else await controller.change(plan)
    return AlterClientQuotasResponse(
        entries=[_outcome(entry, error) for entry, error in zip(request.entries, results, strict=True)]
    )


async def within_mutation_quota(
    context: RequestContext,
    items: Sequence[T],
    *,
    partitions: Callable[[T], int],
    refused: Callable[[T, ApiError], TopicOutcome],
    change: Callable[[list[T]], Awaitable[list[TopicOutcome]]],
    strict: bool,
) -> tuple[list[TopicOutcome], int]:
    """Have topics changed as far as the client's `controller_mutation_rate` goes, and how long it has to wait.

    `partitions` is how many partitions an item creates or deletes. What does not happen after all is not counted; other
    brokers are not, either.
    """
    quota = context.broker.quotas.mutations(context.session, context.header.client_id, strict=strict)
    if quota is None or is_from_broker(context):
        return await change(list(items)), 0
    sizes = [max(0, min(partitions(item), MAX_PARTITIONS_PER_REQUEST)) for item in items]
    admitted = [quota.admit(size) for size in sizes]
    outcomes: list[TopicOutcome] = []
    try:
        wanted = [item for item, is_in in zip(items, admitted, strict=True) if is_in]
        made = iter(await change(wanted) if wanted else [])
        for item, is_in in zip(items, admitted, strict=True):
            outcomes.append(next(made) if is_in else refused(item, _exceeded()))
    finally:
        done = sum(
            size for size, is_in, outcome in zip(sizes, admitted, outcomes, strict=False) if is_in and not outcome.error
        )
        quota.give_back(sum(size for size, is_in in zip(sizes, admitted, strict=True) if is_in) - done)
    return outcomes, quota.throttle_ms


def _exceeded() -> ApiError:
    return ApiError(ErrorCode.THROTTLING_QUOTA_EXCEEDED, "the client changes topics faster than its quota allows")
