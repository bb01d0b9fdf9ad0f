"""The faults of queues (KIP-932): members, leaders and both coordinators killed, paused and cut off.

What is done is what is done to consumer groups (`group_faults`); what must hold afterwards is in `queue_rounds`.
"""

from __future__ import annotations

from typing import Final

from cluster.faults import Row, Variant
from cluster.group_faults import cut, cut_from_zookeeper, everything, kill, kill_members, pause, pause_members
from cluster.group_rounds import GroupFault, GroupStage, of_group
from cluster.queue_rounds import FULL_QUEUE, SETTINGS, SHORT_QUEUE, QueueStage, run_queue_round


def _variant(name: str, fault: GroupFault) -> Variant:
    return Variant(f"queue {name}", of_group(fault), proxied=True, settings=SETTINGS)


def _leader(stage: GroupStage) -> int:
    return stage.leader()


def _state_coordinator(stage: GroupStage) -> int:
    assert isinstance(stage, QueueStage)
    return stage.state_coordinator()


QUEUE_ROWS: Final = (
    Row(
        "a queue with 20 consumers: members, the leader and the coordinators killed, paused, cut off, all at random",
        (
            _variant("members killed", kill_members),
            _variant("members paused", pause_members),
            _variant("leader killed", kill(_leader)),
            _variant("leader paused", pause(_leader)),
            _variant("leader cut off", cut(_leader)),
            _variant("leader cut from ZooKeeper", cut_from_zookeeper(_leader)),
            _variant("coordinator killed", kill(GroupStage.coordinator)),
            _variant("state coordinator killed", kill(_state_coordinator)),
            _variant("state coordinator paused", pause(_state_coordinator)),
            _variant("state coordinator cut off", cut(_state_coordinator)),
            _variant("everything at random", everything),
        ),
        11,
        100_000,
        SHORT_QUEUE,
        FULL_QUEUE,
        run_queue_round,
    ),
)
SHORT_VARIANTS: Final = ("queue members killed", "queue leader killed", "queue state coordinator cut off")
"""What CI has the time for."""
