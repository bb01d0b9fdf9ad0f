"""Broker settings from environment variables, for containers: `MILLRACE_SETTING_LOG_DIRS` is `log.dirs`.

A name is written as the container images of Kafka want theirs, so that files can be carried over by changing the
prefix: capitals, `_` for a dot, `__` for a dash, `___` for an underscore. The prefix is a long one on purpose:
Kubernetes gives every pod variables called after its services (`MILLRACE_PORT`), which are not settings.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from millrace.config.setting import Scope
from millrace.config.table import BROKER_SETTINGS, find_setting, is_foreign
from millrace.errors import ConfigError

PREFIX: Final = "MILLRACE_SETTING_"
_SEPARATORS: Final = {"_": ".", "__": "-", "___": "_"}
_SPELLED: Final = {name.lower(): name for name in BROKER_SETTINGS}
"""A variable cannot say where a name has capitals (`zookeeper.clientCnxnSocket`)."""


def settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """The broker settings among these variables; ConfigError, by the variable's name, for one that does not exist."""
    found: dict[str, str] = {}
    for variable in sorted(environ):
        if not variable.startswith(PREFIX):
            continue
        name = _name_in(variable)
        if not is_foreign(name):
            try:
                find_setting(Scope.BROKER, name)
            except ConfigError as error:
                raise ConfigError(f"{variable} in the environment: {error}") from None
        found[name] = environ[variable]
    return found


def variable_of(name: str) -> str:
    """The variable that gives the setting `name`."""
    spelled = {character: separator for separator, character in _SEPARATORS.items()}
    return PREFIX + "".join(spelled.get(character, character) for character in name).upper()


def without_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that are no settings: what a broker's process gets whose settings all stand in its file."""
    return {name: value for name, value in environ.items() if not name.startswith(PREFIX)}


def _name_in(variable: str) -> str:
    written = variable.removeprefix(PREFIX).lower()
    name = re.sub(r"_{1,3}", lambda found: _SEPARATORS[found.group()], written)
    return _SPELLED.get(name, name)
