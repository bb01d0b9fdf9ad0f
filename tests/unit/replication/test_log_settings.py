"""From a topic's settings to its log's: what flush.mode, flush.messages and flush.ms promise, and the record walk."""

from __future__ import annotations

import pytest

from millrace.config import BrokerConfig, topic_config
from millrace.replication.replicas import COMPACT_STATE_AT_BYTES, DEFAULT_FLUSH_INTERVAL_MS, log_config
from millrace.storage.settings import FlushMode, LogConfig


def settings(*, internal: bool = False, **overrides: str) -> LogConfig:
    dotted = {name.replace("_", "."): value for name, value in overrides.items()}
    config = topic_config(dotted, BrokerConfig.load(None, {}))
    return log_config(config, internal=internal, producer_expiration_ms=1)


@pytest.mark.parametrize(
    ("overrides", "mode"),
    [
        ({}, FlushMode.GROUP),
        ({"flush_mode": "os"}, FlushMode.OS),
        ({"flush_mode": "interval"}, FlushMode.INTERVAL),
        ({"flush_mode": "os", "flush_messages": "1"}, FlushMode.GROUP),
        ({"flush_mode": "interval", "flush_messages": "100"}, FlushMode.GROUP),
        ({"flush_mode": "os", "flush_ms": "50"}, FlushMode.INTERVAL),
    ],
)
def test_the_flush_mode_keeps_every_promise(overrides: dict[str, str], mode: FlushMode) -> None:
    assert settings(**overrides).flush_mode is mode


def test_internal_topics_do_what_their_settings_say() -> None:
    assert settings(internal=True).flush_mode is FlushMode.GROUP
    assert settings(internal=True, flush_mode="os").flush_mode is FlushMode.OS


def test_the_interval_is_what_flush_ms_says() -> None:
    assert settings(flush_mode="os", flush_ms="50").flush_interval_ms == 50
    assert settings(flush_mode="interval").flush_interval_ms == DEFAULT_FLUSH_INTERVAL_MS


def test_the_record_walk_is_off_unless_asked_for() -> None:
    assert not settings().validate_records
    assert settings(validate_records="true").validate_records


def test_what_compaction_goes_by() -> None:
    config = settings(
        cleanup_policy="compact,delete",
        min_cleanable_dirty_ratio="0.2",
        min_compaction_lag_ms="3",
        max_compaction_lag_ms="4",
        delete_retention_ms="5",
    )
    assert (config.compact, config.delete, config.min_cleanable_ratio) == (True, True, 0.2)
    assert (config.min_compaction_lag_ms, config.max_compaction_lag_ms, config.delete_retention_ms) == (3, 4, 5)
    assert config.compact_at_bytes is None


def test_the_state_of_coordinators_is_compacted_early() -> None:
    assert settings(internal=True).compact_at_bytes == COMPACT_STATE_AT_BYTES


@pytest.mark.parametrize(
    ("overrides", "level"),
    [
        ({}, None),
        ({"compression_zstd_level": "7"}, None),
        ({"compression_type": "snappy"}, None),
        ({"compression_type": "zstd", "compression_zstd_level": "7"}, 7),
        ({"compression_type": "lz4"}, 9),
        ({"compression_type": "gzip", "compression_gzip_level": "2", "compression_lz4_level": "3"}, 2),
    ],
)
def test_the_level_is_that_of_the_codec(overrides: dict[str, str], level: int | None) -> None:
    assert settings(**overrides).compression_level == level


def test_jitter_and_delay() -> None:
    config = settings(segment_jitter_ms="17", file_delete_delay_ms="18")
    assert (config.segment_jitter_ms, config.file_delete_delay_ms) == (17, 18)
