"""A connection fed with bytes through a fake transport: order, back-pressure, limits, and what closes it."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from millrace.clock import Clock, SystemClock
from millrace.errors import ApiError, ErrorCode
from millrace.handlers.context import RequestContext, Services
from millrace.handlers.counting import RequestCounts
from millrace.handlers.needs import NOTHING, Needs, cluster, judged
from millrace.handlers.promise import Promise
from millrace.handlers.registry import Api
from millrace.security.acls import AclTable, Operation, ResourceKind
from millrace.security.audit import Allowed, Audit
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer
from millrace.security.certificates import make_authority
from millrace.security.metering import ClientQuotas
from millrace.security.x509 import pem_certificates
from millrace.server.answers import AnswerRoom
from millrace.server.connection import (
    LOGIN_BYTES,
    MAX_OVERLAPPING_REPLIES,
    MAX_REQUESTS_PER_TURN,
    MAX_WAITING_REQUESTS,
    Connection,
)
from millrace.server.counting import ListenerCounts
from millrace.server.flow import ConnectionLimits, MemoryBudget
from millrace.server.refusals import Refusals
from millrace.wire.frame import decode_response, read_request_header
from millrace.wire.keys import ApiKey
from millrace.wire.messages.groups import HeartbeatResponse
from support.certificates import LONG_AGO
from support.streams import receive
from support.transports import FakeTransport


def numbered_reply(correlation_id: int, version: int, response: Any) -> tuple[bytes]:
    del version
    return (struct.pack(">ii", correlation_id, response),)


def make_api(
    handler: Callable[..., Any], *, overlaps: bool = False, key: ApiKey = ApiKey.HEARTBEAT, needs: Needs = NOTHING
) -> Api:
    return Api(
        key=key,
        min_version=0,
        max_version=3,
        advertised_min=0,
        handler=handler,
        decode=lambda version, buffer, pos: bytes(buffer[pos:]),
        encode=numbered_reply,
        overlaps=overlaps,
        needs=needs,
    )


def _services(clock: Clock, quotas: ClientQuotas, audit: Audit | None = None) -> SimpleNamespace:
    return SimpleNamespace(
        clock=clock,
        quotas=quotas,
        audit=audit,
        config=SimpleNamespace(inter_broker_listener="PLAINTEXT"),
        image=SimpleNamespace(brokers={1: None}),
        authorizer=NO_AUTHORIZER,
        counts=RequestCounts(),
    )


class Rig:
    """A connection with its transport, and the handlers' gates under the test's control."""

    def __init__(
        self,
        *apis: Api,
        budget_bytes: int = 1 << 20,
        limits: ConnectionLimits | None = None,
        transport: FakeTransport | None = None,
        clock: Clock | None = None,
        quotas: ClientQuotas | None = None,
        audit: Audit | None = None,
    ) -> None:
        clock = clock or SystemClock()
        self.transport = transport or FakeTransport()
        self.budget = MemoryBudget(budget_bytes)
        self.room = AnswerRoom(self.budget, SystemClock())
        self.limits = limits or ConnectionLimits(lambda: 10, lambda: 10)
        self.closed: list[Connection] = []
        self.connection = Connection(
            apis={api.key: api for api in apis},
            services=cast(Services, _services(clock, quotas or ClientQuotas(), audit)),
            listener="PLAINTEXT",
            budget=self.budget,
            answers=self.room,
            limits=self.limits,
            refusals=Refusals(clock),
            counts=ListenerCounts(),
            max_frame_bytes=1 << 20,
            spawn=self._spawn,
            on_closed=self.closed.append,
        )
        self.transport.protocol = self.connection
        self.connection.connection_made(cast(asyncio.BaseTransport, self.transport))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def send(self, correlation_id: int, *, key: int = ApiKey.HEARTBEAT, version: int = 0, body: bytes = b"") -> None:
        receive(self.connection, request(correlation_id, key=key, version=version, body=body))

    def error_answer(self, response: type[HeartbeatResponse]) -> tuple[int, int]:
        correlation_id, message = decode_response(response, 0, self.transport.written[4:])
        return correlation_id, message.error_code

    @property
    def answers(self) -> list[tuple[int, int]]:
        return [cast("tuple[int, int]", pair) for pair in struct.iter_unpack(">ii", self.transport.written)]


def request(correlation_id: int, *, key: int = ApiKey.HEARTBEAT, version: int = 0, body: bytes = b"") -> bytes:
    payload = struct.pack(">hhih", key, version, correlation_id, -1) + body
    return struct.pack(">i", len(payload)) + payload


async def run_ready() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Gates:
    """An async handler that answers when the test opens the gate of the request's first byte."""

    def __init__(self) -> None:
        self.started: list[int] = []
        self.futures: dict[int, asyncio.Future[int]] = {}

    async def handle(self, context: RequestContext, body: bytes) -> int:
        del context
        self.started.append(body[0])
        future = self.futures.setdefault(body[0], asyncio.get_running_loop().create_future())
        return await future

    async def open(self, number: int) -> None:
        self.futures.setdefault(number, asyncio.get_running_loop().create_future()).set_result(number)
        await run_ready()


