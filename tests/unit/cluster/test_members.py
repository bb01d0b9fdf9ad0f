"""Several brokers on one metadata log: who is controller, who is live, and what each of them may ask."""

from __future__ import annotations

import asyncio

import pytest

from millrace.cluster.controller import ElectionKind, IsrProposal, Reassignment
from millrace.cluster.image import ClusterImage
from millrace.cluster.membership import (
    Displaced,
    MembershipFacts,
    Reconcile,
    Register,
    Stand,
    StepDown,
    Wait,
    next_step,
)
from millrace.cluster.planning import NewTopic, Plan
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ChangeSet, ControllerChanged, encode
from millrace.metadata.embedded import EmbeddedStore
from millrace.metadata.store import BrokerRegistration, Member, Membership, SessionState
from support.metadata import ControlPlane

# --- the decision -----------------------------------------------------------------------------------------------------

ME = Member(BrokerRegistration(1, ()), 11)
OTHER = Member(BrokerRegistration(2, ()), 12)


def facts(
    membership: Membership | None = None,
    *,
    session: SessionState = SessionState.CONNECTED,
    broker_epoch: int = 11,
    reign: int | None = None,
    image_controller: tuple[int, int] = (2, 7),
    may_stand: bool = True,
    leaving: bool = False,
    refused: int | None = None,
) -> MembershipFacts:
    return MembershipFacts(1, session, broker_epoch, reign, membership, image_controller, may_stand, leaving, refused)


NOBODY = Membership((ME, OTHER), None, 7)
TAKEN = Membership((ME, OTHER), 2, 7)
MINE = Membership((ME, OTHER), 1, 7)


@pytest.mark.parametrize(
    ("given", "step"),
    [
        (facts(NOBODY, session=SessionState.SUSPENDED), Wait()),
        (facts(NOBODY, session=SessionState.EXPIRED, broker_epoch=-1), Wait()),
        (facts(NOBODY, broker_epoch=-1), Register()),
        (facts(NOBODY, broker_epoch=-1, leaving=True), Wait()),
        (facts(None), Wait()),
        (facts(NOBODY), Stand(None)),
        (facts(NOBODY, may_stand=False), Wait()),
        (facts(TAKEN), Wait()),
        (facts(TAKEN, refused=7), Stand(7)),
        (facts(TAKEN, refused=6), Wait()),
        (facts(TAKEN, refused=7, may_stand=False), Wait()),
        (facts(TAKEN, image_controller=(-1, 7)), Stand(7)),
        (facts(TAKEN, image_controller=(-1, 6)), Wait()),
        (facts(MINE), Stand(7)),  # an earlier incarnation of this broker held it
        (facts(MINE, reign=7), Reconcile()),
        (facts(TAKEN, reign=6), StepDown("broker 2 has epoch 7")),
        (facts(Membership((Member(ME.registration, 99),), None, 7)), Displaced()),
    ],
)
def test_what_a_broker_does_next(given: MembershipFacts, step: object) -> None:
    assert next_step(given) == step


# --- several controllers ----------------------------------------------------------------------------------------------


def same_images(plane: ControlPlane) -> bool:
    images = [controller.image for controller in plane.controllers.values()]
    return all(image == images[0] for image in images)


async def test_one_is_controller_and_all_have_the_same_image() -> None:
    async with ControlPlane(3) as plane:
        assert plane.leading.broker_id == 1
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        assert same_images(plane)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await plane.wait_for_images(lambda image: "t" in image.topics)
        assert same_images(plane)
        with pytest.raises(ApiError) as caught:
            await plane.controllers[2].create_topics([NewTopic("u")])
        assert caught.value.code is ErrorCode.NOT_CONTROLLER


async def test_when_the_controller_leaves_another_one_takes_its_place_and_its_partitions() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await plane.stop(1)
        await plane.wait_for_images(lambda image: not image.is_live(1) and image.controller_id in {2, 3})
        assert plane.leading.broker_id == plane.leading.image.controller_id
        assert same_images(plane)
        for state in plane.leading.image.topics["t"].partitions:
            assert set(state.isr) == {2, 3} and state.leader in {2, 3}
        await plane.leading.create_topics([NewTopic("u")])


async def test_a_broker_comes_back_as_a_new_incarnation() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        epoch = plane.controllers[3].broker_epoch
        await plane.stop(3)
        await plane.wait_for_images(lambda image: not image.is_live(3))
        back = await plane.start(3)
        assert back.broker_epoch > epoch and back.image.brokers[3].broker_epoch == back.broker_epoch
        assert not list(back.image.in_sync_on(3))


