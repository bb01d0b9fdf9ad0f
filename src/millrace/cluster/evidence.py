"""What was heard of other brokers, and what follows from it: pure decisions of `liveness`.

A refused call is evidence against one of two: the other process, which may have died, or the link to it, on which a
firewall may say so although both ends live. The rules (docs/coordination.md, "Dead, or only out of reach") tell them
apart by what else is known, and err on the side of whom the store has as controller:

- The controller fences whoever refuses it, dead or not: a broker it does not reach is better not a leader. Only when so
  many refuse that without it they are a majority does it wait whether they depose it, or call it.
- A controller is deposed when most of the registered brokers are refused by it, and nobody reaches it. Fewer do it when
  nobody reaches it, and the time has passed in which it would have fenced or called them if it lived.
- Whoever answers a call by turning its login away, or by saying that the caller has no right to ask, lives, and is not
  fenced for its silence; nothing else follows, and a fenced broker does not count again by it.
- A call from somebody who refuses calls shows that it lives. A controller that does not reach most of those who live
  resigns.

Not here: asking, waiting and acting (`liveness`). Times are seconds of the monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from millrace.cluster.image import ClusterImage

REFUSED_TWICE_S: Final = 0.2
FENCED_WITHIN_S: Final = 0.4
"""What a controller that lives needs to fence a broker that refuses it, or the others to depose it; with a margin."""
CALLED_WITHIN_S: Final = 1.25
"""A controller calls every broker, and every broker the controller, once a second or more often; with a margin."""
CALLS_COUNT_S: Final = 2 * CALLED_WITHIN_S
TAKEOVER_STEP_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Health:
    """What was heard of one incarnation of a broker."""

    broker_id: int
    broker_epoch: int
    since_s: float
    """When the watch began, or was resumed after a stall of this process."""
    answered_s: float | None = None
    """When the newest question was asked that it answered as itself."""
    going: bool = False
    """It answered that it is shutting down."""
    refused_s: float | None = None
    """The newest refusal (or answer of somebody else at its address) since it was last reached."""
    refusing_s: float | None = None
    """Since when it counts as refusing: the second refusal in short order since it was last reached."""
    called_s: float | None = None
    """When it last called here."""
    turned_away_s: float | None = None
    """When somebody last answered at its address and did not let this broker in."""

    def answered(self, asked_s: float, *, going: bool) -> Health:
        return replace(self, answered_s=asked_s, going=going, refused_s=None, refusing_s=None)

    def turned_away(self, now_s: float) -> Health:
        return replace(self, turned_away_s=now_s)

    def refused(self, now_s: float) -> Health:
        again = self.refused_s is not None and now_s - self.refused_s <= REFUSED_TWICE_S
        since_s = now_s if again and self.refusing_s is None else self.refusing_s
        return replace(self, refused_s=now_s, refusing_s=since_s)


def refuses(health: Health) -> bool:
    """Whether its machine, or something on the way there, said twice within a short time that nobody listens."""
    return health.refusing_s is not None


def is_refuted(health: Health, now_s: float) -> bool:
    """Whether it refuses calls and makes some: it lives, and the link to it does not work."""
    if health.refusing_s is None or health.called_s is None:
        return False
    return health.called_s > health.refusing_s and now_s - health.called_s < CALLS_COUNT_S


def is_silent(health: Health, now_s: float, silence_s: float) -> bool:
    """Whether it has not answered for as long as a session lasts."""
    heard = (health.since_s, health.answered_s, health.turned_away_s)
    return now_s - max(when_s for when_s in heard if when_s is not None) >= silence_s


# --- what a controller does -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the controller does: brokers by id, with the epoch that is meant."""

    fence: Mapping[int, int]
    unfence: Mapping[int, int]
    resign: bool = False
    again_s: float | None = None
    """When it has to be judged again, whatever is heard till then."""


