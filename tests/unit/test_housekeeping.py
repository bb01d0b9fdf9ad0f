"""When a broker does its housekeeping for the first time, and how long what it deletes stays on disk."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.broker import Broker
from millrace.cluster.planning import TopicRef
from millrace.config import BrokerConfig
from support.one_loop import Brokers, until


@pytest.mark.parametrize(
    ("initial_ms", "interval_ms", "first_s"), [("30000", "300000", 30.0), ("30000", "100", 0.1), ("0", "500", 0.0)]
)
async def test_the_first_time_comes_soon_after_the_start(
    tmp_path: Path, initial_ms: str, interval_ms: str, first_s: float
) -> None:
    slept: list[float] = []

    class Stopped(Exception):
        pass

    class Clock:
        async def sleep(self, seconds: float) -> None:
            slept.append(seconds)
            if len(slept) == 2:
                raise Stopped

    config = BrokerConfig(
        {
            "log.dirs": str(tmp_path),
            "log.initial.task.delay.ms": initial_ms,
            "log.retention.check.interval.ms": interval_ms,
        }
    )
    broker = Broker(config, clock=Clock())  # type: ignore[arg-type]
    with pytest.raises(Stopped):
        await broker._keep_retention([])  # type: ignore[arg-type]
    assert slept == [first_s, int(interval_ms) / 1000]


@pytest.mark.parametrize("delay_ms", ["0", "60000"])
async def test_a_deleted_topic_stays_on_disk_for_a_while(tmp_path: Path, delay_ms: str) -> None:
    async with Brokers(tmp_path, 1) as brokers:
        await brokers.create("t", (1,))
        await brokers.write(await brokers.leads(1, "t"))
        brokers.services(1).config.apply_dynamic({"log.segment.delete.delay.ms": delay_ms}, {})
        home = tmp_path / "1"
        assert (home / "t-0").is_dir()
        await brokers.controller.controller.delete_topics([TopicRef(name="t")])
        await until(lambda: not (home / "t-0").exists())
        if delay_ms == "0":
            await until(lambda: not list(home.glob("t-0.*")))
        else:
            await asyncio.sleep(0)
            (kept,) = home.glob("t-0.*-delete")
            assert list(kept.glob("*.log"))
    assert not list(home.glob("t-0*")), "a broker that stops leaves nothing to its next start"
