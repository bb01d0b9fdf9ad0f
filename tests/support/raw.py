"""A raw socket client and a watched broker, for tests that send what no client library would.

`RawClient` sends any bytes and reads frames. `WatchedBroker` is `millrace up` as a process whose memory and log are
looked at: `unharmed` wraps one attack and then asserts what must hold after every attack, whatever it was: a client on
another connection was served throughout, memory grew by less than 32 MiB even at its peak, the log holds no traceback,
and a new connection is answered within a second. Messages are built with `millrace.wire`; `framed` takes a body as is.
"""

from __future__ import annotations

import contextlib
import resource
import socket
import struct
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import psutil

from millrace.errors import ErrorCode
from millrace.records.encode import Record, encode_batch
from millrace.wire.frame import RequestHeader, decode_response, encode_request, is_flexible
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class, response_class
from millrace.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from millrace.wire.messages.cluster import MetadataRequest, MetadataResponse
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.group_offsets import OffsetFetchRequest
from millrace.wire.messages.groups import FindCoordinatorRequest
from millrace.wire.messages.produce import ProduceRequest, ProduceResponse
from millrace.wire.messages.topics import CreateTopicsRequest, CreateTopicsResponse
from millrace.wire.schema import Request, Struct
from support.servers import HOST, MillraceServer

MIB: Final = 1024 * 1024
MAX_GROWTH_BYTES: Final = 32 * MIB
PROMPT_S: Final = 1.0
"""Within this a bad request is answered or its connection closed; what waits for a disk too may take twice as long."""
PATIENT_S: Final = 10.0
"""For exchanges whose speed is not the point."""
_RECOVERY_S: Final = 60.0
"""How long to wait for a broker that a case has brought to its knees."""
CLIENT_ID: Final = "raw"
_SIZE: Final = struct.Struct(">i")
_LOADING: Final = {
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.NOT_COORDINATOR,
}
_ALARMS: Final = ("Traceback", "Task exception was never retrieved", "Unhandled")


class PeerClosed(Exception):
    """The broker closed the connection."""


def framed(api_key: int, version: int, body: bytes = b"", **header: Any) -> bytes:
    """A request frame with a correct size around a body, and a header, that need not be correct."""
    raw = request_header(api_key, version, **header) + body
    return _SIZE.pack(len(raw)) + raw


def request_header(
    api_key: int,
    version: int,
    *,
    correlation_id: int = 7,
    client_id: bytes | None = CLIENT_ID.encode(),
    client_id_length: int | None = None,
    tags: bytes = b"\0",
) -> bytes:
    """The bytes before a body; `client_id_length` may lie, and `tags` are sent where the version has any."""
    length = client_id_length if client_id_length is not None else -1 if client_id is None else len(client_id)
    raw = struct.pack(">hhih", api_key, version, correlation_id, length) + (client_id or b"")
    return raw + tags if is_flexible(api_key, version) else raw


def api_versions_frame(correlation_id: int = 7, version: int = 0) -> bytes:
    """The cheapest valid request."""
    request = ApiVersionsRequest(client_software_name="raw", client_software_version="1")
    return encode_request(RequestHeader(ApiKey.API_VERSIONS, version, correlation_id, CLIENT_ID), request)


def error_codes(response: Struct) -> set[ErrorCode]:
    """Every error code anywhere in a response, NONE among them."""
    found: set[ErrorCode] = set()
    for name in response.field_names():
        value = getattr(response, name)
        if name == "error_code":
            found.add(ErrorCode(value))
        elif isinstance(value, Struct):
            found |= error_codes(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, Struct):
                    found |= error_codes(item)
    return found


