"""The controller: one writer, one image, in order, across restarts and failures."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.clock import ManualClock
from millrace.cluster.controller import Controller, IsrProposal
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import AlterOp, ConfigAlteration, MorePartitions, NewTopic, Plan, TopicRef
from millrace.config import BrokerConfig, topic_config
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.metadata.deltas import (
    BrokerRegistered,
    ChangeSet,
    ConfigChanged,
    ControllerChanged,
    ResourceType,
    TopicCreated,
    encode,
)
from millrace.metadata.embedded import Database, EmbeddedStore
from support.metadata import ENDPOINT, ControlPlane, running_controller


async def test_a_new_cluster_has_an_id_a_broker_and_a_controller() -> None:
    async with running_controller(settings={"broker.id": "5", "broker.rack": "left"}) as controller:
        image = controller.image
        assert controller.is_controller and image.controller_id == 5
        assert len(image.cluster_id) == 22
        broker = image.brokers[5]
        assert (broker.endpoints, broker.rack, broker.fenced) == ((ENDPOINT,), "left", False)
        assert broker.endpoint("PLAINTEXT") == ENDPOINT and broker.endpoint("OTHER") is None
        assert "controller, epoch 1" in repr(controller)


async def test_changes_are_in_the_image_when_they_are_answered() -> None:
    async with running_controller() as controller:
        (created,) = await controller.create_topics([NewTopic("a", 2, configs=(("flush.mode", "os"),))])
        topic = controller.image.topics["a"]
        assert created.error is None and topic.topic_id == created.topic_id
        await controller.create_partitions([MorePartitions("a", 3)])
        assert len(controller.image.topics["a"].partitions) == 3
        await controller.alter_configs([ConfigAlteration(2, "a", (("flush.mode", AlterOp.SET, "group"),))])
        assert controller.image.topic_overrides("a") == {"flush.mode": "group"}
        (deleted,) = await controller.delete_topics([TopicRef(topic_id=topic.topic_id)])
        assert deleted.name == "a" and not controller.image.topics and not controller.image.configs
        (again,) = await controller.create_topics([NewTopic("a")])
        assert again.topic_id != topic.topic_id


async def test_validation_changes_nothing() -> None:
    async with running_controller() as controller:
        before = controller.image
        assert (await controller.create_topics([NewTopic("a")], validate_only=True))[0].error is None
        assert (await controller.create_topics([NewTopic("")], validate_only=True))[0].error is not None
        assert (await controller.create_partitions([MorePartitions("a", 3)], validate_only=True))[0].error is not None
        change = ConfigAlteration(ResourceType.BROKER, "", (("log.retention.ms", AlterOp.SET, "5"),))
        assert await controller.alter_configs([change], validate_only=True) == [None]
        assert controller.image is before


async def test_listeners_hear_every_delta_in_order_and_in_time() -> None:
    heard: list[tuple[str, ClusterImage, ClusterImage, ChangeSet]] = []
    async with running_controller() as controller:
        end = controller.on_image(lambda old, new, changes: heard.append(("first", old, new, changes)))
        controller.on_image(lambda old, new, changes: heard.append(("second", old, new, changes)))
        for name in ("a", "b"):
            await controller.create_topics([NewTopic(name)])
            assert heard[-1][2] is controller.image
        assert [who for who, *_ in heard] == ["first", "second"] * 2
        assert heard[0][2] is heard[2][1]
        assert [change.name for change in heard[0][3] if isinstance(change, TopicCreated)] == ["a"]
        end()
        await controller.create_topics([NewTopic("c")])
        assert [who for who, *_ in heard[4:]] == ["second"]


async def test_a_failing_listener_does_not_stop_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("listener bug")

    async with running_controller() as controller:
        controller.on_image(fail)
        heard: list[int] = []
        controller.on_image(lambda _old, new, _changes: heard.append(new.index))
        await controller.create_topics([NewTopic("a")])
        assert heard == [controller.image.index] and "a" in controller.image.topics
    assert "listener bug" in caplog.text


async def test_requests_that_queue_up_share_a_delta() -> None:
    async with running_controller() as controller:
        before = controller.image.index
        outcomes = await asyncio.gather(*(controller.create_topics([NewTopic(f"t{n % 150}")]) for n in range(300)))
        assert sum(outcome.error is None for (outcome,) in outcomes) == 150
        assert {outcome.error.code for (outcome,) in outcomes if outcome.error} == {ErrorCode.TOPIC_ALREADY_EXISTS}
        assert len(controller.image.topics) == 150
        assert controller.image.index - before < 12


async def test_topics_are_ensured_once() -> None:
    async with running_controller() as controller:
        results = await asyncio.gather(*(controller.ensure_topics(["a", "b"]) for _ in range(20)))
        ids = {tuple(outcome.topic_id for outcome in outcomes) for outcomes in results}
        assert len(ids) == 1
        index = controller.image.index
        await controller.ensure_topics(["a"])
        offsets = await controller.ensure_internal_topic("__consumer_offsets")
        assert len(offsets.partitions) == 50 and offsets.replication_factor == 1
        assert await controller.ensure_internal_topic("__consumer_offsets") is offsets
        assert controller.image.index == index + 1


async def test_an_internal_topic_that_cannot_be_made_is_an_error() -> None:
    async with running_controller(settings={"offsets.topic.num.partitions": "10001"}) as controller:
        with pytest.raises(ApiError) as caught:
            await controller.ensure_internal_topic("__consumer_offsets")
        assert caught.value.code is ErrorCode.POLICY_VIOLATION


async def test_producer_id_blocks_do_not_overlap_even_after_a_restart(tmp_path: Path) -> None:
    blocks: list[range] = []
    for _ in range(2):
        async with running_controller(EmbeddedStore.at(tmp_path / "metadata.db")) as controller:
            blocks += await asyncio.gather(*(controller.next_producer_id_block() for _ in range(5)))
    ids = [number for block in blocks for number in block]
    assert len(ids) == len(set(ids)) == 10_000


async def test_dynamic_broker_settings_reach_the_config(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with running_controller(EmbeddedStore.at(path)) as controller:
        config = controller._config
        await controller.alter_configs([
            ConfigAlteration(ResourceType.BROKER, "", (("log.retention.ms", AlterOp.SET, "5"),)),
            ConfigAlteration(ResourceType.BROKER, "1", (("log.segment.bytes", AlterOp.SET, "2000000"),)),
        ])  # fmt: skip
        assert topic_config({}, config).retention_ms == 5
        assert topic_config({}, config).segment_bytes == 2_000_000
    fresh = Controller(EmbeddedStore.at(path), BrokerConfig())
    await fresh.load()
    assert topic_config({}, fresh._config).retention_ms == 5
    await fresh.stop()


# --- restarts ---------------------------------------------------------------------------------------------------------


def content(image: ClusterImage) -> tuple[object, ...]:
    """What must be the same after a restart: all but the epochs of the new run."""
    topics = {
        topic.name: (topic.topic_id, [(state.replicas, state.isr, state.leader) for state in topic.partitions])
        for topic in image.topics.values()
    }
    return (image.cluster_id, topics, dict(image.configs), image.next_producer_id, set(image.brokers))


operations = st.lists(
    st.one_of(
        st.tuples(st.just("create"), st.integers(0, 5)),
        st.tuples(st.just("delete"), st.integers(0, 5)),
        st.tuples(st.just("grow"), st.integers(0, 5)),
        st.tuples(st.just("alter"), st.integers(0, 5)),
        st.tuples(st.just("ids"), st.integers(0, 5)),
        st.tuples(st.just("restart"), st.integers(0, 5)),
    ),
    max_size=25,
)


@settings(max_examples=40, deadline=None)
@given(operations, st.integers(1, 6))
def test_a_restart_gives_the_same_image(steps: list[tuple[str, int]], deltas_per_snapshot: int) -> None:
    async def run() -> None:
        database = Database()
        keeper = EmbeddedStore(database)  # keeps the memory alive while the controller is away
        await keeper.open()
        controller = await started(database)
        for step, number in steps:
            name = f"topic-{number}"
            if step == "create":
                await controller.create_topics([NewTopic(name, number + 1, configs=(("retention.ms", str(number)),))])
            elif step == "delete":
                await controller.delete_topics([TopicRef(name)])
            elif step == "grow":
                await controller.create_partitions([MorePartitions(name, number + 3)])
            elif step == "alter":
                alteration = ConfigAlteration(ResourceType.TOPIC, name, (("flush.ms", AlterOp.SET, str(number)),))
                await controller.alter_configs([alteration])
            elif step == "ids":
                await controller.next_producer_id_block()
            else:
                before = controller.image
                await controller.stop()
                fresh = Controller(EmbeddedStore(database), BrokerConfig(), deltas_per_snapshot=deltas_per_snapshot)
                assert await fresh.load() == before
                await fresh.start([ENDPOINT])
                assert content(fresh.image) == content(before)
                assert fresh.image.controller_epoch > before.controller_epoch
                assert fresh.image.brokers[1].broker_epoch > before.brokers[1].broker_epoch
                controller = fresh
        await controller.stop()
        await keeper.close()

        assert not [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]

    async def started(database: Database) -> Controller:
        controller = Controller(EmbeddedStore(database), BrokerConfig(), deltas_per_snapshot=deltas_per_snapshot)
        await controller.load()
        await controller.start([ENDPOINT])
        return controller

    asyncio.run(run())


async def test_a_restart_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with running_controller(EmbeddedStore.at(path), deltas_per_snapshot=3) as controller:
        for number in range(8):
            await controller.create_topics([NewTopic(f"t{number}", configs=(("retention.ms", "7"),))])
        before = controller.image
    async with running_controller(EmbeddedStore.at(path)) as controller:
        assert content(controller.image) == content(before)
        assert controller.image.index == before.index + 1


async def test_brokers_of_an_earlier_run_that_are_gone_are_fenced(tmp_path: Path) -> None:
    path = tmp_path / "metadata.db"
    async with running_controller(EmbeddedStore.at(path), {"broker.id": "1"}):
        pass
    async with running_controller(EmbeddedStore.at(path), {"broker.id": "2"}) as controller:
        assert [broker.broker_id for broker in controller.image.live_brokers] == [2]
        assert controller.image.brokers[1].fenced
        await controller.create_topics([NewTopic("a", 4)])
        assert {state.replicas for state in controller.image.topics["a"].partitions} == {(2,)}


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_fenced_controller_stops_writing() -> None:
    database = Database()
    async with running_controller(EmbeddedStore(database)) as controller:
        other = EmbeddedStore(database)
        await other.open()
        epoch = await other.elect(2, replacing=controller.image.controller_epoch)
        assert epoch is not None
        with pytest.raises(ApiError) as caught:
            await controller.create_topics([NewTopic("a")])
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        assert not controller.is_controller
        with pytest.raises(ApiError):
            await controller.create_topics([NewTopic("a")], validate_only=True)
        # It goes on following the one that took over.
        seen = asyncio.Event()
        controller.on_image(lambda *_: seen.set())
        changes = (ControllerChanged(2, epoch), BrokerRegistered(2, 9, (ENDPOINT,)))
        await other.append(encode(changes), epoch)
        async with asyncio.timeout(10):
            await seen.wait()
        assert controller.image.controller_id == 2
        await other.close()


class FailingStore(EmbeddedStore):
    failing = False

    async def append(self, delta: bytes, controller_epoch: int) -> int:
        if self.failing:
            raise StorageError("disk full")
        return await super().append(delta, controller_epoch)

    async def write_snapshot(self, *_: object) -> None:
        raise StorageError("disk full")


async def test_a_write_that_fails_is_answered_and_the_next_one_may_work(caplog: pytest.LogCaptureFixture) -> None:
    store = FailingStore()
    async with running_controller(store, deltas_per_snapshot=1) as controller:
        store.failing = True
        with pytest.raises(ApiError) as caught:
            await controller.create_topics([NewTopic("a")])
        assert caught.value.code is ErrorCode.KAFKA_STORAGE_ERROR
        assert "a" not in controller.image.topics
        store.failing = False
        assert (await controller.create_topics([NewTopic("a")]))[0].error is None
    assert "disk full" in caplog.text


async def test_a_plan_with_a_bug_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    def broken(_: ClusterImage) -> Plan[Any]:
        raise ZeroDivisionError

    async with running_controller() as controller:
        good = asyncio.create_task(controller.create_topics([NewTopic("a")]))
        with pytest.raises(ApiError) as caught:
            await controller.change(broken)
        assert caught.value.code is ErrorCode.UNKNOWN_SERVER_ERROR
        assert (await good)[0].error is None and "a" in controller.image.topics


async def test_a_log_that_cannot_be_read_ends_the_writing(caplog: pytest.LogCaptureFixture) -> None:
    database = Database()
    async with running_controller(EmbeddedStore(database)) as controller:
        other = EmbeddedStore(database)
        await other.open()
        await other.append(b"not a delta", controller.image.controller_epoch)
        await other.append(encode((ConfigChanged(ResourceType.GROUP, "g", ()),)), controller.image.controller_epoch)
        with pytest.raises(ApiError):
            await controller.create_topics([NewTopic("a")])
        await other.close()
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)


async def test_waiting_requests_are_answered_at_the_end() -> None:
    class Stuck(EmbeddedStore):
        stuck = False

        async def append(self, delta: bytes, controller_epoch: int) -> int:
            if self.stuck:
                await asyncio.Event().wait()
            return await super().append(delta, controller_epoch)

    store = Stuck()
    async with running_controller(store) as controller:
        store.stuck = True
        waiting = [asyncio.create_task(controller.create_topics([NewTopic(f"t{number}")])) for number in range(3)]
        await asyncio.sleep(0.01)
        waiting.append(asyncio.create_task(controller.create_topics([NewTopic("late")])))
        await asyncio.sleep(0)
    for task in waiting:
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.code is ErrorCode.NOT_CONTROLLER


async def test_a_cancelled_request_does_not_disturb_the_others() -> None:
    async with running_controller() as controller:
        doomed = asyncio.create_task(controller.create_topics([NewTopic("doomed")]))
        await asyncio.sleep(0)
        doomed.cancel()
        (outcome,) = await controller.create_topics([NewTopic("a")])
        assert outcome.error is None


async def test_leadership_goes_back_to_preferred_leaders_from_time_to_time() -> None:
    clock = ManualClock()
    settings = {"leader.imbalance.check.interval.seconds": "30"}
    async with ControlPlane(2, settings, clock=clock) as plane:
        leading = plane.leading
        await leading.create_topics([NewTopic("t", assignments=((0, (2, 1)),))])
        state = leading.image.topics["t"].partitions[0]
        away = IsrProposal(leading.image.topics["t"].topic_id, 0, state.leader_epoch, 0, ((1, -1),))
        await leading.alter_partition(2, plane.controllers[2].broker_epoch, [away])
        state = leading.image.topics["t"].partitions[0]
        back = IsrProposal(leading.image.topics["t"].topic_id, 0, state.leader_epoch, 1, ((1, -1), (2, -1)))
        await leading.alter_partition(1, leading.broker_epoch, [back])
        assert leading.image.topics["t"].partitions[0].leader == 1
        clock.advance(30)
        async with asyncio.timeout(10):
            while leading.image.topics["t"].partitions[0].leader != 2:
                await asyncio.sleep(0)


async def test_a_topic_that_comes_to_allow_unclean_election_gets_a_leader() -> None:
    async with ControlPlane(2) as plane:
        leading = plane.leading
        await leading.create_topics([NewTopic("t", assignments=((0, (2, 1)),))])
        alone = IsrProposal(leading.image.topics["t"].topic_id, 0, 0, 0, ((2, -1),))
        await leading.alter_partition(2, plane.controllers[2].broker_epoch, [alone])
        await plane.stop(2)
        await plane.wait_for_images(lambda image: image.topics["t"].partitions[0].leader == -1)
        allow = ConfigAlteration(ResourceType.TOPIC, "t", (("unclean.leader.election.enable", AlterOp.SET, "true"),))
        assert await leading.alter_configs([allow]) == [None]
        await plane.wait_for_images(lambda image: image.topics["t"].partitions[0].leader == 1)
        assert leading.image.topics["t"].partitions[0].isr == (1,)
