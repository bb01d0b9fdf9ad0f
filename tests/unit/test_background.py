"""Every kind of background task of a running broker is ended with an exception: it is logged, and the task goes on, or
the broker ends with a reason.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from millrace import tasks
from millrace.client.blocking import BlockingConnection
from millrace.cluster.planning import TopicRef
from millrace.errors import ApiError, ErrorCode, StorageError
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.model import CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC
from millrace.queues.records import ShareKey
from millrace.storage.log import Log
from millrace.wire.messages.topics import CreateTopicsRequest
from support.one_loop import Brokers, until

OF_EVERY_BROKER = {
    "retention", "compaction", "checkpoints", "high watermarks", "disk space", "disk reports", "loop lag",
    "metadata-follow", "metadata-write", "membership", "sessions", "registrations",
    "leader-rebalance", "internal-topics", "recovery", "expired-tokens",
    "isr-proposals", "isr-check",
    "idle-sweep-PLAINTEXT",
    "coordinating __consumer_offsets-N", "offset expiry",
    "coordinating __share_group_state-N", "share state snapshots", "share state pruning",
}  # fmt: skip
OF_SEVERAL = {"fetch from broker N", "lease", "liveness", "watch-broker-N"}
FATAL = {"metadata-follow"}


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "FIRST_PAUSE_S", 0.01)


class Planted(Exception):
    """What ends a task here."""


def kept_tasks() -> list[asyncio.Task[Any]]:
    """The tasks on this loop that should never end."""
    return [task for task in asyncio.all_tasks() if task.get_coro().__qualname__ == "Tasks._keep"]  # type: ignore[union-attr]


def kind_of(task: asyncio.Task[Any]) -> str:
    return re.sub(r"\d+", "N", task.get_name())


def work_of(task: asyncio.Task[Any]) -> str | None:
    """What the owner of the task waits for: the work itself, or the end of the pause before it begins again."""
    return getattr(task.get_coro().cr_await, "__qualname__", None)  # type: ignore[union-attr]


async def end(task: asyncio.Task[Any]) -> Planted:
    """Have the task fail where it waits."""
    planted = Planted(task.get_name())
    while True:
        waiter = task._fut_waiter  # type: ignore[attr-defined]
        while isinstance(waiter, asyncio.Task):
            waiter = waiter._fut_waiter  # type: ignore[attr-defined]
        if waiter is not None and not waiter.done():
            waiter.set_exception(planted)
            return planted
        await asyncio.sleep(0)


def was_logged(caplog: pytest.LogCaptureFixture, error: Exception) -> bool:
    return any(record.exc_info is not None and record.exc_info[1] is error for record in caplog.records)


async def prepare(brokers: Brokers) -> None:
    """Have everything run that a broker ever runs in the background."""
    await brokers.create("t", *([tuple(range(1, brokers.count + 1))] * 3))
    for topic in (CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC):
        await brokers.controller.controller.ensure_internal_topic(topic)
    await until(lambda: all(_leader(brokers, topic) > 0 for topic in (CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC)))
    await until(lambda: {kind_of(task) for task in kept_tasks()} >= OF_EVERY_BROKER)


def _leader(brokers: Brokers, topic: str) -> int:
    found = brokers.image.topic(topic)
    return -1 if found is None else found.partitions[0].leader


async def check_that_it_works(brokers: Brokers) -> None:
    """Topics are made and deleted, records committed, offsets kept, the state of queues as well."""
    everybody = tuple(range(1, brokers.count + 1))
    await brokers.create("check", everybody)
    leader = brokers.replica(1, "check")
    await brokers.write(leader)
    groups = brokers.services(_leader(brokers, CONSUMER_OFFSETS_TOPIC)).groups
    commit = OffsetToCommit("check", 0, leader.topic_id, 3, -1, "")
    assert await groups.commit("g", [commit]) == [ErrorCode.NONE]
    assert (await groups.fetch_offsets("g"))["check"][0].offset == 3
    queues = brokers.services(_leader(brokers, SHARE_STATE_TOPIC)).share_state
    key = ShareKey("q", leader.topic_id, 0)
    await queues.initialize(key, 1, 2)
    assert (await queues.summary(key)).start_offset == 2
    (outcome,) = await brokers.controller.controller.delete_topics([TopicRef("check")])
    assert outcome.error is None
    for broker_id in everybody:
        replicas = brokers.services(broker_id).replicas
        await until(lambda replicas=replicas: replicas.held("check", 0) is None)  # type: ignore[misc]


async def end_each(brokers: Brokers, caplog: pytest.LogCaptureFixture, expected: set[str]) -> None:
    assert {kind_of(task) for task in kept_tasks()} == expected
    for task in kept_tasks():
        if kind_of(task) in FATAL or task.done():  # with the task that started it
            continue
        await until(lambda task=task: work_of(task) != "SystemClock.sleep")  # type: ignore[misc]
        work = work_of(task)
        error = await end(task)
        await until(lambda error=error: was_logged(caplog, error))  # type: ignore[misc]
        await until(lambda task=task, work=work: task.done() or work_of(task) == work)  # type: ignore[misc]
        assert not task.done()
    await until(lambda: {kind_of(task) for task in kept_tasks()} == expected)
    await check_that_it_works(brokers)
    for broker in brokers.running.values():
        assert broker.failure is None


async def end_one_for_good(brokers: Brokers) -> None:
    await end(next(task for task in kept_tasks() if kind_of(task) in FATAL))
    await until(lambda: any(broker.failed.is_set() for broker in brokers.running.values()))
    (failure,) = [broker.failure for broker in brokers.running.values() if broker.failure is not None]
    assert failure.startswith("metadata-follow: the metadata log cannot be followed")


async def test_the_tasks_of_a_broker_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Brokers(tmp_path, 1) as alone:
        await prepare(alone)
        await end_each(alone, caplog, OF_EVERY_BROKER)
        await end_one_for_good(alone)
    assert not kept_tasks()


async def test_the_tasks_of_a_cluster(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with Brokers(tmp_path, 3, watched=True) as brokers:
        await prepare(brokers)
        await until(lambda: {kind_of(task) for task in kept_tasks()} >= OF_SEVERAL)
        await end_each(brokers, caplog, OF_EVERY_BROKER | OF_SEVERAL)
        await end_one_for_good(brokers)
    assert not kept_tasks()


# --- a coordinator that loads -----------------------------------------------------------------------------------------


async def test_a_log_that_cannot_be_read_while_a_coordinator_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    read = Log.read
    failing: set[str] = set()

    def read_or_fail(self: Log, *args: Any, **kwargs: Any) -> Any:
        if self.directory.name in failing:
            raise StorageError("the planted fault")
        return read(self, *args, **kwargs)

    monkeypatch.setattr(Log, "read", read_or_fail)
    async with Brokers(tmp_path, 1) as alone:
        await prepare(alone)
        await check_that_it_works(alone)
        await alone.create("kept", (1,))
        commit = OffsetToCommit("kept", 0, alone.replica(1, "kept").topic_id, 5, -1, "")
        await alone.services(1).groups.commit("g", [commit])
        key = ShareKey("q", commit.topic_id, 0)
        await alone.services(1).share_state.initialize(key, 1, 2)
        await alone.stop(1)
        failing.update((f"{CONSUMER_OFFSETS_TOPIC}-0", f"{SHARE_STATE_TOPIC}-0"))
        await alone.start(1)
        services = alone.services(1)
        for topic in (CONSUMER_OFFSETS_TOPIC, SHARE_STATE_TOPIC):
            told = f"coordinating {topic}-0 has failed, and begins again in 0.0 s: the planted fault"
            await until(lambda told=told: told in caplog.text)  # type: ignore[misc]
        for asked in (services.groups.fetch_offsets("g"), services.share_state.summary(key)):
            with pytest.raises(ApiError) as loading:
                await asked
            assert loading.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
        failing.clear()
        await services.groups.loaded()
        await services.share_state.loaded()
        held = await services.groups.fetch_offsets("g")
        summary = await services.share_state.summary(key)
        assert held["kept"][0].offset == 5
        assert summary.start_offset == 2


# --- a process --------------------------------------------------------------------------------------------------------

BROKER_WITH_A_PLANTED_FAULT = """
from millrace.cluster.view import MetadataView
apply = MetadataView._apply