async def test_a_request_that_does_not_overlap_keeps_the_next_one_waiting() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle))
    for number in (1, 2, 3):
        rig.send(number, body=bytes([number]))
    await run_ready()
    assert gates.started == [1]
    await gates.open(1)
    assert gates.started == [1, 2]
    assert rig.answers == [(1, 1)]


async def test_overlapping_requests_start_at_once_and_answer_in_order() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle, overlaps=True))
    for number in (1, 2, 3):
        rig.send(number, body=bytes([number]))
    await run_ready()
    assert gates.started == [1, 2, 3]
    await gates.open(3)
    await gates.open(2)
    assert rig.answers == []
    await gates.open(1)
    assert rig.answers == [(1, 1), (2, 2), (3, 3)]


async def test_a_plain_handler_behind_a_waiting_one_answers_in_its_turn() -> None:
    gates = Gates()
    quick = make_api(lambda context, body: 9, key=ApiKey.METADATA)
    rig = Rig(make_api(gates.handle, overlaps=True), quick)
    rig.send(1, body=b"\x01")
    rig.send(2, key=ApiKey.METADATA)
    await run_ready()
    assert rig.answers == []
    await gates.open(1)
    assert rig.answers == [(1, 1), (2, 9)]


async def test_no_reply_means_no_bytes() -> None:
    rig = Rig(make_api(lambda context, body: None))
    rig.send(1)
    assert rig.answers == []
    assert rig.budget.used_bytes == 0


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack(">i", -1),
        struct.pack(">i", 2**31 - 1),
        struct.pack(">i", 0),
        struct.pack(">i", 3) + b"abc",
        request(1, key=999),
        request(1, version=4),
        request(1, version=-1),
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
    ids=["negative", "huge", "empty", "short", "unknown key", "too new", "too old", "http", "tls"],
)
async def test_bytes_that_are_not_the_protocol_close_the_connection(raw: bytes) -> None:
    rig = Rig(make_api(lambda context, body: 1))
    receive(rig.connection, raw)
    assert rig.transport.closed
    rig.connection.connection_lost(None)
    assert rig.budget.used_bytes == 0
    assert rig.budget.serving_bytes == 0
    assert rig.limits.count == 0


async def test_a_broken_handler_closes_only_where_no_error_fits(caplog: pytest.LogCaptureFixture) -> None:
    def broken(context: RequestContext, body: bytes) -> int:
        raise ZeroDivisionError

    rig = Rig(make_api(broken))
    rig.send(1)
    assert rig.error_answer(HeartbeatResponse) == (1, ErrorCode.UNKNOWN_SERVER_ERROR)
    assert "ZeroDivisionError" in caplog.text
    rig = Rig(make_api(broken, key=ApiKey.METADATA))
    rig.send(1, key=ApiKey.METADATA)
    assert rig.transport.closed


async def test_an_api_error_is_answered_in_place() -> None:
    async def refused(context: RequestContext, body: bytes) -> int:
        raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND)

    rig = Rig(make_api(refused))
    rig.send(1)
    await run_ready()
    assert rig.error_answer(HeartbeatResponse) == (1, ErrorCode.GROUP_ID_NOT_FOUND)


async def test_a_peer_that_does_not_read_is_not_read_from_and_nothing_new_begins() -> None:
    started = []
    rig = Rig(make_api(lambda context, body: started.append(1) or 1))
    rig.connection.pause_writing()
    assert not rig.transport.reading
    rig.send(1)
    assert started == []
    rig.connection.resume_writing()
    assert started == [1]
    assert rig.transport.reading


async def test_waiting_requests_are_bounded() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle))
    for number in range(MAX_WAITING_REQUESTS + 2):
        rig.send(number, body=bytes([number % 256]))
    await run_ready()
    assert not rig.transport.reading


