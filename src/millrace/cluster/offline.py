"""Changes to the metadata of a cluster of which no broker runs: users who must be there before its first start.

Brokers that log in to each other cannot make the users they log in as. Whoever may open the store, by the files of a
single broker or by the login to ZooKeeper, may write there what a controller would.

Invariants
- **Nobody is bypassed.** The change is written in an office won by the store's own election, under an epoch of its
  own. Where a broker is registered, or holds the office or the file, it is refused: that broker is to be asked instead.
  A broker that comes in the same moment waits for the office and finds the change in the log.
- **The log stays a log of controllers.** The delta names its epoch, and that nobody reigns in it: the next controller
  takes the office of this one as that of one who has resigned.

Not here: what a credential is made of (`security.scram`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.cluster.view import MetadataView
from millrace.errors import ConfigError, StorageError
from millrace.metadata.deltas import Change, ControllerChanged, ScramChanged, encode
from millrace.metadata.embedded import EmbeddedStore
from millrace.metadata.store import Fenced, Membership, MetadataStore
from millrace.model import NO_BROKER
from millrace.security.scram import ScramCredential, ScramMechanism


async def add_user_offline(
    store: MetadataStore, user: str, mechanism: ScramMechanism, credential: ScramCredential, clock: Clock
) -> None:
    """Give `user` that credential, or another one. As `change_offline`."""
    await change_offline(store, [ScramChanged(user, mechanism, credential)], clock)


async def change_offline(
    store: MetadataStore, changes: Iterable[Change] | Callable[[ClusterImage], Iterable[Change]], clock: Clock
) -> ClusterImage:
    """Write `changes` as one delta into `store`, which is new or that of a cluster that does not run; what it has then.

    They may be decided from what is there; where nothing is to be changed, nothing is written, whoever runs.
    `store` is closed before and after. ConfigError where a broker runs, StorageError where the store cannot be used.
    """
    if isinstance(store, EmbeddedStore) and store.database.path is not None:
        store.database.path.parent.mkdir(parents=True, exist_ok=True)
    await store.open()
    try:
        image = await MetadataView(store, clock).load()
        wanted = tuple(changes(image) if callable(changes) else changes)
        return await _write(store, image, wanted) if wanted else image
    finally:
        await store.close()


async def _write(store: MetadataStore, image: ClusterImage, changes: tuple[Change, ...]) -> ClusterImage:
    membership = await current_membership(store)
    if membership.members or membership.controller_id is not None:
        ids = [member.registration.broker_id for member in membership.members]
        raise _runs(f"broker {', '.join(map(str, ids))}" if ids else "a controller")
    epoch = await store.elect(NO_BROKER)
    if epoch is None:
        raise _runs("a controller")
    delta = (ControllerChanged(NO_BROKER, epoch), *changes)
    applied = image.apply(delta, image.index + 1)  # what cannot be folded is not written
    try:
        await store.append(encode(delta), epoch)
    except Fenced as error:
        raise StorageError(f"somebody else writes in this store: {error}") from error
    return applied


async def current_membership(store: MetadataStore) -> Membership:
    """Who is registered with an open store, and who is controller."""
    async with contextlib.aclosing(store.membership()) as memberships:
        async for membership in memberships:
            return membership
    raise StorageError("the metadata store was closed")


def _runs(who: str) -> ConfigError:
    return ConfigError(f"the cluster runs ({who} is registered): change it through a broker, or stop it first")