def fail_on_boom(self, new, changes):
    if new.topic("boom") is not None:
        raise RuntimeError("planted")
    apply(self, new, changes)

MetadataView._apply = fail_on_boom
from millrace.cli import main
main()
"""


def test_a_broker_that_cannot_go_on_says_why_and_ends(tmp_path: Path) -> None:
    config = tmp_path / "server.properties"
    config.write_text(f"broker.id=1\nlisteners=PLAINTEXT://127.0.0.1:0\nlog.dirs={tmp_path / 'data'}\n")
    broker = subprocess.Popen(
        [sys.executable, "-c", BROKER_WITH_A_PLANTED_FAULT, "broker", "--config", str(config), "--log-level", "error"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert broker.stdout is not None
        ready = broker.stdout.readline()
        connection = BlockingConnection("127.0.0.1", int(ready.rpartition(":")[2]))
        topic = CreateTopicsRequest.CreatableTopic(name="boom", num_partitions=1, replication_factor=1)
        answer = connection.request(CreateTopicsRequest(topics=[topic]))
        assert answer.topics[0].error_code
        connection.close()
        _, errors = broker.communicate(timeout=60)
    finally:
        broker.kill()
        broker.wait()
    assert broker.returncode == 1
    last = errors.strip().splitlines()[-1]
    assert "the broker has stopped: metadata-follow: the metadata log cannot be followed: planted" in last