async def test_a_registration_that_is_replaced_in_one_step_costs_the_place_in_the_isr() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await plane.kill(3)  # its session still counts
        assert plane.leading.image.is_live(3)
        back = await plane.start(3)
        assert not list(back.image.in_sync_on(3)) and not list(back.image.led_by(3))
        assert all(state.leader in {1, 2} for _, _, state in back.image.partitions())


async def test_a_fenced_writer_steps_down_and_takes_part_again() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        epoch = await plane.stores[2].elect(2, replacing=1)
        assert epoch == 2
        with pytest.raises(ApiError) as caught:
            await plane.controllers[1].create_topics([NewTopic("a")])
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        # Broker 2 learns from the store that it is controller, although it did not stand, and reigns anew.
        await plane.wait_for_images(lambda image: image.controller_id == 2 and image.controller_epoch == 3)
        assert plane.leading.broker_id == 2
        await plane.stop(2)
        await plane.wait_for_images(lambda image: image.controller_epoch == 4)
        assert plane.leading.broker_id in {1, 3}


async def test_two_who_hold_the_controller_for_dead_do_not_both_reign() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        old = plane.leading
        await plane.kill(1)
        for broker_id in (2, 3):
            plane.controllers[broker_id]._member.take_over(1, {1: old.broker_epoch})
        await plane.wait_for_images(lambda image: image.controller_epoch == 2)
        assert plane.leading.broker_id in {2, 3}
        # The first delta of the reign has it all: who reigns, and that the old controller's broker is gone.
        assert not plane.leading.image.is_live(1)
        assert same_images(plane)


async def test_a_session_that_expires_costs_the_office_and_gives_a_new_epoch() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        first = plane.controllers[1]
        epoch = first.broker_epoch
        plane.stores[1].expire()
        await plane.wait_for_images(lambda image: image.brokers[1].broker_epoch > epoch and image.is_live(1))
        assert first.broker_epoch == first.image.brokers[1].broker_epoch
        assert plane.leading.image.controller_epoch == 2
        assert not list(first.image.in_sync_on(1))
        assert same_images(plane)


async def test_a_suspended_controller_answers_nothing_until_it_is_connected() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        leading = plane.leading
        await leading.create_topics([NewTopic("a")])
        plane.stores[1].suspend()
        await asyncio.sleep(0)
        change = asyncio.create_task(leading.create_topics([NewTopic("b")]))
        read = asyncio.create_task(leading.change(names))
        done, _ = await asyncio.wait([change, read], timeout=0.1)
        assert not done
        plane.stores[1].reconnect()
        assert (await change)[0].error is None
        assert await read == {"a", "b"}


def names(image: ClusterImage) -> Plan[set[str]]:
    return Plan(set(image.topics))


async def test_a_controller_whose_session_lapsed_is_refused_by_the_store() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        old = plane.controllers[1]
        plane.stores[1].suspend()
        change = asyncio.create_task(old.create_topics([NewTopic("late")]))
        plane.stores[1].lapse()
        others = [plane.controllers[2], plane.controllers[3]]
        for controller in others:
            await controller.wait_for_image(lambda image: image.controller_epoch == 2, 10)
        plane.stores[1].expire()
        with pytest.raises(ApiError) as caught:
            await change
        assert caught.value.code is ErrorCode.NOT_CONTROLLER
        await plane.wait_for_images(lambda image: image.is_live(1) and image.controller_id != 1)
        assert "late" not in old.image.topics


async def test_a_new_controller_has_applied_everything_before_it_writes() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        behind = plane.controllers[2]
        plane.stores[2].following.clear()
        await plane.controllers[1].create_topics([NewTopic("t", 3, 3)])
        await plane.kill(1)
        behind._member.take_over(1, {1: behind.image.brokers[1].broker_epoch})
        async with asyncio.timeout(10):
            while plane.database.controller_id != 2:
                await asyncio.sleep(0)
        end = plane.database.last_index
        for _ in range(100):
            await asyncio.sleep(0)
        assert plane.database.last_index == end, "it wrote against an old image"
        assert not behind.is_controller and "t" not in behind.image.topics
        plane.stores[2].following.set()
        await plane.wait_for_images(lambda image: image.controller_id == 2)
        for _, _, state in behind.image.partitions():
            assert set(state.isr) == {2, 3} and state.leader in {2, 3}


async def test_a_new_controller_judges_by_the_registrations_after_its_election() -> None:
    async with ControlPlane(2) as plane:
        plane.stores[2].generation += 1  # broker 2 does not hear that a third one comes
        await plane.start(3)
        await plane.wait_for_images(lambda image: image.is_live(3))
        fenced: set[int] = set()
        plane.controllers[3].on_image(
            lambda _old, new, _changes: fenced.update(b.broker_id for b in new.brokers.values() if b.fenced)
        )
        first = plane.controllers[1]
        await plane.kill(1)
        plane.controllers[2]._member.take_over(1, {1: first.broker_epoch})
        await plane.wait_for_images(lambda image: image.controller_id == 2)
        assert fenced == {1}


