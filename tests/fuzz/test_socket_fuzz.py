"""Requests that are nearly right, over a socket, to a broker in a process of its own.

Every served API at every version is generated from its declaration, filled with names and batches that the broker
knows, and then damaged, or left whole with values at their extremes. Whatever comes: the broker answers it with
something that can be decoded, or closes that connection; see `support.raw` for what else must hold. At the end the
broker is stopped and started again, because what it stored must not keep it from starting.

MILLRACE_FUZZ_SECONDS is the time for all tests here together, MILLRACE_FUZZ_SEED repeats a run: the seed of a run is
part of every failure's text. The order of requests is the same for the same seed, how many fit the time is not.
"""

from __future__ import annotations

import os
import random
import struct
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from millrace.errors import ErrorCode
from millrace.records.batch import HEADER_BYTES, read_header, with_crc
from millrace.records.compression import Codec
from millrace.records.encode import Header, Record, encode_batch
from millrace.wire.codec import encode
from millrace.wire.frame import decode_response, is_flexible
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class, response_class
from millrace.wire.schema import Array, Nested, Request, Struct
from support.raw import Bystander, PeerClosed, RawClient, WatchedBroker, batch, served_versions
from support.values import Values, reference_encode

SECONDS = float(os.environ.get("MILLRACE_FUZZ_SECONDS", "10"))
SEED = int(os.environ.get("MILLRACE_FUZZ_SEED", "1" if "CI" in os.environ else str(random.randrange(10**6))))
# A mutated request is answered at once or not at all: it may well be a long poll, or a member that waits for others.
REPLY_S = 0.05
# What must be answered has time: a busy machine may leave the broker without a core for longer than that.
OWED_REPLY_S = 30.0

TOPICS = ("plain", "compacted", "recompressed", "stamped")
GROUPS = ("group-1", "group-2")
TRANSACTIONAL_IDS = ("id-1", "id-2")
SETTINGS = ("retention.ms", "cleanup.policy", "max.message.bytes", "segment.bytes", "compression.type", "no.such")
VALUES = ("1", "-1", "compact", "delete", "compact,delete", "gzip", "zstd", "1048576", "", "soon", "9" * 100)

pytestmark = [pytest.mark.fuzz, pytest.mark.timeout(SECONDS * 4 + 120)]


@contextmanager
def prepared_broker() -> Iterator[WatchedBroker]:
    """With a topic of every kind that treats batches in its own way, each with something in it."""
    with WatchedBroker({"group.max.size": "20", "max.incremental.fetch.session.cache.slots": "100"}) as running:
        with running.connect() as client:
            client.create_topic("plain", partitions=2)
            client.create_topic("compacted", config={"cleanup.policy": "compact"})
            client.create_topic("recompressed", config={"compression.type": "lz4"})
            client.create_topic("stamped", config={"message.timestamp.type": "LogAppendTime"})
            for topic in TOPICS:
                assert client.produce(topic, batch(b"a", b"b", b"c")).error_code == 0
        yield running


@pytest.fixture(scope="module")
def broker() -> Iterator[WatchedBroker]:
    with prepared_broker() as running:
        yield running


@pytest.fixture
def untouched_broker() -> Iterator[WatchedBroker]:
    """Mutated requests delete topics and change settings: batches that shall be accepted need a broker without them."""
    with prepared_broker() as running:
        yield running


