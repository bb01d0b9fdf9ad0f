"""Changes of metadata that a client may ask any broker for: the controller makes them, the others pass them on.

A handler under `on_controller` runs only where this broker is the controller. Elsewhere the very request goes to the
controller in an Envelope (`envelope`), at the version in which it came, with who asked; the controller judges by that,
and its answer is the answer. What cannot be done in time is answered by the API's own `refuse`, with an error that
clients retry.

Where rights are judged item by item, the handler does that first, on both brokers, and has the rest done
(`done_for_allowed`): nothing is passed on that this broker refuses by itself.

Invariants: a request that a broker passed on is never passed on again, so that two brokers that each take the other for
the controller cannot play ball with it; only a refusal (NOT_CONTROLLER, nothing was done) is tried again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, TypeVar

from millrace.cluster.dialer import client_id
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.auditing import error_codes
from millrace.handlers.context import RequestContext
from millrace.handlers.envelope import VERSION as ENVELOPE_VERSION
from millrace.handlers.envelope import opened, sealed
from millrace.handlers.registry import REFUSE
from millrace.security.acls import CLUSTER_NAME, Operation, ResourceKind
from millrace.wire.schema import Struct

A = TypeVar("A")
Item = TypeVar("Item")
Q = TypeVar("Q")
R = TypeVar("R", bound=Struct)

MAX_TIMEOUT_MS: Final = 60_000
MIN_FORWARD_MS: Final = 1000
"""A client that would not wait at all still gets the controller's answer: it asked for a change, not for a timeout."""
RETRY_PAUSE_S: Final = 0.05
IMAGE_WAIT_S: Final = 2.0
"""How long an answer may wait for this broker's own image: whoever asks it next should find what was just made."""


def on_controller(
    refuse: Callable[[RequestContext, Q, ApiError], R],
    *,
    shown_when: Callable[[Q, R], Callable[[ClusterImage], bool] | None] | None = None,
) -> Callable[[Callable[[RequestContext, Q], Awaitable[R]]], Callable[[RequestContext, Q], Awaitable[R]]]:
    """Run the decorated handler on the controller, wherever the request came in.

    `refuse` answers an error in every item. `shown_when` gives the condition under which an image shows what the answer
    says; None where it cannot be told.
    """

    def decorate(handler: Callable[[RequestContext, Q], Awaitable[R]]) -> Callable[[RequestContext, Q], Awaitable[R]]:
        @functools.wraps(handler)
        async def answer(context: RequestContext, request: Q) -> R:
            clock = context.broker.clock
            limit_s = timeout_ms(context, request) / 1000
            deadline = clock.monotonic() + limit_s
            while True:
                is_here = context.broker.controller.is_controller
                if context.notes is not None:
                    context.notes.passed_on = not is_here
                try:
                    if is_here:
                        return await handler(context, request)
                    response: R = await _forward(context, request, deadline)
                except ApiError as error:
                    if error.code != ErrorCode.NOT_CONTROLLER or _may_not_try_again(context, deadline):
                        return refuse(context, request, _told(error))
                else:
                    if not _is_refused(response):
                        await wait_for_own_image(context, shown_when(request, response) if shown_when else None)
                        return response
                    if _may_not_try_again(context, deadline):
                        return response
                await clock.sleep(RETRY_PAUSE_S)

        setattr(answer, REFUSE, refuse)
        return answer

    return decorate


async def done_for_allowed(
    items: Sequence[Item],
    judge: Callable[[Item], ApiError | None],
    refuse: Callable[[Item, ApiError], A],
    act: Callable[[list[Item]], Awaitable[list[A]]],
) -> list[A]:
    """One answer per item, in order: its refusal, or what `act` answers to all that are not refused."""
    refusals = [judge(item) for item in items]
    allowed = [item for item, refusal in zip(items, refusals, strict=True) if refusal is None]
    answers = iter(await act(allowed) if allowed else ())
    return [
        next(answers) if refusal is None else refuse(item, refusal)
        for item, refusal in zip(items, refusals, strict=True)
    ]


def timeout_ms(context: RequestContext, request: object) -> int:
    """How long the request may take: what it says, within reason; where it says nothing, what the broker does."""
    told = getattr(request, "timeout_ms", None)
    if told is None:
        told = context.broker.config.get_int("request.timeout.ms")
    return max(0, min(told, MAX_TIMEOUT_MS))


def is_from_broker(context: RequestContext) -> bool:
    """Whether another broker of this cluster asks for itself: by its name, where brokers ask, with a broker's right."""
    broker = context.broker
    return (
        context.listener == broker.config.inter_broker_listener
        and any(context.header.client_id == client_id(broker_id) for broker_id in broker.image.brokers)
        and broker.authorizer.may(
            context.session, context.client_host, Operation.CLUSTER_ACTION, ResourceKind.CLUSTER, CLUSTER_NAME
        )
    )


async def _forward(context: RequestContext, request: Any, deadline: float) -> Any:
    if _goes_no_further(context):
        raise ApiError(ErrorCode.NOT_CONTROLLER, f"broker {context.broker.broker_id} is not the controller")
    left_ms = max(MIN_FORWARD_MS, round((deadline - context.broker.clock.monotonic()) * 1000))
    answer = await context.broker.controller.forward(sealed(context, request), ENVELOPE_VERSION, left_ms)
    return opened(request, context.version, answer)


def _goes_no_further(context: RequestContext) -> bool:
    return context.is_forwarded or is_from_broker(context)


def _may_not_try_again(context: RequestContext, deadline: float) -> bool:
    # The broker that passed it on looks for the controller itself.
    return _goes_no_further(context) or context.broker.clock.monotonic() + RETRY_PAUSE_S >= deadline


def _is_refused(response: Struct) -> bool:
    """Whether the other side was no longer the controller; then it did nothing at all."""
    return any(code == ErrorCode.NOT_CONTROLLER for code in error_codes(response))


def _told(error: ApiError) -> ApiError:
    """A connection that broke is this broker's, not the client's: to the client it is an answer that did not come."""
    if error.code == ErrorCode.NETWORK_EXCEPTION:
        return ApiError(ErrorCode.REQUEST_TIMED_OUT, f"no answer of the controller ({error.message})")
    return error


async def wait_for_own_image(context: RequestContext, condition: Callable[[ClusterImage], bool] | None) -> None:
    """Wait, a moment at most, until this broker's image shows what was answered: it is done in any case."""
    if condition is not None:
        with contextlib.suppress(ApiError):
            await context.broker.controller.wait_for_image(condition, IMAGE_WAIT_S)