class RawClient:
    """One connection. Every wait is bounded; what takes longer is a failure."""

    def __init__(self, address: tuple[str, int], *, receive_buffer_bytes: int | None = None) -> None:
        self.socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer_bytes is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        self.socket.settimeout(PATIENT_S)
        self.socket.connect(address)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.socket.close()

    def reset(self) -> None:
        """Close with RST instead of FIN."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.socket.close()

    def send(self, data: bytes) -> None:
        """All of `data`; PeerClosed where the broker would not have all of it."""
        try:
            self.socket.sendall(data)
        except (ConnectionResetError, BrokenPipeError):
            raise PeerClosed from None

    def try_send(self, data: bytes) -> None:
        """As much of `data` as the broker takes before it closes."""
        with contextlib.suppress(PeerClosed):
            self.send(data)

    def read_frame(self, within_s: float = PROMPT_S) -> bytes:
        """The next frame without its size; PeerClosed at the end of the stream, TimeoutError after `within_s`."""
        deadline = time.monotonic() + within_s
        (size,) = _SIZE.unpack(self._read(4, deadline))
        return self._read(size, deadline)

    def _read(self, size: int, deadline: float) -> bytes:
        data = bytearray()
        while len(data) < size:
            self.socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                chunk = self.socket.recv(min(size - len(data), MIB))
            except (ConnectionResetError, BrokenPipeError):
                chunk = b""
            finally:
                self.socket.settimeout(PATIENT_S)
            if not chunk:
                raise PeerClosed
            data += chunk
        return bytes(data)

    def expect_close(self, within_s: float = PROMPT_S) -> list[bytes]:
        """Read until the broker closes the connection; the frames that came before, TimeoutError if it does not."""
        deadline = time.monotonic() + within_s
        frames = []
        try:
            while True:
                frames.append(self.read_frame(max(deadline - time.monotonic(), 0.001)))
        except PeerClosed:
            return frames

    def call(self, request: Request, version: int, *, within_s: float = PATIENT_S) -> Any:
        """One request and its response, decoded by declaration."""
        self.request(request, version)
        return self.response(type(request).api_key, version, within_s=within_s)

    def request(self, request: Request, version: int) -> int:
        """Send one request; its correlation id."""
        self._correlation_id += 1
        header = RequestHeader(type(request).api_key, version, self._correlation_id, CLIENT_ID)
        self.send(encode_request(header, request))
        return self._correlation_id

    def response(self, api_key: int, version: int, *, within_s: float = PATIENT_S) -> Any:
        """The next response, which must be to the last request sent by `request`."""
        correlation_id, response = decode_response(response_class(api_key), version, self.read_frame(within_s))
        assert correlation_id == self._correlation_id
        return response

    def alive(self) -> None:
        """Assert that this connection is still served."""
        response: ApiVersionsResponse = self.call(ApiVersionsRequest(), 0, within_s=PATIENT_S)
        assert response.error_code == 0
        assert response.api_keys

    # What tests do all the time.

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> uuid.UUID:
        """Create a topic; its id."""
        request = CreateTopicsRequest(
            topics=[
                CreateTopicsRequest.CreatableTopic(
                    name=name,
                    num_partitions=partitions,
                    replication_factor=1,
                    configs=[
                        CreateTopicsRequest.CreatableTopicConfig(name=key, value=value)
                        for key, value in (config or {}).items()
                    ],
                )
            ]
        )
        response: CreateTopicsResponse = self.call(request, 7)
        (topic,) = response.topics
        assert topic.error_code == 0, (name, ErrorCode(topic.error_code), topic.error_message)
        return topic.topic_id

    def topic(self, name: str, *, auto_create: bool = False) -> MetadataResponse.MetadataResponseTopic:
        """What Metadata says about a topic."""
        request = MetadataRequest(
            topics=[MetadataRequest.MetadataRequestTopic(name=name)], allow_auto_topic_creation=auto_create
        )
        response: MetadataResponse = self.call(request, 12)
        (topic,) = response.topics
        return topic

    def find_coordinator(self, group: str) -> None:
        """Return when the group's coordinator is there; the first one who asks has its topic made."""
        deadline = time.monotonic() + PATIENT_S
        find, load = FindCoordinatorRequest(key=group, key_type=0), OffsetFetchRequest(group_id=group, topics=None)
        while self.call(find, 2).error_code or self.call(load, 7).error_code in _LOADING:
            assert time.monotonic() < deadline, "no coordinator"
            time.sleep(0.01)

    def produce(
        self, topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1, version: int = 9
    ) -> ProduceResponse.PartitionProduceResponse:
        """Produce one record set; the answer for its partition."""
        request = produce_request(topic, records, partition=partition, acks=acks)
        response: ProduceResponse = self.call(request, version, within_s=2 * PROMPT_S)
        ((answer,),) = [each.partition_responses for each in response.responses]
        return answer

    def fetch(self, topic: str, offset: int, **options: Any) -> FetchResponse.PartitionData:
        """Fetch one partition without a session; the answer for it."""
        response: FetchResponse = self.call(fetch_request(topic, offset, **options), 12, within_s=2 * PROMPT_S)
        ((answer,),) = [each.partitions for each in response.responses]
        return answer


