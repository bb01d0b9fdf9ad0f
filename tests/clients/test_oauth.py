"""Real clients log in by access tokens (OAUTHBEARER): with and without TLS, by tokens that do not count, and again when
theirs end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.adapters.interface import Client, Login
from clients.conftest import CLIENTS
from clients.logins import (
    refusal_of_aiokafka,
    refusal_of_kafka_python,
    refusal_of_librdkafka,
    write_while_logins_end,
    writes_and_reads,
)
from millrace.security.certificates import make_authority
from millrace.testing import Cluster
from support import identity_provider as provider
from support.identity_provider import Endpoint

LIFETIME_S = 3
each_client = pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.name)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With what the broker shows (broker.pem) and what clients trust (ca.pem)."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = make_authority("tests")
    authority.write(directory / "ca.pem", directory / "ca.key")
    authority.issue("broker", hosts=["127.0.0.1"]).write(directory / "broker.pem")
    return directory


@pytest.fixture(scope="module")
def secured(directory: Path) -> Iterator[Cluster]:
    """A broker that has its keys from an https endpoint."""
    with Endpoint(directory).serving() as endpoint:
        settings = {
            "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:0",
            "ssl.keystore.location": str(directory / "broker.pem"),
            "sasl.enabled.mechanisms": "OAUTHBEARER",
            "sasl.oauthbearer.jwks.endpoint.url": endpoint.url,
            "sasl.oauthbearer.allowed.urls": endpoint.url,
            "sasl.oauthbearer.jwks.endpoint.truststore.location": str(endpoint.authorities),
            "sasl.oauthbearer.expected.issuer": provider.ISSUER,
            "sasl.oauthbearer.expected.audience": provider.AUDIENCE,
        }
        with Cluster(settings=settings) as cluster:
            yield cluster


def by_token(lifetime_s: float = 300, ca_file: str = "", **claims: object) -> Login:
    """A login for which every token is made when it is asked for."""

    def make() -> tuple[str, float]:
        ends_at = time.time() + lifetime_s
        return provider.token(provider.claims(**{"exp": ends_at, **claims})), ends_at

    return Login("OAUTHBEARER", "", "", ca_file, make)


@each_client
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_a_client_logs_in_and_works(
    secured: Cluster, directory: Path, protocol: str, kind: Callable[[Login], Client], fresh: Callable[[str], str]
) -> None:
    topic = fresh("oauth")
    secured.create_topic(topic)
    ca_file = str(directory / "ca.pem") if protocol == "SASL_SSL" else ""
    writes_and_reads(kind(by_token(ca_file=ca_file)), secured.bootstrap_servers_of(protocol), topic)


@pytest.mark.parametrize("wrong", [{"aud": "somebody"}, {"exp": 1_700_000_000}], ids=["of another", "expired"])
def test_clients_are_told_that_their_token_does_not_count(
    secured: Cluster, directory: Path, wrong: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    bootstrap = secured.bootstrap_servers_of("SASL_SSL")
    login = by_token(ca_file=str(directory / "ca.pem"), **wrong)
    assert "invalid_token" in refusal_of_librdkafka(bootstrap, login)
    assert "invalid_token" in refusal_of_kafka_python(bootstrap, login, "invalid_token", caplog)
    caplog.clear()
    # aiokafka takes every answer for a yes, goes on, and is closed on.
    assert "closed" in refusal_of_aiokafka(bootstrap, login, caplog)


def test_a_token_that_ends_costs_no_record(secured: Cluster, directory: Path, fresh: Callable[[str], str]) -> None:
    topic = fresh("again")
    clients: list[Client] = [kind(by_token(LIFETIME_S, str(directory / "ca.pem"))) for kind in CLIENTS]
    secured.create_topic(topic, len(clients))
    write_while_logins_end(clients, secured.bootstrap_servers_of("SASL_SSL"), topic, 3 * LIFETIME_S)