class Fuzzer:
    """A seeded source of frames that are nearly requests."""

    def __init__(self, seed: str, served: dict[ApiKey, tuple[int, int]], topic_ids: list[Any]) -> None:
        self._random = random.Random(seed)
        self._values = Values(seed)
        self._places = [(key, version) for key, (low, high) in served.items() for version in range(low, high + 1)]
        self._topic_ids = topic_ids

    def place(self) -> tuple[ApiKey, int]:
        return self._random.choice(self._places)

    def request(self, key: ApiKey, version: int) -> Request:
        """A request of extremes in which some of the names mean something."""
        message = self._values.message(request_class(key), version)
        self._make_sense(message, version)
        return message

    def body(self, key: ApiKey, version: int) -> bytes:
        """The bytes of a request, damaged more often than not."""
        message = self.request(key, version)
        if self._random.random() < 0.2 and is_flexible(key, version):
            raw = reference_encode(message, version, unknown_tags=self._random)
        else:
            raw = encode(message, version)
        return raw if self._random.random() < 0.3 else self.damaged(raw)

    def damaged(self, raw: bytes) -> bytes:
        data = bytearray(raw)
        for _ in range(self._random.choice((1, 1, 1, 2, 5))):
            self._damage(data)
        return bytes(data)

    def _damage(self, data: bytearray) -> None:
        chance = self._random
        place = chance.randrange(len(data) + 1)
        size = min(chance.choice((1, 2, 4, 8, 16)), len(data) - place)
        match chance.randrange(7):
            case 0:
                if size:
                    data[place] ^= 1 << chance.randrange(8)
            case 1:
                data[place : place + size] = chance.choice((b"\xff", b"\x00", b"\x80", b"\x7f")) * size
            case 2:
                number = chance.choice((-1, -2, 0, 1, 2**31 - 1, -(2**31), 2**15 - 1, 65536))
                data[place : place + 4] = struct.pack(">i", number)
            case 3:
                del data[place:]
            case 4:
                del data[place : place + size]
            case 5:
                data[place:place] = chance.randbytes(chance.choice((1, 2, 8, 64)))
            case 6:
                data[place:place] = data[: chance.randrange(len(data) + 1)]

    def batch(self) -> bytes:
        """A batch with a correct CRC around records, or a compressed stream, or a header, that may be damaged."""
        chance = self._random
        now_ms = int(time.time() * 1000)
        records = [
            Record(
                offset,
                now_ms + chance.choice((0, 1, -1, -(10**6))),
                chance.choice((b"k", b"", b"key" * 50)),
                chance.choice((b"v", None, b"", chance.randbytes(300))),
                chance.choice(((), (Header("h", b"v"),), (Header("", None),) * 3)),
            )
            for offset in range(chance.choice((1, 1, 2, 10)))
        ]
        sound = encode_batch(records, compression=chance.choice(list(Codec)))
        header, payload = read_header(sound), sound[HEADER_BYTES:]
        kind = chance.random()
        if kind < 0.2:
            return sound
        if kind < 0.7:
            payload = self.damaged(payload)
            header = header._replace(batch_length=HEADER_BYTES - 12 + len(payload))
            return with_crc(header, payload).pack() + payload
        if kind < 0.9:
            raw = bytearray(header.pack())
            self._damage(raw)
            raw = (raw + bytes(HEADER_BYTES))[:HEADER_BYTES]
            return with_crc(read_header(raw), payload).pack() + payload
        return self.damaged(sound)

    def _make_sense(self, message: Struct, version: int) -> None:
        """Put known names where names are expected, so that a request gets further than to "no such topic"."""
        chance = self._random
        for field in message.declaration.fields:
            value = getattr(message, field.name)
            if not field.versions.include(version):
                continue
            if isinstance(value, Struct):
                self._make_sense(value, version)
            elif isinstance(field.type, Array) and isinstance(field.type.element, Nested):
                for item in value or ():
                    self._make_sense(item, version)
            elif isinstance(value, float):
                continue  # a quota's `value` is a number, a setting's is a text
            elif (choices := self._choices(field.name)) is not None and chance.random() < 0.8:
                known = chance.choice(choices)
                setattr(message, field.name, [known] if isinstance(value, list) else known)

    def _choices(self, name: str) -> tuple[Any, ...] | list[Any] | None:
        match name:
            case "topic" | "resource_name" | "topic_names" | "name":
                return (*TOPICS, *SETTINGS) if name == "name" else TOPICS
            case "topic_id":
                return self._topic_ids
            case "group_id" | "groups_names" | "coordinator_keys" | "key":
                return GROUPS
            case "value":
                return VALUES
            case "resource_type":
                return (2, 2, 2, 32, 99)  # not the broker: some settings rightly shut everybody out
            case "records":
                return [self.batch()]
            case "partition" | "index" | "partition_index" | "partition_indexes":
                return (0, 0, 1)
            case "acks":
                return (-1, 1)
            case "max_wait_ms" | "timeout_ms":
                return (0, 10)
            case "num_partitions" | "count":
                return (1, 2, 3, -1, 0, 2**31 - 1)
            case "replication_factor":
                return (1, -1)
            case "session_timeout_ms" | "rebalance_timeout_ms":
                return (6000,)
            case "committed_offset" | "fetch_offset" | "offset" | "timestamp":
                return (0, 1, 2, -1, -2, -3, 2**62)
            case "transactional_id":
                return TRANSACTIONAL_IDS
            case "generation_id" | "member_epoch" | "generation_id_or_member_epoch":
                return (0, 1, -1)
            case _:
                return None


class Peer:
    """Sends frames one at a time, and checks whatever comes back."""

    def __init__(self, broker: WatchedBroker, reply_s: float) -> None:
        self._broker = broker
        self._reply_s = reply_s
        self._client: RawClient | None = None
        self.outcomes: Counter[str] = Counter()
        self._correlation_id = 0

    def send(self, key: ApiKey, version: int, body: bytes) -> Any:
        """The decoded answer, or None where there was none."""
        client = self._client = self._client or self._broker.connect()
        self._correlation_id += 1
        header = struct.pack(">hhih", key, version, self._correlation_id, 4) + b"fuzz"
        raw = header + (b"\0" if is_flexible(key, version) else b"") + body
        try:
            client.send(struct.pack(">i", len(raw)) + raw)
            frame = client.read_frame(self._reply_s)
        except PeerClosed:
            self._drop("closed")
            return None
        except TimeoutError:
            self._drop("waiting")
            return None
        self.outcomes["answered"] += 1
        correlation_id, response = decode_response(response_class(key), version, frame)
        assert correlation_id == self._correlation_id
        return response

    def _drop(self, outcome: str) -> None:
        assert self._client is not None
        self.outcomes[outcome] += 1
        if self.outcomes[outcome] % 2:
            self._client.reset()
        else:
            self._client.close()
        self._client = None

    def close(self) -> None:
        if self._client is not None:
            self._client.close()


