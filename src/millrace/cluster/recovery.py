"""Leaders for partitions that have none, by what their replicas have.

When all members of an ISR die at once, each of them has every committed record, but the first that comes back may have
a damaged log, and another one may have more that was not committed. So nobody leads by coming back: the others are
waited for, a bounded time, those who are there are asked how far their logs reach, and the largest answer leads. One
whose log is of no use does not, however long it is alone. Where a topic allows unclean election, and nobody who has
everything is there, all replicas are asked.

Pure functions decide, against the newest image; `Recovery` is the task of the controller that waits and asks. It keeps
nothing but since when it waits, so a new controller begins from the image. Not here: elections that need no answers
(`elections`), asking (`survey`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from millrace.clock import Clock
from millrace.cluster.directories import DirectoryChoice
from millrace.cluster.elections import (
    LogEnd,
    LogEnds,
    PartitionKey,
    RulesOf,
    TopicRules,
    has_everything,
    led_from_nobody,
    topic_rules,
)
from millrace.cluster.image import ClusterImage
from millrace.cluster.planning import Plan
from millrace.cluster.survey import AskLogEnds, Survey
from millrace.cluster.view import MetadataView
from millrace.cluster.writer import MetadataWriter
from millrace.config import BrokerConfig
from millrace.errors import ApiError
from millrace.metadata.deltas import (
    BrokerFenced,
    BrokerRegistered,
    BrokerUnregistered,
    Change,
    ChangeSet,
    ConfigChanged,
    ControllerChanged,
    DirectoriesChanged,
    PartitionChanged,
    PartitionState,
)
from millrace.model import LOST_DIRECTORY, NO_BROKER

logger = logging.getLogger(__name__)

PATIENCE_S: Final = 3.0
"""How long the others are waited for since the first one is there: brokers of one cluster start at about one time."""
RETRY_S: Final = 0.5
RETRY_LIMIT_S: Final = 5.0
"""Who gave no answer, or one of no use, is asked again after a pause that grows up to this."""

_NEWS: Final = (
    BrokerFenced,
    BrokerRegistered,
    BrokerUnregistered,
    ConfigChanged,
    ControllerChanged,
    DirectoriesChanged,
)


@dataclass(frozen=True, slots=True)
class Orphan:
    """A partition without a leader, and who may lead it if his log is whole."""

    topic: str
    key: PartitionKey
    state: PartitionState
    candidates: tuple[int, ...]
    missing: tuple[int, ...]
    """Who may have more, and may come back."""
    rules: TopicRules


def orphans(image: ClusterImage, rules_of: RulesOf) -> list[Orphan]:
    """The partitions without a leader that could have one."""
    found = []
    for topic, index, state in image.partitions():
        if state.leader != NO_BROKER:
            continue
        rules = rules_of(topic.name)
        missing: tuple[int, ...] = ()
        candidates = tuple(each for each in state.replicas if has_everything(image, state, each))
        if candidates:
            missing = tuple(each for each in state.isr if _may_come_back(image, state, each))
        elif rules.unclean:
            candidates = tuple(each for each in state.replicas if image.is_present(state, each))
        if candidates:
            found.append(Orphan(topic.name, (topic.topic_id, index), state, candidates, missing, rules))
    return found


def _may_come_back(image: ClusterImage, state: PartitionState, broker_id: int) -> bool:
    """Whether a start of its broker would bring a replica back; a live broker does not get a directory by itself."""
    broker = image.brokers.get(broker_id)
    return broker is not None and broker.fenced and state.directory_of(broker_id) != LOST_DIRECTORY


Since = Mapping[PartitionKey, float]
"""When partitions were first seen that could have a leader."""


def due(found: Iterable[Orphan], since: Since, now_s: float) -> list[Orphan]:
    """Those whose candidates are asked now."""
    return [each for each in found if not each.missing or _is_patience_over(each, since, now_s)]


def _is_patience_over(orphan: Orphan, since: Since, now_s: float) -> bool:
    return now_s >= since.get(orphan.key, now_s) + PATIENCE_S


def plan_recovery(image: ClusterImage, ends: LogEnds, since: Since, now_s: float, rules_of: RulesOf) -> Plan[int]:
    """Elect by the answers; the result is how many leaders there are.

    Who has not answered is waited for like one that is not there.
    """
    changes: list[Change] = []
    choose = DirectoryChoice(image)
    for orphan in orphans(image, rules_of):
        answers = ends.get(orphan.key, {})
        able = {each: end for each in orphan.candidates if (end := answers.get(each)) is not None}
        is_waited_for = orphan.missing or any(each not in answers for each in orphan.candidates)
        if not able or (is_waited_for and not _is_patience_over(orphan, since, now_s)):
            continue
        after = led_from_nobody(image, orphan.state, _best(image, orphan, able), orphan.rules, choose)
        changes.append(PartitionChanged(*orphan.key, after))
    return Plan(len(changes), tuple(changes))


def _best(image: ClusterImage, orphan: Orphan, able: Mapping[int, LogEnd]) -> int:
    """The longest log; of those who have everything one that can take more, if there is one."""

    def rank(broker_id: int) -> tuple[bool, LogEnd]:
        is_clean = has_everything(image, orphan.state, broker_id)
        return is_clean and image.takes_records(orphan.topic, orphan.state, broker_id), able[broker_id]

    return max(able, key=rank)


class Recovery:
    """Elects, while this broker is controller. Owner: one task, which looks when something may have changed."""

    def __init__(self, view: MetadataView, writer: MetadataWriter, config: BrokerConfig, clock: Clock) -> None:
        self._view = view
        self._writer = writer
        self._config = config
        self._clock = clock
        self._since: dict[PartitionKey, float] = {}
        self._retry_s = RETRY_S
        self._wake = asyncio.Event()
        view.on_image(self._image_changed)

    def __repr__(self) -> str:
        return f"Recovery({len(self._since)} partitions wait for a leader)"

    def _image_changed(self, _old: ClusterImage, _new: ClusterImage, changes: ChangeSet) -> None:
        if any(isinstance(each, _NEWS) or _is_orphaned(each) for each in changes):
            self._retry_s = RETRY_S
            self._wake.set()

    async def run(self, ask: AskLogEnds) -> None:
        """Look whenever something may have changed, until cancelled; `ask` tells what replicas have."""
        pause_s: float | None = 0.0
        while True:
            timer = None if pause_s is None else self._clock.call_later(pause_s, self._wake.set)
            await self._wake.wait()
            self._wake.clear()
            if timer is not None:
                timer.cancel()
            try:
                pause_s = await self._look(ask)
            except ApiError as error:
                logger.warning("partitions without a leader have to wait: %s", error)
                pause_s = self._next_retry_s()

    async def _look(self, ask: AskLogEnds) -> float | None:
        """Elect where it is time to; in how many seconds to look again, if nothing changes before."""
        if not self._writer.is_open:
            self._since = {}
            return None
        found = orphans(self._view.image, topic_rules(self._view.image, self._config))
        now_s = self._clock.monotonic()
        self._since = {each.key: self._since.get(each.key, now_s) for each in found}
        patience_ends = [self._since[each.key] + PATIENCE_S - now_s for each in found]
        pauses_s = [each for each in patience_ends if each > 0]
        asked = due(found, self._since, now_s)
        if asked:
            survey = await ask({each.key: each.candidates for each in asked})
            elected = await self._writer.change(lambda image: self._plan(image, survey))
            if elected:
                logger.info("%d partitions have a leader again", elected)
            if elected < len(asked):
                pauses_s.append(self._next_retry_s())
        return min(pauses_s, default=None)

    def _next_retry_s(self) -> float:
        retry_s, self._retry_s = self._retry_s, min(self._retry_s * 2, RETRY_LIMIT_S)
        return retry_s

    def _plan(self, image: ClusterImage, survey: Survey) -> Plan[int]:
        rules_of = topic_rules(image, self._config)
        return plan_recovery(image, survey.ends_in(image), self._since, self._clock.monotonic(), rules_of)


def _is_orphaned(change: Change) -> bool:
    return isinstance(change, PartitionChanged) and change.state.leader == NO_BROKER
