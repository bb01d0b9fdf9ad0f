"""The compatibility page is what the registry says."""

from __future__ import annotations

from pathlib import Path

from millrace.handlers import registry
from millrace.handlers.api_versions import _listed
from millrace.handlers.compatibility import compatibility_markdown
from millrace.wire.keys import ApiKey
from millrace.wire.messages import request_class

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == compatibility_markdown(), "run `make docs`"


def test_every_handler_says_what_it_does_and_serves_only_declared_versions() -> None:
    for api in registry.load().values():
        assert api.doc, api.key.name
        declared = request_class(api.key)
        assert declared.min_version <= api.min_version <= api.max_version <= declared.max_version, api.key.name


def test_what_brokers_say_to_each_other_is_served_and_not_advertised() -> None:
    internal = {api.key for api in registry.load().values() if api.internal}
    assert internal == {
        ApiKey.ALTER_PARTITION,
        ApiKey.BROKER_HEARTBEAT,
        ApiKey.ALLOCATE_PRODUCER_IDS,
        ApiKey.ASSIGN_REPLICAS_TO_DIRS,
        ApiKey.GET_REPLICA_LOG_INFO,
        ApiKey.ENVELOPE,
        ApiKey.INITIALIZE_SHARE_GROUP_STATE,
        ApiKey.READ_SHARE_GROUP_STATE,
        ApiKey.WRITE_SHARE_GROUP_STATE,
        ApiKey.DELETE_SHARE_GROUP_STATE,
        ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
    }
    optional = {api.key: api.setting for api in registry.load().values() if api.setting}
    assert optional == dict.fromkeys((ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY), "telemetry.receiver")
    advertised = {listed.api_key for listed in _listed(frozenset())}
    assert advertised == set(registry.load()) - internal - set(optional)
    assert {listed.api_key for listed in _listed(frozenset(optional.values()))} == advertised | set(optional)
