"""No dynamic setting is forgotten by the fault tests: each has values that its own rule takes, or a reason."""

from __future__ import annotations

import pytest

from cluster.setting_faults import BROKER_VALUES, LEFT_OUT, TOPIC_VALUES, dynamic_settings, values_of
from millrace.config.setting import Scope, Setting, parse_value
from millrace.config.table import SETTINGS

DYNAMIC = [setting for scope in (Scope.TOPIC, Scope.BROKER) for setting in dynamic_settings(scope)]


@pytest.mark.parametrize("setting", DYNAMIC, ids=lambda setting: f"{setting.scope.value} {setting.name}")
def test_every_dynamic_setting_has_values_or_a_reason(setting: Setting) -> None:
    values = values_of(setting)
    assert values or setting.name in LEFT_OUT
    for text in values:
        value = parse_value(setting, text)
        assert value != setting.default or len(values) > 1, "a change that changes nothing"
        assert setting.check is None or setting.check(value) is None


def test_no_values_are_left_of_settings_that_are_gone() -> None:
    assert set(TOPIC_VALUES) <= set(SETTINGS[Scope.TOPIC])
    assert set(BROKER_VALUES) <= {setting.name for setting in dynamic_settings(Scope.BROKER)}
