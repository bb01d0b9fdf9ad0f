"""The demo's failover: the leader of a busy partition is killed, others take over, it comes back and catches up.

`Failover.look` takes the next step when it is due, by what the brokers say of their partitions; `FailoverThread` calls
it often enough to measure. Times of an outage count from the kill. Not here: processes (`demo.brokers`), the account,
which has to be exact whatever happens here (`demo.scenario`).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol

from millrace.clock import Clock, SystemClock
from millrace.demo.traffic import CLICKS

BROKERS_NEEDED: Final = 3
"""With fewer, a partition that lost a replica has one left, or none."""
RESTART_AFTER_S: Final = 3.0
LED_TIMEOUT_S: Final = 30.0
IN_SYNC_TIMEOUT_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.02


class PartitionSeen(NamedTuple):
    """A partition as a broker tells it."""

    topic: str
    number: int
    leader: int
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


class Killable(Protocol):
    """What a failover needs of a cluster."""

    def kill(self, broker_id: int) -> None: ...

    def launch(self, broker_id: int) -> None: ...

    def partitions(self) -> list[PartitionSeen]: ...


@dataclass(frozen=True, slots=True)
class Outage:
    """One broker's absence, as far as it has come."""

    broker_id: int
    at_s: float
    """When it was killed, in the demo's own time."""
    partitions: int
    """How many it led."""
    led_after_s: float | None = None
    restarted_after_s: float | None = None
    in_sync_after_s: float | None = None

    def __str__(self) -> str:
        minutes, seconds = divmod(int(self.at_s), 60)
        text = f"broker {self.broker_id} was killed at {minutes}:{seconds:02}"
        if self.led_after_s is None:
            return f"{text}, its {self.partitions} partitions have no leader yet"
        text += f", its {self.partitions} partitions were led by others after {self.led_after_s:.1f} s"
        if self.restarted_after_s is None:
            return text
        text += f"; started again after {self.restarted_after_s:.1f} s"
        return text if self.in_sync_after_s is None else f"{text}, in sync after {self.in_sync_after_s:.1f} s"


class Failover:
    """Kill, wait for other leaders, start again, wait for all replicas. Owner: whoever calls `look`."""

    def __init__(self, cluster: Killable, at_s: float, clock: Clock) -> None:
        """`at_s`: what the demo's own time is now."""
        self.outage: Outage | None = None
        self.problem: str | None = None
        self.is_over = False
        self._cluster = cluster
        self._clock = clock
        self._offset_s = at_s - clock.monotonic()
        self._began_s = clock.monotonic()
        self._killed_s = 0.0
        self._led: frozenset[tuple[str, int]] = frozenset()

    def look(self) -> None:
        """One step, if its time has come."""
        outage = self.outage
        if outage is None:
            self._kill()
        elif outage.led_after_s is None:
            self._look_for_leaders(outage)
        elif outage.restarted_after_s is None:
            if self._since_kill_s() >= RESTART_AFTER_S:
                self._cluster.launch(outage.broker_id)
                self.outage = replace(outage, restarted_after_s=self._since_kill_s())
        else:
            self._look_for_replicas(outage, outage.restarted_after_s)

    def _since_kill_s(self) -> float:
        return self._clock.monotonic() - self._killed_s

    def _kill(self) -> None:
        seen = self._cluster.partitions()
        victim = next((one.leader for one in seen if (one.topic, one.number) == (CLICKS, 0) and one.leader >= 0), None)
        if victim is None:
            if self._clock.monotonic() - self._began_s > LED_TIMEOUT_S:
                self._give_up(f"nobody leads partition 0 of {CLICKS}, so nobody was killed")
            return
        self._led = frozenset((one.topic, one.number) for one in seen if one.leader == victim)
        self._killed_s = self._clock.monotonic()
        self._cluster.kill(victim)
        self.outage = Outage(victim, self._killed_s + self._offset_s, len(self._led))

    def _look_for_leaders(self, outage: Outage) -> None:
        leaders = {(one.topic, one.number): one.leader for one in self._cluster.partitions()}
        if all(leaders.get(partition, -1) not in (-1, outage.broker_id) for partition in self._led):
            self.outage = replace(outage, led_after_s=self._since_kill_s())
        elif self._since_kill_s() > LED_TIMEOUT_S:
            self._cluster.launch(outage.broker_id)
            self._give_up(f"partitions of broker {outage.broker_id} had no leader {LED_TIMEOUT_S:.0f} s after its end")

    def _look_for_replicas(self, outage: Outage, restarted_after_s: float) -> None:
        seen = self._cluster.partitions()
        if seen and all(set(one.in_sync) == set(one.replicas) for one in seen):
            self.outage = replace(outage, in_sync_after_s=self._since_kill_s())
            self.is_over = True
        elif self._since_kill_s() - restarted_after_s > IN_SYNC_TIMEOUT_S:
            self._give_up(f"broker {outage.broker_id} was not in sync {IN_SYNC_TIMEOUT_S:.0f} s after its start")

    def _give_up(self, problem: str) -> None:
        self.problem, self.is_over = problem, True


class FailoverThread(threading.Thread):
    """Takes a failover to its end beside the demo."""

    def __init__(self, cluster: Killable, at_s: float) -> None:
        super().__init__(name="failover", daemon=True)
        self.failover = Failover(cluster, at_s, SystemClock())
        self._leaving = threading.Event()

    def leave(self) -> None:
        """Stop where it is; the cluster may be ended after this has returned."""
        self._leaving.set()
        self.join()

    def run(self) -> None:
        try:
            while not self.failover.is_over and not self._leaving.wait(_LOOK_EVERY_S):
                self.failover.look()
        except Exception as error:  # noqa: BLE001  # a thread's root: the summary tells it
            self.failover.problem, self.failover.is_over = f"failover: {error}", True
