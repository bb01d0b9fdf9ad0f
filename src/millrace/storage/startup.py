"""What is found in a data directory at a start, and what is believed of it.

After a clean stop nothing but the checkpoints is read. After a crash every log is checked from its recovery point.
Not here: what is believed of one log's files (`recovery`), whose directory it is (`directory`).
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING

from millrace.errors import CorruptLogError
from millrace.model import TopicPartition
from millrace.storage import checkpoint
from millrace.storage.directory import LogDirectory
from millrace.storage.log import Log
from millrace.storage.move import MARK
from millrace.storage.names import DELETE_SUFFIX, FUTURE_SUFFIX, partition_named
from millrace.storage.recovery import LogState

if TYPE_CHECKING:
    from millrace.storage.logdirs import LogDirs

logger = logging.getLogger(__name__)


def load_directory(dirs: LogDirs, directory: LogDirectory) -> None:
    """Find the logs of a directory; those that were not closed are checked from their recovery point on."""
    files = dirs.files
    path = directory.path
    marker = files.read_bytes(path / checkpoint.CLEAN_SHUTDOWN)
    clean = marker is not None
    directory.clean_epoch = -1 if marker is None else checkpoint.read_clean_shutdown(marker)
    points = checkpoint.read_offsets(files, path / checkpoint.RECOVERY_POINTS)
    starts = checkpoint.read_offsets(files, path / checkpoint.LOG_STARTS)
    cleaned = checkpoint.read_offsets(files, path / checkpoint.CLEANED_OFFSETS) or {}
    dirs.high_watermarks.update(checkpoint.read_offsets(files, path / checkpoint.HIGH_WATERMARKS) or {})
    directory.checkpointed.update(points or {}, starts or {})
    names = files.names(path)
    if clean:
        # From here on a crash is a crash.
        files.remove(path / checkpoint.CLEAN_SHUTDOWN)
        files.sync_directory(path)
    elif points:
        logger.warning("%s was not stopped cleanly: checking its logs", path)
    dirs.clean_start = dirs.clean_start and (clean or not points)
    for name in names:
        partition = partition_named(name)
        if partition is None:
            if name.endswith((DELETE_SUFFIX, FUTURE_SUFFIX)):
                dirs.remove_later(path / name)
            continue
        # Without its entry a log's end is not known, so that it has to be looked at.
        known = clean and points is not None and partition in points and starts is not None
        state = LogState(
            start_offset=(starts or {}).get(partition, 0),
            recovery_point=(points or {}).get(partition, 0),
            clean=known,
        )
        log = dirs.make(directory, partition, dirs.config, state)
        other = dirs.directory_of(partition)
        if other is not None:
            log.cleaned_offset = cleaned.get(partition, 0)
            if not _replaces_other(dirs, directory, other, partition, log):
                continue
        dirs.attach(directory, partition, log)
        log.cleaned_offset = cleaned.get(partition, 0)
        if not known:
            try:
                log.ensure_loaded()
            except CorruptLogError:
                # It says so itself (`Log.failure`), and it is offline alone.
                continue
    logs = checkpoint.read_logs(files, path / checkpoint.LOGS)
    dirs.note_topic_ids({place: topic_id for place, topic_id in logs.items() if place in directory.logs})
    directory.missing = {place: topic_id for place, topic_id in logs.items() if place not in directory.logs}
    for place in directory.missing:
        logger.error("the log of %s is missing in %s", place, path)


def _replaces_other(
    dirs: LogDirs, directory: LogDirectory, other: LogDirectory, partition: TopicPartition, log: Log
) -> bool:
    """A log is in two directories: a move was cut short, and the one with its mark counts; the other is deleted.

    Where that is not so, one of them was away when the other was made or used: the cluster knows which one counts.
    """
    path, other_path = directory.path / str(partition), other.path / str(partition)
    here, there = (dirs.files.size_of(each / MARK) is not None for each in (path, other_path))
    other_log = other.logs[partition]
    with suppress(CorruptLogError):
        log.ensure_loaded()
    marked, plain = (log, other_log) if here else (other_log, log)
    is_behind = marked.failure is not None or marked.end_offset < plain.end_offset
    if here == there or is_behind:
        dirs.note_twin(directory, partition, log)
        return False
    if here:
        dirs.delete_log(partition)
    else:
        log.release()
        dirs.doom(directory, partition)
    return here
