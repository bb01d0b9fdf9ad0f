"""Whether a broker may be relied on: what `/readyz` answers.

Ready is a broker that clients get answers from, that is registered, that the metadata store answers, and that is in
every ISR in which it should be. A replica that is being added has never been in sync: it is not waited for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from millrace.handlers.context import Services
    from millrace.monitoring.collector import Pace

MAX_NAMED: Final = 3
_STEP: Final = 64


async def reasons_not_ready(services: Services, pace: Pace) -> list[str]:
    """Why the broker is not ready, a line each; empty where it is."""
    reasons = []
    controller = services.controller
    if not controller.is_connected:
        store = "ZooKeeper" if services.config.get("zookeeper.connect") else "the metadata store"
        reasons.append(f"{store} does not answer")
    if not controller.is_registered:
        reasons.append("the broker is not registered, or is fenced")
    reasons += [
        f"the data directory {directory.path} is offline"
        for directory in services.log_dirs.directories
        if directory.failure is not None
    ]
    lacking = []
    for number, partition in enumerate(services.replicas):
        state = partition.state
        if services.broker_id not in state.isr and services.broker_id not in state.adding:
            lacking.append(f"{partition.topic}-{partition.index}")
        if number % _STEP == 0:
            await pace.step()
    if lacking:
        more = ", ..." if len(lacking) > MAX_NAMED else ""
        named = ", ".join(lacking[:MAX_NAMED]) + more
        reasons.append(f"the broker is not in the ISR of {len(lacking)} of its partitions: {named}")
    return reasons