def make_fuzzer(broker: WatchedBroker, name: str) -> Fuzzer:
    with broker.connect() as client:
        ids = [client.topic(topic).topic_id for topic in TOPICS]
        return Fuzzer(f"{name}-{SEED}", served_versions(client), ids)


def test_mutated_requests(broker: WatchedBroker) -> None:
    fuzzer = make_fuzzer(broker, "requests")
    peer = Peer(broker, REPLY_S)
    rounds = 0
    deadline = time.monotonic() + SECONDS * 0.6
    last = ""
    try:
        while time.monotonic() < deadline:
            # Judged every few hundred requests, so that a failure names what came just before.
            with broker.unharmed():
                for _ in range(300):
                    key, version = fuzzer.place()
                    body = fuzzer.body(key, version)
                    last = f"{key.name} v{version} {body[:2000].hex()}"
                    peer.send(key, version, body)
                rounds += 1
    except Exception as error:
        raise AssertionError(f"seed {SEED}, after {rounds} rounds, {dict(peer.outcomes)}; last was {last}") from error
    finally:
        peer.close()
    assert peer.outcomes["answered"] > 0
    assert peer.outcomes["closed"] > 0


def test_mutated_batches(untouched_broker: WatchedBroker) -> None:
    broker = untouched_broker
    fuzzer = make_fuzzer(broker, "batches")
    peer = Peer(broker, OWED_REPLY_S)
    request: Any = request_class(ApiKey.PRODUCE)
    codes: Counter[ErrorCode] = Counter()
    chance = random.Random(SEED)
    deadline = time.monotonic() + SECONDS * 0.4
    last = ""
    try:
        while time.monotonic() < deadline:
            with broker.unharmed():
                for _ in range(300):
                    records = fuzzer.batch()
                    topic = chance.choice(TOPICS)
                    last = f"{topic} {records[:2000].hex()}"
                    data = request.PartitionProduceData(index=0, records=records)
                    message = request(acks=1, topic_data=[request.TopicProduceData(name=topic, partition_data=[data])])
                    response = peer.send(ApiKey.PRODUCE, 9, encode(message, 9))
                    assert response is not None, "a Produce was not answered"
                    codes[ErrorCode(response.responses[0].partition_responses[0].error_code)] += 1
                    if chance.random() < 0.05:
                        look_for_timestamps(peer, topic, chance.choice((-3, 1, int(time.time() * 1000) - 1000)))
    except Exception as error:
        raise AssertionError(f"seed {SEED}, {dict(codes)}; last was {last}") from error
    finally:
        peer.close()
    assert codes[ErrorCode.NONE] > 0, f"seed {SEED}, {dict(codes)}"
    assert codes[ErrorCode.INVALID_RECORD] > 0
    assert codes[ErrorCode.UNKNOWN_SERVER_ERROR] == 0, f"seed {SEED}"


def look_for_timestamps(peer: Peer, topic: str, timestamp: int) -> None:
    cls: Any = request_class(ApiKey.LIST_OFFSETS)
    wanted = cls.ListOffsetsPartition(partition_index=0, timestamp=timestamp)
    request = cls(replica_id=-1, topics=[cls.ListOffsetsTopic(name=topic, partitions=[wanted])])
    assert peer.send(ApiKey.LIST_OFFSETS, 7, encode(request, 7)) is not None, "a ListOffsets was not answered"


def test_the_broker_starts_again_with_what_it_was_given(broker: WatchedBroker) -> None:
    """The last test of the module: once after a clean stop, once after a crash."""
    with broker.connect() as client:
        end = client.fetch(Bystander.TOPIC, 0).high_watermark
    for stop in (broker.stop, broker.kill):
        stop()
        log_start = broker.log_path.stat().st_size
        broker.start()
        with broker.connect() as client:
            for group in GROUPS:
                client.find_coordinator(group)
            assert client.fetch(Bystander.TOPIC, 0).high_watermark >= end
            for topic in TOPICS:
                if client.topic(topic).error_code == 0:
                    client.fetch(topic, 0)
        assert "Traceback" not in broker.log_text(log_start), f"seed {SEED}: {broker.log_tail()}"
