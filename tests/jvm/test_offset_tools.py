"""kafka-get-offsets, kafka-delete-records and kafka-log-dirs."""

from __future__ import annotations

import json
import time
from pathlib import Path

from support.kafka_jars import DELETE_RECORDS, GET_OFFSETS, LOG_DIRS
from support.kafka_tools import KafkaTools


def test_earliest_latest_and_by_time(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic, partitions=2)
    before_ms = time.time_ns() // 1_000_000
    tools.produce(topic, ["k\tfirst"], "--reader-property", "parse.key=true")
    between_ms = time.time_ns() // 1_000_000 + 1
    tools.produce(topic, ["k\tsecond", "k\tthird"], "--reader-property", "parse.key=true")
    (index,) = [index for index, end in tools.offsets(topic).items() if end == 3]
    assert tools.offsets(topic, "earliest") == {0: 0, 1: 0}
    assert tools.offsets(topic, str(before_ms)) == {index: 0}
    assert tools.offsets(topic, str(between_ms)) == {index: 1}
    assert tools.offsets(topic, str(between_ms + 3_600_000)) == {}
    assert tools.offsets(topic, "max-timestamp")[index] in (1, 2)


def test_unknown_topic_is_an_error(tools: KafkaTools, topic: str) -> None:
    missing = tools.attempt(GET_OFFSETS, "--topic", topic)
    assert missing.status != 0
    assert "Could not match any topic-partitions" in missing.stdout + missing.stderr


def test_delete_records(tools: KafkaTools, topic: str, tmp_path: Path) -> None:
    tools.create_topic(topic)
    tools.produce(topic, [str(number) for number in range(10)])

    def delete_before(offset: int) -> str:
        request = {"partitions": [{"topic": topic, "partition": 0, "offset": offset}], "version": 1}
        plan = tmp_path / "offsets.json"
        plan.write_text(json.dumps(request))
        return tools.run(DELETE_RECORDS, "--offset-json-file", str(plan)).stdout

    assert "low_watermark: 4" in delete_before(4)
    assert tools.offsets(topic, "earliest") == {0: 4}
    assert tools.consume(topic, 6, "--from-beginning") == [str(number) for number in range(4, 10)]
    assert "OffsetOutOfRangeException" in delete_before(1000)
    assert "low_watermark: 10" in delete_before(-1)
    assert tools.offsets(topic, "earliest") == tools.offsets(topic, "latest") == {0: 10}


def test_log_dirs(tools: KafkaTools, topic: str) -> None:
    tools.create_topic(topic)
    tools.produce(topic, ["x" * 1000])
    report = json.loads(tools.run(LOG_DIRS, "--describe", "--topic-list", topic).lines[-1])
    ((partition,),) = [each["partitions"] for broker in report["brokers"] for each in broker["logDirs"]]
    assert partition["partition"] == f"{topic}-0"
    assert 1000 < partition["size"] < 1200