async def test_a_controller_that_resigns_leaves_the_office_to_others() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        old = plane.leading
        await old._member.resign({1: old.broker_epoch})
        await plane.wait_for_images(lambda image: image.controller_epoch == 2)
        assert plane.leading.broker_id in {2, 3}
        assert not plane.leading.image.is_live(1)


async def test_all_at_once_and_all_back() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        for broker_id in (3, 2, 1):
            await plane.kill(broker_id)
        starting = [asyncio.create_task(plane.start(broker_id)) for broker_id in (2, 3, 1)]
        await asyncio.gather(*starting)
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.wait_for_images(lambda image: all(state.leader != -1 for _, _, state in image.partitions()))
        assert same_images(plane)


async def test_another_process_with_the_same_id_displaces_the_first() -> None:
    async with ControlPlane(2) as plane:
        told = asyncio.Event()
        first = plane.controllers[2]
        first.on_fatal = lambda _reason: told.set()
        second = EmbeddedStore(plane.database)
        await second.open()
        epoch = await second.register(BrokerRegistration(2, ()))
        async with asyncio.timeout(10):
            await told.wait()
        await plane.wait_for_images(lambda image: image.brokers[2].broker_epoch == epoch)
        await second.close()


# --- what every broker may ask ----------------------------------------------------------------------------------------


async def test_isr_proposals_from_every_broker() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        (made,) = await plane.leading.create_topics([NewTopic("t", 3, 3)])
        await plane.wait_for_images(lambda image: "t" in image.topics)
        led = {state.leader: index for _, index, state in plane.leading.image.partitions()}
        for leader, controller in plane.controllers.items():
            index = led[leader]
            state = controller.image.topics["t"].partitions[index]
            other = next(replica for replica in state.replicas if replica != leader)
            members = ((leader, controller.broker_epoch), (other, -1))
            good = IsrProposal(made.topic_id, index, state.leader_epoch, state.partition_epoch, members)
            bad = IsrProposal(made.topic_id, 99, 0, 0, members)
            assert await controller.propose_isr([good]) == [ErrorCode.NONE]
            changed = controller.image.partition(made.topic_id, index)
            assert changed is not None and set(changed.isr) == {leader, other}
            assert await controller.propose_isr([good, bad]) == [
                ErrorCode.INVALID_UPDATE_VERSION, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
            ]  # fmt: skip
            away = IsrProposal(made.topic_id, index, changed.leader_epoch, changed.partition_epoch, ((other, -1),))
            assert await controller.propose_isr([away]) == [ErrorCode.NEW_LEADER_ELECTED]
            moved = controller.image.partition(made.topic_id, index)
            assert moved is not None and moved.leader == other


async def test_a_proposal_of_an_earlier_incarnation_is_refused() -> None:
    async with ControlPlane(2) as plane:
        with pytest.raises(ApiError) as caught:
            await plane.leading.alter_partition(2, 1, [])
        assert caught.value.code is ErrorCode.STALE_BROKER_EPOCH


async def test_producer_ids_and_topics_from_every_broker() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        asked = [controller.next_producer_id_block() for controller in plane.controllers.values() for _ in range(3)]
        ids = [number for block in await asyncio.gather(*asked) for number in block]
        assert len(ids) == len(set(ids)) == 9000
        everywhere = [controller.ensure_topics(["a", "b"]) for controller in plane.controllers.values()]
        outcomes = await asyncio.gather(*everywhere)
        assert all(outcome.error is None for several in outcomes for outcome in several)
        assert len({outcome.topic_id for several in outcomes for outcome in several}) == 2
        for controller in plane.controllers.values():
            assert (await controller.ensure_internal_topic("__consumer_offsets")).replication_factor == 3
        (bad,) = await plane.controllers[2].ensure_topics(["no/such"])
        assert bad.error is not None and bad.error.code is ErrorCode.INVALID_TOPIC_EXCEPTION


async def test_a_broker_that_leaves_hands_over_first() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        for broker_id in (3, 1):  # one that is not the controller, and the one that is
            controller = plane.controllers[broker_id]
            assert await controller.leave()
            assert not controller.image.is_live(broker_id) and not list(controller.image.led_by(broker_id))
            answer = await controller.heartbeat(broker_id, controller.broker_epoch)
            assert answer.error is ErrorCode.BROKER_NOT_AVAILABLE
            await plane.stop(broker_id)
        await plane.wait_for_images(lambda image: image.controller_id == 2)
        last = plane.controllers[2]
        assert all(state.leader == 2 for _, _, state in last.image.partitions())
        index = last.image.index
        assert not await last.leave()  # there is nobody to hand over to
        assert last.image.index == index


