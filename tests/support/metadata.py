"""Generated images and change-sets, and a controller on a store in memory."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from hypothesis import strategies as st

from millrace.cluster.controller import Controller
from millrace.cluster.image import ClusterImage
from millrace.config import BrokerConfig
from millrace.metadata.deltas import (
    BrokerRegistered,
    Change,
    ClusterCreated,
    ControllerChanged,
    Endpoint,
    PartitionState,
)
from millrace.metadata.embedded import EmbeddedStore
from millrace.metadata.store import MetadataStore

ENDPOINT = Endpoint("PLAINTEXT", "broker.example", 9092)

small_ints = st.integers(min_value=-1, max_value=2**31 - 1)
texts = st.text(max_size=12)
partition_states = st.builds(
    PartitionState,
    st.lists(st.integers(0, 9), min_size=1, max_size=3, unique=True).map(tuple),
    st.lists(st.integers(0, 9), max_size=3, unique=True).map(tuple),
    st.integers(-1, 9),
    st.integers(0, 100),
    st.integers(0, 100),
)
endpoints = st.builds(Endpoint, texts, texts, st.integers(0, 65535), st.sampled_from(["PLAINTEXT", "SSL"]))
uuids = st.integers(min_value=2, max_value=2**128 - 1).map(lambda number: uuid.UUID(int=number))


def cluster_of(*broker_ids: int, fenced: tuple[int, ...] = (), racks: Mapping[int, str] | None = None) -> ClusterImage:
    """An image with these brokers and no topics; the first is controller."""
    changes: list[Change] = [ClusterCreated("test-cluster"), ControllerChanged(broker_ids[0], 1)]
    changes.extend(
        BrokerRegistered(broker_id, 100 + broker_id, (ENDPOINT,), (racks or {}).get(broker_id), broker_id in fenced)
        for broker_id in broker_ids
    )
    return ClusterImage().apply(tuple(changes))


@asynccontextmanager
async def running_controller(
    store: MetadataStore | None = None,
    settings: Mapping[str, str] | None = None,
    *,
    deltas_per_snapshot: int = 1000,
) -> AsyncIterator[Controller]:
    """A controller that has started and stops at the end."""
    controller = Controller(
        store or EmbeddedStore(), BrokerConfig(dict(settings or {})), deltas_per_snapshot=deltas_per_snapshot
    )
    await controller.load()
    await controller.start([ENDPOINT])
    try:
        yield controller
    finally:
        await controller.stop()