def batch(*values: bytes | None, key: bytes | None = b"k", **changes: Any) -> bytes:
    """A sound batch with one record per value, stamped now."""
    now_ms = int(time.time() * 1000)
    records = [Record(offset, now_ms, key, value) for offset, value in enumerate(values or (b"v",))]
    return encode_batch(records, **changes)


def produce_request(topic: str, records: bytes | None, *, partition: int = 0, acks: int = -1) -> ProduceRequest:
    """A Produce of one record set to one partition, by name."""
    data = ProduceRequest.PartitionProduceData(index=partition, records=records)
    return ProduceRequest(
        acks=acks,
        timeout_ms=5000,
        topic_data=[ProduceRequest.TopicProduceData(name=topic, partition_data=[data])],
    )


def fetch_request(
    topic: str,
    offset: int,
    *,
    partition: int = 0,
    max_wait_ms: int = 0,
    min_bytes: int = 1,
    max_bytes: int = 50 * MIB,
    partition_max_bytes: int = MIB,
    **changes: Any,
) -> FetchRequest:
    """A Fetch of one partition, by name, without a session unless `changes` say otherwise."""
    wanted = FetchRequest.FetchPartition(
        partition=partition, fetch_offset=offset, partition_max_bytes=partition_max_bytes
    )
    return FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        topics=[FetchRequest.FetchTopic(topic=topic, partitions=[wanted])],
        **changes,
    )


class Bystander(threading.Thread):
    """A well-behaved client on a connection of its own: produces a record and fetches it back, over and over."""

    TOPIC: Final = "bystander"
    PAUSE_S: Final = 0.01

    def __init__(self, address: tuple[str, int]) -> None:
        super().__init__(name="bystander", daemon=True)
        self._address = address
        self._ending = threading.Event()
        self._turn = threading.Condition()
        self.rounds = 0
        self.slowest_s = 0.0
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            with RawClient(self._address) as client:
                while not self._ending.wait(self.PAUSE_S):
                    started = time.monotonic()
                    sent = b"round %d" % self.rounds
                    answer = client.produce(self.TOPIC, batch(sent))
                    assert answer.error_code == 0, ErrorCode(answer.error_code)
                    fetched = client.fetch(self.TOPIC, answer.base_offset)
                    assert fetched.error_code == 0, ErrorCode(fetched.error_code)
                    assert sent in bytes(fetched.records or b""), "the record that was acknowledged is not there"
                    with self._turn:
                        self.rounds += 1
                        self.slowest_s = max(self.slowest_s, time.monotonic() - started)
                        self._turn.notify_all()
        except BaseException as error:  # noqa: BLE001 - told by `check`
            self.failure = error
            with self._turn:
                self._turn.notify_all()

    def begin(self) -> None:
        """Forget how slow earlier rounds were."""
        with self._turn:
            self.slowest_s = 0.0

    def check(self) -> None:
        """Assert that a whole round begins and ends from now on, and that no round since `begin` was held up."""
        with self._turn:
            target = self.rounds + 2
            self._turn.wait_for(lambda: self.rounds >= target or self.failure is not None, PATIENT_S)
            if self.failure is not None:
                raise AssertionError("the client on another connection was harmed") from self.failure
            assert self.rounds >= target, "the client on another connection is not served any more"
            assert self.slowest_s < 2 * PROMPT_S, f"a client on another connection waited {self.slowest_s:.2f} s"

    def end(self) -> None:
        self._ending.set()
        self.join(PATIENT_S)


