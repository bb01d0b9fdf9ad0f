"""Who is taken for dead and who counts again: the decisions, and the watch at work over real sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.client.connection import Connection
from millrace.cluster.liveness import Health, Verdict, is_dead, is_refusal, is_silent, judge, takeover_delay_s
from millrace.cluster.planning import NewTopic
from millrace.errors import ApiError, ErrorCode
from support.metadata import ControlPlane, cluster_of

SILENCE_S = 6.0
NOW_S = 1000.0


def heard(broker_id: int, ago_s: float | None = 0.5, *, since_s: float = 0.0, **others: object) -> Health:
    answered_s = None if ago_s is None else NOW_S - ago_s
    return Health(broker_id, 100 + broker_id, since_s, answered_s, **others)  # type: ignore[arg-type]


def refused(broker_id: int, *times_s: float) -> Health:
    return heard(broker_id, refused_s=times_s)


def verdict(*peers: Health, fenced_s: Mapping[int, float] | None = None) -> Verdict:
    return judge(peers, fenced_s or {}, now_s=NOW_S, silence_s=SILENCE_S)


def test_nothing_is_done_about_brokers_that_answer() -> None:
    assert verdict(heard(2), heard(3), heard(4, 5.9)) == Verdict({}, {})


def test_two_refusals_in_short_order_are_death_and_one_is_not() -> None:
    assert verdict(heard(2), refused(3, NOW_S)) == Verdict({}, {})
    assert verdict(heard(2), refused(3, NOW_S - 0.1, NOW_S)) == Verdict({3: 103}, {})
    assert verdict(heard(2), refused(3, NOW_S - 0.3, NOW_S)) == Verdict({}, {})


def test_silence_is_death_after_a_session_and_counts_from_the_start_of_the_watch() -> None:
    assert verdict(heard(2), heard(3, 6.0)) == Verdict({3: 103}, {})
    assert verdict(heard(2), heard(3, None, since_s=NOW_S - 5)) == Verdict({}, {})
    assert verdict(heard(2), heard(3, None, since_s=NOW_S - 6)) == Verdict({3: 103}, {})
    assert verdict(heard(2), heard(3, 60.0, since_s=NOW_S - 1)) == Verdict({}, {})  # the watch was resumed


def test_a_controller_that_reaches_too_few_resigns() -> None:
    silent = [heard(number, 7.0) for number in (2, 3, 4)]
    assert verdict(*silent[:2]) == Verdict({}, {}, resign=True)
    assert verdict(silent[0], heard(3)) == Verdict({2: 102}, {})
    assert verdict(*silent[:2], heard(4)) == Verdict({}, {}, resign=True)
    assert verdict(*silent[:2], heard(4), heard(5)) == Verdict({2: 102, 3: 103}, {})
    # Between two, the session with the store decides, and the controller has one.
    assert verdict(silent[0]) == Verdict({2: 102}, {})
    # Those who are known to be dead say nothing about the network.
    assert verdict(silent[0], refused(3, NOW_S - 0.1, NOW_S)) == Verdict({2: 102, 3: 103}, {})


def test_a_fenced_broker_counts_again_after_an_answer_to_a_later_question() -> None:
    fenced_s = {3: NOW_S - 2}
    assert verdict(heard(2), heard(3, 1.0), fenced_s=fenced_s) == Verdict({}, {3: 103})
    assert verdict(heard(2), heard(3, 2.5), fenced_s=fenced_s) == Verdict({}, {})
    assert verdict(heard(2), heard(3, None), fenced_s=fenced_s) == Verdict({}, {})
    assert verdict(heard(2), heard(3, 1.0, going=True), fenced_s=fenced_s) == Verdict({}, {})
    assert verdict(heard(2), heard(3, 1.0, refused_s=(NOW_S,)), fenced_s=fenced_s) == Verdict({}, {})


healths = st.builds(
    Health,
    st.integers(1, 9),
    st.just(5),
    st.floats(0, NOW_S),
    st.none() | st.floats(0, NOW_S),
    st.booleans(),
    st.lists(st.floats(NOW_S - 1, NOW_S), max_size=2).map(lambda times: tuple(sorted(times))),
)


@given(
    st.lists(healths, unique_by=lambda health: health.broker_id),
    st.dictionaries(st.integers(1, 9), st.floats(0, NOW_S)),
)
def test_verdicts_are_for_those_they_fit(peers: list[Health], fenced_s: dict[int, float]) -> None:
    given_verdict = judge(peers, fenced_s, now_s=NOW_S, silence_s=SILENCE_S)
    by_id = {peer.broker_id: peer for peer in peers}
    assert not set(given_verdict.fence) & set(given_verdict.unfence)
    assert not set(given_verdict.fence) & set(fenced_s) and set(given_verdict.unfence) <= set(fenced_s)
    for broker_id in given_verdict.fence:
        assert is_dead(by_id[broker_id]) or is_silent(by_id[broker_id], NOW_S, SILENCE_S)
    live = [peer for peer in peers if peer.broker_id not in fenced_s and not is_dead(peer)]
    reached = [peer for peer in live if not is_silent(peer, NOW_S, SILENCE_S)]
    if not given_verdict.resign:
        assert len(reached) * 2 >= len(live) or len(live) == 1
        assert {peer.broker_id for peer in live if peer not in reached} <= set(given_verdict.fence)
    else:
        assert not set(given_verdict.fence) & {peer.broker_id for peer in live}


def test_brokers_take_over_one_after_another() -> None:
    image = cluster_of(1, 2, 3, 4, fenced=(4,))
    assert [takeover_delay_s(image, broker_id) for broker_id in (2, 3, 4)] == pytest.approx([0.0, 0.1, 0.2])


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
        await plane.settled(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await plane.kill(3)
        await plane.settled(lambda image: not image.is_live(3), 5)
        assert all(state.leader in {1, 2} for _, _, state in plane.leading.image.partitions())
        assert 3 in plane.database.members
        await plane.start(3)
        assert plane.leading.image.is_live(3)


async def test_a_killed_controller_is_replaced_at_once_and_its_broker_fenced_in_the_same_delta() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.settled(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        firsts = []
        plane.controllers[3].on_image(
            lambda old, new, _: firsts.append(new) if old.controller_epoch != new.controller_epoch else None
        )
        await plane.kill(1)
        await plane.settled(lambda image: image.controller_id in {2, 3}, 5)
        assert not firsts[0].is_live(1) and not list(firsts[0].led_by(1))
        await plane.leading.create_topics([NewTopic("u", 1, 2)])


async def test_controller_and_another_broker_killed_together() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.settled(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        await asyncio.gather(plane.kill(1), plane.kill(2))
        await plane.settled(lambda image: [broker.broker_id for broker in image.live_brokers] == [3], 5)
        assert plane.leading.broker_id == 3
        assert all(state.leader == 3 for _, _, state in plane.leading.image.partitions())


async def test_a_killed_controller_that_comes_back_at_once_reigns_anew_or_follows() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.settled(lambda image: len(image.live_brokers) == 3)
        await plane.kill(1)
        await plane.start(1)
        await plane.settled(lambda image: len(image.live_brokers) == 3 and image.controller_epoch >= 2)
        assert plane.leading.image.controller_id == plane.leading.broker_id


async def test_a_silent_broker_is_fenced_after_a_session_and_counts_again_when_it_answers() -> None:
    async with ControlPlane(3, QUICK, liveness=True) as plane:
        await plane.settled(lambda image: len(image.live_brokers) == 3)
        plane.servers[3].answering.clear()
        await plane.settled(lambda image: not image.is_live(3))
        assert plane.leading.image.is_live(2)
        plane.servers[3].answering.set()
        await plane.settled(lambda image: image.is_live(3))


async def test_a_controller_that_reaches_nobody_leaves_the_office() -> None:
    async with ControlPlane(3, QUICK, liveness=True) as plane:
        await plane.settled(lambda image: len(image.live_brokers) == 3)
        await plane.leading.create_topics([NewTopic("t", 6, 3)])
        for broker_id in (2, 3):
            plane.servers[broker_id].answering.clear()
        await plane.settled(lambda image: image.controller_epoch >= 2)
        assert plane.leading.broker_id in {2, 3}
        for broker_id in (2, 3):
            plane.servers[broker_id].answering.set()
        await plane.settled(lambda image: len(image.live_brokers) == 3)


async def test_a_broker_that_leaves_is_not_called_back() -> None:
    async with ControlPlane(3, FIRM, liveness=True) as plane:
        await plane.settled(lambda image: len(image.live_brokers) == 3)
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
        await plane.settled(lambda image: len(image.live_brokers) == 2)
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
