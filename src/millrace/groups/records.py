"""What a record of `__consumer_offsets` says, of whatever kind it is.

The kinds have their bytes where they belong: commits in `offsets.records`, classic groups in `classic.records`,
KIP-848 groups in `modern.records`, share groups in `share.records`. Those of streams groups are passed over.
"""

from __future__ import annotations

from millrace.groups.classic.records import GroupRecord, read_group
from millrace.groups.entries import kind_of
from millrace.groups.modern.records import ModernRecord, read_entry
from millrace.groups.offsets.records import OffsetRecord, read_offset
from millrace.groups.share.records import ShareRecord, read_share_entry


def read_record(
    key: bytes, value: bytes | None, record_offset: int
) -> OffsetRecord | GroupRecord | ModernRecord | ShareRecord | None:
    """What a record says, or None for a kind that is not ours; ProtocolError where it cannot be read."""
    kind = kind_of(key)
    return (
        read_offset(kind, key, value, record_offset)
        or read_group(kind, key, value)
        or read_entry(kind, key, value)
        or read_share_entry(kind, key, value)
    )