async def test_overlapping_replies_are_bounded() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle, overlaps=True))
    for number in range(MAX_OVERLAPPING_REPLIES + 10):
        rig.send(number, body=bytes([number % 256]))
    await run_ready()
    assert len(gates.started) == MAX_OVERLAPPING_REPLIES


async def test_the_memory_budget_stops_reading_and_lets_go_on_in_order() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle), budget_bytes=100)
    rig.send(1, body=b"\x01" + bytes(200))
    assert not rig.transport.reading
    await run_ready()
    await gates.open(1)
    assert rig.budget.used_bytes == 0
    assert rig.transport.reading


async def test_a_lone_half_request_larger_than_the_budget_still_arrives() -> None:
    rig = Rig(make_api(lambda context, body: len(body)), budget_bytes=600)
    raw = request(1, body=bytes(1000))
    receive(rig.connection, raw[:700])
    assert rig.transport.reading
    receive(rig.connection, raw[700:])
    assert rig.answers == [(1, 1000)]
    assert rig.budget.used_bytes == 0


async def test_at_twice_the_budget_a_half_request_is_closed() -> None:
    rig = Rig(make_api(lambda context, body: len(body)), budget_bytes=100)
    receive(rig.connection, request(1, body=bytes(1000))[:500])
    assert rig.transport.closed
    rig.connection.connection_lost(None)
    assert rig.budget.used_bytes == 0


LARGE_BYTES = 100_000


def make_large(handler: Callable[..., Any], *, overlaps: bool = False) -> Api:
    """An API whose answers weigh `LARGE_BYTES`."""
    return replace(
        make_api(handler, overlaps=overlaps),
        encode=lambda correlation_id, version, response: (struct.pack(">i", correlation_id), bytes(LARGE_BYTES - 4)),
    )


async def test_over_the_budget_a_half_request_of_a_stranger_is_closed() -> None:
    budget_bytes = 2 * LOGIN_BYTES // 3
    rig = Rig(make_api(lambda context, body: 1), budget_bytes=budget_bytes)
    rig.connection.narrow({}, 50_000, read_request_header)
    receive(rig.connection, struct.pack(">i", 50_000) + bytes(budget_bytes + 100))
    assert not rig.transport.closed, "a login may be that large"
    receive(rig.connection, bytes(LOGIN_BYTES - budget_bytes))
    assert rig.budget.exhausted and not rig.budget.overrun
    assert rig.transport.closed
    rig.connection.connection_lost(None)
    assert rig.budget.used_bytes == 0


async def test_an_answer_counts_as_memory_until_its_last_byte_was_taken() -> None:
    rig = Rig(make_large(lambda context, body: 1))
    rig.send(1)
    assert rig.budget.used_bytes == 0, "the peer read it"
    rig.transport.peer_reads = False
    rig.send(2)
    assert rig.connection.held_bytes == rig.room.used_bytes == rig.budget.used_bytes == LARGE_BYTES
    rig.transport.unsent_bytes = 1
    assert rig.connection.taken_bytes == LARGE_BYTES - 1
    assert rig.budget.used_bytes == LARGE_BYTES, "the transport keeps the whole of it"
    rig.transport.let_peer_read()
    assert rig.connection.held_bytes == rig.room.used_bytes == rig.budget.used_bytes == 0
    assert rig.connection.taken_bytes == LARGE_BYTES


async def test_the_last_byte_of_an_answer_holds_all_of_it() -> None:
    """A transport keeps a buffer until it has all been sent."""

    class AllButAByte(FakeTransport):
        def writelines(self, buffers: list[bytes]) -> None:
            super().writelines(buffers)
            self.unsent_bytes = 1

    rig = Rig(make_large(lambda context, body: 1), transport=AllButAByte())
    rig.send(1)
    assert rig.room.used_bytes == LARGE_BYTES
    rig.transport.let_peer_read()
    assert rig.room.used_bytes == 0


async def test_an_answer_that_waits_for_its_turn_counts_and_only_the_one_it_waits_for_has_room() -> None:
    gates = Gates()
    contexts: dict[int, RequestContext] = {}

    async def handle(context: RequestContext, body: bytes) -> int:
        contexts[body[0]] = context
        return await gates.handle(context, body)

    rig = Rig(make_large(handle, overlaps=True))
    for number in (1, 2, 3):
        rig.send(number, body=bytes([number]))
    await run_ready()
    room = rig.connection.answer_room
    assert room(contexts[3]) > 0
    await gates.open(2)
    assert rig.room.used_bytes == LARGE_BYTES
    assert room(contexts[1]) > 0, "or both would wait for each other"
    assert room(contexts[3]) == 0
    woken: list[int] = []
    rig.connection.when_room(contexts[3], lambda: woken.append(3))
    await gates.open(1)
    assert rig.room.used_bytes == 0
    assert woken == [3]
    assert room(contexts[3]) > 0


