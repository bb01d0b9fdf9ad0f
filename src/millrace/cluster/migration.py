"""The metadata of a broker that was alone moves to ZooKeeper, so that its data becomes the first part of a cluster.

What the broker had stays where it is: the logs in their directory, topics under their ids, leader epochs, settings and
producer ids. Only the metadata log changes its place. Not here: who calls this, before which brokers (`local.cluster`).

Invariants
- **One place counts at any moment.** While `metadata.db` is in the log directory, it is the cluster, and whatever
  ZooKeeper has of it is a draft. The rename of that file to `metadata.db.migrated` is the moment from which ZooKeeper
  is the cluster. A crash before it leaves a single broker that starts as before; a crash after it leaves a cluster.
- **A draft is whole.** It is one snapshot, seen from the moment its pointer is switched, and on ZooKeeper's disk before
  the rename. It names no controller, which every image that brokers wrote does: a draft is told from a cluster by that,
  and only a draft of the same cluster is ever written over.
- **Nobody writes meanwhile.** The log directory is locked as brokers lock it, so that the single broker does not run,
  and the snapshot is written in an office of ZooKeeper's that fences every other writer.
- **Epochs go on.** Leader epochs and partition epochs are kept. The broker counts as an incarnation of epoch 0, below
  every epoch that ZooKeeper gives, so that its first registration there is a new one, as after any restart.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.cluster.offline import current_membership
from millrace.cluster.view import MetadataView
from millrace.errors import ConfigError, StorageError
from millrace.metadata.deltas import ChangeSet, encode
from millrace.metadata.embedded import FILE_NAME, EmbeddedStore
from millrace.metadata.store import Fenced, Membership, MetadataStore, Snapshot
from millrace.storage.directory import LogDirectory
from millrace.storage.files import Files

logger = logging.getLogger(__name__)

MIGRATED_NAME: Final = f"{FILE_NAME}.migrated"
_BEFORE_ALL_EPOCHS: Final = 0


def is_single(log_directory: Path) -> bool:
    """Whether a log directory is that of a broker that keeps its metadata itself."""
    return (log_directory / FILE_NAME).exists()


async def migrate(log_directory: Path, broker_id: int, store: MetadataStore, clock: Clock) -> ClusterImage:
    """Move the metadata of the single broker `broker_id` from its (first) log directory to `store`; what was moved.

    `store` is closed before and after. ConfigError where the broker runs, or where the store has something else.
    """
    files = Files()
    directory = LogDirectory(log_directory, files, clock)
    directory.lock()
    try:
        image = await _read(log_directory / FILE_NAME, clock)
        changes = first_of_a_cluster(image, broker_id)
        await store.open()
        try:
            await _write_draft(image.cluster_id, changes, broker_id, store, clock)
        finally:
            await store.close()
        files.rename(log_directory / FILE_NAME, log_directory / MIGRATED_NAME)
        files.sync_directory(log_directory)
    finally:
        directory.unlock()
    logger.info("the metadata of cluster %s (%d topics) is in ZooKeeper now", image.cluster_id, len(image.topics))
    return image


def first_of_a_cluster(image: ClusterImage, broker_id: int) -> ChangeSet:
    """The changes that build the image of a single broker as the beginning of a cluster's."""
    others = {replica for _, _, state in image.partitions() for replica in state.replicas} | {*image.brokers}
    if others - {broker_id}:
        raise ConfigError(f"the single broker was broker {min(others - {broker_id})}, not broker {broker_id}")
    brokers = {
        each: replace(broker, broker_epoch=_BEFORE_ALL_EPOCHS, fenced=False) for each, broker in image.brokers.items()
    }
    return replace(image, controller_id=-1, controller_epoch=0, brokers=brokers).as_changes()


async def _read(path: Path, clock: Clock) -> ClusterImage:
    store = EmbeddedStore.at(path)
    await store.open()
    try:
        return await MetadataView(store, clock).load()
    finally:
        await store.close()


async def _write_draft(cluster_id: str, changes: ChangeSet, broker_id: int, store: MetadataStore, clock: Clock) -> None:
    found = await MetadataView(store, clock).load()
    membership = await current_membership(store)
    _check_draft(found, cluster_id, membership)
    # Whoever began this before and was cut short is replaced, and so fenced.
    holds_office = membership.controller_id is not None
    epoch = await store.elect(broker_id, replacing=membership.controller_epoch if holds_office else None)
    if epoch is None or await store.end() != found.index:
        raise ConfigError("another cluster is being started in this ZooKeeper; give each a path of its own")
    try:
        await store.write_snapshot(Snapshot(found.index + 1, encode(changes)), epoch)
    except Fenced as error:
        raise StorageError(f"somebody else writes in this ZooKeeper: {error}") from error


def _check_draft(found: ClusterImage, cluster_id: str, membership: Membership) -> None:
    """ConfigError unless there is nothing in the store, or a draft of this very cluster."""
    if membership.members:
        brokers = ", ".join(str(member.registration.broker_id) for member in membership.members)
        raise ConfigError(f"brokers of another cluster run with this ZooKeeper ({brokers}); give this one another path")
    if not found.index or (found.cluster_id == cluster_id and not found.controller_epoch):
        return
    if found.cluster_id == cluster_id:
        raise ConfigError(
            f"this ZooKeeper has cluster {cluster_id} already, and it has gone on there: "
            f"{FILE_NAME} is a copy from before, move it away"
        )
    raise ConfigError(f"this ZooKeeper has another cluster ({found.cluster_id}); give this one another path")
