"""What the leader of a partition asks the transaction coordinator before it takes a transactional write (KIP-890).

Of a producer with transaction version 2 the partition is added to the transaction; of an older one, which adds it
itself, it is verified that it has. To each coordinator one request is under way at a time; what is asked meanwhile goes
with the next. A coordinator on this broker is asked without a socket.

While the transaction before is being completed, CONCURRENT_TRANSACTIONS, the question is asked again for a moment, so
that a producer that is quick does not have to come again itself.

Owner of one task per coordinator that is being asked. Not here: what is done with the answer (`handlers.produce`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode, MillraceError
from millrace.model import NO_BROKER, TRANSACTION_STATE_TOPIC, TopicPartition
from millrace.tasks import Tasks
from millrace.transactions.markers import PeerRequests
from millrace.transactions.settings import GateSettings
from millrace.transactions.state import EPOCH_VERSION, Producer
from millrace.wire.messages.transactions import AddPartitionsToTxnRequest

_VERSION: Final = 5
_TIMEOUT_MS: Final = 10_000

_OF_THE_WHOLE: Final = frozenset({
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
})  # fmt: skip
"""The coordinator could not say: another one can, or the same one later."""
_TOO_NEW: Final = frozenset({ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.OPERATION_NOT_ATTEMPTED})
"""The coordinator does not know a partition yet that is led here."""

Partition = tuple[str, int]
Admission = dict[Partition, ErrorCode]


class LocalCoordinator(Protocol):
    """The part of `TransactionCoordinator` that is needed here."""

    def partition_for(self, transactional_id: str) -> int: ...

    async def add_partitions(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], *, version: int
    ) -> None: ...

    def add_at_once(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition], *, version: int
    ) -> bool: ...

    def verify(
        self, transactional_id: str, producer: Producer, partitions: Collection[TopicPartition]
    ) -> dict[TopicPartition, ErrorCode]: ...

    def completion(self, transactional_id: str) -> asyncio.Future[None] | None: ...


class _Question(NamedTuple):
    """What is asked for one transaction; the same question about more partitions goes in one."""

    transactional_id: str
    producer: Producer
    add: bool


class Gate:
    """The way of leaders to transaction coordinators."""

    def __init__(
        self,
        *,
        broker_id: int,
        local: LocalCoordinator,
        peers: PeerRequests,
        image: Callable[[], ClusterImage],
        settings: GateSettings,
        clock: Clock,
    ) -> None:
        self._broker_id = broker_id
        self._local = local
        self._peers = peers
        self._image = image
        self._settings = settings
        self._clock = clock
        self._tasks = Tasks(clock)
        self._channels: dict[int, _Channel] = {}

    def __repr__(self) -> str:
        return f"Gate(broker {self._broker_id})"

    async def stop(self) -> None:
        """Ask nobody any more; whoever waits is told NETWORK_EXCEPTION."""
        await self._tasks.stop()

    def adds_at_once(
        self, transactional_id: str, producer_id: int, producer_epoch: int, partitions: list[Partition]
    ) -> bool:
        """Whether the partitions are part of the producer's transaction now: `admit` with `add`, without a wait.

        False says nothing but that `admit` has to be asked. True where the coordinator is on this broker and a write to
        its log needs no other replica and no disk.
        """
        try:
            return self._coordinator(transactional_id) == self._broker_id and self._local.add_at_once(
                transactional_id,
                Producer(producer_id, producer_epoch),
                [TopicPartition(*each) for each in partitions],
                version=EPOCH_VERSION,
            )
        except ApiError:
            return False

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: list[Partition],
        *,
        add: bool,
    ) -> Admission:
        """Whether a producer may write to partitions as part of its transaction; one code for each of them.

        NONE: it may. INVALID_PRODUCER_EPOCH: it is fenced. TRANSACTION_ABORTABLE: the partition is not part of the
        transaction. ApiError where the coordinator could not be asked: COORDINATOR_NOT_AVAILABLE, NOT_COORDINATOR,
        COORDINATOR_LOAD_IN_PROGRESS or NETWORK_EXCEPTION, after each of which the write may be tried again.
        """
        question = _Question(transactional_id, Producer(producer_id, producer_epoch), add)
        until_s = self._clock.monotonic() + self._settings.retry_max_ms / 1000
        while True:
            answer = await self._ask(question, partitions)
            is_early = add and ErrorCode.CONCURRENT_TRANSACTIONS in answer.values()
            left_s = until_s - self._clock.monotonic()
            if not is_early or left_s <= 0:
                return answer
            await self._pause(transactional_id, left_s)

    async def _ask(self, question: _Question, partitions: list[Partition]) -> Admission:
        coordinator = self._coordinator(question.transactional_id)
        if coordinator == self._broker_id:
            return await self._ask_here(question, partitions)
        channel = self._channels.get(coordinator)
        if channel is None:
            channel = self._channels[coordinator] = _Channel(coordinator, self._peers, self._tasks)
        answer = await channel.ask(question, partitions)
        for code in answer.values():
            if code in _OF_THE_WHOLE:
                raise ApiError(code, f"the coordinator of {question.transactional_id!r} is elsewhere or not ready")
            if code in _TOO_NEW:
                raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, "the coordinator does not know the partition yet")
        return answer

    async def _ask_here(self, question: _Question, partitions: list[Partition]) -> Admission:
        asked = [TopicPartition(*each) for each in partitions]
        try:
            if question.add:
                await self._local.add_partitions(
                    question.transactional_id, question.producer, asked, version=EPOCH_VERSION
                )
                return dict.fromkeys(partitions, ErrorCode.NONE)
            found = self._local.verify(question.transactional_id, question.producer, asked)
            return {each: found[TopicPartition(*each)] for each in partitions}
        except ApiError as error:
            if error.code in _OF_THE_WHOLE:
                raise
            return {each: _of_a_write(error.code) for each in partitions}

    async def _pause(self, transactional_id: str, left_s: float) -> None:
        """Until it is worth asking again."""
        try:
            here = self._coordinator(transactional_id) == self._broker_id
            waiting = self._local.completion(transactional_id) if here else None
        except ApiError:
            return  # the next attempt says it
        if waiting is None:
            await self._clock.sleep(min(self._settings.retry_backoff_ms / 1000, left_s))
            return
        is_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self._clock.call_later(left_s, lambda: is_up.set_result(None))
        try:
            # `wait` cancels neither: others wait for the completion, too.
            await asyncio.wait({waiting, is_up}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()

    def _coordinator(self, transactional_id: str) -> int:
        topic = self._image().topic(TRANSACTION_STATE_TOPIC)
        if topic is None:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"there is no {TRANSACTION_STATE_TOPIC}")
        index = self._local.partition_for(transactional_id)
        leader = topic.partitions[index].leader
        if leader == NO_BROKER:
            raise ApiError(ErrorCode.COORDINATOR_NOT_AVAILABLE, f"{TRANSACTION_STATE_TOPIC}-{index} has no leader")
        return leader


def _of_a_write(code: ErrorCode) -> ErrorCode:
    """As the answer to a write says it: there a fenced producer has an invalid epoch."""
    return ErrorCode.INVALID_PRODUCER_EPOCH if code is ErrorCode.PRODUCER_FENCED else code


@dataclass(slots=True)
class _Asked:
    """One question with everybody who asks it."""

    partitions: dict[Partition, None] = field(default_factory=dict)
    waiting: list[tuple[list[Partition], asyncio.Future[Admission]]] = field(default_factory=list)


class _Channel:
    """What one coordinator is to be asked: one request at a time, and with it everything that has come together."""

    def __init__(self, broker_id: int, peers: PeerRequests, tasks: Tasks) -> None:
        self._broker_id = broker_id
        self._peers = peers
        self._tasks = tasks
        self._questions: dict[_Question, _Asked] = {}
        self._is_asking = False

    async def ask(self, question: _Question, partitions: list[Partition]) -> Admission:
        """The answer for each partition; ApiError where there is none."""
        done: asyncio.Future[Admission] = asyncio.get_running_loop().create_future()
        asked = self._questions.setdefault(question, _Asked())
        asked.partitions.update(dict.fromkeys(partitions))
        asked.waiting.append((partitions, done))
        if not self._is_asking:
            self._is_asking = True
            self._tasks.start(f"asking coordinator {self._broker_id}", self._ask_all())
        return await done

    async def _ask_all(self) -> None:
        try:
            while self._questions:
                batch = self._take()
                try:
                    answers = await self._request(batch)
                except MillraceError as error:
                    code = error.code if isinstance(error, ApiError) else ErrorCode.NETWORK_EXCEPTION
                    _fail(batch, ApiError(code if code in _OF_THE_WHOLE else ErrorCode.NETWORK_EXCEPTION, str(error)))
                    continue
                except BaseException:
                    left, self._questions = self._questions, {}
                    for unanswered in (batch, left):
                        _fail(unanswered, ApiError(ErrorCode.NETWORK_EXCEPTION, "the question was given up"))
                    raise
                for question, asked in batch.items():
                    found = answers.get(question.transactional_id, {})
                    for partitions, done in asked.waiting:
                        if not done.done():
                            # What was not answered has not happened.
                            done.set_result({each: found.get(each, ErrorCode.NOT_COORDINATOR) for each in partitions})
        finally:
            self._is_asking = False

    def _take(self) -> dict[_Question, _Asked]:
        """Of each transactional id one question: the answer says no more than the id."""
        batch: dict[_Question, _Asked] = {}
        taken: set[str] = set()
        for question in tuple(self._questions):
            if question.transactional_id not in taken:
                taken.add(question.transactional_id)
                batch[question] = self._questions.pop(question)
        return batch

    async def _request(self, batch: dict[_Question, _Asked]) -> dict[str, Admission]:
        message = AddPartitionsToTxnRequest(transactions=[_encoded(*each) for each in batch.items()])
        response = await self._peers.request(self._broker_id, message, _VERSION, _TIMEOUT_MS)
        if response.error_code:
            raise ApiError(ErrorCode(response.error_code), "the coordinator refused the request")
        return _decoded(response)


def _fail(batch: dict[_Question, _Asked], error: ApiError) -> None:
    for asked in batch.values():
        for _, done in asked.waiting:
            if not done.done():
                done.set_exception(error)


def _encoded(question: _Question, asked: _Asked) -> AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction:
    by_topic: dict[str, list[int]] = {}
    for topic, partition in asked.partitions:
        by_topic.setdefault(topic, []).append(partition)
    return AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction(
        transactional_id=question.transactional_id,
        producer_id=question.producer.producer_id,
        producer_epoch=question.producer.epoch,
        verify_only=not question.add,
        topics=[
            AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=name, partitions=indexes)
            for name, indexes in by_topic.items()
        ],
    )


def _decoded(response: Any) -> dict[str, Admission]:
    return {
        each.transactional_id: {
            (topic.name, partition.partition_index): _of_a_write(ErrorCode(partition.partition_error_code))
            for topic in each.topic_results
            for partition in topic.results_by_partition
        }
        for each in response.results_by_transaction
    }
