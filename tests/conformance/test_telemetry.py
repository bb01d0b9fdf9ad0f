"""Client telemetry (KIP-714) of running brokers: subscriptions, pushes, and what of them reaches the receiver."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.model import ZERO_UUID, encode_uuid
from millrace.records.compression import Codec, compress
from millrace.telemetry.manager import ClientTelemetry
from millrace.testing import Cluster
from millrace.wire.keys import ApiKey
from millrace.wire.messages.api_versions import ApiVersionsRequest
from millrace.wire.messages.telemetry import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
    PushTelemetryRequest,
)
from support.client_metrics import subscribe, unsubscribe
from support.otlp import OtlpEndpoint, gauge, metric_names, resources
from support.raw import MIB, PATIENT_S, PeerClosed, RawClient, framed

KEYS = {int(ApiKey.GET_TELEMETRY_SUBSCRIPTIONS), int(ApiKey.PUSH_TELEMETRY)}
SHORT_MS = 100
ANOTHER_PORT = 1


@pytest.fixture(scope="module")
def endpoint() -> Iterator[OtlpEndpoint]:
    with OtlpEndpoint() as running:
        yield running


@pytest.fixture(scope="module")
def cluster(endpoint: OtlpEndpoint) -> Iterator[Cluster]:
    with Cluster(settings={"telemetry.receiver": endpoint.url, "telemetry.max.bytes": str(MIB // 4)}) as running:
        yield running


def connect(cluster: Cluster) -> RawClient:
    host, _, port = cluster.bootstrap_servers.split(",")[0].rpartition(":")
    client = RawClient((host, int(port)))
    client.call(ApiVersionsRequest(client_software_name="conformance", client_software_version="1.2"), 4)
    return client


@pytest.fixture
def client(cluster: Cluster) -> Iterator[RawClient]:
    with connect(cluster) as connected:
        yield connected


def telemetry_of(cluster: Cluster) -> ClientTelemetry:
    services = cluster._brokers[1].services
    assert services is not None and services.telemetry is not None
    return services.telemetry


@pytest.fixture
def subscription(client: RawClient) -> Iterator[str]:
    """Of every metric, ten times a second, of clients of this software."""
    subscribe(client, "all", metrics="*", interval_ms=str(SHORT_MS), match="client_software_name=conformance")
    yield "all"
    unsubscribe(client, "all")


def ask(client: RawClient, instance_id: uuid.UUID = ZERO_UUID) -> GetTelemetrySubscriptionsResponse:
    response: GetTelemetrySubscriptionsResponse = client.call(
        GetTelemetrySubscriptionsRequest(client_instance_id=instance_id), 0
    )
    return response


def push(
    client: RawClient, told: GetTelemetrySubscriptionsResponse, metrics: bytes, *, codec: int = 0, **changes: Any
) -> ErrorCode:
    fields = {"client_instance_id": told.client_instance_id, "subscription_id": told.subscription_id, **changes}
    response = client.call(PushTelemetryRequest(compression_type=codec, metrics=metrics, **fields), 0)
    return ErrorCode(response.error_code)


def advertised(client: RawClient, version: int = 4) -> set[int]:
    response = client.call(ApiVersionsRequest(client_software_name="x", client_software_version="1"), version)
    return {each.api_key for each in response.api_keys}


def test_without_a_receiver_there_is_no_telemetry() -> None:
    with Cluster() as cluster, connect(cluster) as client:
        for version in (0, 4):
            assert not advertised(client, version) & KEYS
        with pytest.raises(PeerClosed):
            ask(client)


def test_with_a_receiver_there_is(client: RawClient) -> None:
    for version in (0, 4):
        assert advertised(client, version) >= KEYS


def test_a_version_of_api_versions_that_is_not_known_is_answered_with_the_same_list(client: RawClient) -> None:
    client.send(framed(ApiKey.API_VERSIONS, 99))
    answer = client.read_frame()
    assert all(key.to_bytes(2, "big") + bytes(4) in answer for key in KEYS)


def test_what_a_client_is_told(client: RawClient, subscription: str) -> None:
    told = ask(client)
    assert told.error_code == ErrorCode.NONE
    assert told.client_instance_id != ZERO_UUID
    assert told.accepted_compression_types == [4, 3, 1, 2]
    assert (told.push_interval_ms, told.telemetry_max_bytes) == (SHORT_MS, MIB // 4)
    assert told.delta_temporality is True
    assert told.requested_metrics == ["*"]


def test_a_client_that_matches_nothing_is_told_to_push_nothing(client: RawClient) -> None:
    subscribe(client, "others", metrics="*", match="client_id=somebody-else")
    told = ask(client)
    unsubscribe(client, "others")
    assert (told.error_code, told.requested_metrics, told.push_interval_ms) == (0, [], 300_000)


@pytest.mark.parametrize("codec", Codec)
def test_a_push_reaches_the_receiver_with_whose_it_is(
    client: RawClient, subscription: str, endpoint: OtlpEndpoint, codec: Codec
) -> None:
    name = f"test.{codec.name}"
    told = ask(client)
    metrics = gauge(name, 7, client_rack="r1", principal="User:root")
    assert push(client, told, compress(codec, metrics), codec=codec) == ErrorCode.NONE
    got = endpoint.wait_for(lambda requests: any(metric_names(each.body) == {name} for each in requests))
    (request,) = (each for each in got if metric_names(each.body) == {name})
    ((*own, last),) = resources(request.body)
    assert dict(own) == {
        "client_instance_id": encode_uuid(told.client_instance_id),
        "client_id": "raw",
        "client_software_name": "conformance",
        "client_software_version": "1.2",
        "client_source_address": "127.0.0.1",
        "client_source_port": str(client.socket.getsockname()[1]),
        "principal": "User:ANONYMOUS",
        "broker_id": "1",
    }
    assert last == ("client_rack", "r1")
    assert (request.path, request.content_type) == ("/v1/metrics", "application/x-protobuf")


def test_a_client_may_be_gone_right_after_its_last_push(
    cluster: Cluster, subscription: str, endpoint: OtlpEndpoint
) -> None:
    with connect(cluster) as client:
        told = ask(client)
        request = PushTelemetryRequest(
            client_instance_id=told.client_instance_id,
            subscription_id=told.subscription_id,
            terminating=True,
            metrics=gauge("last.words", 1),
        )
        client.request(request, 0)
    endpoint.wait_for(lambda requests: any("last.words" in metric_names(each.body) for each in requests))


def test_pushes_that_are_not_in_order(client: RawClient, subscription: str) -> None:
    told = ask(client)
    for instance_id in (ZERO_UUID, uuid.UUID(int=1)):
        assert push(client, told, b"", client_instance_id=instance_id) == ErrorCode.INVALID_REQUEST
    unknown = told.subscription_id ^ 1
    assert push(client, told, b"", subscription_id=unknown) == ErrorCode.UNKNOWN_SUBSCRIPTION_ID
    told = ask(client, told.client_instance_id)
    assert told.error_code == ErrorCode.NONE, "after that error a client asks at once"
    assert push(client, told, b"x", codec=7) == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert ask(client, told.client_instance_id).error_code == ErrorCode.NONE
    assert push(client, told, bytes(MIB // 4 + 1)) == ErrorCode.TELEMETRY_TOO_LARGE
    assert push(client, ask(client), b"\x0a\x7f") == ErrorCode.INVALID_RECORD
    assert push(client, ask(client), b"no gzip", codec=Codec.GZIP) == ErrorCode.INVALID_RECORD


def test_pushes_and_questions_before_their_time(cluster: Cluster, client: RawClient) -> None:
    subscribe(client, "slow", metrics="a,b", interval_ms="60000")
    before = telemetry_of(cluster).throttled_total
    told = ask(client)
    assert told.requested_metrics == ["a", "b"]
    assert ask(client, told.client_instance_id).error_code == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert push(client, told, b"") == ErrorCode.NONE
    assert push(client, told, b"") == ErrorCode.THROTTLING_QUOTA_EXCEEDED
    assert telemetry_of(cluster).throttled_total == before + 2
    assert push(client, told, b"", terminating=True) == ErrorCode.NONE
    assert push(client, told, b"", terminating=True) == ErrorCode.INVALID_REQUEST
    subscribe(client, "slow", metrics="c")
    changed = ask(client, told.client_instance_id)
    assert (changed.error_code, changed.requested_metrics) == (ErrorCode.NONE, ["c"])
    assert changed.subscription_id != told.subscription_id
    unsubscribe(client, "slow")


def test_an_instance_goes_with_its_connection(cluster: Cluster, subscription: str) -> None:
    telemetry = telemetry_of(cluster)
    before = telemetry.instances
    with connect(cluster) as client:
        ask(client)
        assert telemetry.instances == before + 1
    deadline = time.monotonic() + PATIENT_S
    while telemetry.instances > before:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_file_is_a_receiver_too(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with Cluster(settings={"telemetry.receiver": f"file:{path}"}) as cluster, connect(cluster) as client:
        subscribe(client, "all", metrics="*")
        told = ask(client)
        assert push(client, told, compress(Codec.ZSTD, gauge("in.a.file", 7)), codec=Codec.ZSTD) == ErrorCode.NONE
    # The end of a broker waits for what was pushed.
    (line,) = path.read_text().splitlines()
    (of_resource,) = json.loads(line)["resourceMetrics"]
    attributes = {each["key"]: each["value"]["stringValue"] for each in of_resource["resource"]["attributes"]}
    assert attributes["client_instance_id"] == encode_uuid(told.client_instance_id)
    (metric,) = of_resource["scopeMetrics"][0]["metrics"]
    assert (metric["name"], metric["gauge"]["dataPoints"][0]["asInt"]) == ("in.a.file", "7")


def test_a_receiver_that_is_not_there_holds_nobody_up() -> None:
    with Cluster(settings={"telemetry.receiver": f"http://127.0.0.1:{ANOTHER_PORT}/"}) as cluster:
        with connect(cluster) as client:
            subscribe(client, "all", metrics="*", interval_ms=str(SHORT_MS))
            for _ in range(20):
                assert push(client, ask(client), gauge("a", 1)) == ErrorCode.NONE
            telemetry = telemetry_of(cluster)
            assert (telemetry.pushes_total, telemetry.forwarded_total, telemetry.waiting) == (20, 0, 20)
        began = time.monotonic()
    assert time.monotonic() - began < PATIENT_S
    assert telemetry.dropped_total == 20


def test_every_broker_tells_the_same(endpoint: OtlpEndpoint) -> None:
    """A client that asked one of them may push to another."""
    with Cluster(brokers=2, settings={"telemetry.receiver": endpoint.url}) as cluster:
        addresses = [each.rpartition(":") for each in cluster.bootstrap_servers.split(",")]
        clients = [RawClient((host, int(port))) for host, _, port in addresses]
        with clients[0], clients[1]:
            subscribe(clients[0], "all", metrics="x,y,z", interval_ms="1000")
            told = ask(clients[0])
            assert told.requested_metrics == ["x", "y", "z"]
            deadline = time.monotonic() + PATIENT_S
            while ask(clients[1]).requested_metrics != ["x", "y", "z"]:
                assert time.monotonic() < deadline, "it has not heard of the subscription"
                time.sleep(0.01)
            assert push(clients[1], told, gauge("from.another", 1)) == ErrorCode.NONE
