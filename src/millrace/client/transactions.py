"""Transactions as a client has them: begin one, add partitions, end many. Which to end, and how, is decided elsewhere.

The protocol is that of transaction version 1, with every broker since Kafka 2.5: partitions are added by a request of
their own, and the end of a transaction leaves the epoch as it is. Whoever knows id, producer id and epoch may end it,
from another process than the one that wrote, and may ask for the same end again: that is a success, too. (Version 2 of
KIP-890 raises the epoch at the end, so that a repeated end could not be told from that of the next transaction.)

Invariant: an answer that may have been lost is asked for again only where the request may be repeated. That holds for
adding and ending, not for `begin`, whose late twin would abort what was begun since; there the caller decides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple

from millrace.client import requests
from millrace.client.blocking import BlockingConnection, Pending
from millrace.client.cluster import ClusterClient, CoordinatorKind, raise_for
from millrace.client.retrying import is_retriable
from millrace.errors import ApiError, ErrorCode
from millrace.model import TopicPartition
from millrace.wire.messages.producers import InitProducerIdRequest
from millrace.wire.messages.transactions import AddPartitionsToTxnRequest, EndTxnRequest
from millrace.wire.schema import Request

PRODUCE_VERSION: Final = 11
"""From 12 on a Produce adds its partitions to the transaction by itself, as transaction version 2 has it."""
_INIT_VERSION: Final = 5
_ADD_VERSION: Final = 3
_END_VERSION: Final = 4

_SHUT_OUT_TIMEOUT_MS: Final = 60_000
_MAYBE_DONE: Final = frozenset({ErrorCode.NETWORK_EXCEPTION, ErrorCode.REQUEST_TIMED_OUT})


class Transaction(NamedTuple):
    """One transaction, as long as nobody begins another one under its id: that raises the epoch."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


def are_served(client: ClusterClient) -> bool:
    """Whether the brokers have transactions at all."""
    return client.serves(InitProducerIdRequest, AddPartitionsToTxnRequest, EndTxnRequest)


def begin(client: ClusterClient, transactional_id: str, timeout_ms: int, other_id: Callable[[], str]) -> Transaction:
    """A transaction under a transactional id; one that was open there is aborted, and its producer shut out.

    When an answer was lost, the request may still arrive at any later time and shut out whoever has the id by then:
    the next attempt is made under `other_id()`.
    """
    attempts = client.attempts(f"a transaction of '{transactional_id}'")
    while True:
        try:
            return _init(client, transactional_id, timeout_ms)
        except ApiError as error:
            attempts.failed(error)
            if error.code in _MAYBE_DONE:
                transactional_id = other_id()


def shut_out(client: ClusterClient, transactional_ids: Collection[str]) -> None:
    """Have the transactions that may be open under these ids aborted; one attempt, and no word of those that fail."""
    for each in transactional_ids:
        try:
            _init(client, each, _SHUT_OUT_TIMEOUT_MS)
        except ApiError:
            continue  # it was asked, or is aborted when its time is over


def _init(client: ClusterClient, transactional_id: str, timeout_ms: int) -> Transaction:
    message = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
    try:
        response = client.ask(
            client.coordinator(transactional_id, CoordinatorKind.TRANSACTION), message, at_most=_INIT_VERSION
        )
        raise_for(response.error_code)
    except ApiError as error:
        if error.code is not ErrorCode.CONCURRENT_TRANSACTIONS:
            client.forget_coordinator(transactional_id, CoordinatorKind.TRANSACTION)
        raise
    return Transaction(transactional_id, response.producer_id, response.producer_epoch)


def add_partitions(client: ClusterClient, transaction: Transaction, partitions: Collection[TopicPartition]) -> None:
    """Make partitions part of an open transaction."""
    refused = _ask_all(client, {transaction: _adding(transaction, partitions)}, _ADD_VERSION, _read_added)
    for error in refused.values():
        raise ApiError(error.code, f"{error.message or 'refused'} (transaction '{transaction.transactional_id}')")


def not_open(
    client: ClusterClient, transactions: Mapping[Transaction, Collection[TopicPartition]]
) -> dict[Transaction, ApiError]:
    """Those that are no longer open, and why, by adding what they have: that changes nothing in one that is."""
    messages = {each: _adding(each, partitions) for each, partitions in transactions.items()}
    return _ask_all(client, messages, _ADD_VERSION, _read_added)


def end(client: ClusterClient, transactions: Collection[Transaction], *, commit: bool) -> dict[Transaction, ApiError]:
    """Commit or abort all, and return those that refused; one that has ended in the same way already has not.

    Returns when everybody has answered; ApiError when somebody does not within `retry_timeout_ms`.
    """
    messages = {each: _ending(each, commit=commit) for each in transactions}
    return _ask_all(client, messages, _END_VERSION, lambda response: raise_for(response.error_code))


def abandon(client: ClusterClient, transaction: Transaction) -> None:
    """Abort a transaction that nobody else knows of, if that is easily done; else its timeout does it."""
    try:
        connection = client.coordinator(transaction.transactional_id, CoordinatorKind.TRANSACTION)
        client.ask(connection, _ending(transaction, commit=False), at_most=_END_VERSION)
    except ApiError:
        return


def _ending(transaction: Transaction, *, commit: bool) -> Request:
    return EndTxnRequest(
        transactional_id=transaction.transactional_id,
        producer_id=transaction.producer_id,
        producer_epoch=transaction.producer_epoch,
        committed=commit,
    )


def _adding(transaction: Transaction, partitions: Collection[TopicPartition]) -> Request:
    return requests.add_partitions_to_txn(*transaction, partitions)


def _read_added(response: Any) -> None:
    requests.read_add_partitions_to_txn(response)


def _ask_all(
    client: ClusterClient, messages: Mapping[Transaction, Request], version: int, read: Callable[[Any], None]
) -> dict[Transaction, ApiError]:
    """Ask the coordinators of all transactions at once, and again those that did not answer for good."""
    missing = dict(messages)
    refused: dict[Transaction, ApiError] = {}
    attempts = client.attempts("transactions")
    while missing:
        errors: dict[Transaction, ApiError] = {}
        sent: list[tuple[Transaction, BlockingConnection, Pending]] = []
        try:
            client.learn_transaction_coordinators(each.transactional_id for each in missing)
        except ApiError:
            pass  # one by one, then, with the same failure if it lasts
        for transaction, message in missing.items():
            try:
                connection = client.coordinator(transaction.transactional_id, CoordinatorKind.TRANSACTION)
                sent.append((transaction, connection, client.send(connection, message, at_most=version)))
            except ApiError as error:
                errors[transaction] = error
        for transaction, connection, pending in sent:
            try:
                read(connection.receive(pending))
            except ApiError as error:
                errors[transaction] = error
        missing = {each: message for each, message in missing.items() if each in errors}
        for transaction, failure in errors.items():
            if not is_retriable(failure.code):
                refused[transaction] = failure
                del missing[transaction]
            elif failure.code is not ErrorCode.CONCURRENT_TRANSACTIONS:
                client.forget_coordinator(transaction.transactional_id, CoordinatorKind.TRANSACTION)
        if missing:
            transaction = next(iter(missing))
            attempts.failed(errors[transaction], about=f"'{transaction.transactional_id}'")
    return refused
