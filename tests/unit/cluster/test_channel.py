"""The way to the controller: found in the image, opened again, tried again, but a request is sent once."""

from __future__ import annotations

import asyncio

import pytest

from millrace.clock import ManualClock, SystemClock
from millrace.cluster.channel import (
    ControllerChannel,
    Unsent,
    persist,
    within,
)
from millrace.cluster.dialer import Dialer, client_id, inter_broker_endpoint
from millrace.cluster.image import ClusterImage
from millrace.cluster.view import MetadataView
from millrace.config import BrokerConfig
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import BrokerRegistered, ControllerChanged, Endpoint
from millrace.metadata.embedded import EmbeddedStore
from millrace.wire.messages.brokers import BrokerHeartbeatRequest
from support.metadata import ControlPlane, cluster_of

PROBE = BrokerHeartbeatRequest(broker_id=1, broker_epoch=1)


def test_the_listener_of_the_brokers() -> None:
    listeners = {"listeners": "CLIENTS://:9092,BROKERS://:9093",
                 "listener.security.protocol.map": "CLIENTS:PLAINTEXT,BROKERS:PLAINTEXT"}  # fmt: skip
    assert BrokerConfig(listeners).inter_broker_listener == "CLIENTS"
    assert BrokerConfig({**listeners, "inter.broker.listener.name": "BROKERS"}).inter_broker_listener == "BROKERS"
    first, second = Endpoint("CLIENTS", "a", 1), Endpoint("BROKERS", "a", 2)
    image = cluster_of(1).apply((BrokerRegistered(2, 200, (second, first)),))
    assert inter_broker_endpoint(image, 2) == second
    assert inter_broker_endpoint(image, 3) is None
    assert client_id(2) == "broker-2"


async def test_without_a_controller_nothing_is_sent() -> None:
    view = MetadataView(EmbeddedStore(), SystemClock())
    channel = ControllerChannel(view, Dialer(BrokerConfig(), SystemClock()), SystemClock())
    for image in (ClusterImage(), cluster_of(1)):  # nobody is controller, or this broker itself
        view.image = image
        with pytest.raises(Unsent) as caught:
            await channel.request(PROBE, 1, 1.0)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
    await channel.close()


async def test_the_connection_is_kept_and_opened_again_when_it_broke() -> None:
    async with ControlPlane(2) as plane:
        asking = plane.controllers[2]
        for _ in range(3):
            await asking.next_producer_id_block()
        connection = asking._channel._connection
        assert connection is not None
        await plane.servers[1].close()
        blocks = asyncio.create_task(asking.next_producer_id_block())
        await asyncio.sleep(0.1)
        await plane.servers[1].listen()
        assert len(await blocks) == 1000
        assert asking._channel._connection is not connection and connection.is_closed


async def test_a_new_controller_ends_the_wait_for_the_old_one() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        plane.servers[1].answering.clear()
        asked = asyncio.create_task(plane.controllers[3].next_producer_id_block())
        async with asyncio.timeout(10):
            while not plane.servers[1].asked:
                await asyncio.sleep(0.01)
            plane.stores[1].suspend()
            plane.stores[1].lapse()
            assert len(await asked) == 1000
        plane.stores[1].expire()


async def test_a_forwarded_request_is_sent_once() -> None:
    async with ControlPlane(2) as plane:
        controller, server = plane.controllers[2], plane.servers[1]
        probe = BrokerHeartbeatRequest(broker_id=1, broker_epoch=plane.leading.broker_epoch)
        answer = await controller.forward(probe, 1, 5000)
        assert answer.error_code == ErrorCode.NONE
        server.answering.clear()
        sent = len(server.asked)
        with pytest.raises(ApiError) as caught:
            await controller.forward(probe, 1, 200)
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT
        assert len(server.asked) == sent + 1
        await server.close()
        connection = controller._forwarding._connection
        async with asyncio.timeout(10):
            while connection is not None and not connection.is_closed:
                await asyncio.sleep(0)
        # Nobody listens: the way there is tried until the time is up.
        with pytest.raises(Unsent):
            await controller.forward(probe, 1, 200)
        with pytest.raises(ApiError) as caught:
            await plane.leading.forward(probe, 1, 200)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER


async def test_persistence_ends_with_the_time_or_with_a_final_error() -> None:
    clock = ManualClock()
    left: list[float] = []

    async def refuse(left_s: float) -> None:
        left.append(left_s)
        clock.advance(0.3)
        raise ApiError(ErrorCode.NOT_CONTROLLER)

    async def advance() -> None:
        while True:
            await asyncio.sleep(0)
            clock.advance(0.05)

    moving = asyncio.create_task(advance())
    with pytest.raises(ApiError):
        await persist(refuse, clock=clock, timeout_s=1.0)
    assert 2 <= len(left) <= 4 and left == sorted(left, reverse=True)

    async def fail(_left_s: float) -> None:
        left.clear()
        raise ApiError(ErrorCode.INVALID_REQUEST)

    with pytest.raises(ApiError) as caught:
        await persist(fail, clock=clock, timeout_s=1.0)
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    moving.cancel()


async def test_work_is_cancelled_when_its_time_is_up() -> None:
    clock = ManualClock()
    work = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(within(clock, work, 2.0))
    await asyncio.sleep(0)
    clock.advance(2.0)
    with pytest.raises(ApiError) as caught:
        await waiting
    assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT and work.cancelled()
    waiting = asyncio.create_task(within(clock, asyncio.sleep(60), 2.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_the_controller_is_named_by_the_newest_image() -> None:
    async with ControlPlane(2) as plane:
        view = MetadataView(plane.stores[2], SystemClock())
        view.image = plane.controllers[2].image.apply((ControllerChanged(9, 5),))
        channel = ControllerChannel(view, Dialer(BrokerConfig({"broker.id": "2"}), SystemClock()), SystemClock())
        with pytest.raises(Unsent):
            await channel.request(PROBE, 1, 1.0)
        view.image = plane.controllers[2].image
        assert (await channel.request(PROBE, 1, 5.0)).error_code in set(ErrorCode)
        await channel.close()
