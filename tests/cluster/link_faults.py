"""Links that refuse: "connection refused" at once, as a firewall's REJECT says it, although both ends live.

Each fault refuses the calls of some brokers to others for a while. Besides what every round shows (nothing is lost or
doubled), the office of the controller may change hands only as often as the fault says, and no partition may be without
an acknowledgement for longer than it says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from cluster.faults import Row, Variant
from cluster.rounds import Fault, Limits, Stage
from support.checker_metadata import read_log
from support.tcp_proxy import ZOOKEEPER, Node, broker_node

Links = Sequence[tuple[Node, Node]]
"""Who is refused by whom."""

FAILOVER_S: Final = 2.0
"""Much more than a failover takes, so that a busy machine does not fail a round; what it must not be is a session."""


def refusing(links: Callable[[Stage], Links], *, changes: int, pause_s: Callable[[Stage], float]) -> Fault:
    """Refuse these calls for a session and a half: longer than a follower that cannot fetch stays in the ISR."""

    def fault(stage: Stage) -> None:
        stage.limits = limits(stage, changes, pause_s(stage))
        refused = links(stage)
        stage.mark(f"refused: {', '.join(f'{source} by {target}' for source, target in refused)}")
        for source, target in refused:
            stage.cluster.wires().refuse(source, target)
        time.sleep(held_s(stage))
        stage.mark(f"the controller is {stage.controller()}")

    return fault


def limits(stage: Stage, changes: int, pause_s: float) -> Limits:
    servers = stage.cluster.zookeeper
    assert servers is not None
    return Limits(read_log(servers.hosts, servers.access)[-1].controller_epoch + changes, pause_s)


def held_s(stage: Stage) -> float:
    return stage.scale.session_s * 1.5


# --- who is refused by whom -------------------------------------------------------------------------------------------


def both_ways(one: int, *others: int) -> Links:
    return [pair for other in others for pair in one_way(one, other) + one_way(other, one)]


def one_way(source: int, *targets: int) -> list[tuple[Node, Node]]:
    return [(broker_node(source), broker_node(target)) for target in targets]


def others(stage: Stage, broker_id: int) -> list[int]:
    return [each for each in stage.cluster.brokers if each != broker_id]


def controller_and_a_broker(stage: Stage) -> Links:
    controller = stage.controller()
    return both_ways(controller, others(stage, controller)[0])


def two_brokers(stage: Stage) -> Links:
    """Both lead partitions that the other follows, and the controller reaches both."""
    return both_ways(*others(stage, stage.controller()))


def a_broker_and_all_others(stage: Stage) -> Links:
    alone = others(stage, stage.controller())[0]
    return both_ways(alone, *others(stage, alone))


def controller_and_all_others(stage: Stage) -> Links:
    controller = stage.controller()
    return both_ways(controller, *others(stage, controller))


def controller_by_all_others(stage: Stage) -> Links:
    controller = stage.controller()
    return one_way(controller, *others(stage, controller))


def a_broker_by_all_others(stage: Stage) -> Links:
    alone = others(stage, stage.controller())[0]
    return one_way(alone, *others(stage, alone))


def a_broker_by_the_controller(stage: Stage) -> Links:
    controller = stage.controller()
    return one_way(others(stage, controller)[0], controller)


def a_leader_by_zookeeper(stage: Stage) -> Links:
    return [(broker_node(stage.leader()), ZOOKEEPER)]


def all_but_the_next(stage: Stage) -> Links:
    """A ring: every broker reaches its neighbour on one side, and is reached by the one on the other."""
    ids = list(stage.cluster.brokers)
    return [
        link
        for place, broker_id in enumerate(ids)
        for link in one_way(broker_id, *(each for each in ids if each not in {broker_id, ids[(place + 1) % len(ids)]}))
    ]


# --- how long a partition may wait ------------------------------------------------------------------------------------


def a_failover(_stage: Stage) -> float:
    return FAILOVER_S


def a_lag(stage: Stage) -> float:
    """A follower that cannot fetch is noticed after replica.lag.time.max.ms, looked at every half of it."""
    return stage.scale.session_s * 1.5 + FAILOVER_S


def a_session(stage: Stage) -> float:
    """The end of a session is noticed by ZooKeeper after up to half as much again; then clients have to hear of it."""
    return stage.scale.session_s * 2 + FAILOVER_S


def the_fault_itself(stage: Stage) -> float:
    return held_s(stage) + FAILOVER_S


def flapping(stage: Stage) -> None:
    """A link that refuses and works in turn, between the controller and a broker."""
    stage.limits = limits(stage, 0, FAILOVER_S)
    links = controller_and_a_broker(stage)
    stage.mark(f"refused now and then: {links}")
    for _ in range(stage.scale.bounces * 2):
        for source, target in links:
            stage.cluster.wires().refuse(source, target)
        time.sleep(0.7)
        stage.cluster.wires().heal()
        time.sleep(0.7)


def _variant(
    name: str, links: Callable[[Stage], Links], changes: int, pause_s: Callable[[Stage], float], *, short: bool = True
) -> Variant:
    return Variant(name, refusing(links, changes=changes, pause_s=pause_s), proxied=True, short=short)


LINK_ROWS: Final = (
    Row(
        "links that refuse: controller, leader, one from all, ZooKeeper, one-way, a ring, flapping",
        (
            _variant("controller and broker refuse each other", controller_and_a_broker, 0, a_failover),
            _variant("two brokers refuse each other", two_brokers, 0, a_lag),
            _variant("broker and all others refuse each other", a_broker_and_all_others, 0, a_failover),
            _variant("controller and all others refuse each other", controller_and_all_others, 1, a_failover),
            _variant("controller refused by all others", controller_by_all_others, 1, a_failover),
            _variant("broker refused by all others", a_broker_by_all_others, 0, a_lag, short=False),
            _variant("broker refused by the controller", a_broker_by_the_controller, 0, a_lag, short=False),
            _variant("leader refused by ZooKeeper", a_leader_by_zookeeper, 1, a_session),
            _variant("ring partition", all_but_the_next, 0, the_fault_itself),
            Variant("refusing link flapping", flapping, proxied=True, short=False),
        ),
        10,
        30_000,
    ),
)
