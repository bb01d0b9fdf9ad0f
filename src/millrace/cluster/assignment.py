"""Which brokers hold which replicas: pure, and the same for the same arguments.

Brokers are lined up so that neighbours stand in different racks. The first replica (the preferred leader) of partition
p is the broker p places from the start, so leadership is even; the others follow at a distance that grows with each
turn around the line, so that the partitions of a dead broker spread over all survivors; a broker whose rack already
holds a replica is passed over while a rack without one is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live broker that may hold replicas."""

    broker_id: int
    rack: str | None = None


def place(
    partitions: int, replication_factor: int, candidates: Sequence[Candidate], *, start: int = 0
) -> list[tuple[int, ...]]:
    """Replicas of each of `partitions` partitions, the preferred leader first.

    `start` is any number that differs between topics, so that small topics do not all begin on the same broker.
    """
    if not 1 <= replication_factor <= len(candidates):
        raise ValueError(f"{replication_factor} replicas do not fit on {len(candidates)} brokers")
    line = _rack_alternated(candidates)
    racks = {candidate.rack for candidate in line}
    placed = []
    for number in range(start, start + partitions):
        first = number % len(line)
        turn = number // len(line)
        placed.append(_replicas(line, first, turn, replication_factor, len(racks)))
    return placed


def _replicas(line: list[Candidate], first: int, turn: int, count: int, racks: int) -> tuple[int, ...]:
    chosen = [line[first]]
    others = len(line) - 1
    if others:
        shift = turn % others
        order = [line[(first + 1 + (shift + step) % others) % len(line)] for step in range(others)]
        while len(chosen) < count:
            used_racks = {candidate.rack for candidate in chosen}
            used = {candidate.broker_id for candidate in chosen}
            # None is a rack like any other: brokers without one count as standing together.
            fresh_rack_left = len(used_racks) < racks
            chosen.append(
                next(
                    candidate
                    for candidate in order
                    if candidate.broker_id not in used and not (fresh_rack_left and candidate.rack in used_racks)
                )
            )
    return tuple(candidate.broker_id for candidate in chosen)


def _rack_alternated(candidates: Sequence[Candidate]) -> list[Candidate]:
    by_rack: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda candidate: candidate.broker_id):
        by_rack.setdefault(candidate.rack or "", []).append(candidate)
    columns = [by_rack[rack] for rack in sorted(by_rack)]
    return [candidate for candidate in chain.from_iterable(zip_longest(*columns)) if candidate is not None]
