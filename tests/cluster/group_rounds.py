"""One round of a fault test of a consumer group (KIP-848): as in `rounds`, with members that read and commit.

A round is green when nothing acknowledged was lost in the topic, every record was given to some member, no commit and
no member went back, and the group has come to rest: everybody in its last epoch, every partition with one member.
"""

from __future__ import annotations

import random
import signal
import time
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final

from cluster.rounds import TROUBLE, Clients, Fault, Result, Scale, Stage, create_topic, disturb, high_watermarks, judge
from millrace.admin.groups import GroupView, describe_group
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError
from millrace.model import TopicPartition
from support.checker_groups import check_group
from support.cluster_processes import ClusterProcesses, wait_for
from support.servers import ServerFailed

GROUP_SESSION_MS: Final = 2_000
SETTINGS: Final = (
    # The group's state in one partition: its leader is the coordinator.
    ("offsets.topic.num.partitions", "1"),
    ("group.consumer.min.session.timeout.ms", "1000"),
    ("group.consumer.session.timeout.ms", str(GROUP_SESSION_MS)),
    ("group.consumer.min.heartbeat.interval.ms", "100"),
    ("group.consumer.heartbeat.interval.ms", "400"),
)
OFFSETS_TOPIC: Final = "__consumer_offsets"
_RESTS_WITHIN_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class GroupScale(Scale):
    """How large a round with a group is."""

    members: int = 4
    partitions: int = 8


SHORT_GROUP: Final = GroupScale(acked=3_000, bounces=1, rate=1_500, session_timeout_ms=3000, outage_s=5)
FULL_GROUP: Final = GroupScale(
    acked=100_000, bounces=3, rate=4_000, session_timeout_ms=6000, outage_s=30, members=20, partitions=40
)


class GroupClients(Clients):
    """Producers and the members of one group. Members are numbered in the order of their start."""

    def __init__(self, client: Mapping[str, str], topic: str, scale: GroupScale, directory: Path) -> None:
        super().__init__(client, topic, scale, directory, partitions=scale.partitions, consumers=0)
        self.group = f"group-of-{topic}"
        self.running: list[int] = []
        self._paused: set[int] = set()
        self._started = 0
        properties = {**client, "request.timeout.ms": "2000", "default.api.timeout.ms": "2000"}
        self._cluster = ClusterClient(ClientSettings.from_properties(properties))
        for _ in range(scale.members):
            self.start_member()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        self._cluster.close()

    @property
    def given(self) -> int:
        """Records that members were given, more than once or not."""
        return sum(count for name, count in self._counts.items() if name.startswith("member"))

    def start_member(self) -> None:
        self._started += 1
        self._start("member", self._started, "--group", self.group, module="cluster.group_member")
        self.running.append(self._started)

    def kill_member(self, number: int) -> None:
        """kill -9: the group learns of it when the session ends."""
        self.running.remove(number)
        self._paused.discard(number)
        self._processes[f"member-{number}"].kill()
        self._forget(f"member-{number}")

    def pause_member(self, number: int) -> None:
        self._processes[f"member-{number}"].send_signal(signal.SIGSTOP)
        self._paused.add(number)

    def resume_members(self) -> None:
        while self._paused:
            self._processes[f"member-{self._paused.pop()}"].send_signal(signal.SIGCONT)

    def describe(self) -> GroupView | None:
        """The group as its coordinator has it; None where nobody answers, or there is none."""
        try:
            return describe_group(self._cluster, self.group)
        except ApiError:
            return None

    def wait_group(self, condition: Callable[[GroupView], bool], failure: str) -> GroupView:
        def found() -> GroupView | None:
            view = self.describe()
            return view if view is not None and condition(view) else None

        return wait_for(found, _RESTS_WITHIN_S, failure, pause_s=0.1)

    def wait_size(self, members: int) -> None:
        self.wait_group(lambda view: len(view.members) == members, f"the group has not got {members} members")

    def wait_at_rest(self) -> None:
        """Everybody is in the group's epoch, and every partition has one owner."""
        wanted = {TopicPartition(self._topic, index) for index in range(self.partitions)}

        def at_rest(view: GroupView) -> bool:
            owned = Counter(each for member in view.members for each in member.partitions)
            return (
                view.state == "stable"
                and len(view.members) == len(self.running)
                and {member.epoch for member in view.members} == {view.epoch}
                and owned == Counter(wanted)
            )

        try:
            self.wait_group(at_rest, "the group has not come to rest")
        except ServerFailed as error:
            raise ServerFailed(f"{error}: {self.describe()}") from None

    def wait_all_move(self) -> None:
        """Wait until the group has committed more of every partition: somebody reads each, whatever happened."""
        before = self._committed()

        def moved() -> bool | None:
            now = self._committed()
            return True if all(now[each] > before[each] for each in before) else None

        wait_for(moved, _RESTS_WITHIN_S, "some partitions are read by nobody", pause_s=0.1)

    def _committed(self) -> dict[TopicPartition, int]:
        """From whoever coordinates the group by now; waits for one that answers."""
        wanted = [TopicPartition(self._topic, index) for index in range(self.partitions)]

        def answered() -> dict[TopicPartition, int] | None:
            try:
                return {each: at or 0 for each, at in self._cluster.committed_offsets(self.group, wanted).items()}
            except ApiError:
                return None

        return wait_for(answered, _RESTS_WITHIN_S, "nobody says what was committed", pause_s=0.1)

    def stop(self) -> list[str]:
        """Let producers finish, members read and commit everything, and the group rest; what went wrong."""
        problems = self._stop("producer")
        try:
            self._wait_everything_committed()
            self.wait_at_rest()
        except ServerFailed as error:
            problems.append(str(error))
        problems += self._stop("member")
        self._reap()
        return problems

    def _wait_everything_committed(self) -> None:
        ends = high_watermarks(self._client, self._topic, self.partitions)

        def is_all() -> bool | None:
            return True if all(at == ends[each.partition] for each, at in self._committed().items()) else None

        wait_for(is_all, _RESTS_WITHIN_S, "the group has not committed everything", pause_s=0.1)


