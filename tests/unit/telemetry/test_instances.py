"""Client instances: what they are to push, and when they may."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace

import pytest

from millrace.clock import ManualClock
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import ResourceType
from millrace.model import ZERO_UUID, encode_uuid
from millrace.records.compression import Codec
from millrace.telemetry import instances
from millrace.telemetry.instances import (
    DEFAULT_INTERVAL_MS,
    EXPIRY_S,
    Client,
    ClientInstances,
    Configs,
    Instance,
    Push,
    subscription_id,
)

CLIENT = Client("web-1", "apache-kafka-java", "4.3.0", "10.0.0.7", 4711, "User:alice")
ID = uuid.UUID("6ba7b810-9dad-41d1-80b4-00c04fd430c8")
MAX_BYTES = 1000


class World:
    def __init__(self, **subscriptions: Mapping[str, str]) -> None:
        self.clock = ManualClock()
        self.configs: Configs = {}
        self.subscribe(**subscriptions)
        self.instances = ClientInstances(lambda: self.configs, self.clock)

    def subscribe(self, **subscriptions: Mapping[str, str]) -> None:
        self.configs = {(ResourceType.CLIENT_METRICS, name): values for name, values in subscriptions.items()}

    def ask(self, instance_id: uuid.UUID = ID, client: Client = CLIENT) -> Instance:
        return self.instances.ask(instance_id, client)[1]

    def push(self, subscription: int, *, codec: int = 0, size: int = 10, last: bool = False) -> None:
        push = Push(subscription, codec, bytes(size), last)
        self.instances.check_push(self.instances.instance(ID, CLIENT), push, MAX_BYTES)

    def ask_code(self) -> ErrorCode:
        try:
            self.ask()
        except ApiError as error:
            return error.code
        return ErrorCode.NONE

    def push_code(self, subscription: int, *, codec: int = 0, size: int = 10, last: bool = False) -> ErrorCode:
        try:
            self.push(subscription, codec=codec, size=size, last=last)
        except ApiError as error:
            return error.code
        return ErrorCode.NONE


THROTTLED, NONE = ErrorCode.THROTTLING_QUOTA_EXCEEDED, ErrorCode.NONE


def test_without_a_subscription_nothing_is_wanted() -> None:
    instance = World().ask()
    assert (instance.metrics, instance.interval_ms) == ((), DEFAULT_INTERVAL_MS)


def test_all_that_match_count_and_the_shortest_interval() -> None:
    world = World(
        a={"metrics": "x,y", "interval.ms": "5000", "match": "client_id=web-.*"},
        b={"metrics": "y,z", "interval.ms": "2000", "match": "client_software_name=.*java,client_source_port=4711"},
        c={"metrics": "*", "interval.ms": "100", "match": "client_id=web"},
    )
    instance = world.ask()
    assert (instance.metrics, instance.interval_ms) == (("x", "y", "z"), 2000)


def test_all_metrics_are_said_by_a_star_alone() -> None:
    assert World(a={"metrics": "x"}, b={"metrics": "*"}).ask().metrics == ("*",)


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ("", True),
        ("client_id=web-1", True),
        ("client_id=web", False),
        ("client_id=web-., client_software_version=4[.].*", True),
        ("client_id=web-.,client_software_version=3[.].*", False),
        ("client_source_address=10[.]0[.]0[.][0-9]+", True),
        ("client_source_port=4711", True),
        ("client_source_port=47", False),
        (f"client_instance_id={encode_uuid(ID)}", True),
        (f"client_instance_id={ID}", False),
    ],
)
def test_a_client_matches_by_all_of_its_pairs_and_whole_values(match: str, fits: bool) -> None:
    world = World(a={"metrics": "x", "match": match})
    assert (world.ask().metrics == ("x",)) is fits


def test_who_has_no_client_id_matches_none() -> None:
    world = World(a={"metrics": "x", "match": "client_id=.*"}, b={"metrics": "y", "match": "client_source_port=.*"})
    assert world.ask(client=replace(CLIENT, client_id=None)).metrics == ("y",)


def test_a_subscription_that_cannot_be_read_concerns_nobody(caplog: pytest.LogCaptureFixture) -> None:
    assert World(a={"metrics": "x", "match": "client_id=(?=a)a"}, b={"metrics": "y"}).ask().metrics == ("y",)
    assert "concerns nobody" in caplog.text


def test_ids_are_by_kafkas_formula() -> None:
    """The numbers are of Kafka's own classes, Crc32C and Uuid."""
    assert subscription_id(("*",), 300_000, uuid.UUID(int=0)) == 1012207395
    assert subscription_id(("*",), 300_000, uuid.UUID(int=(5 << 96) | (9 << 64) | (3 << 32) | 6)) == 1012207402
    assert subscription_id(("a", "b"), 100, ID) != subscription_id(("a",), 100, ID) != subscription_id(("a",), 101, ID)
    for value in range(50):
        assert -(2**31) <= subscription_id(("a",), value, ID) < 2**31


def test_a_client_without_an_id_is_given_one() -> None:
    world = World()
    first, _ = world.instances.ask(ZERO_UUID, CLIENT)
    second, _ = world.instances.ask(ZERO_UUID, CLIENT)
    assert first != second
    assert ZERO_UUID not in (first, second)
    assert world.instances.ask(ID, CLIENT)[0] == ID


