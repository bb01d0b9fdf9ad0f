"""Several brokers on one metadata log through random lives: ends, kills, expired sessions, rival elections, changes.

After each history everybody comes back, and all must agree: one controller, one image, every broker live in it, every
partition led by a member of its ISR, and nothing that was answered is missing.
"""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.cluster.controller import Controller
from millrace.cluster.planning import NewTopic
from millrace.errors import ApiError
from support.metadata import ControlPlane

BROKERS = (1, 2, 3)
steps = st.lists(
    st.tuples(
        st.sampled_from(["stop", "kill", "start", "expire", "lapse", "rival", "suspend", "create", "ids", "turns"]),
        st.sampled_from(BROKERS),
    ),
    min_size=3,
    max_size=25,
)


class Lives:
    """A control plane, and what it answered."""

    def __init__(self, plane: ControlPlane) -> None:
        self.plane = plane
        self.created: set[str] = set()
        self.ids: list[range] = []
        self.asked: list[asyncio.Task[None]] = []
        self.killed: set[int] = set()

    async def step(self, what: str, broker_id: int) -> None:
        plane = self.plane
        there = broker_id in plane.controllers
        if what == "start" and not there:
            # Alone it could wait for a controller whose session nobody ends.
            for dead in self.killed - {broker_id}:
                plane.stores[dead].lapse()
            self.killed.clear()
            await plane.start(broker_id)
        elif what == "turns":
            for _ in range(broker_id * 20):
                await asyncio.sleep(0)
        elif there:
            await self.step_of(plane.controllers[broker_id], what, broker_id)

    async def step_of(self, controller: Controller, what: str, broker_id: int) -> None:
        plane, store = self.plane, self.plane.stores[broker_id]
        match what:
            case "stop":
                store.reconnect()
                await plane.stop(broker_id)
            case "kill":
                self.killed.add(broker_id)
                await plane.kill(broker_id)
            case "expire":
                store.expire()
            case "lapse":
                store.suspend()
                store.lapse()
                store.expire()
            case "rival":
                controller._member.take_over(plane.database.controller_epoch, {})
            case "suspend":
                store.suspend()
                await asyncio.sleep(0)
                store.reconnect()
            case "create":
                self.asked.append(asyncio.create_task(self.create(controller, f"t{len(self.asked)}")))
            case "ids":
                self.asked.append(asyncio.create_task(self.allocate(controller)))

    async def create(self, controller: Controller, name: str) -> None:
        try:
            (outcome,) = await controller.create_topics([NewTopic(name, 2)])
            if outcome.error is None:
                self.created.add(name)
        except ApiError:
            pass  # it may have happened, and it may not

    async def allocate(self, controller: Controller) -> None:
        try:
            self.ids.append(await controller.allocate_producer_ids(controller.broker_id, controller.broker_epoch))
        except ApiError:
            pass

    async def end(self) -> None:
        plane = self.plane
        for broker_id in self.killed:
            plane.stores[broker_id].lapse()
        for broker_id in BROKERS:
            if broker_id not in plane.controllers:
                await plane.start(broker_id)
        await asyncio.gather(*self.asked)
        async with asyncio.timeout(20):
            while not self.agreed():
                await asyncio.sleep(0.005)

    def agreed(self) -> bool:
        controllers = list(self.plane.controllers.values())
        image = controllers[0].image
        return (
            all(controller.image == image for controller in controllers)
            and [controller.broker_id for controller in controllers if controller.is_controller]
            == [image.controller_id]
            and image.index == self.plane.database.last_index
            and all(image.is_live(c.broker_id) for c in controllers)
            and all(image.brokers[c.broker_id].broker_epoch == c.broker_epoch for c in controllers)
        )

    def check(self) -> None:
        image = self.plane.leading.image
        assert self.created <= set(image.topics)
        numbers = [number for block in self.ids for number in block]
        assert len(numbers) == len(set(numbers)) and all(number < image.next_producer_id for number in numbers)
        for _, _, state in image.partitions():
            assert state.leader in state.isr


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(steps)
def test_all_agree_in_the_end(history: list[tuple[str, int]]) -> None:
    async def run() -> None:
        async with ControlPlane(3, {"default.replication.factor": "2", "offsets.topic.num.partitions": "1"}) as plane:
            lives = Lives(plane)
            for what, broker_id in history:
                await lives.step(what, broker_id)
            await lives.end()
            lives.check()

    asyncio.run(run())
