"""Brokers without transactions: the sink says so, and which option makes it work there."""

from __future__ import annotations

import pytest

from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ConfigError
from millrace.spark import exactly_once
from millrace.wire.keys import ApiKey
from support.fake_broker import FakeBroker


def test_a_broker_without_transactions_is_named() -> None:
    with FakeBroker({ApiKey.INIT_PRODUCER_ID: lambda _: None}) as broker:
        client = ClusterClient(ClientSettings.from_properties({"bootstrap.servers": broker.bootstrap}))
        with client, pytest.raises(ConfigError) as caught:
            exactly_once.require_transactions(client)
    assert f"{broker.bootstrap} has no transactions" in str(caught.value)
    assert "set option delivery to at-least-once" in str(caught.value)
