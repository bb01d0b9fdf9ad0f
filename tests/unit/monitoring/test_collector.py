"""A scrape goes in slices, one part that fails does not take the others, and who asks at the same time asks once."""

from __future__ import annotations

import asyncio
import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.clock import ManualClock, SystemClock
from millrace.metrics.catalog import Detail
from millrace.monitoring.collector import SLICE_S, TELL_EVERY_S, Collector, Pace, Scrape

NOTHING: frozenset[Detail] = frozenset()


async def leaders(scrape: Scrape) -> None:
    scrape.sheet.add("millrace_leaders", 7)


async def fails(scrape: Scrape) -> None:
    scrape.sheet.add("millrace_partitions", 1)
    raise RuntimeError("broken")


def values(pieces: list[bytes]) -> dict[str, float]:
    return {
        f"{sample.name}{sorted(sample.labels.values())}": sample.value
        for family in text_string_to_metric_families(b"".join(pieces).decode())
        for sample in family.samples
    }


async def test_a_part_that_fails_is_left_out_counted_and_told_once_in_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = ManualClock()
    collector = Collector({"first": fails, "second": leaders}, clock)
    with caplog.at_level(logging.ERROR):
        for number in (1, 2, 3):
            found = values(await collector.text(NOTHING))
            assert found["millrace_leaders[]"] == 7
            assert found["millrace_scrape_errors_total['first']"] == number
            assert found["millrace_scrape_errors_total['second']"] == 0
            assert "millrace_partitions[]" not in found
        assert [record.getMessage() for record in caplog.records] == [
            "the metrics of first could not be collected, 1 times so far"
        ]
        clock.advance(TELL_EVERY_S)
        await collector.text(NOTHING)
    assert "4 times" in caplog.records[-1].getMessage() and len(caplog.records) == 2
    await collector.stop()


async def test_who_asks_for_the_same_while_it_is_collected_gets_the_same() -> None:
    going_on = asyncio.Event()
    begun = []

    async def waits(scrape: Scrape) -> None:
        begun.append(scrape.details)
        await scrape.pace.elsewhere(going_on.wait())
        scrape.sheet.add("millrace_leaders", len(begun))

    collector = Collector({"waits": waits}, SystemClock())
    asking = [asyncio.ensure_future(collector.text(NOTHING)) for _ in range(5)]
    other = asyncio.ensure_future(collector.text(frozenset({Detail.TOPICS})))
    while len(begun) < 2:
        await asyncio.sleep(0)
    asking[0].cancel()  # who hangs up does not take it from the others
    going_on.set()
    first, *others = await asyncio.gather(*asking[1:])
    assert all(each is first for each in others)
    assert begun == [NOTHING, frozenset({Detail.TOPICS})]
    assert values(await other)["millrace_leaders[]"] == 2
    assert values(await collector.text(NOTHING))["millrace_leaders[]"] == 3
    await collector.stop()


async def test_others_have_their_turn_while_much_is_collected() -> None:
    clock = ManualClock()
    turns = []
    loop = asyncio.get_running_loop()

    async def much(scrape: Scrape) -> None:
        for number in range(100):
            if number % 10 == 0:
                loop.call_soon(turns.append, number)
            clock.advance(SLICE_S / 5)
            await scrape.pace.step()

    collector = Collector({"much": much}, clock)
    found = values(await collector.text(NOTHING))
    assert turns == list(range(0, 100, 10))
    assert SLICE_S <= found["millrace_scrape_loop_held_seconds[]"] < 1.5 * SLICE_S
    assert found["millrace_scrape_seconds[]"] == pytest.approx(20 * SLICE_S)
    await collector.stop()


async def test_what_is_waited_for_elsewhere_is_not_held() -> None:
    clock = ManualClock()
    pace = Pace(clock)

    async def elsewhere() -> int:
        clock.advance(5.0)
        return 3

    clock.advance(0.0005)
    assert await pace.elsewhere(elsewhere()) == 3
    await pace.step()
    assert pace.longest_s == 0.0005
