"""`millrace configs` against running brokers: every kind of resource, where values come from, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clients.test_command_line import CommandLine
from millrace.testing import Cluster

pytestmark = pytest.mark.parametrize("cluster", [3], ids=["3-brokers"], indirect=True)


@pytest.fixture
def run(cluster: Cluster, capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(cluster.bootstrap_servers, capsysbinary, tmp_path / "stdin")


@pytest.fixture
def topic(run: CommandLine, fresh: Callable[[str], str]) -> str:
    name = fresh("cli-configs")
    run.text("topics", "create", name)
    return name


def own(run: CommandLine, topic: str) -> dict[str, str]:
    """What was set for the topic itself: the brokers of these tests have settings in their files, too."""
    found = run.json("configs", "get", "--topic", topic)
    assert {each["source"] for each in found} <= {"DYNAMIC_TOPIC_CONFIG", "STATIC_BROKER_CONFIG"}
    return {each["name"]: each["value"] for each in found if each["source"] == "DYNAMIC_TOPIC_CONFIG"}


def test_settings_of_a_topic(run: CommandLine, topic: str) -> None:
    of_topic = ("--topic", topic)
    assert own(run, topic) == {}
    assert "the broker's file" in run.text("configs", "get", *of_topic)
    assert run.text("configs", "set", "retention.ms=1000", "max.message.bytes=2000", *of_topic) == (
        f"set retention.ms=1000 for topic '{topic}'\nset max.message.bytes=2000 for topic '{topic}'\n"
    )
    assert own(run, topic) == {"max.message.bytes": "2000", "retention.ms": "1000"}
    assert run.json("configs", "get", "retention.ms", *of_topic) == [
        {
            "name": "retention.ms",
            "value": "1000",
            "source": "DYNAMIC_TOPIC_CONFIG",
            "sensitive": False,
            "read_only": False,
        }
    ]
    assert run.text("configs", "get", "retention.ms", "segment.ms", *of_topic).splitlines() == [
        "NAME              VALUE  SOURCE",
        "retention.ms       1000  the topic",
        "segment.ms    604800000  default",
    ]
    everything = {each["name"]: each for each in run.json("configs", "get", "--all", *of_topic)}
    assert len(everything) > 30
    assert everything["segment.ms"]["source"] == "DEFAULT_CONFIG"

    out, err = run.raw("configs", "unset", "retention.ms", "segment.ms", *of_topic)
    assert out.decode() == f"unset retention.ms for topic '{topic}'\n"
    assert err == f"segment.ms is not set for topic '{topic}'\n"
    assert run.json("configs", "unset", "retention.ms", "max.message.bytes", *of_topic) == [
        {"name": "retention.ms", "result": "not set"},
        {"name": "max.message.bytes", "result": "unset"},
    ]
    assert own(run, topic) == {}


def test_what_is_refused(run: CommandLine, topic: str) -> None:
    of_topic = ("--topic", topic)
    run.text("configs", "set", "retention.ms=1000", *of_topic)
    near = f"there is no setting 'retenion.ms' of topic '{topic}'; did you mean 'retention.ms'?"
    for words in (["get", "retenion.ms"], ["set", "retenion.ms=1"], ["unset", "retenion.ms"]):
        assert near in run.error("configs", *words, *of_topic)
    wrong = run.error("configs", "set", "retention.ms=soon", "segment.ms=1000", *of_topic)
    assert wrong.endswith("retention.ms=soon: expected a whole number (long)")
    assert own(run, topic) == {"retention.ms": "1000"}, "all of it or nothing"
    assert "did you mean" in run.error("configs", "get", "--topic", topic[:-1] + "x")
    assert "must be between 2 and 10" in run.error("configs", "set", "share.delivery.count.limit=11", "--group", "g")
    assert "there is no broker 77 in the cluster" in run.error("configs", "get", "--broker", "77")
    assert "cannot change while brokers run" in run.error("configs", "set", "num.partitions=3", "--broker", "1")


def test_settings_of_a_group(run: CommandLine, fresh: Callable[[str], str]) -> None:
    of_group = ("--group", fresh("cli-configs"))

    def own() -> list[dict[str, str]]:  # the brokers' files of this cluster say something of groups, too
        return [each for each in run.json("configs", "get", *of_group) if each["source"] == "DYNAMIC_GROUP_CONFIG"]

    assert own() == []
    run.text("configs", "set", "share.delivery.count.limit=3", *of_group)
    (limit,) = own()
    assert (limit["name"], limit["value"], limit["source"]) == (
        "share.delivery.count.limit",
        "3",
        "DYNAMIC_GROUP_CONFIG",
    )
    assert "the group" in run.text("configs", "get", *of_group)
    run.text("configs", "unset", "share.delivery.count.limit", *of_group)
    (limit,) = run.json("configs", "get", "share.delivery.count.limit", *of_group)
    assert (limit["value"], limit["source"]) == ("5", "DEFAULT_CONFIG")


def test_settings_of_brokers(run: CommandLine) -> None:
    """Of one, which only it can tell, and of all; what was set for one comes first."""
    last = str(len(run.bootstrap.split(",")))
    name = "log.retention.ms"

    def of_broker(setting: str) -> tuple[str, str]:
        (found,) = run.json("configs", "get", setting, "--broker", last)
        return found["value"], found["source"]

    assert "log.dirs" in run.text("configs", "get", "--broker", last)
    run.text("configs", "set", f"{name}=3600000", "--brokers")
    try:
        (shared,) = run.json("configs", "get", "--brokers")
        assert (shared["name"], shared["source"]) == (name, "DYNAMIC_DEFAULT_BROKER_CONFIG")
        assert of_broker(name) == ("3600000", "DYNAMIC_DEFAULT_BROKER_CONFIG")
        assert of_broker("log.retention.hours") == ("168", "DEFAULT_CONFIG"), "although another one overrules it"
        run.text("configs", "set", f"{name}=7200000", "--broker", last)
        assert of_broker(name) == ("7200000", "DYNAMIC_BROKER_CONFIG")
        assert (
            "log.retention.hours is not set" in run.raw("configs", "unset", "log.retention.hours", "--broker", last)[1]
        )
        assert "log.retention.hours is not set for all" in run.error(
            "configs", "get", "log.retention.hours", "--brokers"
        )
        assert "did you mean 'log.retention.hours'" in run.error("configs", "unset", "log.retention.hors", "--brokers")
        run.text("configs", "unset", name, "--broker", last)
        assert of_broker(name) == ("3600000", "DYNAMIC_DEFAULT_BROKER_CONFIG")
    finally:
        run.text("configs", "unset", name, "--brokers")
    assert run.json("configs", "get", "--brokers") == []
    out, err = run.raw("configs", "get", "--brokers")
    assert (out, err) == (b"", "nothing is set for all brokers\n")


def test_levels_of_loggers(run: CommandLine) -> None:
    of_loggers = ("--loggers", str(len(run.bootstrap.split(","))))
    name = "millrace.queues.partition"
    (before,) = run.json("configs", "get", name, *of_loggers)
    run.text("configs", "set", f"{name}=ERROR", *of_loggers)
    (level,) = run.json("configs", "get", name, *of_loggers)
    assert (level["value"], level["source"]) == ("ERROR", "DYNAMIC_BROKER_LOGGER_CONFIG")
    run.text("configs", "unset", name, *of_loggers)
    assert run.json("configs", "get", name, *of_loggers) == [before]
    assert "set it to one of" in run.error("configs", "set", f"{name}=LOUD", *of_loggers)


def test_subscriptions_to_metrics_of_clients(run: CommandLine) -> None:
    of_it = ("--client-metrics", "all")
    assert "nothing is set for the subscription 'all' to client metrics" in run.raw("configs", "get", *of_it)[1]
    run.text("configs", "set", "metrics=*", "interval.ms=1000", *of_it)
    shown = run.json("configs", "get", *of_it)
    assert {(each["name"], each["value"]) for each in shown} == {("metrics", "*"), ("interval.ms", "1000")}
    assert {each["source"] for each in shown} == {"DYNAMIC_CLIENT_METRICS_CONFIG"}
    assert "expected name=pattern" in run.error("configs", "set", "match=shoe_size=44", *of_it)
    run.text("configs", "unset", "metrics", "interval.ms", *of_it)
    assert run.json("configs", "get", *of_it) == []
