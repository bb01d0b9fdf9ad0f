"""Which replicas should move so that the brokers have equal shares: pure, and the same for the same image.

Where another number of replicas is wanted, that comes first. Then the brokers that are to be emptied lose what they
hold, racks are spread, counts are evened out, one replica at a time from the fullest broker to the emptiest, and last
the preferred leaders, by order alone. Only what has to move moves. Not here: how a move is made (`reassignments`).

Invariants: a partition keeps its number of replicas unless another is asked for, and never has two on one broker; no
step puts the replicas of a partition into fewer racks than before; replicas on brokers that are neither targets nor
drained (dead ones) stay where they are; a plan made from the result of a plan is empty.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import islice

from millrace.cluster.image import ClusterImage
from millrace.cluster.reassignments import Reassignment
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_BROKER

PartitionKey = tuple[str, int]


def plan_balance(
    image: ClusterImage, *, brokers_in: Collection[int], drain: Collection[int], factor: int | None = None
) -> list[Reassignment]:
    """The moves that leave `drain` empty and share everything else evenly among `brokers_in`, with `factor` replicas.

    ApiError INVALID_REPLICATION_FACTOR where a partition has more replicas than there would be brokers for it.
    """
    before = {
        (topic.name, index): tuple(replica for replica in state.replicas if replica not in state.removing)
        for topic, index, state in image.partitions()
    }
    racks = {broker.broker_id: broker.rack or "" for broker in image.brokers.values()}
    shares = _Shares(sorted(set(brokers_in) - set(drain)), racks)
    for key in sorted(before):
        shares.add(key, list(before[key]))
    if factor is not None:
        shares.resize(factor)
    shares.empty(set(drain))
    shares.spread_racks()
    shares.even_replicas()
    shares.even_leaders()
    return [
        Reassignment(topic, index, tuple(replicas))
        for (topic, index), replicas in shares.replicas.items()
        if tuple(replicas) != before[topic, index]
    ]


@dataclass(slots=True)
class _Shares:
    """An assignment while it is being evened out."""

    targets: list[int]
    racks: dict[int, str]
    replicas: dict[PartitionKey, list[int]] = field(default_factory=dict)
    held: defaultdict[int, defaultdict[str, set[PartitionKey]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    """By broker, by topic: a broker should not get all the partitions of one topic."""
    count: Counter[int] = field(default_factory=Counter)

    def add(self, key: PartitionKey, replicas: list[int]) -> None:
        self.replicas[key] = replicas
        for replica in replicas:
            self.held[replica][key[0]].add(key)
            self.count[replica] += 1

    def move(self, key: PartitionKey, source: int, target: int) -> None:
        replicas = self.replicas[key]
        replicas[replicas.index(source)] = target
        self.held[source][key[0]].discard(key)
        self.held[target][key[0]].add(key)
        self.count[source] -= 1
        self.count[target] += 1

    def racks_after(self, key: PartitionKey, source: int, target: int) -> int:
        """How many racks the partition would be in with `target` in the place of `source`, or beside all others."""
        others = [replica for replica in self.replicas[key] if replica != source]
        return len({self.racks.get(replica, "") for replica in (*others, target)})

    def racks_of(self, key: PartitionKey) -> int:
        return len({self.racks.get(replica, "") for replica in self.replicas[key]})

    # --- the steps ----------------------------------------------------------------------------------------------------

    def resize(self, factor: int) -> None:
        """Give every partition so many replicas; those go first that cannot stay, and then the last."""
        for key in sorted(self.replicas):
            replicas = self.replicas[key]
            while len(replicas) > factor:
                gone = next((replica for replica in reversed(replicas) if replica not in self.targets), replicas[-1])
                replicas.remove(gone)
                self.held[gone][key[0]].discard(key)
                self.count[gone] -= 1
            while len(replicas) < factor:
                free = [broker for broker in self.targets if broker not in replicas]
                if not free:
                    text = f"{factor} replicas of {key[0]}-{key[1]} need {factor} brokers that run"
                    raise ApiError(ErrorCode.INVALID_REPLICATION_FACTOR, text)
                # With nobody in its place, a newcomer counts the racks that there would be.
                best = min(free, key=lambda broker: self._cost(key, NO_BROKER, broker))
                replicas.append(best)
                self.held[best][key[0]].add(key)
                self.count[best] += 1

    def empty(self, drained: set[int]) -> None:
        for key in sorted(self.replicas):
            for source in [replica for replica in self.replicas[key] if replica in drained]:
                free = [broker for broker in self.targets if broker not in self.replicas[key]]
                if not free:
                    text = (
                        f"{key[0]}-{key[1]} has {len(self.replicas[key])} replicas, and too few brokers would be left"
                    )
                    raise ApiError(ErrorCode.INVALID_REPLICATION_FACTOR, text)
                best = min(free, key=lambda broker: self._cost(key, source, broker))
                self.move(key, source, best)

    def _cost(self, key: PartitionKey, source: int, target: int) -> tuple[int, int, int, int]:
        return (-self.racks_after(key, source, target), self.count[target], len(self.held[target][key[0]]), target)

    def spread_racks(self) -> None:
        available = len({self.racks.get(broker, "") for broker in self.targets})
        if available == 1:
            return
        for key in sorted(self.replicas):
            while self.racks_of(key) < min(len(self.replicas[key]), available):
                step = self._rack_step(key)
                if step is None:
                    break
                self.move(key, *step)

    def _rack_step(self, key: PartitionKey) -> tuple[int, int] | None:
        """The cheapest move of one replica that puts the partition into one more rack."""
        now = self.racks_of(key)
        steps = [
            (-self.count[source], self._cost(key, source, target), source, target)
            for source in self.replicas[key]
            if source in self.targets
            for target in self.targets
            if target not in self.replicas[key] and self.racks_after(key, source, target) > now
        ]
        if not steps:
            return None
        _, _, source, target = min(steps)
        return source, target

    def even_replicas(self) -> None:
        while (step := next(self._even_steps(), None)) is not None:
            keys, source, target = step
            for key in keys:
                self.move(key, source, target)

    def _even_steps(self) -> Iterator[tuple[list[PartitionKey], int, int]]:
        """Moves that make two brokers more alike, the most needed first."""
        fullest = sorted(self.targets, key=lambda broker: (-self.count[broker], broker))
        for source in fullest:
            for target in reversed(fullest):
                if self.count[source] - self.count[target] < 2:
                    break
                keys = self._movable(source, target)
                if keys:
                    yield keys, source, target

    def _movable(self, source: int, target: int) -> list[PartitionKey]:
        """Partitions that can go from one to the other, of a topic the first has much of and the second little.

        A part of the difference at a time: single moves would take minutes for thousands of partitions, and all at
        once would take them from one broker only.
        """
        here, there = self.held[source], self.held[target]
        topics = sorted((len(there.get(topic, ())) - len(keys), topic) for topic, keys in here.items() if keys)
        for fewer, topic in topics:
            limit = max(1, min(self.count[source] - self.count[target], -fewer) // 4)
            candidates = sorted(here[topic] - there.get(topic, set()))
            admitted = (key for key in candidates if self.racks_after(key, source, target) >= self.racks_of(key))
            if keys := list(islice(admitted, limit)):
                return keys
        return []

    def even_leaders(self) -> None:
        """Put other replicas first where that evens out the preferred leaders; no record has to be copied for it."""
        led: Counter[int] = Counter(replicas[0] for replicas in self.replicas.values())
        # What one hands over may open a way for another that had none before.
        while self._even_leaders_once(led):
            pass

    def _even_leaders_once(self, led: Counter[int]) -> bool:
        """Let every broker hand over what it can, those first that lead most; whether any did."""
        done = False
        for source in sorted(self.targets, key=lambda broker: (-led[broker], broker)):
            while (path := self._hand_over(source, led)) is not None:
                for key, giver, taker in path:
                    replicas = self.replicas[key]
                    other = replicas.index(taker)
                    replicas[0], replicas[other] = taker, giver
                led[source] -= 1
                led[path[-1][2]] += 1
                done = True
        return done

    def _hand_over(self, source: int, led: Counter[int]) -> list[tuple[PartitionKey, int, int]] | None:
        """A chain of leaderships handed on, from `source` to a broker that leads at least two fewer."""
        if led[source] - min(led[broker] for broker in self.targets) < 2:
            return None
        edges = self._handovers()
        reached: dict[int, tuple[PartitionKey, int, int] | None] = {source: None}
        queue = deque([source])
        while queue:
            giver = queue.popleft()
            for taker, key in sorted(edges[giver].items()):
                if taker in reached:
                    continue
                reached[taker] = (key, giver, taker)
                if led[source] - led[taker] >= 2:
                    return _chain(reached, taker)
                queue.append(taker)
        return None

    def _handovers(self) -> defaultdict[int, dict[int, PartitionKey]]:
        """For each leader and each target that could lead in its place, one partition of which that is true."""
        edges: defaultdict[int, dict[int, PartitionKey]] = defaultdict(dict)
        targets = set(self.targets)
        for key, replicas in self.replicas.items():
            for taker in replicas[1:]:
                if taker in targets:
                    edges[replicas[0]].setdefault(taker, key)
        return edges


def _chain(reached: dict[int, tuple[PartitionKey, int, int] | None], end: int) -> list[tuple[PartitionKey, int, int]]:
    steps = []
    step = reached[end]
    while step is not None:
        steps.append(step)
        step = reached[step[1]]
    return steps[::-1]