async def test_leaving_does_not_hang_where_nobody_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace.cluster.controller.LEAVE_TIMEOUT_S", 0.3)
    async with ControlPlane(2) as plane:
        await plane.servers[1].close()
        async with asyncio.timeout(20):
            assert not await plane.controllers[2].leave()


async def test_a_controller_that_leaves_gives_up_the_office_while_it_still_runs() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        leaving = plane.leading
        assert await leaving.leave()
        await leaving.wait_for_image(lambda image: image.is_live(image.controller_id), 20)
        assert not leaving.is_controller and leaving.image.controller_id != leaving.broker_id


async def test_requests_wait_for_the_next_controller() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        await plane.kill(1)
        asked = asyncio.create_task(plane.controllers[3].next_producer_id_block())
        await asyncio.sleep(0.1)
        assert not asked.done()
        plane.stores[1].lapse()
        assert len(await asked) == 1000


async def test_probes_are_for_one_incarnation() -> None:
    async with ControlPlane(2) as plane:
        controller = plane.controllers[2]
        assert (await controller.heartbeat(2, controller.broker_epoch)).error is ErrorCode.NONE
        assert (await controller.heartbeat(2, controller.broker_epoch - 1)).error is ErrorCode.STALE_BROKER_EPOCH
        assert (await controller.heartbeat(1, controller.broker_epoch)).error is ErrorCode.STALE_BROKER_EPOCH
        with pytest.raises(ApiError) as caught:
            await controller.heartbeat(2, controller.broker_epoch, want_shut_down=True)
        assert caught.value.code is ErrorCode.NOT_CONTROLLER


async def test_elections_moves_and_farewells_through_the_controller() -> None:
    async with ControlPlane(3) as plane:
        await plane.wait_for_images(lambda image: len(image.live_brokers) == 3)
        leading = plane.leading
        await leading.create_topics([NewTopic("t", assignments=((0, (3, 1)),))])
        assert await leading.alter_reassignments([Reassignment("t", 0, (1, 3))]) == [None]
        assert await leading.elect_leaders(ElectionKind.PREFERRED, None) == [(("t", 0), None)]
        assert leading.image.topics["t"].partitions[0].leader == 1
        await leading.alter_reassignments([Reassignment("t", 0, (3, 1))])
        assert await leading.rebalance_leaders() == 1
        with pytest.raises(ApiError) as caught:
            await leading.unregister_broker(2)
        assert caught.value.code is ErrorCode.INVALID_REQUEST
        await plane.stop(2)
        await plane.wait_for_images(lambda image: not image.is_live(2))
        await leading.unregister_broker(2)
        assert 2 not in leading.image.brokers
        with pytest.raises(ApiError) as caught:
            await leading.unregister_broker(2)
        assert caught.value.code is ErrorCode.BROKER_ID_NOT_REGISTERED


async def test_a_follower_that_was_left_behind_goes_on_from_the_snapshot() -> None:
    async with ControlPlane(2, deltas_per_snapshot=5) as plane:
        follower = plane.controllers[2]
        heard: list[tuple[ClusterImage, ClusterImage, ChangeSet]] = []
        follower.on_image(lambda old, new, changes: heard.append((old, new, changes)))
        plane.stores[2].following.clear()
        for number in range(17):
            await plane.leading.create_topics([NewTopic(f"t{number}")])
        plane.stores[2].following.set()
        await plane.wait_for_images(lambda image: "t16" in image.topics)
        assert same_images(plane) and heard[-1][1] is follower.image
        assert len(heard) < 17, "it was not left behind"
        assert all(old.apply(changes, new.index) == new for old, new, changes in heard)


async def test_a_log_that_cannot_be_read_is_the_end_of_this_brokers_part() -> None:
    async with ControlPlane(2) as plane:
        told: list[str] = []
        plane.controllers[2].on_fatal = told.append
        await plane.stores[1].append(b"not a delta", 1)
        async with asyncio.timeout(10):
            while not told:
                await asyncio.sleep(0)
        assert "cannot be followed" in told[0]
        with pytest.raises(ApiError):
            await plane.controllers[2].wait_for_image(lambda _: False, 10)
        with pytest.raises(ApiError):
            await plane.controllers[1].create_topics([NewTopic("a")])


async def test_the_log_says_who_wrote_it() -> None:
    async with ControlPlane(2) as plane:
        with pytest.raises(Exception, match="epoch"):
            await plane.stores[2].append(encode((ControllerChanged(2, 9),)), 9)
