"""Planted broker bugs: each is caught by a fault test. A test that a broken broker passes would prove nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Final

import pytest

from cluster.disk_faults import first_back_with_empty_disks
from cluster.faults import (
    cut_power_of_all,
    deaf_leader_killed,
    two_leaders_killed_before_the_third_replica_heard_of_either,
)
from cluster.group_faults import kill, pause_members
from cluster.group_rounds import SETTINGS, SHORT_GROUP, GroupStage, of_group, run_group_round
from cluster.queue_rounds import SETTINGS as QUEUE_SETTINGS
from cluster.queue_rounds import SHORT_QUEUE, run_queue_round
from cluster.rounds import SHORT, Fault, Result, Scale, run_round
from cluster.transaction_faults import kill_all, kill_coordinator_before_its_markers_arrive, nothing_else
from cluster.transaction_rounds import SETTINGS as TRANSACTION_SETTINGS
from cluster.transaction_rounds import (
    SHORT_COPY,
    SHORT_MIX,
    TransactionFault,
    TransactionStage,
    of_transactions,
    run_copy_round,
    run_late_round,
    run_mixed_round,
)
from support.checker import Anomaly
from support.cluster_processes import ClusterProcesses, Layout

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

Play = Callable[[ClusterProcesses, Fault, Scale, int], Result]

# A broken broker may never be whole again: what clients saw is judged all the same, so there is no need to wait long.
SCALE: Final = dataclasses.replace(SHORT, acked=2_000, bounces=1, heals_within_s=6)


def caught(bug: str, fault: Fault, *, proxied: bool = False, bounces: int = 1) -> Result:
    layout = Layout(proxied=proxied, session_timeout_ms=SCALE.session_timeout_ms, planted=bug)
    with ClusterProcesses(layout) as cluster:
        return run_round(cluster, fault, dataclasses.replace(SCALE, bounces=bounces))


def test_acknowledgement_before_replication() -> None:
    result = caught("ack-before-replication", deaf_leader_killed, proxied=True)
    assert result.lost, result.describe()


def test_truncation_to_the_high_watermark() -> None:
    # Four times in five the follower's mark is behind at that moment; the first loss ends the round.
    fault = two_leaders_killed_before_the_third_replica_heard_of_either
    result = caught("truncation-to-high-watermark", fault, proxied=True, bounces=12)
    assert result.lost, result.describe()


def test_epochs_that_are_ignored() -> None:
    result = caught("ignored-epoch", deaf_leader_killed, proxied=True)
    differences = [failure for failure in result.failures if "differ" in failure]
    assert differences or Anomaly.INCONSISTENT in result.report.counts, result.describe()


def test_no_deduplication() -> None:
    result = caught("no-deduplication", deaf_leader_killed, proxied=True)
    assert result.duplicates, result.describe()


def test_a_flush_that_is_skipped() -> None:
    result = caught("skipped-flush", cut_power_of_all)
    assert result.lost, result.describe()


def test_directories_that_are_ignored() -> None:
    """Whoever was the last one in the ISR leads, and what it has is nothing: the others follow it."""
    result = caught("ignored-directories", first_back_with_empty_disks)
    assert result.lost, result.describe()


def test_commits_of_members_that_were_removed() -> None:
    # A member that wakes up commits before it hears that it was removed, seven times in eight.
    scale = dataclasses.replace(SHORT_GROUP, bounces=3)
    layout = Layout(planted="commits-of-anybody", settings=SETTINGS)
    with ClusterProcesses(layout) as cluster:
        result = run_group_round(cluster, of_group(pause_members), scale)
    assert Anomaly.COMMIT_BACK in result.report.counts, result.describe()


def test_acknowledgements_of_a_queue_that_are_not_kept_yet() -> None:
    layout = Layout(planted="accepted-before-kept", settings=QUEUE_SETTINGS)
    with ClusterProcesses(layout) as cluster:
        scale = dataclasses.replace(SHORT_QUEUE, library_every=0)
        for seed in range(5):  # a kill has to come between an answer and the write behind it
            result = run_queue_round(cluster, of_group(kill(GroupStage.leader)), scale, seed)
            if Anomaly.AGAIN in result.report.counts:
                return
    raise AssertionError(result.describe())


def caught_in_transactions(bug: str, play: Play, fault: TransactionFault, *, seed: int = 0, brokers: int = 1) -> Result:
    layout = Layout(
        brokers=brokers,
        zookeeper_nodes=1 if brokers > 1 else 0,
        planted=bug,
        proxied=True,
        client_links=True,
        session_timeout_ms=3000,
        settings=TRANSACTION_SETTINGS,
    )
    size = SHORT_COPY if play is run_copy_round else SHORT_MIX
    scale = dataclasses.replace(size, acked=size.acked // 4, heals_within_s=6, stable_within_s=2, copied_within_s=15)
    with ClusterProcesses(layout) as cluster:
        return play(cluster, of_transactions(fault), scale, seed)


def test_markers_that_a_new_coordinator_does_not_send() -> None:
    fault = kill_coordinator_before_its_markers_arrive
    result = caught_in_transactions("forgotten-markers", run_mixed_round, fault, brokers=3)
    found = {Anomaly.HANGING, Anomaly.LOST, Anomaly.TORN, Anomaly.ABORTED_READ}
    assert found & result.report.counts.keys(), result.describe()


def test_an_epoch_that_stays_as_it_is() -> None:
    result = caught_in_transactions("epoch-not-bumped", run_late_round, nothing_else)
    found = {Anomaly.LOST, Anomaly.TORN, Anomaly.ABORTED_READ}
    assert found & result.report.counts.keys(), result.describe()


def test_a_leader_that_does_not_ask_the_coordinator() -> None:
    result = caught_in_transactions("no-verification", run_late_round, nothing_else, seed=1)
    assert {Anomaly.HANGING, Anomaly.ABORTED_READ} & result.report.counts.keys(), result.describe()


def test_aborted_transactions_that_recovery_forgets() -> None:
    def after_some_aborts(stage: TransactionStage) -> None:
        stage.goes_on(200)
        kill_all(stage)

    result = caught_in_transactions("forgotten-aborts", run_mixed_round, after_some_aborts)
    assert Anomaly.ABORTED_READ in result.report.counts, result.describe()


def test_offsets_that_are_visible_before_their_transaction_is_committed() -> None:
    result = caught_in_transactions("offsets-before-marker", run_copy_round, nothing_else)
    assert {Anomaly.MISSED, Anomaly.ABORTED_OFFSET} <= result.report.counts.keys(), result.describe()


def test_a_power_cut_of_all_brokers_loses_nothing_without_a_bug() -> None:
    result = caught("power-loss", cut_power_of_all)
    assert result.green, result.describe()
