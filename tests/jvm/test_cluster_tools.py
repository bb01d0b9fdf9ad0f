"""kafka-metadata-quorum, kafka-cluster, kafka-leader-election and kafka-reassign-partitions, on one broker."""

from __future__ import annotations

import json
import re
from pathlib import Path

from support.kafka_tools import KafkaTools

QUORUM = "org.apache.kafka.tools.MetadataQuorumCommand"
ELECTION = "org.apache.kafka.tools.LeaderElectionCommand"
REASSIGNMENT = "org.apache.kafka.tools.reassign.ReassignPartitionsCommand"


def test_the_quorum_has_a_leader_and_no_lag(tools: KafkaTools) -> None:
    told = tools.run(QUORUM, "describe", "--status").stdout
    (leader,) = re.findall(r"LeaderId:\s+(\d+)", told)
    assert re.search(r"HighWatermark:\s+[1-9]\d*\n", told)
    assert re.search(r"MaxFollowerLag:\s+0\n", told)
    (voters,) = re.findall(r"CurrentVoters:\s+(\[.*\])", told)
    assert f'"id": {leader}' in voters
    rows = [line.split() for line in tools.run(QUORUM, "describe", "--replication").lines]
    assert [row[0] for row in rows if row[-1] == "Leader"] == [leader]


def test_an_election_that_is_not_needed_is_no_failure(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic, partitions=2)
    options = ("--election-type", "preferred")
    done = tools.run(ELECTION, *options, "--topic", topic, "--partition", "1")
    assert "Valid replica already elected for partitions" in done.stdout
    tools.run(ELECTION, *options, "--all-topic-partitions")
    unknown = tools.attempt(ELECTION, *options, "--topic", topic, "--partition", "9")
    assert "UnknownTopicOrPartitionException" in unknown.stdout + unknown.stderr


def test_a_move_to_where_it_is_is_done_at_once(tools: KafkaTools, topic: str, tmp_path: Path) -> None:
    tools.create_topic(topic)
    (leader,) = re.findall(r"LeaderId:\s+(\d+)", tools.run(QUORUM, "describe", "--status").stdout)
    plan = tmp_path / "plan.json"
    row = {"topic": topic, "partition": 0, "replicas": [int(leader)]}
    plan.write_text(json.dumps({"version": 1, "partitions": [row]}))
    file = ("--reassignment-json-file", str(plan))
    assert "Successfully started" in tools.run(REASSIGNMENT, *file, "--execute").stdout
    assert f"partition {topic}-0 is completed" in tools.run(REASSIGNMENT, *file, "--verify").stdout
    assert "No partition reassignments found" in tools.run(REASSIGNMENT, "--list").stdout
    row["replicas"] = [999]
    plan.write_text(json.dumps({"version": 1, "partitions": [row]}))
    refused = tools.attempt(REASSIGNMENT, *file, "--execute")
    assert "999" in refused.stdout + refused.stderr
    assert "No partition reassignments found" in tools.run(REASSIGNMENT, "--list").stdout
