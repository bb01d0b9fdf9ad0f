"""Who is taken for dead and who counts again: the watch at work over real sockets."""

from __future__ import annotations

import asyncio
import socket

import pytest

from millrace.client.connection import Connection
from millrace.cluster.controller import HeartbeatAnswer
from millrace.cluster.evidence import CALLED_WITHIN_S
from millrace.cluster.liveness import PROBES_PER_SESSION, is_refusal
from millrace.cluster.planning import NewTopic
from millrace.errors import ApiError, ErrorCode
from support.metadata import ControlPlane


async def test_a_refusal_is_told_from_other_failures() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    for host in ("127.0.0.1", "localhost"):
        with pytest.raises(ApiError) as caught:
            await Connection.open(host, port, negotiate=False)
        assert is_refusal(caught.value)
    with pytest.raises(ApiError) as caught:
        await Connection.open("no-such-host.invalid", port, negotiate=False)
    assert not is_refusal(caught.value)
    mixed = ApiError(ErrorCode.NETWORK_EXCEPTION)
    mixed.__cause__ = OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 113] No route to host")
    assert not is_refusal(mixed)
    both = ApiError(ErrorCode.NETWORK_EXCEPTION)
    both.__cause__ = OSError("Multiple exceptions: [Errno 111] Connect call failed, [Errno 111] Connect call failed")
    assert is_refusal(both)


# --- at work ----------------------------------------------------------------------------------------------------------

QUICK = {"zookeeper.session.timeout.ms": "1000"}
FIRM = {"zookeeper.session.timeout.ms": "60000"}
"""Long enough that silence plays no part."""


async def test_a_killed_broker_is_fenced_at_once_although_its_session_lives() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await plane.kill(3)
        await plane.wait_for_images(lambda image: not image.is_live(3), 5)
        assert all(state.leader in {1, 2} for _, _, state in plane.leading.image.partitions())
        assert 3 in plane.database.members
        await plane.start(3)
        assert plane.leading.image.is_live(3)


async def test_a_killed_controller_is_replaced_at_once_and_its_broker_fenced_in_the_same_delta() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        firsts = []
        plane.controllers[3].on_image(
            lambda old, new, _: firsts.append(new) if old.controller_epoch != new.controller_epoch else None
        )
        await plane.kill(1)
        await plane.wait_for_images(lambda image: image.controller_id in {2, 3}, 5)
        assert not firsts[0].is_live(1) and not list(firsts[0].led_by(1))
        await plane.leading.create_topics([NewTopic("u", 1, 2)])


async def test_controller_and_another_broker_killed_together() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await asyncio.gather(plane.kill(1), plane.kill(2))
        await plane.wait_for_images(lambda image: [broker.broker_id for broker in image.live_brokers] == [3], 5)
        assert plane.leading.broker_id == 3
        assert all(state.leader == 3 for _, _, state in plane.leading.image.partitions())


async def test_a_controller_whose_door_is_closed_is_replaced_once_and_then_followed() -> None:
    """It lives, reaches the others and the store, and refuses everybody: it does not take its office back."""
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.servers[1].close()
        await plane.wait_for_images(lambda image: image.controller_epoch == 2 and not image.is_live(1), 5)
        office = plane.leading.broker_id
        plane.servers[office].asked.clear()
        async with asyncio.timeout(10):
            while len(plane.servers[office].asked) < 6:
                await asyncio.sleep(0.01)
        await plane.wait_for_images(lambda image: (image.controller_id, image.controller_epoch) == (office, 2))
        await plane.servers[1].listen()
        await plane.wait_for_images(lambda image: image.is_live(1), 5)
        assert plane.leading.image.controller_epoch == 2


async def test_of_two_brokers_that_refuse_each_other_one_goes_on_alone() -> None:
    async with ControlPlane(2, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 2)
        await asyncio.gather(plane.servers[1].close(), plane.servers[2].close())
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 1, 5)
        office = plane.leading.image.controller_id, plane.leading.image.controller_epoch
        # The one that was fenced is refused for longer than it would wait before a takeover, and does nothing.
        await asyncio.sleep(CALLED_WITHIN_S)
        await plane.wait_for_images(lambda image: (image.controller_id, image.controller_epoch) == office)
        assert [broker.broker_id for broker in plane.leading.image.live_brokers] == [plane.leading.broker_id]


