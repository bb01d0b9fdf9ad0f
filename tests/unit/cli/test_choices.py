"""What options take, and which of them exclude each other."""

from __future__ import annotations

import pytest

from millrace.cli.choices import reading_settings
from millrace.cli.output import CommandError
from millrace.cli.root import run


def test_isolation_is_librdkafkas_setting() -> None:
    assert reading_settings(None) == {}, "the library's own default, or what --client says"
    assert reading_settings("read-committed") == {"isolation.level": "read_committed"}
    assert reading_settings("read-uncommitted") == {"isolation.level": "read_uncommitted"}
    with pytest.raises(CommandError, match="--isolation is read-committed or read-uncommitted, not 'dirty'"):
        reading_settings("dirty")


def test_a_queues_isolation_is_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["consume", "jobs", "--queue", "workers", "--isolation", "read-committed"]) == 2
    assert "share.isolation.level" in capsys.readouterr().err
