"""docs/configuration.md, written from the table."""

from __future__ import annotations

from millrace.config.setting import Scope, format_value
from millrace.config.table import SETTINGS


def configuration_markdown() -> str:
    """The text of docs/configuration.md."""
    parts = [
        "# Configuration\n",
        (
            "Generated from `src/millrace/config/table.py` and `without_effect.py` beside it; a test keeps them equal."
            " Names and defaults are Kafka's unless the text says otherwise. A value is looked up in this order: the"
            " topic's (or group's) own, dynamic for this broker, dynamic for all brokers, `--set`, the environment of"
            " `millrace broker` (`log.dirs` as `MILLRACE_SETTING_LOG_DIRS`: `_` for a dot, `__` for a dash, `___` for"
            " an underscore), its file, the default.\n"
        ),
    ]
    titles = {
        Scope.TOPIC: "Topic settings",
        Scope.BROKER: "Broker settings",
        Scope.GROUP: "Group settings",
        Scope.CLIENT_METRICS: "Client metrics subscriptions",
    }
    for scope, title in titles.items():
        last = "broker default" if scope in {Scope.TOPIC, Scope.GROUP} else "changes"
        parts.append(f"## {title}\n")
        parts.append(f"| name | type | default | {last} | meaning |\n|---|---|---|---|---|")
        for setting in SETTINGS[scope].values():
            if setting.hidden:
                continue
            if last == "changes":
                note = setting.update.value
            else:
                note = ", ".join(f"`{synonym.name}`" for synonym in setting.synonyms) or "-"
            default = format_value(setting.default)
            shown = "none" if default is None else f"`{default}`" if default else "empty"
            parts.append(f"| `{setting.name}` | {setting.kind.name.lower()} | {shown} | {note} | {setting.doc} |")
        parts.append("")
    return "\n".join(parts)