def judge(
    peers: Sequence[Health], fenced_s: Mapping[int, float], *, registered: int, now_s: float, silence_s: float
) -> Verdict:
    """What a controller does about its peers; `fenced_s` says which of them are fenced, and since when.

    `registered` counts the brokers that have a session with the store, the controller among them.
    """
    live = [peer for peer in peers if peer.broker_id not in fenced_s]
    refusing = [peer for peer in live if refuses(peer)]
    again_s = None
    if sum(map(refuses, peers)) * 2 > registered:
        # If they live they are a majority, and depose this controller, or call it and it resigns. Fenced by it first,
        # they would leave every ISR to a broker that is cut off.
        waiting = {peer: peer.refusing_s + CALLED_WITHIN_S for peer in refusing if peer.refusing_s is not None}
        refusing = [peer for peer in refusing if waiting[peer] <= now_s]
        again_s = min((due_s for due_s in waiting.values() if due_s > now_s), default=None)
    silent = [peer for peer in live if not refuses(peer) and is_silent(peer, now_s, silence_s)]
    unfence = [peer for peer in peers if peer.broker_id in fenced_s and _is_back(peer, fenced_s[peer.broker_id])]
    out_of_reach = len(silent) + sum(is_refuted(peer, now_s) for peer in peers)
    reached = sum(not refuses(peer) for peer in live) - len(silent) + len(unfence)
    # Of two brokers each reaches half of the others or none: the session with the store decides, and this one has it.
    if out_of_reach > reached and out_of_reach + reached > 1:
        return Verdict(_epochs(peer for peer in refusing if not is_refuted(peer, now_s)), {}, resign=True)
    return Verdict(_epochs((*refusing, *silent)), _epochs(unfence), again_s=again_s)


def _is_back(peer: Health, fenced_s: float) -> bool:
    answered = peer.answered_s is not None and peer.answered_s >= fenced_s
    return answered and not peer.going and peer.refused_s is None


def _epochs(peers: Iterable[Health]) -> dict[int, int]:
    return {peer.broker_id: peer.broker_epoch for peer in peers}


# --- what another broker does about a controller that refuses it ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hearsay:
    """What the other brokers said when asked about one that refuses."""

    reach_it: frozenset[int] = frozenset()
    are_refused: frozenset[int] = frozenset()
    dead_too: frozenset[int] = frozenset()
    """They refused to be asked. The rest did not answer, or do not know."""


def is_refusal_confirmed(health: Health, asked_s: float, now_s: float) -> bool | None:
    """Whether a broker refuses this one as well, by what was heard since that was asked; None: not known yet."""
    if is_refuted(health, now_s) or (health.answered_s is not None and health.answered_s >= asked_s):
        return False
    if refuses(health) and health.refused_s is not None and health.refused_s >= asked_s:
        return True
    return None


def is_majority(hearsay: Hearsay, registered: int) -> bool:
    """Whether most of the registered brokers, this one among them, are refused."""
    return (len(hearsay.are_refused) + 1) * 2 > registered


def takeover_s(
    controller: Health, hearsay: Hearsay, *, registered: int, is_fenced: bool, turn_s: float, now_s: float
) -> float | None:
    """When a broker takes the office of a controller that refuses it; None: not by what is known.

    `turn_s` is when it is this broker's turn among several, `is_fenced` whether the controller has fenced it.
    """
    if controller.refusing_s is None or hearsay.reach_it or is_refuted(controller, now_s):
        return None
    if is_majority(hearsay, registered):
        return turn_s
    if is_fenced:
        return None  # by a controller that is refused in turn, and lives: its session decides
    # Of two brokers one may go on alone. Of more, to be cut off is likelier than that all others have died.
    patience_s = FENCED_WITHIN_S if registered <= 2 else CALLED_WITHIN_S
    return max(turn_s, controller.refusing_s + patience_s)


def takeover_delay_s(image: ClusterImage, broker_id: int) -> float:
    """How long a broker waits before it takes a dead controller's office: one after another, so that one is enough."""
    candidates = [broker.broker_id for broker in image.live_brokers if broker.broker_id != image.controller_id]
    rank = candidates.index(broker_id) if broker_id in candidates else len(candidates)
    return rank * TAKEOVER_STEP_S
