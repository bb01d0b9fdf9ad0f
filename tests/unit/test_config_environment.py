"""Settings in environment variables: their names, what wins, and what is told of a wrong one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.config import BROKER_SETTINGS
from millrace.config.environment import settings_in, variable_of, without_settings
from millrace.errors import ConfigError

MILLRACE = [sys.executable, "-m", "millrace"]


@pytest.mark.parametrize(
    ("variable", "name"),
    [
        ("LOG_DIRS", "log.dirs"),
        ("LISTENER_NAME_HOST_SCRAM__SHA__256_SASL_JAAS_CONFIG", "listener.name.host.scram-sha-256.sasl.jaas.config"),
        ("LISTENER_NAME_PLAINTEXT___HOST_SSL_CLIENT_AUTH", "listener.name.plaintext_host.ssl.client.auth"),
        ("ZOOKEEPER_CLIENTCNXNSOCKET", "zookeeper.clientCnxnSocket"),
        ("PROCESS_ROLES", "process.roles"),  # KRaft's: taken along, so that it is warned of as in a file
    ],
)
def test_a_variable_is_the_setting(variable: str, name: str) -> None:
    assert settings_in({f"MILLRACE_SETTING_{variable}": " a value"}) == {name: " a value"}
    assert variable_of(name) == f"MILLRACE_SETTING_{variable}"


def test_every_setting_has_a_variable_of_its_own() -> None:
    variables = {variable_of(name): "1" for name in BROKER_SETTINGS}
    assert set(settings_in(variables)) == set(BROKER_SETTINGS)


def test_other_variables_are_none() -> None:
    others = {"MILLRACE_BOOTSTRAP": "a:1", "MILLRACE_SERVICE_PORT": "9092", "KAFKA_LOG_DIRS": "/x", "PATH": "/bin"}
    assert settings_in(others) == {}
    assert without_settings({**others, "MILLRACE_SETTING_LOG_DIRS": "/y"}) == others


@pytest.mark.parametrize("variable", ["LOG_DIRZ", "", "LOG____DIRS", "log.dirz"])
def test_a_wrong_one_is_told_by_its_name(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"^MILLRACE_SETTING_{variable} in the environment: unknown broker setting"):
        settings_in({f"MILLRACE_SETTING_{variable}": "x"})


def run(*options: str, **settings: str) -> subprocess.CompletedProcess[str]:
    """`millrace broker`, which is told to stop as soon as it is ready."""
    variables = {f"MILLRACE_SETTING_{name}": value for name, value in settings.items()}
    with subprocess.Popen(
        [*MILLRACE, "broker", "--log-level", "warning", *options],
        env={**without_settings(os.environ), **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as broker:
        assert broker.stdout is not None
        assert broker.stderr is not None
        ready = broker.stdout.readline()
        broker.send_signal(signal.SIGTERM)
        return subprocess.CompletedProcess(broker.args, broker.wait(30), ready, broker.stderr.read())


def test_a_broker_without_a_file(tmp_path: Path) -> None:
    done = run(LOG_DIRS=str(tmp_path / "data"), LISTENERS="PLAINTEXT://127.0.0.1:0")
    assert done.stdout.startswith("ready bootstrap=127.0.0.1:"), done.stderr
    assert done.returncode == 0
    assert (tmp_path / "data" / "meta.properties").exists()


def test_what_is_given_for_the_call_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "server.properties"
    file.write_text("listeners=PLAINTEXT://127.0.0.1:0\nlog.dirs=/proc/in-the-file\nbroker.id=1\n")
    data = tmp_path / "data"
    done = run("--config", str(file), "--set", "broker.id=3", LOG_DIRS=str(data), BROKER_ID="2")
    assert done.returncode == 0, done.stderr
    assert "node.id=3" in (data / "meta.properties").read_text()


def test_nothing_given_at_all() -> None:
    done = run()
    assert (done.stdout, done.returncode) == ("", 2)
    assert done.stderr == (
        "millrace: error: no settings: give --config FILE, or in the environment MILLRACE_SETTING_LOG_DIRS=FOLDER\n"
    )
