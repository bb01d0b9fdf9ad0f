"""The administrative calls, as each client makes them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from clients.opened import Opened
from clients.reading import read_all, read_count
from millrace.testing import Cluster


def test_topics_come_and_go(opened: Opened, fresh: Callable[[str], str]) -> None:
    admin = opened.admin()
    topic = fresh("managed")
    assert topic not in admin.topics()
    admin.create_topic(topic, 3)
    assert admin.topics()[topic] == 3
    with pytest.raises(Exception, match=r"(?i)already.?exists"):
        admin.create_topic(topic, 3)
    admin.delete_topic(topic)
    assert topic not in admin.topics()
    with pytest.raises(Exception, match=r"(?i)unknown"):
        admin.delete_topic(topic)


def test_a_deleted_topic_can_be_created_again_empty(opened: Opened, fresh: Callable[[str], str]) -> None:
    admin = opened.admin()
    topic = fresh("again")
    admin.create_topic(topic, 1)
    opened.sender().send(topic, b"old").result(20)
    admin.delete_topic(topic)
    admin.create_topic(topic, 1)
    assert opened.sender().send(topic, b"new").result(20).offset == 0
    assert [one.value for one in read_all(opened.reader(), [(topic, 0)])] == [b"new"]


@pytest.mark.parametrize("topic", ["not/allowed", "..", "x" * 250, "with space"])
def test_bad_topic_names_are_refused(opened: Opened, topic: str) -> None:
    with pytest.raises(Exception, match=r"(?i)invalid.?topic|topic.?exception"):
        opened.admin().create_topic(topic, 1)


def test_settings_of_a_topic(opened: Opened, fresh: Callable[[str], str]) -> None:
    admin = opened.admin()
    topic = fresh("configured")
    admin.create_topic(topic, 1, {"retention.ms": "12345"})
    assert admin.topic_config(topic)["retention.ms"] == "12345"
    assert admin.topic_config(topic)["cleanup.policy"] == "delete"
    admin.set_topic_config(topic, "retention.ms", "54321")
    assert admin.topic_config(topic)["retention.ms"] == "54321"
    with pytest.raises(Exception, match=r"(?i)(invalid|cannot|must|not a)"):
        admin.set_topic_config(topic, "retention.ms", "soon")
    assert admin.topic_config(topic)["retention.ms"] == "54321"


def test_partitions_can_be_added_but_not_removed(opened: Opened, fresh: Callable[[str], str]) -> None:
    admin = opened.admin()
    topic = fresh("growing")
    admin.create_topic(topic, 1)
    admin.create_partitions(topic, 4)
    assert admin.topics()[topic] == 4
    assert opened.sender().send(topic, b"there", partition=3).result(20) == (3, 0)
    with pytest.raises(Exception, match=r"(?i)partition"):
        admin.create_partitions(topic, 2)


def test_records_can_be_deleted_up_to_an_offset(opened: Opened, cluster: Cluster, fresh: Callable[[str], str]) -> None:
    admin = opened.admin()
    topic = fresh("trimmed")
    cluster.create_topic(topic)
    sender = opened.sender()
    for number in range(10):
        sender.send(topic, b"%d" % number).result(20)
    assert admin.delete_records((topic, 0), 4) == 4
    reader = opened.reader()
    assert reader.bounds((topic, 0)) == (4, 10)
    assert [one.offset for one in read_all(reader, [(topic, 0)])] == list(range(4, 10))
    with pytest.raises(Exception, match=r"(?i)out.?of.?range"):
        admin.delete_records((topic, 0), 99)


def test_groups_can_be_listed_described_and_deleted(
    opened: Opened, cluster: Cluster, fresh: Callable[[str], str]
) -> None:
    admin = opened.admin()
    topic, group = fresh("grouped"), fresh("described")
    cluster.create_topic(topic)
    opened.sender().send(topic, b"one").result(20)
    reader = opened.client.reader(opened.bootstrap, group=group)
    reader.subscribe(topic)
    read_count(reader, 1)
    reader.commit()
    assert group in admin.groups()
    assert admin.group_state(group) == ("stable", 1)
    assert admin.group_offsets(group) == {(topic, 0): 1}
    reader.close()
    ends_at = time.monotonic() + 10
    while admin.group_state(group) != ("empty", 0):
        assert time.monotonic() < ends_at, admin.group_state(group)
    if opened.client.deletes_groups:
        admin.delete_group(group)
        assert group not in admin.groups()
