"""Three servers: the log goes on without one of them, waits without two, and loses nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

from millrace.local.zookeeper import ZooKeeperServers
from millrace.metadata.store import BrokerRegistration, SessionState
from millrace.metadata.zookeeper import ZooKeeperStore
from support.metadata import ENDPOINT


async def test_an_ensemble_loses_one_server_and_then_a_majority(tmp_path: Path) -> None:
    servers = ZooKeeperServers(tmp_path, nodes=3)
    with servers:
        writer, reader = (ZooKeeperStore(servers.hosts, session_timeout_ms=20_000) for _ in range(2))
        await writer.open()
        await reader.open()
        broker_epoch = await writer.register(BrokerRegistration(1, (ENDPOINT,)))
        epoch = await writer.elect(1)
        assert epoch is not None
        written: list[int] = []
        read: list[int] = []
        states: list[SessionState] = []
        stop = asyncio.Event()

        async def write() -> None:
            while not stop.is_set():
                written.append(await writer.append(b"%d" % len(written), epoch))

        async def follow() -> None:
            async for number, data in reader.follow(0):
                assert data == b"%d" % (number - 1)
                read.append(number)

        async def watch() -> None:
            async for state in writer.sessions():
                states.append(state)

        async def until(condition: Callable[[], bool]) -> None:
            async with asyncio.timeout(60):
                while not condition():
                    await asyncio.sleep(0.01)

        async def progress() -> None:
            before = len(read)
            await until(lambda: len(read) > before + 20)

        writing = asyncio.create_task(write())
        watching = [asyncio.create_task(follow()), asyncio.create_task(watch())]
        await progress()
        for node in servers.nodes:  # whichever leads, and whichever the sessions are on
            await asyncio.to_thread(servers.kill, node)
            await progress()
            await asyncio.to_thread(servers.restart, node)
            await progress()
        for node in (1, 2):
            await asyncio.to_thread(servers.kill, node)
        await until(lambda: states[-1] is SessionState.SUSPENDED)
        for node in (1, 2):
            servers.launch(node)
        await progress()
        stop.set()
        await writing
        await until(lambda: len(read) == len(written))
        assert read == written == list(range(1, len(written) + 1))
        assert SessionState.EXPIRED not in states
        async with aclosing(reader.membership()) as memberships:
            membership = await anext(memberships)
        assert [member.broker_epoch for member in membership.members] == [broker_epoch]
        for task in watching:
            task.cancel()
        await writer.close()
        await reader.close()
