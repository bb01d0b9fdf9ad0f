"""Three members share a topic and commit what they have handled: python examples/consumer_group.py [HOST:PORT]"""

# ruff: noqa: T201

from __future__ import annotations

import asyncio
import sys

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic

TOPIC = "orders"
COUNT = 300


async def produce(bootstrap: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True) as producer:
        for number in range(COUNT):
            await producer.send(TOPIC, f"order {number}".encode(), key=f"customer-{number % 20}".encode())


async def member(name: str, bootstrap: str, handled: asyncio.Queue[str]) -> None:
    """Reads until it is cancelled; an order counts as handled once its offset is committed."""
    consumer = AIOKafkaConsumer(
        TOPIC,
        bootstrap_servers=bootstrap,
        group_id="workers",
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        heartbeat_interval_ms=500,
    )
    async with consumer:
        while True:
            batches = await consumer.getmany(timeout_ms=200)
            if batches:
                await consumer.commit()
                for records in batches.values():
                    for _ in records:
                        handled.put_nowait(name)


async def main(bootstrap: str) -> None:
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap)
    await admin.start()
    await admin.create_topics([NewTopic(TOPIC, num_partitions=6, replication_factor=1)])
    await admin.close()

    handled: asyncio.Queue[str] = asyncio.Queue()
    members = [asyncio.create_task(member(f"member-{number}", bootstrap, handled)) for number in range(3)]
    await produce(bootstrap)
    counts: dict[str, int] = {}
    for _ in range(COUNT):
        name = await asyncio.wait_for(handled.get(), 30)
        counts[name] = counts.get(name, 0) + 1
    for task in members:
        task.cancel()
    await asyncio.gather(*members, return_exceptions=True)
    print(f"{COUNT} orders handled: {dict(sorted(counts.items()))}")


asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "localhost:9092"))
