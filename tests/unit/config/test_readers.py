"""Every row of the table of settings has a reader in the code, or says that it has no effect; and never both.

How readers are found is in `support.setting_readers`; that it finds them is tested here, too.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

import millrace
from millrace.config import (
    BROKER_SETTINGS,
    SETTINGS,
    BrokerConfig,
    ConfigSource,
    Kind,
    Scope,
    Setting,
    find_setting,
    format_value,
    parse_value,
)
from millrace.config.without_effect import ONLY_DEFAULT, has_no_effect
from millrace.errors import ConfigError
from support.setting_readers import SettingReaders, modules_of

SOURCES = Path(millrace.__file__).parent
ROWS = [(scope, row) for scope, rows in SETTINGS.items() for row in rows.values()]


@cache
def readers() -> SettingReaders:
    return SettingReaders(modules_of(SOURCES))


@cache
def readers_by_listener() -> SettingReaders:
    return SettingReaders(readers().modules, frozenset({"listener_value"}))


def allows_only_the_default(row: Setting) -> bool:
    return ONLY_DEFAULT in row.doc


def test_every_setting_is_read_or_says_that_it_has_no_effect() -> None:
    silent = [
        f"{scope.value} setting {row.name}"
        for scope, row in ROWS
        if not readers().of(scope, row.name) and not has_no_effect(row) and not allows_only_the_default(row)
    ]
    assert not silent, (
        "nothing reads these, and their texts do not say so: end the text with NO_EFFECT, or have the setting read "
        "(by its full name, not by one that is put together)"
    )


def test_no_setting_that_says_it_has_no_effect_is_read() -> None:
    read = {
        f"{scope.value} setting {row.name}": readers().of(scope, row.name)[:3]
        for scope, row in ROWS
        if has_no_effect(row) and readers().of(scope, row.name)
    }
    assert not read, "these are read: say what they do"


def test_a_setting_of_which_only_the_default_is_possible_refuses_the_rest() -> None:
    found = [row for _, row in ROWS if allows_only_the_default(row)]
    assert found
    for row in found:
        others = ("true", "false") if row.kind is Kind.BOOLEAN else ("JKS", "PKCS12", "pem", "")
        for text in set(others) - {format_value(row.default)}:
            with pytest.raises(ConfigError):
                parse_value(row, text)


def test_what_a_listener_may_have_for_itself_is_read_for_that_listener() -> None:
    """Otherwise `listener.name.NAME.SETTING` would be taken and not obeyed."""
    deaf = []
    for name, row in BROKER_SETTINGS.items():
        try:
            find_setting(Scope.BROKER, f"listener.name.inside.{name}")
        except ConfigError:
            continue
        if not has_no_effect(row) and not readers_by_listener().of(Scope.BROKER, name):
            deaf.append(name)
    assert not deaf


def test_the_default_of_a_setting_without_effect_has_none_either() -> None:
    assert has_no_effect(BROKER_SETTINGS["log.preallocate"])
    assert not has_no_effect(BROKER_SETTINGS["log.segment.delete.delay.ms"])


# --- the finder itself ------------------------------------------------------------------------------------------------


def found_in(tmp_path: Path, text: str, name: str, scope: Scope = Scope.BROKER) -> list[str]:
    (tmp_path / "part.py").write_text(text)
    return SettingReaders(modules_of(tmp_path)).of(scope, name)


@pytest.mark.parametrize(
    "text",
    [
        "x = config.get_int('num.partitions') + 1",
        "x = self._config.get('num.partitions')",
        "_NAME = 'num.partitions'\ndef f(config):\n    return config.get_int(_NAME)",
        (
            "_NAMES = {'a': ('num.partitions', None)}\n"
            "def f(config):\n    for a, (b, c) in _NAMES.items():\n        use(config.get_int(b))"
        ),
        "def f(config):\n    def number(name):\n        return config.get_int(name)\n    use(number('num.partitions'))",
        "x = partial(config.listener_value, listener, 'num.partitions')",
        "x = Part(count=config.get_int('num.partitions'))\ndef f(part):\n    return part.count + 1",
        (
            "class Part:\n    def __init__(self, count):\n        self.x = list(count)\n"
            "x = Part(count=config.get_int('num.partitions'))"
        ),
    ],
)
def test_a_read_is_found(tmp_path: Path, text: str) -> None:
    assert found_in(tmp_path, text, "num.partitions")


@pytest.mark.parametrize(
    "text",
    [
        "x = 'num.partitions'",
        "x = raise_for('num.partitions is wrong', 'num.partitions')",
        "x = fields.get('num.partitions')",
        "x = config.is_set('num.partitions')",
        "x = config.get_int(f'num.{what}')",
        "x = Part(count=config.get_int('num.partitions'))",
        "x = Part(count=int(config.get('num.partitions')))\ny = Other(count=x.count)",
        (
            "class Part:\n    def __init__(self, count):\n        self._count = count\n"
            "x = Part(count=config.get_int('num.partitions'))"
        ),
    ],
)
def test_what_is_no_read_is_not_taken_for_one(tmp_path: Path, text: str) -> None:
    assert found_in(tmp_path, text, "num.partitions") == []


def test_a_topics_setting_is_an_attribute_that_is_used(tmp_path: Path) -> None:
    handed_on = "y = LogConfig(file_delete_delay_ms=topic.file_delete_delay_ms)"
    assert found_in(tmp_path, handed_on, "file.delete.delay.ms", Scope.TOPIC) == []
    assert found_in(tmp_path, handed_on, "log.segment.delete.delay.ms") == []
    used = handed_on + "\nremove(log.file_delete_delay_ms)"
    assert found_in(tmp_path, used, "file.delete.delay.ms", Scope.TOPIC)
    assert found_in(tmp_path, used, "log.segment.delete.delay.ms"), "the default of what is read is read"


def test_the_settings_of_clients_are_no_readers(tmp_path: Path) -> None:
    (tmp_path / "cli").mkdir()
    (tmp_path / "cli" / "part.py").write_text("x = config.get_int('num.partitions')")
    assert SettingReaders(modules_of(tmp_path)).of(Scope.BROKER, "num.partitions") == []


def test_a_setting_without_effect_is_reported_at_the_start() -> None:
    config = BrokerConfig({"num.replica.fetchers": "4", "num.partitions": "2", "socket.send.buffer.bytes": "1000"})
    assert config.ignored == ("num.replica.fetchers",)
    (synonym, *_) = config.found("num.replica.fetchers")
    assert (synonym.value, synonym.source) == ("4", ConfigSource.STATIC_BROKER_CONFIG)