@dataclass(slots=True)
class GroupStage(Stage):
    """What a fault of a group acts on."""

    members: GroupClients = field(kw_only=True)

    def coordinator(self) -> int:
        return self.cluster.leader(OFFSETS_TOPIC, 0)

    def some_members(self, share: float) -> list[int]:
        """So large a part of the members, at least one, by lot."""
        running = self.members.running
        return self.rng.sample(running, max(1, int(len(running) * share)))


GroupFault = Callable[[GroupStage], None]


def of_group(fault: GroupFault) -> Fault:
    """A fault of a group, as one of a stage: group rounds have no other."""

    def checked(stage: Stage) -> None:
        assert isinstance(stage, GroupStage)
        fault(stage)

    return checked


def run_group_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    """One round on a running cluster, with its own topic and group; everything that is wrong is in the result."""
    assert isinstance(scale, GroupScale)
    result = Result()
    started = time.monotonic()
    topic = f"round-{uuid.uuid4().hex[:8]}"
    directory = cluster.home / "history" / topic
    directory.mkdir(parents=True)
    try:
        create_topic(cluster, topic, scale.partitions)
        with GroupClients(cluster.client_settings, topic, scale, directory) as clients:
            stage = GroupStage(cluster, clients, topic, scale, random.Random(seed), result.marks, members=clients)
            clients.wait_at_rest()
            result.failures += disturb(stage, fault, result)
            clients.resume_members()
            result.failures += clients.stop()
            events = judge(stage, result)
            check_group(events, result.report)
            result.marks.append(f"{clients.given} records given to members, {result.report.acked} acknowledged")
    except TROUBLE as error:
        result.failures.append(f"{type(error).__name__}: {error}")
    result.failures += [f"{broker} died by itself" for broker in cluster.brokers.values() if broker.died()]
    result.seconds = time.monotonic() - started
    return result
