"""A librdkafka consumer without Python objects: the library of the confluent-kafka wheel, called through ctypes.

confluent-kafka makes a Python object of every record, a microsecond each, and one thread of that is slower than either
broker: what it measures is itself. Here a record costs the application what it costs a C program, nearly nothing.
"""

from __future__ import annotations

import time
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    c_char_p,
    c_int,
    c_int32,
    c_int64,
    c_size_t,
    c_ssize_t,
    c_void_p,
    create_string_buffer,
)
from functools import cache
from pathlib import Path
from typing import Any

import confluent_kafka

BATCH_RECORDS = 10_000
_CONSUMER = 1
_OFFSET_BEGINNING = -2
_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "conf_new": (c_void_p, []),
    "conf_set": (c_int, [c_void_p, c_char_p, c_char_p, c_char_p, c_size_t]),
    "new": (c_void_p, [c_int, c_void_p, c_char_p, c_size_t]),
    "poll_set_consumer": (c_int, [c_void_p]),
    "topic_partition_list_new": (c_void_p, [c_int]),
    "topic_partition_list_add": (c_void_p, [c_void_p, c_char_p, c_int32]),
    "topic_partition_list_set_offset": (c_int, [c_void_p, c_char_p, c_int32, c_int64]),
    "topic_partition_list_destroy": (None, [c_void_p]),
    "assign": (c_int, [c_void_p, c_void_p]),
    "queue_get_consumer": (c_void_p, [c_void_p]),
    "consume_batch_queue": (c_ssize_t, [c_void_p, c_int, POINTER(c_void_p), c_size_t]),
    "message_destroy": (None, [c_void_p]),
    "queue_destroy": (None, [c_void_p]),
    "consumer_close": (c_int, [c_void_p]),
    "destroy": (None, [c_void_p]),
}


class _Message(Structure):
    """rd_kafka_message_t, as far as it is looked at."""

    _fields_ = (
        ("error", c_int),
        ("topic", c_void_p),
        ("partition", c_int32),
        ("payload", c_void_p),
        ("size", c_size_t),
        ("key", c_void_p),
        ("key_size", c_size_t),
        ("offset", c_int64),
    )


@cache
def _library() -> CDLL:
    beside = Path(confluent_kafka.__file__).parent.parent
    found = [*beside.glob("confluent_kafka.libs/librdkafka*.so*"), *beside.glob("confluent_kafka/.dylibs/librdkafka*")]
    if not found:
        raise RuntimeError(f"no librdkafka beside {beside}/confluent_kafka: install confluent-kafka from its wheel")
    library = CDLL(str(found[0]))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, f"rd_kafka_{name}")
        function.restype, function.argtypes = result, arguments
    return library


def consume(settings: dict[str, str], topic: str, records: int) -> float:
    """Seconds that partition 0's first `records` take, counted from the first batch of them to the last."""
    kafka = _library()
    error = create_string_buffer(512)
    config = kafka.rd_kafka_conf_new()
    for name, value in settings.items():
        if kafka.rd_kafka_conf_set(config, name.encode(), value.encode(), error, len(error)):
            raise RuntimeError(error.value.decode())
    consumer = kafka.rd_kafka_new(_CONSUMER, config, error, len(error))
    if not consumer:
        raise RuntimeError(error.value.decode())
    kafka.rd_kafka_poll_set_consumer(consumer)
    partitions = kafka.rd_kafka_topic_partition_list_new(1)
    kafka.rd_kafka_topic_partition_list_add(partitions, topic.encode(), 0)
    kafka.rd_kafka_topic_partition_list_set_offset(partitions, topic.encode(), 0, _OFFSET_BEGINNING)
    kafka.rd_kafka_assign(consumer, partitions)
    kafka.rd_kafka_topic_partition_list_destroy(partitions)
    queue = kafka.rd_kafka_queue_get_consumer(consumer)
    try:
        return _drain(kafka, queue, records)
    finally:
        kafka.rd_kafka_queue_destroy(queue)
        kafka.rd_kafka_consumer_close(consumer)
        kafka.rd_kafka_destroy(consumer)


def _drain(kafka: CDLL, queue: int, records: int) -> float:
    messages = (c_void_p * BATCH_RECORDS)()
    destroy = kafka.rd_kafka_message_destroy
    seen = skipped = 0
    first = 0.0
    give_up = time.monotonic() + 300
    while seen < records:
        # Not more than there are: it would wait the whole second for the rest of the last batch.
        count = kafka.rd_kafka_consume_batch_queue(queue, 1000, messages, min(BATCH_RECORDS, records - seen))
        if count > 0:
            last = _Message.from_address(messages[count - 1])
            seen += count
            # Partition 0 from its beginning, nothing missing, nothing twice: the last offset tells.
            if last.error or last.offset != seen - 1:
                raise RuntimeError(f"record {seen} came with error {last.error} and offset {last.offset}")
            if not skipped:
                skipped = count  # they came before the clock started
                first = time.monotonic()
            for message in messages[:count]:
                destroy(message)
        if time.monotonic() > give_up:
            raise RuntimeError(f"consumed {seen} of {records} records in 300 s")
    return (time.monotonic() - first) * records / (records - skipped)