def test_asking_again_is_for_the_next_interval() -> None:
    world = World(a={"metrics": "*", "interval.ms": "1000"})
    world.ask()
    world.clock.advance(0.999)
    assert world.ask_code() == THROTTLED
    assert world.instances.throttled_total == 1
    world.clock.advance(0.001)
    assert world.ask_code() == NONE


def test_the_first_push_after_asking_may_come_at_once_and_the_next_an_interval_later() -> None:
    world = World(a={"metrics": "*", "interval.ms": "1000"})
    known = world.ask().subscription_id
    world.clock.advance(0.001)
    assert world.push_code(known) == NONE
    world.clock.advance(0.998)
    assert world.push_code(known) == THROTTLED
    world.clock.advance(0.003)
    assert world.push_code(known) == NONE


def test_a_push_that_nobody_asked_for_is_taken_if_its_id_is_right() -> None:
    """The client may have asked another broker."""
    world = World(a={"metrics": "*", "interval.ms": "1000"})
    known = subscription_id(("*",), 1000, ID)
    assert world.push_code(known + 1) == ErrorCode.UNKNOWN_SUBSCRIPTION_ID
    world.clock.advance(1)
    assert world.push_code(known) == NONE


def test_the_last_push_may_come_early_and_is_the_last() -> None:
    world = World(a={"metrics": "*", "interval.ms": "1000"})
    known = world.ask().subscription_id
    assert world.push_code(known) == NONE
    assert world.push_code(known, last=True) == NONE
    world.clock.advance(5)
    assert world.push_code(known) == ErrorCode.INVALID_REQUEST


def test_a_change_of_the_subscriptions_is_heard_of_at_once() -> None:
    world = World(a={"metrics": "x", "interval.ms": "1000"})
    known = world.ask().subscription_id
    world.subscribe(a={"metrics": "x,y", "interval.ms": "1000"})
    assert world.push_code(known) == ErrorCode.UNKNOWN_SUBSCRIPTION_ID
    assert world.instances.unknown_subscriptions_total == 1
    changed = world.ask()
    assert changed.metrics == ("x", "y")
    assert world.push_code(changed.subscription_id) == NONE


def test_a_change_of_other_settings_is_none() -> None:
    world = World(a={"metrics": "x", "interval.ms": "1000"})
    world.ask()
    world.configs = {**world.configs, (ResourceType.TOPIC, "t"): {"retention.ms": "1"}}
    assert world.ask_code() == THROTTLED


@pytest.mark.parametrize(
    ("codec", "size", "code"),
    [
        (5, 1, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (-1, 1, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE),
        (Codec.NONE, MAX_BYTES + 1, ErrorCode.TELEMETRY_TOO_LARGE),
        (Codec.ZSTD, MAX_BYTES + 1, ErrorCode.TELEMETRY_TOO_LARGE),
        (Codec.NONE, MAX_BYTES, NONE),
    ],
)
def test_what_is_wrong_with_a_push(codec: int, size: int, code: ErrorCode) -> None:
    world = World(a={"metrics": "x"})
    assert world.push_code(world.ask().subscription_id, codec=codec, size=size) == code


@pytest.mark.parametrize(("codec", "forgiven"), [(9, True), (0, False)])
def test_after_a_push_with_another_compression_a_client_may_ask_at_once(codec: int, forgiven: bool) -> None:
    world = World(a={"metrics": "x"})
    world.push_code(world.ask().subscription_id, codec=codec, size=MAX_BYTES + 1)
    assert world.ask_code() == (NONE if forgiven else THROTTLED)


def test_silent_instances_expire() -> None:
    world = World(a={"interval.ms": "100", "match": "client_id=web-1"})
    world.ask()
    world.ask(uuid.uuid4(), Client("slow", "", "", "", 0, ""))
    assert len(world.instances) == 2
    world.clock.advance(EXPIRY_S + 1)
    world.ask(uuid.uuid4(), CLIENT)
    assert len(world.instances) == 2, "one is new, one is silent for less than three of its intervals"


def test_an_instance_that_expired_is_as_new() -> None:
    world = World(a={"metrics": "x", "interval.ms": "100"})
    world.push_code(world.ask().subscription_id, last=True)
    world.clock.advance(EXPIRY_S + 1)
    assert world.push_code(world.ask().subscription_id) == NONE


def test_there_are_only_so_many_and_those_heard_of_last_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instances, "MAX_INSTANCES", 3)
    world = World()
    ids = [uuid.uuid4() for _ in range(4)]
    for each in ids[:3]:
        world.ask(each)
    world.instances.instance(ids[0], CLIENT)
    world.ask(ids[3])
    assert list(world.instances._instances) == [ids[2], ids[0], ids[3]]


def test_an_instance_goes_with_its_connection_unless_it_was_made_anew() -> None:
    world = World(a={"metrics": "x"})
    old = world.ask()
    world.subscribe(a={"metrics": "y"})
    new = world.ask()
    world.instances.forget(ID, old)
    assert len(world.instances) == 1
    world.instances.forget(ID, new)
    assert len(world.instances) == 0
