"""InitProducerId of idempotent producers, at every version; with transactional ids it is in `test_transactions`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.handlers.producers import init_producer_id
from millrace.security.authorizer import NO_AUTHORIZER
from millrace.wire.messages.producers import InitProducerIdRequest
from support.handling import Handling
from support.metadata import cluster_of


async def asked(ids: AsyncMock, version: int) -> tuple[int, int, int]:
    services: Any = SimpleNamespace(
        authorizer=NO_AUTHORIZER, image=cluster_of(1), producer_ids=SimpleNamespace(next=ids)
    )
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=1000)
    response = await Handling(None, services).call(init_producer_id, request, version)  # type: ignore[arg-type]
    return response.error_code, response.producer_id, response.producer_epoch


@pytest.mark.parametrize("version", range(6))
async def test_every_producer_gets_an_id_of_its_own(version: int) -> None:
    ids = AsyncMock(side_effect=[7, 8])
    assert await asked(ids, version) == (0, 7, 0)
    assert await asked(ids, version) == (0, 8, 0)


async def test_a_controller_that_cannot_be_reached_is_a_reason_to_ask_again() -> None:
    unreachable = AsyncMock(side_effect=ApiError(ErrorCode.NOT_CONTROLLER, "there is no controller at the moment"))
    assert await asked(unreachable, 5) == (ErrorCode.COORDINATOR_LOAD_IN_PROGRESS, -1, -1)
