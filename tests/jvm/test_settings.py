"""Every setting of Kafka is known here by its name and with its default, but for what docs/coming-from-kafka.md lists.

Kafka prints its own tables: the main methods that write its documentation.
"""

from __future__ import annotations

import html
import re

import pytest

from support.kafka_jars import KafkaJars
from support.maven import ROOT

MAINS = {
    "Broker": "kafka.server.KafkaConfig",
    "Topic": "org.apache.kafka.storage.internals.log.LogConfig",
    "Group": "org.apache.kafka.coordinator.group.GroupConfig",
}
PAGE = ROOT / "docs" / "coming-from-kafka.md"
OURS = ROOT / "docs" / "configuration.md"  # generated from the table; another test holds that

_ENTRY = re.compile(r'<h4><a id="([^"]+)">.*?<th>Default:</th><td>(.*?)</td>', re.DOTALL)
_ROW = re.compile(r"^\| `([^`]+)` \| \w+ \| (.*?) \| ")
_REQUIRED = {"node.id", "process.roles", "controller.listener.names"}
"""Kafka has no default for these since a node cannot start without them; what they mean is not here."""


def kafka_defaults(jars: KafkaJars, scope: str) -> dict[str, str]:
    done = jars.run(MAINS[scope])
    assert done.status == 0, done.stderr
    return {name: _plain(html.unescape(default)) for name, default in _ENTRY.findall(done.stdout)}


def our_defaults(scope: str) -> dict[str, str]:
    section = OURS.read_text().split(f"\n## {scope} settings\n")[1].split("\n## ")[0]
    rows = (_ROW.match(line) for line in section.splitlines())
    return {row[1]: _plain(row[2].strip("`")) for row in rows if row is not None}


def _plain(default: str) -> str:
    text = re.sub(r"\s+\(.*\)$", "", default)  # Kafka's pages say large numbers in words, too
    if text in {"null", "none", "empty", '""', ""}:
        return ""
    if "," in text:
        return ",".join(sorted(text.split(",")))
    try:
        return repr(float(text))
    except ValueError:
        return text


def differences_on_the_page() -> set[str]:
    table = PAGE.read_text().split("What differs:\n")[1].split("\nThese are only here:")[0]
    return set(re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE))


@pytest.mark.parametrize("scope", MAINS)
def test_names_and_defaults_are_kafkas_but_for_what_the_page_says(jars: KafkaJars, scope: str) -> None:
    theirs, ours = kafka_defaults(jars, scope), our_defaults(scope)
    assert len(theirs) > 10 and len(ours) > 10
    assert [name for name in sorted(theirs.keys() - ours.keys()) if not name.startswith("streams.")] == []
    differ = {name for name in theirs.keys() & ours.keys() - _REQUIRED if theirs[name] != ours[name]}
    assert differ == (differences_on_the_page() if scope == "Broker" else set())
