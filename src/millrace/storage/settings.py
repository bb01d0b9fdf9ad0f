"""What a log is told about its topic. Not here: where the values come from (`millrace.config`)."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from millrace.records.batch import NO_LIMIT_MS, ProduceLimits, TimestampType
from millrace.records.compression import DEFAULT_MAX_BYTES, Codec, codec_named
from millrace.storage.producers import DEFAULT_EXPIRATION_MS, DEFAULT_MAX_PRODUCERS
from millrace.storage.recovery import LoadOptions

_WEEK_MS: Final = 7 * 24 * 3600 * 1000


class FlushMode(Enum):
    """When written data is synced to disk."""

    GROUP = "group"
    """Always, as soon as the disk is free; acks=all waits for it."""
    OS = "os"
    """When the kernel likes to, and a segment when it is rolled: Kafka's default."""
    INTERVAL = "interval"
    """Within `flush_interval_ms` of a write."""


@dataclass(frozen=True, slots=True)
class LogConfig:
    """A topic's settings, as far as its logs need them; names and defaults are Kafka's, except for `flush_mode`."""

    segment_bytes: int = 1 << 30
    segment_ms: int = _WEEK_MS
    segment_jitter_ms: int = 0
    retention_ms: int = _WEEK_MS
    retention_bytes: int = -1
    index_interval_bytes: int = 4096
    segment_index_bytes: int = 10 * 1024 * 1024
    max_message_bytes: int = 1_048_588
    timestamp_type: TimestampType = TimestampType.CREATE
    timestamp_before_max_ms: int = NO_LIMIT_MS
    timestamp_after_max_ms: int = 3_600_000
    compact: bool = False
    delete: bool = True
    min_cleanable_ratio: float = 0.5
    min_compaction_lag_ms: int = 0
    max_compaction_lag_ms: int = NO_LIMIT_MS
    delete_retention_ms: int = 24 * 3600 * 1000
    compact_at_bytes: int | None = None
    """Compact as soon as so many bytes are worth it, the active segment's too: for state that somebody has to load."""
    compression_type: str = "producer"
    compression_level: int | None = None
    """Of the codec that `compression_type` names; None: as the codec likes."""
    flush_mode: FlushMode = FlushMode.GROUP
    flush_interval_ms: int = 1000
    file_delete_delay_ms: int = 60_000
    """How long a segment that retention or DeleteRecords has removed stays on disk under another name."""
    producer_expiration_ms: int = DEFAULT_EXPIRATION_MS
    max_producers: int = DEFAULT_MAX_PRODUCERS
    validate_records: bool = False
    """Walk every record of a produced batch (`records.decode.check_records`), not only its header and CRC."""
    max_decompressed_bytes: int = DEFAULT_MAX_BYTES

    @property
    def produce_limits(self) -> ProduceLimits:
        if self.timestamp_type is TimestampType.LOG_APPEND:
            # The producer's timestamps are replaced, so that they cannot be wrong.
            return ProduceLimits(self.max_message_bytes, NO_LIMIT_MS, NO_LIMIT_MS)
        return ProduceLimits(self.max_message_bytes, self.timestamp_before_max_ms, self.timestamp_after_max_ms)

    @property
    def max_segment_ms(self) -> int:
        """The age at which a segment is rolled: only a sealed one can be compacted."""
        return min(self.segment_ms, self.max_compaction_lag_ms) if self.compact else self.segment_ms

    @property
    def target_codec(self) -> Codec | None:
        """The codec that batches are stored in; None: as the producer sent them."""
        return None if self.compression_type == "producer" else codec_named(self.compression_type)

    @property
    def load_options(self) -> LoadOptions:
        return LoadOptions(self.producer_expiration_ms, self.max_producers)
