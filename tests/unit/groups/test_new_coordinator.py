"""The coordinator of a partition that has a new leader: what it answers is committed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from millrace.errors import ApiError, ErrorCode
from millrace.groups.offsets.committed import OffsetToCommit
from millrace.model import CONSUMER_OFFSETS_TOPIC
from millrace.replication.partition import Partition
from support.one_loop import Brokers, until


async def test_a_new_coordinator_waits_until_the_others_have_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Brokers(tmp_path) as brokers:
        await brokers.create("t", (1, 2, 3))
        await brokers.create(CONSUMER_OFFSETS_TOPIC, (2, 1, 3))
        commit = OffsetToCommit("t", 0, brokers.replica(1, "t").topic_id, 5, -1, "")
        old = brokers.services(2).groups
        await old.loaded()
        assert await old.commit("g", [commit]) == [ErrorCode.NONE]

        # Broker 3 copies, but does not get it onto its disk: it promises nothing, and nothing more is committed.
        held = brokers.replica(3, CONSUMER_OFFSETS_TOPIC)
        is_flushed = Partition.is_flushed.fget  # type: ignore[attr-defined]
        monkeypatch.setattr(Partition, "is_flushed", property(lambda self: self is not held and is_flushed(self)))
        later = OffsetToCommit("t", 0, commit.topic_id, 6, -1, "")
        committing = asyncio.ensure_future(old.commit("g", [later]))
        heir = brokers.replica(1, CONSUMER_OFFSETS_TOPIC)
        await until(lambda: heir.log.end_offset == 2)
        await brokers.stop(2)
        with pytest.raises(ApiError):
            await committing

        leader = await brokers.leads(1, CONSUMER_OFFSETS_TOPIC)
        assert leader.high_watermark.offset < leader.log.end_offset == 2
        new = brokers.services(1).groups
        await until(lambda: 0 in new._shards)
        for _ in range(50):
            with pytest.raises(ApiError) as loading:
                await new.fetch_offsets("g")
            assert loading.value.code is ErrorCode.COORDINATOR_LOAD_IN_PROGRESS
            await asyncio.sleep(0)
        monkeypatch.undo()
        await new.loaded()
        assert (await new.fetch_offsets("g"))["t"][0].offset == 6
