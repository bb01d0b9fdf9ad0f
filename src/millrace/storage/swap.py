"""A compacted segment takes the place of those that it was made from, and what a crash in between leads to.

    1. `<base>.*.cleaned`, written and synced            a start removes them
    2. renamed to `<base>.*.swap`, the indexes first     a start removes the indexes while there is a `.log.cleaned`
    3. the old segments renamed to `*.deleted`           a start ends it: from `.log.swap` on the new segment counts
    4. renamed to `<base>.*`, the `.log` first           a start renames the indexes that are left

Steps 2 to 4 are made in one turn of the loop, and the old files are removed only when the directory has been synced.
Renames are taken to reach the disk in their order, as they do on every file system with a journal. Not here: whether a
segment may take the others' place (`log`), and where it comes from (`compaction_job`).
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Final

from millrace.errors import CorruptLogError
from millrace.records.batch import LOG_OVERHEAD_BYTES, MIN_BATCH_LENGTH
from millrace.storage.files import DiskFile, Files
from millrace.storage.segment import (
    CLEANED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    OFFSET_DIGITS,
    PLACE,
    PLACE_BYTES,
    SCAN_CHUNK_BYTES,
    SWAP_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    file_name,
    is_offset_file,
)

logger = logging.getLogger(__name__)

_SIDES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)
_ALL: Final = (LOG_SUFFIX, *_SIDES)


def commit(files: Files, directory: Path, base_offset: int) -> None:
    """Step 2: from its end on the segment counts, whatever happens."""
    _rename(files, directory, base_offset, (*_SIDES, LOG_SUFFIX), CLEANED_SUFFIX, SWAP_SUFFIX)


def rename_into_place(files: Files, directory: Path, base_offset: int) -> None:
    """Step 4: the segment gets its name."""
    _rename(files, directory, base_offset, _ALL, SWAP_SUFFIX, "")


def discard(files: Files, directory: Path) -> None:
    """Remove what compaction has written and nobody wants."""
    for name in files.names(directory):
        if name.endswith(CLEANED_SUFFIX):
            files.remove(directory / name)


def recover(files: Files, directory: Path) -> None:
    """End what was begun, or undo it; before anything else in the directory is believed."""
    names = set(files.names(directory))
    for base_offset in _bases(names, LOG_SUFFIX + CLEANED_SUFFIX):
        for suffix in _SIDES:
            files.remove(directory / file_name(base_offset, suffix + SWAP_SUFFIX))
    for base_offset in _bases(names, LOG_SUFFIX + SWAP_SUFFIX):
        logger.warning("%s: a compacted segment at offset %d takes its place now", directory, base_offset)
        end_offset = _end_offset(files, directory / file_name(base_offset, LOG_SUFFIX + SWAP_SUFFIX), base_offset)
        for suffix in _ALL:
            for old in _bases(names, suffix):
                if base_offset <= old < end_offset:
                    files.remove(directory / file_name(old, suffix))
        rename_into_place(files, directory, base_offset)
    for suffix in _SIDES:
        for base_offset in _bases(set(files.names(directory)), suffix + SWAP_SUFFIX):
            rename_into_place(files, directory, base_offset)
    if any(name.endswith((CLEANED_SUFFIX, SWAP_SUFFIX)) for name in names):
        discard(files, directory)
        files.sync_directory(directory)


def _bases(names: set[str], suffix: str) -> list[int]:
    return sorted(int(name[:OFFSET_DIGITS]) for name in names if is_offset_file(name, suffix))


def _rename(files: Files, directory: Path, base_offset: int, suffixes: tuple[str, ...], old: str, new: str) -> None:
    for suffix in suffixes:
        source = directory / file_name(base_offset, suffix + old)
        if files.size_of(source) is not None:
            files.rename(source, directory / file_name(base_offset, suffix + new))


def _end_offset(files: Files, path: Path, base_offset: int) -> int:
    """Where the offsets of a segment end; it was synced before it got this name."""
    file = DiskFile(path)
    end_offset, position = base_offset, 0
    chunk, start = b"", 0
    size_bytes = files.size_of(path) or 0
    try:
        while position < size_bytes:
            if position - start + PLACE_BYTES > len(chunk):
                chunk, start = files.pread(file, min(SCAN_CHUNK_BYTES, size_bytes - position), position), position
            if len(chunk) < PLACE_BYTES:
                raise CorruptLogError(f"{path} ends in a part of a batch at byte {position}")
            base, length, delta = PLACE.unpack_from(chunk, position - start)
            if length < MIN_BATCH_LENGTH:
                raise CorruptLogError(f"{path} has no batch at byte {position}")
            end_offset = base + delta + 1
            position += length + LOG_OVERHEAD_BYTES
    finally:
        files.close(file)
    return end_offset
