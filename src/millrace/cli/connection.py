"""The door of the command line to a cluster: librdkafka clients with sane settings, and its errors in plain words.

librdkafka reports an unreachable broker, or one that does not let it in, by retrying in the background and logging,
which is wrong for a command that a person waits for. So a command first sees whether it is let in (`cli.entry`), and
afterwards library logs are dropped unless MILLRACE_DEBUG is set.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient

from millrace.cli.entry import CLIENT_ID, require_entry
from millrace.cli.output import CommandError

REQUEST_TIMEOUT_S: Final = 15.0

# The library's own conditions (not the protocol's) have names with an underscore; they are documented and stable.
_BROKEN: Final = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN})  # noqa: SLF001
_LATE: Final = frozenset({KafkaError._TIMED_OUT, KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT_QUEUE})  # noqa: SLF001
_PARTITION_END: Final = KafkaError._PARTITION_EOF  # noqa: SLF001

T = TypeVar("T")


def client_settings(bootstrap: str, overrides: Mapping[str, str]) -> dict[str, Any]:
    """What every client of the command line is configured with; the user's `--client` settings win."""
    return {
        "bootstrap.servers": bootstrap,
        "client.id": CLIENT_ID,
        "socket.connection.setup.timeout.ms": 5000,
        "log.connection.close": False,
        **overrides,
    }


def _logger() -> logging.Logger:
    logger = logging.getLogger("millrace.cli.librdkafka")
    if not logger.handlers:
        logger.propagate = False
        if os.environ.get("MILLRACE_DEBUG"):
            logger.addHandler(logging.StreamHandler())
        else:
            logger.addHandler(logging.NullHandler())
    return logger


def open_admin(bootstrap: str, overrides: Mapping[str, str]) -> AdminClient:
    require_entry(bootstrap, overrides)
    return AdminClient(client_settings(bootstrap, overrides), logger=_logger())


def open_producer(bootstrap: str, settings: Mapping[str, Any]) -> Producer:
    require_entry(bootstrap, settings)
    return Producer({**client_settings(bootstrap, {}), **settings}, logger=_logger())


def open_consumer(bootstrap: str, settings: Mapping[str, Any]) -> Consumer:
    require_entry(bootstrap, settings)
    return Consumer({**client_settings(bootstrap, {}), **settings}, logger=_logger())


def result(future: Future[T]) -> T:
    """The answer of an admin call, waited for no longer than the request itself may take."""
    return future.result(timeout=REQUEST_TIMEOUT_S + 5)


def error_of(error: BaseException) -> KafkaError | None:
    """The `KafkaError` inside an exception of librdkafka, if there is one."""
    if isinstance(error, KafkaException) and error.args and isinstance(error.args[0], KafkaError):
        return error.args[0]
    return None


def is_partition_end(error: KafkaError) -> bool:
    """Whether this is no failure, but the news that the end of a partition was reached."""
    return error.code() == _PARTITION_END


def explain(error: KafkaError) -> str:
    """A librdkafka error in one line of plain words, with the protocol's name for it."""
    if error.code() in _BROKEN:
        return "the connection to the broker broke"
    if error.code() in _LATE:
        return "the broker did not answer in time"
    text = " ".join(error.str().split())
    return f"{text.removeprefix('Broker: ').removeprefix('Local: ')} ({error.name()})"


def explain_kafka_exception(error: BaseException) -> str | None:
    kafka_error = error_of(error)
    if kafka_error is not None:
        return explain(kafka_error)
    if isinstance(error, TimeoutError):
        return "the broker did not answer in time"
    return str(error) if isinstance(error, KafkaException) else None


def topic_partitions(client: AdminClient | Consumer, topic: str) -> list[int]:
    """The partitions of a topic, without creating it."""
    metadata = client.list_topics(timeout=REQUEST_TIMEOUT_S)
    found = metadata.topics.get(topic)
    if found is None:
        from difflib import get_close_matches

        near = get_close_matches(topic, metadata.topics, n=1)
        raise CommandError(f"there is no topic '{topic}'" + (f"; did you mean '{near[0]}'?" if near else ""))
    if found.error is not None:
        raise CommandError(f"topic '{topic}': {explain(found.error)}")
    return sorted(found.partitions)