async def test_a_witness_says_what_it_hears_when_it_is_asked() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        controller = plane.leading
        (witness, _) = [each for each in plane.controllers.values() if not each.is_controller]
        accused = (controller.broker_id, controller.broker_epoch)
        reached = await witness.heartbeat(*accused, want_fence=True)
        assert reached == HeartbeatAnswer(ErrorCode.NONE, is_fenced=False)
        unknown = await witness.heartbeat(controller.broker_id, controller.broker_epoch + 1, want_fence=True)
        assert unknown.error is ErrorCode.BROKER_NOT_AVAILABLE
        await plane.servers[controller.broker_id].close()
        refused = await witness.heartbeat(*accused, want_fence=True)
        assert refused == HeartbeatAnswer(ErrorCode.NONE, is_fenced=True)


async def test_a_killed_controller_that_comes_back_at_once_reigns_anew_or_follows() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.kill(1)
        await plane.start(1)
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3 and image.controller_epoch >= 2)
        assert plane.leading.image.controller_id == plane.leading.broker_id


async def test_a_silent_broker_is_fenced_after_a_session_and_counts_again_when_it_answers() -> None:
    async with ControlPlane(3, QUICK, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        plane.servers[3].answering.clear()
        await plane.wait_for_images(lambda image: not image.is_live(3))
        assert plane.leading.image.is_live(2)
        plane.servers[3].answering.set()
        await plane.wait_for_images(lambda image: image.is_live(3))


async def test_a_broker_that_lets_nobody_ask_is_not_taken_for_silent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its rules have lost the principal of the brokers; the process lives, and says so with every answer."""
    async with ControlPlane(3, QUICK, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        asked = plane.servers[3].asked

        async def refuse(*_: object, **__: object) -> HeartbeatAnswer:
            raise ApiError(ErrorCode.CLUSTER_AUTHORIZATION_FAILED)

        monkeypatch.setattr(plane.controllers[3], "heartbeat", refuse)
        asked.clear()
        fenced: list[bool] = []
        plane.leading.on_image(lambda _old, new, _changes: fenced.append(not new.is_live(3)))
        async with asyncio.timeout(20):
            while len(asked) < 3 * PROBES_PER_SESSION:
                await asyncio.sleep(0.01)
        assert plane.leading.image.is_live(3) and not any(fenced)
    (said,) = {record.getMessage() for record in caplog.records if "to broker 3" in record.getMessage()}
    assert said.endswith("it may not act as a broker there; its principal belongs in super.users")


async def test_a_controller_that_reaches_nobody_leaves_the_office() -> None:
    async with ControlPlane(3, QUICK, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        for broker_id in (2, 3):
            plane.servers[broker_id].answering.clear()
        await plane.wait_for_images(lambda image: image.controller_epoch >= 2)
        assert plane.leading.broker_id in {2, 3}
        for broker_id in (2, 3):
            plane.servers[broker_id].answering.set()
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)


async def test_a_broker_that_leaves_is_not_called_back() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        leaving = plane.controllers[3]
        await leaving.leave()
        plane.leading.suspect(3)
        plane.servers[3].asked.clear()
        async with asyncio.timeout(10):
            while len(plane.servers[3].asked) < 2:
                plane.leading.suspect(3)
                await asyncio.sleep(0.01)
        assert not plane.leading.image.is_live(3)


async def test_a_suspect_is_asked_at_once() -> None:
    async with ControlPlane(2, FIRM, liveness=True) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 2)
        server = plane.servers[2]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(10):
            while not server.asked:
                await asyncio.sleep(0.01)
            begin = loop.time()
            for _ in range(20):
                before = len(server.asked)
                plane.leading.suspect(2)
                while len(server.asked) == before:
                    await asyncio.sleep(0.001)
        assert loop.time() - begin < 10
        plane.leading.suspect(99)  # unknown: nothing to ask


async def test_one_broker_alone_watches_nobody() -> None:
    async with ControlPlane(1) as plane:
        assert plane.leading._liveness is None
        plane.leading.suspect(2)