class WatchedBroker(MillraceServer):
    """`millrace up` with everything watched that an attack must not change."""

    def __init__(self, settings: Mapping[str, str] | None = None) -> None:
        super().__init__(settings)
        self._bystander: Bystander | None = None

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            with self.connect() as client:
                client.create_topic(Bystander.TOPIC)
                warm_up(client)
        except BaseException:
            self.close()
            raise
        return self

    def _command(self) -> Sequence[str]:
        return [*super()._command(), "--log-level", "info"]

    @property
    def address(self) -> tuple[str, int]:
        return HOST, self.port

    @property
    def data_dir(self) -> Path:
        return self.home / "data"

    def connect(self, **options: Any) -> RawClient:
        return RawClient(self.address, **options)

    def close(self) -> None:
        if self._bystander is not None:
            self._bystander.end()
        super().close()

    def _recover(self) -> None:
        """Wait until a broker that was brought to its knees answers again, so that the next case starts fair."""
        if self._bystander is not None:
            self._bystander.end()
            self._bystander = None
        with self.connect() as client:
            client.call(ApiVersionsRequest(), 0, within_s=_RECOVERY_S)

    def _watch_bystander(self) -> Bystander:
        """The client on another connection; a new one where an earlier case harmed it, so that this one is judged."""
        bystander = self._bystander
        if bystander is None or bystander.failure is not None:
            self._recover()
            bystander = self._bystander = Bystander(self.address)
            bystander.start()
            bystander.check()
        bystander.begin()
        return bystander

    def log_text(self, start: int = 0) -> str:
        return self.log_path.read_bytes()[start:].decode(errors="replace")

    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    @contextlib.contextmanager
    def unharmed(self, *, max_growth_bytes: int = MAX_GROWTH_BYTES) -> Iterator[None]:
        """Assert that the block does no harm; see the head of this module."""
        bystander = self._watch_bystander()
        log_start = self.log_path.stat().st_size
        before_bytes = self._forget_peak()
        try:
            yield
        except BaseException:
            self._recover()
            raise
        bystander.check()
        with self.connect() as client:
            started = time.monotonic()
            client.alive()
            assert time.monotonic() - started < PROMPT_S, "a new connection was kept waiting"
        grown_bytes = self._peak_bytes() - before_bytes
        assert grown_bytes < max_growth_bytes, f"memory grew by {grown_bytes / MIB:.1f} MiB"
        log = self.log_text(log_start)
        assert not any(word in log for word in _ALARMS), log[-4000:]

    def refuses(self, data: bytes) -> None:
        """Assert that `data` gets its connection closed, as its first bytes and after a valid exchange."""
        with self.unharmed():
            for used in (False, True):
                with self.connect() as client:
                    if used:
                        client.alive()
                    client.try_send(data)
                    assert client.expect_close() == [], "answered, though it is not the protocol"

    def _forget_peak(self) -> int:
        """Let the kernel's record of the highest resident size begin anew; the size now."""
        with contextlib.suppress(OSError):
            Path(f"/proc/{self.pid}/clear_refs").write_text("5")
        return self.rss_bytes()

    def _peak_bytes(self) -> int:
        """The highest resident size since `_forget_peak`; the present one where the kernel does not tell."""
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{self.pid}/status").read_text().splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self.rss_bytes()


def warm_up(client: RawClient) -> None:
    """Ask for every served API once, so that what a broker loads at first use is not taken for growth."""
    for key, (_, version) in served_versions(client).items():
        request: Any = request_class(key)()
        if key == ApiKey.PRODUCE:
            request.acks = 1  # with 0 there would be no answer
        client.call(request, version)
    client.find_coordinator("warm-up")
    for _ in range(20):
        client.produce(Bystander.TOPIC, batch(bytes(64 * 1024)))
    client.fetch(Bystander.TOPIC, 0)


def served_versions(client: RawClient) -> dict[ApiKey, tuple[int, int]]:
    """What the broker says it serves, without versions that it names for the sake of old clients only."""
    response: ApiVersionsResponse = client.call(ApiVersionsRequest(), 0)
    return {
        ApiKey(listed.api_key): (
            max(listed.min_version, request_class(listed.api_key).min_version),
            listed.max_version,
        )
        for listed in response.api_keys
    }


def file_limit() -> int:
    """How many files this process may have open; a broker that it starts inherits the number."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
