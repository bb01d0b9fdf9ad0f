"""`millrace cluster` against the real handlers on a controller that lives in its image: three brokers, no data."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millrace.admin import moves
from millrace.admin.cluster import health
from millrace.admin.errors import AdminError
from millrace.admin.health import RESERVE
from millrace.cli import cluster_health, reassign
from millrace.cli.root import run
from millrace.cluster.elections import LogEnd
from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment, completed
from millrace.errors import ErrorCode
from millrace.handlers import registry
from millrace.handlers.context import RequestContext
from millrace.metadata.deltas import (
    BrokerRegistered,
    ClusterCreated,
    ConfigChanged,
    ControllerChanged,
    Endpoint,
    PartitionChanged,
    PartitionState,
    ResourceType,
    TopicCreated,
)
from millrace.model import TopicPartition, new_topic_id
from millrace.wire.frame import RequestHeader
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class
from millrace.wire.messages.brokers import GetReplicaLogInfoRequest, GetReplicaLogInfoResponse
from millrace.wire.messages.configs import DescribeConfigsResponse
from millrace.wire.messages.log_dirs import DescribeLogDirsResponse
from support.fake_broker import HOST, FakeBroker
from support.handling import Deciding, deciding

GOOD = PartitionState((1, 2), (1, 2), 1)
HANDLED = (
    ApiKey.DESCRIBE_CLUSTER, ApiKey.METADATA, ApiKey.LIST_PARTITION_REASSIGNMENTS, ApiKey.DESCRIBE_QUORUM,
    ApiKey.DESCRIBE_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS, ApiKey.ELECT_LEADERS,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS, ApiKey.UNREGISTER_BROKER, ApiKey.DESCRIBE_TOPIC_PARTITIONS,
)  # fmt: skip


def image_of(*, port: int = 9092, fenced: tuple[int, ...] = (), **topics: list[PartitionState]) -> ClusterImage:
    """Brokers 1, 2 and 3, all at one address, and topics; the first broker is controller."""
    endpoint = Endpoint("PLAINTEXT", HOST, port)
    return ClusterImage().apply(
        (
            ClusterCreated("test-cluster"),
            ControllerChanged(1, 4),
            *(
                BrokerRegistered(broker_id, 100 + broker_id, (endpoint,), f"r{broker_id}", broker_id in fenced)
                for broker_id in (1, 2, 3)
            ),
            *(TopicCreated(name, new_topic_id(), tuple(states)) for name, states in topics.items()),
        ),
        77,
    )


class Commands:
    """Runs commands against a cluster that is nothing but an image."""

    def __init__(self, broker: FakeBroker, capsys: pytest.CaptureFixture[str]) -> None:
        self._broker = broker
        self._capsys = capsys
        self.asked = broker.asked

    def cluster(
        self, *, fenced: tuple[int, ...] = (), stalled: bool = False, **topics: list[PartitionState]
    ) -> Deciding:
        """The cluster from now on; unless it is `stalled`, a move goes on each time that somebody looks."""
        on = deciding(image_of(port=self._broker.port, fenced=fenced, **topics))
        controller = on.controller
        assert isinstance(controller, Deciding)
        on.services.advertised = lambda _listener: (HOST, self._broker.port)
        apis = registry.load()

        def answering(key: ApiKey) -> Callable[[Any], Any]:
            version = request_class(key).max_version
            header = RequestHeader(key, version, 1, "test")
            context = RequestContext(on.services, header, version, HOST, "PLAINTEXT", needs=apis[key].needs)

            def answer(request: Any) -> Any:
                answered = apis[key].handler(context, request)
                return asyncio.run(answered) if inspect.iscoroutine(answered) else answered

            return answer

        self._broker.answers = {key: answering(key) for key in HANDLED}
        self._broker.answers[ApiKey.DESCRIBE_LOG_DIRS] = lambda _: _log_dirs(controller.image)
        self._broker.answers[ApiKey.GET_REPLICA_LOG_INFO] = lambda request: _log_info(controller, request)
        if not stalled:
            listing = self._broker.answers[ApiKey.LIST_PARTITION_REASSIGNMENTS]
            self._broker.answers[ApiKey.LIST_PARTITION_REASSIGNMENTS] = _moving_on(controller, listing)
        return controller

    def __call__(self, *argv: str, exit_code: int = 0) -> tuple[str, str]:
        assert run(["cluster", *argv, "--bootstrap", self._broker.bootstrap]) == exit_code
        captured = self._capsys.readouterr()
        return captured.out, captured.err

    def age(self) -> None:
        """From now on it is an old Kafka: no fenced brokers, no quorum, nobody eligible."""
        self._broker.max_versions[ApiKey.DESCRIBE_CLUSTER] = 1
        for key in (ApiKey.DESCRIBE_QUORUM, ApiKey.DESCRIBE_TOPIC_PARTITIONS):
            del self._broker.answers[key]

    def answer(self, key: ApiKey, answer: Callable[[Any], Any]) -> None:
        self._broker.answers[key] = answer

    def json(self, *argv: str) -> Any:
        return json.loads(self(*argv, "--json")[0])


def _moving_on(controller: Deciding, answer: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """The next move arrives after each look at them."""

    def moving_on(request: Any) -> Any:
        response = answer(request)
        for topic, index, state in controller.image.partitions():
            if state.is_reassigning:
                done = completed(replace(state, isr=tuple({*state.isr, *state.adding})))
                leader = done.leader if done.leader in done.isr else done.isr[0]
                change = PartitionChanged(topic.topic_id, index, replace(done, leader=leader))
                controller._view.image = controller.image.apply((change,))
                break
        return response

    return moving_on


def _log_dirs(image: ClusterImage) -> DescribeLogDirsResponse:
    topics = [
        DescribeLogDirsResponse.DescribeLogDirsTopic(
            name=topic.name,
            partitions=[
                DescribeLogDirsResponse.DescribeLogDirsPartition(partition_index=index, partition_size=1000)
                for index in range(len(topic.partitions))
            ],
        )
        for topic in image.topics.values()
    ]
    return DescribeLogDirsResponse(results=[DescribeLogDirsResponse.DescribeLogDirsResult(topics=topics)])


def _log_info(controller: Deciding, request: GetReplicaLogInfoRequest) -> GetReplicaLogInfoResponse:
    """All brokers are at one address: they answer in turn, by `log_ends`."""
    broker_id = next(controller.turns)
    end = controller.log_ends.get(broker_id, LogEnd(0, 0))
    code = ErrorCode.KAFKA_STORAGE_ERROR if end is None else ErrorCode.NONE
    epoch, offset = end or (0, 0)
    return GetReplicaLogInfoResponse(
        topic_partition_log_info_list=[
            GetReplicaLogInfoResponse.TopicPartitionLogInfo(
                topic_id=topic.topic_id,
                partition_log_info=[
                    GetReplicaLogInfoResponse.PartitionLogInfo(
                        partition=index, last_written_leader_epoch=epoch, log_end_offset=offset, error_code=code
                    )
                    for index in topic.partitions
                ],
            )
            for topic in request.topic_partitions or ()
        ]
    )


@pytest.fixture
def cluster(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    monkeypatch.setattr(reassign, "POLL_S", 0.0)
    with FakeBroker() as broker:
        yield Commands(broker, capsys)


# --- describe ---------------------------------------------------------------------------------------------------------


def test_a_good_cluster(cluster: Commands) -> None:
    cluster.cluster(a=[GOOD, GOOD])
    out, _ = cluster("describe")
    assert "3 of 3 brokers live, 1 topic, 2 partitions, controller epoch 4, metadata delta 77" in out
    assert "every partition has a leader and all its replicas in sync" in out
    told = cluster.json("describe")
    assert [(one["broker"], one["rack"], one["state"]) for one in told["brokers"]] == [
        (1, "r1", "controller"), (2, "r2", "live"), (3, "r3", "live"),
    ]  # fmt: skip
    assert [(one["leaders"], one["preferred"], one["replicas"], one["in_sync"]) for one in told["brokers"]] == [
        (2, 2, 2, 2), (0, 0, 2, 2), (0, 0, 0, 0),
    ]  # fmt: skip
    assert (told["cluster_id"], told["controller"], told["topics"], told["partitions"]) == ("test-cluster", 1, 1, 2)
    assert told["offline"] == told["under_replicated"] == told["under_min_isr"] == told["reassigning"] == []


def test_a_cluster_in_trouble(cluster: Commands) -> None:
    controller = cluster.cluster(
        fenced=(2,),
        a=[PartitionState((1, 2), (1,), 1), PartitionState((2,), (2,), -1)],
        b=[PartitionState((3, 1, 2), (1, 2), 1, adding=(3,), removing=(2,))],
    )
    wanted = ConfigChanged(ResourceType.TOPIC, "a", (("min.insync.replicas", "2"),))
    controller._view.image = controller.image.apply((wanted,), 78)
    told = cluster.json("describe")
    places = {
        problem: [(one["topic"], one["partition"]) for one in told[problem]]
        for problem in ("under_replicated", "under_min_isr", "offline", "reassigning")
    }
    assert places == {
        "under_replicated": [("a", 0)],
        "under_min_isr": [("a", 0), ("a", 1)],
        "offline": [("a", 1)],
        "reassigning": [("b", 0)],
    }
    assert told["brokers"][1]["state"] == "fenced"
    out, _ = cluster("describe")
    assert "2 of 3 brokers live" in out
    assert "1 offline, 2 under-min-isr, 1 under-replicated" in out
    assert "offline, under-min-isr" in out


def test_moves_do_not_count_as_missing_replicas() -> None:
    moving = PartitionState((3, 1, 2), (1,), 1, adding=(3,), removing=(2,))
    assert health(image_of(a=[moving])).under_replicated == ()
    assert health(image_of(a=[moving])).reassigning == (TopicPartition("a", 0),)
    assert health(image_of(a=[replace(moving, isr=(2,))])).under_replicated == (TopicPartition("a", 0),)


def test_a_topic_with_fewer_replicas_than_have_to_be_in_sync_is_not_short_of_any() -> None:
    """As its leader counts; so is a topic that came with a single broker into a cluster."""
    wanted = ConfigChanged(ResourceType.TOPIC, "a", (("min.insync.replicas", "2"),))
    alone = PartitionState((1,), (1,), 1)
    assert health(image_of(a=[alone]).apply((wanted,))).is_good
    assert not health(image_of(fenced=(1,), a=[alone]).apply((wanted,))).is_good


# --- health -----------------------------------------------------------------------------------------------------------


def test_a_healthy_cluster(cluster: Commands) -> None:
    cluster.cluster(a=[GOOD, GOOD], b=[PartitionState((3, 1, 2), (1, 2), 1, adding=(3,), removing=(2,))])
    assert cluster("health") == ("healthy: 3 brokers, 2 topics, 3 partitions\n", "")
    told = cluster.json("health")
    assert told["healthy"] and told["problems"] == [] and told["live_brokers"] == told["brokers"] == 3


def test_old_brokers_tell_less(cluster: Commands) -> None:
    cluster.cluster(a=[GOOD, PartitionState((2,), (2,), -1)])
    cluster.age()
    out, _ = cluster("health", exit_code=1)
    assert out.splitlines() == ["a-1: no leader; broker 2, the last in sync, has a log that can be read"]
    assert cluster.json("describe")["controller_epoch"] == 0


def test_a_line_for_each_problem_and_an_exit_code(cluster: Commands) -> None:
    controller = cluster.cluster(
        fenced=(2,),
        a=[PartitionState((1, 2), (1,), 1), PartitionState((2,), (2,), -1), GOOD],
        b=[PartitionState((1, 2, 3), (1, 3), 1), PartitionState((1, 3), (1, 3), 1)],
    )
    wanted = ConfigChanged(ResourceType.TOPIC, "a", (("min.insync.replicas", "2"),))
    controller._view.image = controller.image.apply((wanted,), 78)
    out, _ = cluster("health", exit_code=1)
    assert out.splitlines() == [
        "broker 2 is not running (if it is gone for good: millrace cluster remove 2)",
        "a-0: under min.insync.replicas, acks=all is refused; replicas 1,2, in sync 1",
        "a-1: no leader; broker 2, the last in sync, is not running",
        "a-2: under min.insync.replicas, acks=all is refused; replicas 1,2, in sync 1,2",
        "b-0: under-replicated; replicas 1,2,3, in sync 1,3",
    ]
    told = json.loads(cluster("health", "--json", exit_code=1)[0])
    assert not told["healthy"] and told["live_brokers"] == 2
    assert [one["problem"] for one in told["problems"]] == [
        "broker-missing", "under-min-isr", "no-leader", "under-min-isr", "under-replicated",
    ]  # fmt: skip
    assert told["problems"][0]["broker"] == 2
    assert (told["problems"][2]["topic"], told["problems"][2]["partition"]) == ("a", 1)


def test_directories_that_cannot_be_used_are_problems(cluster: Commands) -> None:
    cluster.cluster(a=[GOOD])
    result = DescribeLogDirsResponse.DescribeLogDirsResult
    answers = iter(
        [
            [result(log_dir="/one"), result(log_dir="/two", error_code=ErrorCode.KAFKA_STORAGE_ERROR)],
            [result(log_dir="/three")],
            [result(log_dir="/four")],
        ]
    )
    cluster.answer(ApiKey.DESCRIBE_LOG_DIRS, lambda _: DescribeLogDirsResponse(results=next(answers)))
    out, _ = cluster("health", exit_code=1)
    assert out == "broker 1: log directory /two is offline (KAFKA_STORAGE_ERROR)\n"


def test_a_directory_below_the_reserve_is_a_problem(cluster: Commands) -> None:
    cluster.cluster(a=[GOOD])
    result = DescribeLogDirsResponse.DescribeLogDirsResult
    mib = 1024 * 1024
    sizes = iter([(10_000, 63), (10_000, 65), (100, 6)])  # of the last one a twentieth is kept free, 5 MiB
    reserve = DescribeConfigsResponse.DescribeConfigsResourceResult(name=RESERVE, value=str(64 * mib))
    configs = DescribeConfigsResponse.DescribeConfigsResult(configs=[reserve])

    def log_dirs(_: Any) -> DescribeLogDirsResponse:
        total, free = next(sizes)
        return DescribeLogDirsResponse(
            results=[result(log_dir="/one", total_bytes=total * mib, usable_bytes=free * mib)]
        )

    cluster.answer(ApiKey.DESCRIBE_LOG_DIRS, log_dirs)
    cluster.answer(ApiKey.DESCRIBE_CONFIGS, lambda _: DescribeConfigsResponse(results=[configs]))
    out, _ = cluster("health", exit_code=1)
    assert out == (
        "broker 1: log directory /one is full (66.1 MB free, see log.dirs.min.free.bytes) and takes no more records\n"
    )


def test_watching_tells_what_changes_until_ctrl_c(cluster: Commands, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = cluster.cluster(a=[GOOD])
    looks = itertools.count()

    class Pause:
        def wait(self, _: float) -> None:
            match next(looks):
                case 1:
                    lost = PartitionChanged(controller.image.topics["a"].topic_id, 0, replace(GOOD, isr=(1,)))
                    controller._view.image = controller.image.apply((lost,))
                case 3:
                    raise KeyboardInterrupt

    monkeypatch.setattr(cluster_health, "_pause", Pause())
    first, second = cluster("health", "--watch", exit_code=1)[0].splitlines()
    assert first.endswith(" healthy: 3 brokers, 1 topic, 1 partition")
    assert second.endswith(" a-0: under-replicated; replicas 1,2, in sync 1")


def test_a_cluster_that_is_away_is_not_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["cluster", "health", "--bootstrap", "127.0.0.1:1"]) == 1
    assert "no broker answers" in capsys.readouterr().err


# --- elect ------------------------------------------------------------------------------------------------------------


def test_preferred_leaders_are_elected(cluster: Commands) -> None:
    controller = cluster.cluster(a=[replace(GOOD, leader=2), GOOD], b=[replace(GOOD, leader=2)])
    out, _ = cluster("elect", "--topic", "a")
    assert out.splitlines()[1:] == ["a              0  elected"]
    assert [state.leader for _, _, state in controller.image.partitions()].count(2) == 1
    assert cluster.json("elect") == [{"topic": "b", "partition": 0, "result": "elected"}]
    assert cluster("elect")[0] == "no partition needed an election\n"
    assert cluster("elect", "--topic", "a", "--partition", "1")[0] == "no partition needed an election\n"


def test_elections_that_cannot_be(cluster: Commands) -> None:
    cluster.cluster(fenced=(1,), a=[replace(GOOD, leader=2, isr=(2,))])
    _, err = cluster("elect", "--topic", "a", exit_code=1)
    assert "1 partition got no new leader: the preferred leader is not" in err
    assert "(PREFERRED_LEADER_NOT_AVAILABLE)" in err
    assert "there is no topic 'z'" in cluster("elect", "--topic", "z", exit_code=1)[1]
    assert "has no partition 1 (it has 1)" in cluster("elect", "--topic", "a", "--partition", "1", exit_code=1)[1]


def test_an_unclean_election_asks_first(cluster: Commands) -> None:
    controller = cluster.cluster(
        fenced=(1,), a=[PartitionState((1, 2, 3), (1,), -1), PartitionState((2, 3), (2, 3), 2)]
    )
    controller.log_ends = {2: LogEnd(4, 90), 3: LogEnd(5, 70)}
    controller.turns = itertools.cycle((2, 3))
    out, err = cluster("elect", "--unclean", exit_code=1)
    assert err.count("\n") == 1 and "acknowledged records may be lost: say --yes" in err
    rows = [" ".join(line.split()) for line in out.splitlines()[2:5]]
    assert rows[0] == "a 0 1 is not running - - in sync"
    assert rows[1] == "a 0 2 has a log that can be read 4 90 -"
    assert rows[2] == "a 0 3 has a log that can be read 5 70 - would lead"
    assert out.splitlines()[5] == "a-0: broker 3 would lead from offset 70; what only broker 1 had is lost for good"
    assert cluster.asked(ApiKey.ELECT_LEADERS) == []
    (outcome,) = cluster.json("elect", "--unclean", "--yes")
    assert (outcome["topic"], outcome["partition"], outcome["result"]) == ("a", 0, "elected")
    assert outcome["would_lead"] == 3 and outcome["may_lose_acknowledged"]
    assert [(one["broker"], one["condition"], one["log_end"]) for one in outcome["replica_logs"]] == [
        (1, "not_running", None), (2, "there", 90), (3, "there", 70),
    ]  # fmt: skip
    assert controller.image.topics["a"].partitions[0].leader == 3
    assert cluster("elect", "--unclean")[0] == "no partition needed an election\n"


def test_an_unclean_election_of_one_that_has_everything_loses_nothing(cluster: Commands) -> None:
    controller = cluster.cluster(fenced=(1,), a=[PartitionState((1, 2), (1,), -1, elr=(2,))])
    controller.turns = itertools.repeat(2)
    out, err = cluster("elect", "--unclean", exit_code=1)
    assert "nothing that was acknowledged is lost" in out and "Elect these leaders: say --yes" in err


def test_nobody_can_be_elected(cluster: Commands) -> None:
    controller = cluster.cluster(fenced=(1,), a=[PartitionState((1, 2), (1, 2), -1)])
    controller.log_ends = {2: None}
    controller.turns = itertools.repeat(2)
    out, err = cluster("elect", "--unclean", "--yes", exit_code=1)
    assert "a-0: nobody can lead; start a broker" in out
    assert "1 partition got no new leader: no replica" in err and "start a broker that has one" in err
    assert "(ELIGIBLE_LEADERS_NOT_AVAILABLE)" in err


def test_why_nobody_leads(cluster: Commands) -> None:
    last = PartitionState((1, 2, 3), (1,), -1)
    controller = cluster.cluster(fenced=(3,), a=[last, last], b=[PartitionState((2, 3), (2, 3), -1)])
    controller.log_ends = {1: None}
    controller.turns = itertools.cycle((1, 2))
    out, _ = cluster("describe")
    assert (
        "a-0, a-1: no leader; broker 1, the last in sync, has a damaged log; "
        "broker 2 may lack acknowledged records; broker 3 is not running" in out
    )
    waiting = "no leader; broker 2, in sync last, has a log that can be read; broker 3, in sync last, is not running"
    assert f"b-0: {waiting}" in out
    assert [one["why"] for one in cluster.json("describe")["offline"] if one["topic"] == "b"] == [waiting]


# --- remove -----------------------------------------------------------------------------------------------------------


def test_a_broker_is_removed_when_it_is_empty_and_stopped(cluster: Commands) -> None:
    controller = cluster.cluster(fenced=(3,), a=[GOOD])
    assert (
        "holds 1 replica; move them away first with: millrace cluster reassign --drain 2"
        in (cluster("remove", "2", exit_code=1)[1])
    )
    assert "there is no broker 9; the brokers are 1,2,3" in cluster("remove", "9", exit_code=1)[1]
    assert "say --yes" in cluster("remove", "3", exit_code=1)[1]
    assert cluster("remove", "3", "--yes")[0] == "removed broker 3\n"
    assert set(controller.image.brokers) == {1, 2}
    cluster.cluster(a=[GOOD])
    assert "broker 3 is running; stop it first" in cluster("remove", "3", "--yes", exit_code=1)[1]


# --- reassign ---------------------------------------------------------------------------------------------------------


def plan_file(path: Path, *moves: tuple[str, int, list[int]]) -> str:
    rows = [{"topic": topic, "partition": index, "replicas": replicas} for topic, index, replicas in moves]
    path.write_text(json.dumps({"version": 1, "partitions": rows}))
    return str(path)


def test_a_plan_is_shown_done_and_its_leaders_follow(cluster: Commands, tmp_path: Path) -> None:
    controller = cluster.cluster(a=[GOOD, GOOD, GOOD])
    file = plan_file(tmp_path / "plan.json", ("a", 0, [3, 2]), ("a", 1, [1, 3]), ("a", 2, [1, 2]))
    out, err = cluster("reassign", "--file", file, "--dry-run")
    assert [line.split() for line in out.splitlines()[1:3]] == [["a", "0", "1,2", "3,2"], ["a", "1", "1,2", "1,3"]]
    assert "2 partitions, 2 new replicas, about 2.0 kB to copy" in err
    assert cluster.asked(ApiKey.ALTER_PARTITION_REASSIGNMENTS) == []
    planned = cluster.json("reassign", "--file", file, "--dry-run")
    assert [row["partition"] for row in planned["partitions"]] == [0, 1]

    assert "say --yes" in cluster("reassign", "--file", file, exit_code=1)[1]
    out, err = cluster("reassign", "--file", file, "--yes")
    assert out.splitlines()[-1] == "moved 2 partitions"
    assert "0 of 2 partitions moved" in err and "2 of 2 partitions moved" in err
    states = controller.image.topics["a"].partitions
    assert [(state.replicas, state.leader) for state in states] == [((3, 2), 3), ((1, 3), 1), ((1, 2), 1)]
    assert cluster("reassign", "--file", file, "--yes")[0] == "nothing to move\n"


def test_topics_get_more_replicas(cluster: Commands) -> None:
    alone = PartitionState((1,), (1,), 1)
    controller = cluster.cluster(a=[alone] * 3, b=[alone], __consumer_offsets=[alone])
    cluster("reassign", "--replication-factor", "2", "--topic", "b", "--yes")
    assert [len(state.replicas) for _, _, state in controller.image.partitions()].count(2) == 1
    cluster("reassign", "--replication-factor", "3", "--yes")
    found = {
        topic.name: [set(state.replicas) for state in topic.partitions] for topic in controller.image.topics.values()
    }
    assert found == {"a": [{1, 2, 3}] * 3, "b": [{1, 2, 3}], "__consumer_offsets": [{1}]}
    assert "4 replicas of a-0 need 4 brokers" in cluster("reassign", "--replication-factor", "4", exit_code=1)[1]
    assert "exclude each other" in cluster("reassign", "--replication-factor", "2", "--status", exit_code=2)[1]


def test_a_limit_is_set_before_the_move_and_taken_off_after_it(cluster: Commands, tmp_path: Path) -> None:
    controller = cluster.cluster(a=[GOOD])
    file = plan_file(tmp_path / "plan.json", ("a", 0, [1, 3]))
    cluster("reassign", "--file", file, "--yes", "--throttle", "5000")
    first, last = cluster.asked(ApiKey.INCREMENTAL_ALTER_CONFIGS)
    told = {
        (resource.resource_type, resource.resource_name): {config.name: config.value for config in resource.configs}
        for resource in first.resources
    }
    rates = {"leader.replication.throttled.rate": "5000", "follower.replication.throttled.rate": "5000"}
    assert told == {
        (ResourceType.BROKER, "1"): rates,
        (ResourceType.BROKER, "2"): rates,
        (ResourceType.BROKER, "3"): rates,
        (ResourceType.TOPIC, "a"): {
            "leader.replication.throttled.replicas": "0:1,0:2",
            "follower.replication.throttled.replicas": "0:3",
        },
    }
    assert {config.value for resource in last.resources for config in resource.configs} == {None}
    assert not controller.image.configs


def test_what_is_refused_is_told(cluster: Commands, tmp_path: Path) -> None:
    controller = cluster.cluster(a=[GOOD, GOOD])
    file = plan_file(tmp_path / "plan.json", ("a", 0, [9, 1]), ("a", 1, [1, 3]))
    out, err = cluster("reassign", "--file", file, "--yes", exit_code=1)
    assert "millrace: error: a-0:" in err and "INVALID_REPLICA_ASSIGNMENT" in err
    assert out.splitlines()[-1] == "moved 1 partition"
    assert controller.image.topics["a"].partitions[1].replicas == (1, 3)


def test_a_move_can_be_watched_and_taken_back(cluster: Commands) -> None:
    moving = PartitionState((3, 2, 1), (1, 2), 1, adding=(3,), removing=(1,))
    controller = cluster.cluster(stalled=True, a=[GOOD, moving], b=[moving])
    assert "2 partitions are being moved: wait (--status)" in cluster("reassign", "--drain", "1", exit_code=1)[1]
    assert cluster.json("reassign", "--status", "--topic", "b") == [
        {"topic": "b", "partition": 0, "replicas": [2, 1], "adding": [3], "removing": [1], "isr": [1, 2]}
    ]
    out, _ = cluster("reassign", "--status")
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["a", "1", "2,1", "3", "1", "1,2"],
        ["b", "0", "2,1", "3", "1", "1,2"],
    ]
    assert "say --yes" in cluster("reassign", "--cancel", "--topic", "b", exit_code=1)[1]
    assert cluster("reassign", "--cancel", "--topic", "b", "--yes")[0] == "took back 1 partition\n"
    assert set(controller.image.topics["b"].partitions[0].replicas) == {1, 2}
    assert controller.image.topics["a"].partitions[1] == moving
    assert cluster.json("reassign", "--cancel", "--yes") == [{"topic": "a", "partition": 1, "result": "taken back"}]
    assert cluster("reassign", "--cancel", "--yes")[0] == "took back 0 partitions\n"


def test_a_move_that_arrives_while_it_is_taken_back_is_no_failure(cluster: Commands) -> None:
    moving = PartitionState((3, 2, 1), (1, 2), 1, adding=(3,), removing=(1,))
    controller = cluster.cluster(a=[moving, moving])
    assert cluster("reassign", "--cancel", "--yes")[0] == "took back 1 partition\n"
    assert [set(state.replicas) for state in controller.image.topics["a"].partitions] == [{3, 2}, {1, 2}]


def test_a_move_goes_on_after_ctrl_c(cluster: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    controller = cluster.cluster(stalled=True, a=[GOOD])
    monkeypatch.setattr(moves, "under_way", interrupted)
    file = plan_file(tmp_path / "plan.json", ("a", 0, [1, 3]))
    _, err = cluster("reassign", "--file", file, "--yes", exit_code=130)
    assert "see it with: millrace cluster reassign --status" in err and "millrace cluster reassign --cancel" in err
    assert controller.image.topics["a"].partitions[0].adding == (3,)


def test_status_takes_off_limits_that_were_left_behind(cluster: Commands) -> None:
    controller = cluster.cluster(a=[GOOD])
    left = ConfigChanged(ResourceType.TOPIC, "a", (("leader.replication.throttled.replicas", "0:1"),))
    rate = ConfigChanged(ResourceType.BROKER, "1", (("leader.replication.throttled.rate", "5"),))
    controller._view.image = controller.image.apply((left, rate))
    out, err = cluster("reassign", "--status")
    assert out == "nothing is being moved\n"
    assert "took off the limits" in err
    assert not controller.image.configs
    assert "took off" not in cluster("reassign", "--status")[1]


def test_plans_name_brokers_that_can_be_used() -> None:
    image = image_of(fenced=(2,), a=[GOOD, GOOD])

    def plan(**changes: Any) -> list[Reassignment]:
        return moves.make_plan(image, **{"add": [], "drain": [], "topics": None, **changes})

    with pytest.raises(AdminError, match="there is no broker 9; the brokers are 1, 2, 3"):
        plan(drain=[9])
    with pytest.raises(AdminError, match="broker 2 is not running"):
        plan(add=[2])
    with pytest.raises(AdminError, match="there is no topic 'z'"):
        plan(topics=["z"])
    with pytest.raises(AdminError, match="broker"):
        plan(drain=[2, 3])
    # A dead broker can be drained, and an empty one takes its place.
    assert [set(move.replicas or ()) for move in plan(drain=[2])] == [{1, 3}, {1, 3}]


def test_a_plan_leaves_empty_brokers_alone_unless_they_are_named() -> None:
    brokers = (BrokerRegistered(broker_id, 100, (Endpoint("", HOST, 1),)) for broker_id in (4, 5))
    image = image_of(a=[PartitionState((1, 2, 3), (1, 2, 3), 1)] * 6).apply(tuple(brokers))
    added = moves.make_plan(image, add=[4], drain=[], topics=None)
    used = {replica for move in added for replica in move.replicas or ()}
    assert 4 in used and 5 not in used
    evened = moves.make_plan(image, add=[], drain=[], topics=None)
    assert {4, 5} <= {replica for move in evened for replica in move.replicas or ()}


def test_only_the_topics_asked_for_move() -> None:
    image = image_of(a=[GOOD, GOOD, GOOD], b=[GOOD, GOOD, GOOD])
    plan = moves.make_plan(image, add=[], drain=[2], topics=["b"])
    assert {move.topic for move in plan} == {"b"} and len(plan) == 3


def test_a_broker_is_drained_and_removed(cluster: Commands) -> None:
    controller = cluster.cluster(a=[GOOD, GOOD], b=[GOOD])
    planned = cluster.json("reassign", "--drain", "2", "--dry-run")
    assert len(planned["partitions"]) == 3
    cluster("reassign", "--drain", "2", "--yes")
    assert not any(2 in state.replicas for _, _, state in controller.image.partitions())
    assert "is running; stop it first" in cluster("remove", "2", "--yes", exit_code=1)[1]


def test_plans_from_files_are_checked() -> None:
    plan = [Reassignment("a", 0, (3, 1)), Reassignment("a", 1, (1, 2))]
    text = json.dumps(moves.render_plan(plan))
    assert moves.parse_plan(text, "plan.json") == plan
    image = image_of(a=[GOOD, GOOD])
    assert moves.check_plan(image, plan) == plan[:1]
    with pytest.raises(AdminError, match="there is no partition a-2"):
        moves.check_plan(image, [Reassignment("a", 2, (1,))])
    for wrong in ("[]", "{", '{"partitions": [{"topic": "a"}]}', '{"partitions": 3}'):
        with pytest.raises(AdminError, match=r"plan.json is no plan .*it looks like"):
            moves.parse_plan(wrong, "plan.json")