async def test_what_a_handler_reserved_counts_until_its_answer_does() -> None:
    gate = asyncio.get_running_loop().create_future()

    async def handle(context: RequestContext, body: bytes) -> int:
        context.reserve(3 * LARGE_BYTES)
        return await gate

    rig = Rig(make_large(handle))
    rig.transport.peer_reads = False
    rig.send(1)
    await run_ready()
    assert rig.room.used_bytes == 3 * LARGE_BYTES
    gate.set_result(1)
    await run_ready()
    assert rig.room.used_bytes == LARGE_BYTES
    rig.transport.let_peer_read()
    assert rig.room.used_bytes == rig.budget.used_bytes == 0


async def test_a_lost_connection_gives_back_reserved_ready_and_unsent_answers() -> None:
    gates = Gates()

    async def handle(context: RequestContext, body: bytes) -> int:
        context.reserve(10)
        return await gates.handle(context, body)

    rig = Rig(make_large(handle, overlaps=True))
    rig.transport.peer_reads = False
    for number in (1, 2, 3, 4):
        rig.send(number, body=bytes([number]))
    await run_ready()
    await gates.open(1)
    await gates.open(3)
    assert rig.room.used_bytes == 2 * LARGE_BYTES + 2 * 10
    assert rig.room.holders == {rig.connection}
    rig.connection.connection_lost(None)
    await run_ready()
    assert rig.room.used_bytes == rig.budget.used_bytes == rig.budget.serving_bytes == 0
    assert not rig.room.holders


async def test_a_connection_begins_a_few_requests_and_then_lets_others() -> None:
    begun: list[int] = []
    rig = Rig(make_api(lambda context, body: begun.append(1) or 1))
    receive(rig.connection, b"".join(request(number) for number in range(40)))
    assert len(begun) == MAX_REQUESTS_PER_TURN
    assert not rig.transport.reading
    while len(begun) < 40:
        await asyncio.sleep(0)
    await run_ready()
    assert [number for number, _ in rig.answers] == list(range(40))
    assert rig.transport.reading


async def test_answers_that_become_ready_together_leave_together() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle, overlaps=True))
    for number in (1, 2, 3):
        rig.send(number, body=bytes([number]))
    await run_ready()
    for number in (1, 2, 3):
        gates.futures[number].set_result(number)
    await run_ready()
    assert rig.answers == [(1, 1), (2, 2), (3, 3)]
    assert rig.transport.writes == 1


async def test_answers_before_a_bad_frame_still_leave() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle))
    receive(rig.connection, request(1, body=b"\x01") + request(2, body=b"\x02") + struct.pack(">i", -1))
    await run_ready()
    await gates.open(1)
    await gates.open(2)
    assert rig.answers == [(1, 1), (2, 2)]
    assert rig.transport.closed


async def test_a_connection_over_the_limit_is_refused() -> None:
    most = 1
    limits = ConnectionLimits(total=lambda: 10, per_host=lambda: most)
    first = Rig(make_api(lambda context, body: 1), limits=limits)
    second = Rig(make_api(lambda context, body: 1), limits=limits)
    assert not first.transport.closed
    assert second.transport.aborted
    most = 2
    third = Rig(make_api(lambda context, body: 1), limits=limits)
    assert not third.transport.closed
    for rig in (first, second, third):
        rig.connection.connection_lost(None)
    assert limits.count == 0


async def test_a_lost_connection_cancels_its_work_and_gives_everything_back() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle))
    rig.send(1, body=b"\x01")
    rig.send(2, body=b"\x02")
    receive(rig.connection, struct.pack(">i", 5000) + b"half")
    await run_ready()
    rig.connection.connection_lost(None)
    await run_ready()
    assert gates.futures[1].cancelled()
    assert rig.budget.used_bytes == 0
    assert rig.budget.serving_bytes == 0
    assert rig.closed == [rig.connection]


