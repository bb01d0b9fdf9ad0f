"""Three members share a topic and commit what they have handled: python examples/consumer_group.py [HOST:PORT]

Needs aiokafka, which millrace does not install: pip install aiokafka
"""

# ruff: noqa: T201

from __future__ import annotations

import asyncio
import sys
from collections import Counter

try:
    from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
    from aiokafka.admin import AIOKafkaAdminClient, NewTopic
    from aiokafka.errors import KafkaError
except ModuleNotFoundError as missing:
    sys.exit(f"there is no module {missing.name}; this example needs: pip install aiokafka")

TOPIC = "shipments"
GROUP = "dispatchers"
COUNT = 300


async def produce(bootstrap: str) -> None:
    producer = AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True)
    try:
        await producer.start()
        for number in range(COUNT):
            await producer.send(TOPIC, f"shipment {number}".encode(), key=f"customer-{number % 20}".encode())
    finally:
        await producer.stop()  # once everything is delivered


async def member(name: str, bootstrap: str, handled: asyncio.Queue[str]) -> None:
    """Reads until it is cancelled; a shipment counts as handled once its offset is committed."""
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=bootstrap,
        group_id=GROUP,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        heartbeat_interval_ms=500,
    )
    try:
        await consumer.start()
        while True:
            batches = await consumer.getmany(timeout_ms=200)
            if batches:
                await consumer.commit()
                for records in batches.values():
                    for _ in records:
                        handled.put_nowait(name)
    finally:
        await consumer.stop()


async def main(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    try:
        await admin.start()
        await admin.create_topics([NewTopic(TOPIC, num_partitions=6, replication_factor=1)])
    finally:
        await admin.close()

    handled: asyncio.Queue[str] = asyncio.Queue()
    counts: Counter[str] = Counter()
    async with asyncio.TaskGroup() as tasks:  # a member that fails ends all of them
        members = [tasks.create_task(member(f"member-{number}", bootstrap, handled)) for number in range(3)]
        await produce(bootstrap)
        while counts.total() < COUNT:
            counts[await asyncio.wait_for(handled.get(), 30)] += 1
        for task in members:
            task.cancel()
    print(f"{COUNT} shipments handled: {dict(sorted(counts.items()))}")


try:
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"))
except KafkaError as error:
    sys.exit(f"it did not work: {error}")
except ExceptionGroup as failed:
    sys.exit(f"it did not work: {failed.exceptions[0]!r}")
