"""What the blocking connection adds to the other one: requests in flight, large frames."""

from __future__ import annotations

import pickle
import socket
import threading
from typing import Any

import pytest

from millrace.client.blocking import BlockingConnection, ReceiveBuffer
from millrace.client.sasl import SaslClient
from millrace.errors import ApiError, ErrorCode, ProtocolError
from millrace.wire.keys import ApiKey
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.groups import HeartbeatRequest, HeartbeatResponse
from support.fake_broker import FakeBroker


def heartbeat(request: Any) -> HeartbeatResponse:
    return HeartbeatResponse(error_code=int(request.group_id))


def connected(broker: FakeBroker) -> BlockingConnection:
    return BlockingConnection("127.0.0.1", broker.port)


def heartbeats(connection: BlockingConnection, *numbers: int) -> list[Any]:
    return [connection.send(HeartbeatRequest(group_id=str(number))) for number in numbers]


def test_several_requests_under_way_in_any_order() -> None:
    with FakeBroker({ApiKey.HEARTBEAT: heartbeat}) as broker, connected(broker) as connection:
        first, second, third, fourth = heartbeats(connection, 1, 2, 3, 4)
        assert connection.receive(third).error_code == 3
        assert connection.awaits(first) and connection.awaits(fourth) and not connection.awaits(third)
        assert connection.request(HeartbeatRequest(group_id="5")).error_code == 5
        assert [connection.receive(each).error_code for each in (fourth, first, second)] == [4, 1, 2]
        with pytest.raises(ApiError) as caught:
            connection.receive(first)  # it was taken
        assert caught.value.code is ErrorCode.NETWORK_EXCEPTION


def test_what_was_under_way_is_lost_with_the_connection() -> None:
    def hang_up_at_two(request: Any) -> Any:
        return ConnectionError if request.group_id == "2" else heartbeat(request)

    with FakeBroker({ApiKey.HEARTBEAT: hang_up_at_two}) as broker, connected(broker) as connection:
        first, second, third = heartbeats(connection, 1, 2, 3)
        assert connection.receive(first).error_code == 1
        for lost in (second, third):
            with pytest.raises(ApiError) as caught:
                connection.receive(lost)
            assert caught.value.code is ErrorCode.NETWORK_EXCEPTION
        assert not connection.awaits(third)
        (fourth,) = heartbeats(connection, 4)  # on a new connection
        with pytest.raises(ApiError):
            connection.receive(third)
        assert connection.receive(fourth).error_code == 4


def test_a_large_response_is_not_copied() -> None:
    records = bytes(range(256)) * (32 * 1024)
    data = FetchResponse.PartitionData(records=records, aborted_transactions=None)
    response = FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic="t", partitions=[data])])
    with FakeBroker({ApiKey.FETCH: lambda request: response}) as broker, connected(broker) as connection:
        found = connection.request(FetchRequest(), 12).responses[0].partitions[0].records
        assert isinstance(found, memoryview) and found == records
        assert isinstance(found.obj, bytearray) and len(found.obj) < len(records) + 200  # a view of the whole frame


def test_a_response_to_something_else() -> None:
    with FakeBroker({ApiKey.HEARTBEAT: heartbeat}) as broker, connected(broker) as connection:
        (pending,) = heartbeats(connection, 1)
        connection._under_way[0] += 1
        with pytest.raises(ProtocolError, match="was asked"):
            connection.receive(pending)
        assert not connection.is_connected


def test_a_lent_buffer_is_for_one_response_after_another() -> None:
    def answer(request: Any) -> FetchResponse:
        data = FetchResponse.PartitionData(records=bytes([request.max_bytes]) * 5000, aborted_transactions=None)
        return FetchResponse(responses=[FetchResponse.FetchableTopicResponse(topic="t", partitions=[data])])

    buffer = ReceiveBuffer()

    def records(pending: Any, lent: ReceiveBuffer | None) -> Any:
        return connection.receive(pending, buffer=lent).responses[0].partitions[0].records

    with FakeBroker({ApiKey.FETCH: answer}) as broker, connected(broker) as connection:
        sent = [connection.send(FetchRequest(max_bytes=number), 12) for number in range(4)]
        second = records(sent[1], buffer)
        first = records(sent[0], buffer)  # it came before, and was held outside of the buffer
        assert (second[0], first[0]) == (1, 0) and first.obj is not second.obj
        third = records(sent[2], buffer)
        assert third.obj is second.obj and second[0] == third[0] == 2
        assert records(sent[3], None)[0] == 3 and third[0] == 2
    assert len(buffer.room(1 << 20)) == 1 << 20 and third[0] == 2  # more room is new room


def test_a_peer_that_sends_a_byte_now_and_then_does_not_hold_us() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ended = threading.Event()

        def drip() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(b"\0\0\1\0")
                while not ended.wait(0.01):
                    try:
                        peer.sendall(b"x")
                    except OSError:
                        return

        dripping = threading.Thread(target=drip)
        dripping.start()
        with pytest.raises(ApiError) as caught:
            _ = BlockingConnection("127.0.0.1", listener.getsockname()[1], timeout_ms=100).offered
        ended.set()
        dripping.join()
        assert caught.value.code is ErrorCode.REQUEST_TIMED_OUT


def test_pickles_with_its_credentials() -> None:
    client = SaslClient("PLAIN", "me", "x")
    with BlockingConnection("h", 1, timeout_ms=5, connect_timeout_ms=7, sasl=client) as connection:
        other = pickle.loads(pickle.dumps(connection))
    assert (other._timeout_ms, other._connect_timeout_ms, other._sasl) == (5, 7, client)


def test_another_thread_interrupts_who_waits() -> None:
    asked = threading.Event()

    def silent(_request: Any) -> None:
        asked.set()

    with FakeBroker({ApiKey.HEARTBEAT: silent}) as broker, connected(broker) as connection:
        failures: list[ErrorCode] = []

        def wait() -> None:
            try:
                connection.request(HeartbeatRequest(group_id="1"))
            except ApiError as error:
                failures.append(error.code)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert asked.wait(20)
        connection.interrupt()
        waiting.join(20)
        assert failures == [ErrorCode.NETWORK_EXCEPTION]
        connection.interrupt()  # of nobody
