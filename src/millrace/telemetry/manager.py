"""Client telemetry of one broker (KIP-714): the subscriptions of client instances, and their pushes, joined.

A push is checked, unpacked within bounds, marked with whose it is, and handed over; the client is answered then.
Unpacking is work for a thread, of which there is one: however many push at a time, one of them expands.

Owner: the event loop. Not here: what the protocol says (`handlers.telemetry`).
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from millrace.clock import Clock
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.records.compression import Codec, ExpandsTooFar, decompress
from millrace.tasks import Tasks
from millrace.telemetry.instances import RESERVED, Client, ClientInstances, Configs, Instance, Push
from millrace.telemetry.otlp import stamped
from millrace.telemetry.receiver import Forwarding, receiver_of

OnLost = dict[object, Callable[[], None]]
"""What a connection calls when it is gone, by who wants to know."""

MAX_ATTRIBUTE_LENGTH: Final = 256
"""Of what clients call themselves, in what is forwarded."""


class ClientTelemetry:
    """What clients push, and where it goes. `start` and `stop` are called once each."""

    def __init__(self, config: BrokerConfig, configs: Callable[[], Configs], clock: Clock) -> None:
        """ConfigError where the receiver is none, or cannot be written to."""
        self.max_bytes = config.get_int("telemetry.max.bytes")
        self._max_expanded_bytes = config.get_int("telemetry.max.decompressed.bytes")
        self._broker_id = config.broker_id
        self._instances = ClientInstances(configs, clock)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="telemetry")
        self._forwarding = Forwarding(receiver_of(config.get_str("telemetry.receiver"), self._worker, clock), clock)
        self._tasks = Tasks(clock)
        self.pushes_total = 0
        """Everything that was pushed, in order or not."""
        self.pushed_bytes_total = 0
        """As it came."""
        self.refused_total = 0
        """Pushes that were answered with an error, those that came too early included."""

    def __repr__(self) -> str:
        return f"ClientTelemetry({self.pushes_total} pushes, {self._instances!r}, {self._forwarding!r})"

    @property
    def throttled_total(self) -> int:
        """Requests of either kind that came before their time."""
        return self._instances.throttled_total

    @property
    def unknown_subscriptions_total(self) -> int:
        return self._instances.unknown_subscriptions_total

    @property
    def forwarded_total(self) -> int:
        return self._forwarding.forwarded_total

    @property
    def dropped_total(self) -> int:
        """Pushes that were taken from clients and did not reach the receiver."""
        return self._forwarding.dropped_total

    @property
    def instances(self) -> int:
        return len(self._instances)

    @property
    def waiting(self) -> int:
        """Pushes that the receiver has not been given yet."""
        return self._forwarding.waiting

    def start(self) -> None:
        self._tasks.keep("client telemetry", self._forwarding.run)

    async def stop(self) -> None:
        """Give the receiver a moment for what it has not taken."""
        await self._forwarding.finish()
        await self._tasks.stop()
        self._forwarding.close()
        self._worker.shutdown(wait=False)

    def ask(self, instance_id: uuid.UUID, client: Client, on_lost: OnLost | None) -> tuple[uuid.UUID, Instance]:
        """What the client should push, and the id of its instance; ApiError where it asks too early."""
        instance_id, instance = self._instances.ask(instance_id, client)
        self._bind(instance_id, instance, on_lost)
        return instance_id, instance

    def push(
        self, instance_id: uuid.UUID, client: Client, push: Push, on_lost: OnLost | None
    ) -> asyncio.Future[bytes] | None:
        """Take a push; ApiError. What is done, or fails with ApiError, when it was unpacked; None: it is empty.

        It goes its way in any case: a client may be gone right after its last push.
        """
        self.pushes_total += 1
        self.pushed_bytes_total += len(push.metrics)
        try:
            if instance_id in RESERVED:
                raise ApiError(ErrorCode.INVALID_REQUEST, "a push needs the id of a client instance")
            instance = self._instances.instance(instance_id, client)
            self._bind(instance_id, instance, on_lost)
            self._instances.check_push(instance, push, self.max_bytes)
        except ApiError:
            self.refused_total += 1
            raise
        instance.last_error = ErrorCode.NONE
        if not push.metrics:
            return None
        attributes = {
            **client.attributes(instance_id),
            "principal": client.principal,
            "broker_id": str(self._broker_id),
        }
        told = {name: text[:MAX_ATTRIBUTE_LENGTH] for name, text in attributes.items()}
        unpack = partial(unpacked, Codec(push.codec), push.metrics, told, self._max_expanded_bytes)
        work = asyncio.get_running_loop().run_in_executor(self._worker, unpack)
        work.add_done_callback(partial(self._unpacked, instance))
        return work

    def _unpacked(self, instance: Instance, work: asyncio.Future[bytes]) -> None:
        if work.cancelled():
            return
        error = work.exception()
        if error is None:
            if metrics := work.result():
                self._forwarding.offer(metrics)
        else:
            self.refused_total += 1
            if isinstance(error, ApiError):
                instance.last_error = error.code

    def _bind(self, instance_id: uuid.UUID, instance: Instance, on_lost: OnLost | None) -> None:
        """An instance goes with the connection that it was last heard on."""
        if on_lost is not None:
            on_lost[self] = partial(self._instances.forget, instance_id, instance)


def unpacked(codec: Codec, metrics: bytes, attributes: dict[str, str], max_bytes: int) -> bytes:
    """A push as it goes on: expanded, and with its client's attributes; ApiError."""
    try:
        expanded = decompress(codec, metrics, max_bytes)
    except ExpandsTooFar:
        # Not INVALID_RECORD, after which a client never pushes again.
        reason = f"the metrics expand to more than telemetry.max.decompressed.bytes={max_bytes}"
        raise ApiError(ErrorCode.TELEMETRY_TOO_LARGE, reason) from None
    return stamped(expanded, attributes, max_bytes)
