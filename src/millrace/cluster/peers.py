"""Requests of this broker to other brokers of the cluster, on the listener of brokers.

One connection is kept to each broker that was asked for something, and opened again when it broke or the broker has
another address. Not here: what is asked, and whether it may be asked twice. Owner: the event loop; several requests
may be under way on a connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

from millrace.client.connection import Connection
from millrace.cluster.dialer import Dialer, inter_broker_endpoint
from millrace.cluster.image import ClusterImage
from millrace.errors import ApiError, ErrorCode
from millrace.metadata.deltas import Endpoint
from millrace.wire.schema import Request

CONNECT_TIMEOUT_MS: Final = 2000


class Peers:
    """The connections to other brokers."""

    def __init__(self, *, dialer: Dialer, image: Callable[[], ClusterImage]) -> None:
        self._dialer = dialer
        self._image = image
        self._peers: dict[int, _Peer] = {}

    def __repr__(self) -> str:
        return f"Peers({len(self._peers)} of broker {self._dialer.broker_id})"

    async def request(self, broker_id: int, message: Request, version: int, timeout_ms: int) -> Any:
        """Send `message` once; ApiError leaves open whether it was acted upon, but for BROKER_NOT_AVAILABLE."""
        endpoint = inter_broker_endpoint(self._image(), broker_id)
        if endpoint is None:
            raise ApiError(ErrorCode.BROKER_NOT_AVAILABLE, f"broker {broker_id} is not known")
        peer = self._peers.get(broker_id)
        if peer is None or peer.endpoint != endpoint:
            if peer is not None:
                await peer.close()
            peer = self._peers[broker_id] = _Peer(broker_id, endpoint)
        connection = await peer.connected(self._dialer)
        return await connection.request(message, version, timeout_ms=timeout_ms)

    async def stop(self) -> None:
        """End the connections; requests under way fail."""
        peers, self._peers = self._peers, {}
        await asyncio.gather(*(peer.close() for peer in peers.values()))


class _Peer:
    def __init__(self, broker_id: int, endpoint: Endpoint) -> None:
        self.broker_id = broker_id
        self.endpoint = endpoint
        self._connection: Connection | None = None
        self._opening = asyncio.Lock()

    async def connected(self, dialer: Dialer) -> Connection:
        async with self._opening:
            if self._connection is not None and self._connection.is_closed:
                await self.close()
            if self._connection is None:
                self._connection = await dialer.open(self.endpoint, self.broker_id, timeout_ms=CONNECT_TIMEOUT_MS)
            return self._connection

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
