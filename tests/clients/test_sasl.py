"""Real clients log in: by every mechanism, with and without TLS, with a wrong password, as nobody, and again when their
session ends."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.adapters.aio import Aiokafka
from clients.adapters.confluent import Confluent
from clients.adapters.interface import Client, Login
from clients.adapters.kafka_python import KafkaPython
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
from support.raw import RawClient
from support.sasl import MECHANISMS, add_user

SETTINGS = {
    "listeners": "PLAINTEXT://127.0.0.1:0,SASL_PLAINTEXT://127.0.0.1:0,SASL_SSL://127.0.0.1:0",
    "sasl.enabled.mechanisms": ",".join(MECHANISMS),
    "plain.sasl.jaas.config": 'PlainLoginModule required user_listed="l1sted";',
}
SESSION_MS = 4000
"""Clients log in again shortly before the end, kafka-python when 85 to 95 % are over: the rest is what a busy machine
has for that before they are closed on."""
USER, PASSWORD = "alice", "al1ce, = 'and' \"so\" on"
HAS_TO_LOG_IN = "the client has to log in"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with what the brokers show (broker.pem) and what clients trust (ca.pem)."""
    directory = tmp_path_factory.mktemp("certificates")
    authority = make_authority("tests")
    authority.write(directory / "ca.pem", directory / "ca.key")
    authority.issue("broker", hosts=["127.0.0.1"]).write(directory / "broker.pem")
    return directory


def running(certificates: Path, brokers: int = 1, **settings: str) -> Iterator[Cluster]:
    shown = {"ssl.keystore.location": str(certificates / "broker.pem"), "ssl.keystore.type": "PEM"}
    with Cluster(brokers, settings={**SETTINGS, **shown, **settings}) as cluster:
        host, _, port = cluster.bootstrap_servers.split(",")[-1].partition(":")
        with RawClient((host, int(port))) as admin:  # with three brokers, one that is not the controller
            add_user(admin, USER, PASSWORD)
        yield cluster


@pytest.fixture(scope="module", params=[1, 3], ids=["1-broker", "3-brokers"])
def secured(request: pytest.FixtureRequest, certificates: Path) -> Iterator[Cluster]:
    yield from running(certificates, request.param)


@pytest.fixture(scope="module")
def forgetful(certificates: Path) -> Iterator[Cluster]:
    """Whose sessions end soon."""
    yield from running(certificates, **{"connections.max.reauth.ms": str(SESSION_MS)})


each_client = pytest.mark.parametrize("kind", CLIENTS, ids=lambda kind: kind.name)
each_mechanism = pytest.mark.parametrize("mechanism", MECHANISMS)


@each_client
@each_mechanism
@pytest.mark.parametrize("protocol", ["SASL_PLAINTEXT", "SASL_SSL"])
def test_a_client_logs_in_and_works(
    secured: Cluster,
    certificates: Path,
    protocol: str,
    kind: Callable[[Login], Client],
    mechanism: str,
    fresh: Callable[[str], str],
) -> None:
    topic = fresh("sasl")
    secured.create_topic(topic)
    login = Login(mechanism, USER, PASSWORD, str(certificates / "ca.pem") if protocol == "SASL_SSL" else "")
    writes_and_reads(kind(login), secured.bootstrap_servers_of(protocol), topic)


@each_client
def test_a_user_of_the_jaas_line(
    secured: Cluster, kind: Callable[[Login], Client], fresh: Callable[[str], str]
) -> None:
    topic = fresh("listed")
    secured.create_topic(topic)
    writes_and_reads(kind(Login("PLAIN", "listed", "l1sted")), secured.bootstrap_servers_of("SASL_PLAINTEXT"), topic)


# --- who is turned away -----------------------------------------------------------------------------------------------


@each_mechanism
@pytest.mark.parametrize("user", [USER, "nobody"])
def test_a_client_is_told_the_same_of_a_wrong_password_and_of_a_user_who_is_not_there(
    forgetful: Cluster, certificates: Path, mechanism: str, user: str, caplog: pytest.LogCaptureFixture
) -> None:
    login = Login(mechanism, user, "wrong", str(certificates / "ca.pem"))
    bootstrap = forgetful.bootstrap_servers_of("SASL_SSL")
    text = (
        "Invalid username or password"
        if mechanism == "PLAIN"
        else f"invalid credentials with SASL mechanism {mechanism}"
    )
    assert text in refusal_of_librdkafka(bootstrap, login)
    assert text in refusal_of_kafka_python(bootstrap, login, text, caplog)
    caplog.clear()
    assert text in refusal_of_aiokafka(bootstrap, login, caplog)


# --- logging in again -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", [[Confluent, KafkaPython], [Aiokafka]], ids=["on the same connection", "on another"])
def test_a_session_that_ends_costs_no_record(
    forgetful: Cluster,
    certificates: Path,
    kinds: list[Callable[[Login], Client]],
    fresh: Callable[[str], str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """librdkafka and kafka-python log in again on the same connection (KIP-368); aiokafka does not know how: it is
    closed on, connects again and sends again what was not answered."""
    topic, trusted = fresh("again"), str(certificates / "ca.pem")
    logins = [Login(mechanism, USER, PASSWORD, trusted) for mechanism in ("PLAIN", "SCRAM-SHA-512")]
    clients = [kind(login) for kind in kinds for login in logins]
    forgetful.create_topic(topic, len(clients))
    caplog.set_level(logging.INFO, "millrace.server")
    write_while_logins_end(clients, forgetful.bootstrap_servers_of("SASL_SSL"), topic, 2.2 * SESSION_MS / 1000)
    closed_on = any(HAS_TO_LOG_IN in record.getMessage() for record in caplog.records)
    assert closed_on == (kinds == [Aiokafka])
