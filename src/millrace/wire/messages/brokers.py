"""What brokers say to each other and to the controller about themselves."""

from __future__ import annotations

from uuid import UUID

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response, array, boolean, int16, int32, int64, uuid


class BrokerHeartbeatRequest(Request, key=ApiKey.BROKER_HEARTBEAT, versions="0-2", flexible="0+"):
    """A sign of life, or the wish to be fenced or to go."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)
    current_metadata_offset: int = int64()
    want_fence: bool = boolean()
    want_shut_down: bool = boolean()
    offline_log_dirs: list[UUID] = array(uuid, "1+", tag=0)
    cordoned_log_dirs: list[UUID] | None = array(uuid, "2+", tag=1, nullable="2+", default=None)


class BrokerHeartbeatResponse(Response, key=ApiKey.BROKER_HEARTBEAT, versions="0-2", flexible="0+"):
    """How the other side sees the broker."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    is_caught_up: bool = boolean()
    is_fenced: bool = boolean(default=True)
    should_shut_down: bool = boolean()


class AllocateProducerIdsRequest(Request, key=ApiKey.ALLOCATE_PRODUCER_IDS, versions="0", flexible="0+"):
    """A broker asks the controller for a block of producer ids."""

    broker_id: int = int32()
    broker_epoch: int = int64(default=-1)


class AllocateProducerIdsResponse(Response, key=ApiKey.ALLOCATE_PRODUCER_IDS, versions="0", flexible="0+"):
    """The block, which nobody else gets."""

    throttle_time_ms: int = int32()
    error_code: int = int16()
    producer_id_start: int = int64()
    producer_id_len: int = int32()