async def test_what_was_asked_for_is_told_however_it_ends() -> None:
    """A client that leaves before its answer does not hide what it has begun."""
    audit = Audit(
        broker_id=1, cluster_id=lambda: "c", allowed=Allowed.ALL, explain=NO_AUTHORIZER.explain, clock=SystemClock()
    )
    outbox = audit.outbox("a test")
    gates = Gates()
    rights = (Operation.READ, ResourceKind.GROUP)

    async def handle(context: RequestContext, body: bytes) -> int:
        assert context.may(*rights, f"group-{body[0]}")
        return await gates.handle(context, body)

    rig = Rig(make_api(handle, overlaps=True, needs=judged(rights)), audit=audit)
    for number in (1, 2):
        rig.send(number, body=bytes([number]))
    await run_ready()
    assert not outbox, "not before it is answered"
    await gates.open(1)
    rig.connection.connection_lost(None)
    await run_ready()
    told = [json.loads(line.data)["resources"][0]["name"] for line in outbox.take(10, 10_000)]
    assert told == ["group-1", "group-2"]


async def test_one_byte_at_a_time_is_as_good_as_any() -> None:
    rig = Rig(make_api(lambda context, body: len(body)))
    for byte in request(7, body=b"hello"):
        receive(rig.connection, bytes([byte]))
    assert rig.answers == [(7, 5)]


async def test_draining_answers_what_has_begun_and_begins_nothing() -> None:
    gates = Gates()
    rig = Rig(make_api(gates.handle))
    rig.send(1, body=b"\x01")
    rig.send(2, body=b"\x02")
    await run_ready()
    rig.connection.drain()
    assert not rig.transport.closed
    await gates.open(1)
    assert rig.answers == [(1, 1)]
    assert gates.started == [1]
    assert rig.transport.closed


# --- rights -----------------------------------------------------------------------------------------------------------

READ_GROUP = (Operation.READ, ResourceKind.GROUP)


class Ruled(Rig):
    """A connection to a broker with rules, of which there are none: nobody may anything."""

    def __init__(self, *apis: Api) -> None:
        super().__init__(*apis)
        self.connection._services.authorizer = Authorizer(enabled=True, acls=AclTable)


async def test_a_handler_that_forgets_to_judge_is_caught() -> None:
    async def later(_context: RequestContext, _body: bytes) -> int:
        return 1

    def with_promise(_context: RequestContext, _body: bytes) -> Promise[int]:
        promise: Promise[int] = Promise()
        asyncio.get_running_loop().call_soon(promise.keep, 1)
        return promise

    for handler in (lambda _context, _body: 1, later, with_promise, lambda _context, _body: None):
        rig = Ruled(make_api(handler, needs=judged(READ_GROUP)))
        rig.send(1)
        await run_ready()
        assert rig.error_answer(HeartbeatResponse) == (1, ErrorCode.UNKNOWN_SERVER_ERROR)


async def test_a_handler_that_asks_for_what_it_has_not_declared_is_caught() -> None:
    rig = Ruled(make_api(lambda context, _body: int(context.may(*READ_GROUP, "g")), needs=cluster(Operation.ALTER)))
    rig.connection._services.authorizer = Authorizer(
        enabled=True, acls=AclTable, super_users=frozenset({"User:ANONYMOUS"})
    )
    rig.send(1)
    assert rig.error_answer(HeartbeatResponse) == (1, ErrorCode.UNKNOWN_SERVER_ERROR)


async def test_a_handler_that_judges_is_answered_whatever_it_found() -> None:
    rig = Ruled(make_api(lambda context, _body: int(context.may(*READ_GROUP, "g")), needs=judged(READ_GROUP)))
    rig.send(1)
    assert rig.answers == [(1, 0)]


async def test_a_request_that_is_refused_as_a_whole_does_not_reach_its_handler() -> None:
    reached: list[bytes] = []
    rig = Ruled(make_api(lambda _context, body: reached.append(body), needs=cluster(Operation.ALTER)))
    rig.send(1)
    assert rig.error_answer(HeartbeatResponse) == (1, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
    assert reached == []


# --- certificates -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_good", [True, False])
async def test_a_certificate_has_to_be_good_where_it_is_not_who_the_client_is_too(is_good: bool) -> None:
    """On a listener where clients log in besides: OpenSSL resumes a session without a look at the dates."""
    identity = make_authority("a").issue("alice", clock=None if is_good else LONG_AGO, days=10)
    (der,) = pem_certificates(identity.certificate)
    shown = SimpleNamespace(getpeercert=lambda binary_form: der, session_reused=True)

    class Resumed(FakeTransport):
        def get_extra_info(self, name: str, default: object = None) -> object:
            return shown if name == "ssl_object" else super().get_extra_info(name, default)

    rig = Rig(make_api(lambda context, body: 1), transport=Resumed())
    assert rig.transport.aborted != is_good
