"""`millrace users` against a running broker: logins made, changed and removed, and that they log in."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from clients.test_command_line import ENVIRONMENT, CommandLine
from millrace.client.cluster import ClusterClient
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError, ErrorCode
from millrace.local.ports import free_ports
from millrace.testing import Cluster

HOST = "127.0.0.1"
TIMEOUT_S = 40


@pytest.fixture(scope="module")
def addresses() -> Iterator[tuple[str, str]]:
    """Of one broker: where everybody is let in, and where one has to log in."""
    open_port, login_port = free_ports(HOST, 2)
    settings = {
        "listeners": f"PLAINTEXT://{HOST}:{open_port},SASL_PLAINTEXT://{HOST}:{login_port}",
        "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
    }
    with Cluster(settings=settings):
        yield f"{HOST}:{open_port}", f"{HOST}:{login_port}"


@pytest.fixture
def run(addresses: tuple[str, str], capsysbinary: pytest.CaptureFixture[bytes], tmp_path: Path) -> CommandLine:
    return CommandLine(addresses[0], capsysbinary, tmp_path / "stdin")


@pytest.fixture
def logs_in(addresses: tuple[str, str]) -> Callable[..., bool]:
    """Whether a user gets in with a password, by the project's own client."""

    def logs_in(user: str, password: str, mechanism: str = "SCRAM-SHA-512") -> bool:
        properties = {
            "bootstrap.servers": addresses[1],
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": mechanism,
            "sasl.username": user,
            "sasl.password": password,
        }
        try:
            with ClusterClient(ClientSettings.from_properties(properties)) as client:
                return client.broker_ids() == [1]
        except ApiError as error:
            if error.code != ErrorCode.SASL_AUTHENTICATION_FAILED:
                raise
            return False

    return logs_in


def test_users_come_and_go(
    run: CommandLine, fresh: Callable[[str], str], logs_in: Callable[..., bool], tmp_path: Path
) -> None:
    user = fresh("alice")
    assert f"there is no user '{user}'" in run.error("users", "list", user)
    assert run.text("users", "add", user, stdin=b"first secret\n") == f"added {user} (SCRAM-SHA-512)\n"
    assert run.json("users", "list", user) == [{"user": user, "mechanism": "SCRAM-SHA-512", "iterations": 8192}]
    assert user in run.text("users", "list")
    assert logs_in(user, "first secret")
    assert not logs_in(user, "first")
    assert not logs_in(user, "first secret", "SCRAM-SHA-256")
    assert f"change it with: millrace users passwd {user}" in run.error("users", "add", user, stdin=b"x\n")

    file = tmp_path / "password"
    file.write_text("from a file\r\nand not this\n")
    other = ("--mechanism", "scram-sha-256", "--iterations", "4096")
    run.text("users", "add", user, *other, "--password-file", file)
    assert logs_in(user, "from a file", "SCRAM-SHA-256")
    assert logs_in(user, "first secret"), "the other mechanism has its own"
    assert run.text("users", "passwd", user, stdin=b"second") == f"changed {user} (SCRAM-SHA-256, SCRAM-SHA-512)\n"
    assert logs_in(user, "second")
    assert logs_in(user, "second", "SCRAM-SHA-256")
    assert not logs_in(user, "first secret")
    assert {each["mechanism"]: each["iterations"] for each in run.json("users", "list", user)} == {
        "SCRAM-SHA-256": 4096,
        "SCRAM-SHA-512": 8192,
    }

    assert "say --yes" in run.error("users", "remove", user)
    assert run.text("users", "remove", user, "-m", "SCRAM-SHA-256", "--yes") == f"removed {user} (SCRAM-SHA-256)\n"
    assert logs_in(user, "second")
    assert "has no password for SCRAM-SHA-256" in run.error("users", "passwd", user, "-m", "SCRAM-SHA-256", stdin=b"x")
    assert run.json("users", "remove", user, "--yes") == [
        {"user": user, "mechanism": "SCRAM-SHA-512", "result": "removed"}
    ]
    assert not logs_in(user, "second")
    for words in (["passwd", user], ["remove", user, "--yes"]):
        assert f"there is no user '{user}'" in run.error("users", *words, stdin=b"x\n")


def test_a_password_is_made(run: CommandLine, fresh: Callable[[str], str], logs_in: Callable[..., bool]) -> None:
    user = fresh("app")
    first, second = run.text("users", "add", user, "--generate").splitlines()
    assert first == f"added {user} (SCRAM-SHA-512)"
    password = second.removeprefix("password: ")
    assert len(password) >= 32
    assert logs_in(user, password)
    (changed,) = run.json("users", "passwd", user, "--generate")
    assert changed["result"] == "changed"
    assert changed["password"] != password
    assert logs_in(user, changed["password"])


def test_a_profile_logs_in_and_a_wrong_password_is_told_at_once(
    run: CommandLine,
    addresses: tuple[str, str],
    fresh: Callable[[str], str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By librdkafka, which would go on trying, and by the project's own client."""
    monkeypatch.setenv("MILLRACE_CONFIG", str(tmp_path / "profiles.toml"))
    user = fresh("ann")
    run.text("users", "add", user, stdin=b"her secret")
    login = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "SCRAM-SHA-512", "sasl.username": user}
    settings = [word for name, value in login.items() for word in ("-X", f"{name}={value}")]
    run.text("profile", "set", "ann", "-b", addresses[1], *settings, "-X", "sasl.password=her secret")
    assert "secret" not in run.text("profile", "show", "ann")
    monkeypatch.setenv("MILLRACE_PROFILE", "ann")
    run.bootstrap = addresses[1]
    run.text("produce", "letters", stdin=b"hello\n")
    assert run.text("consume", "letters", "--from-beginning") == "hello\n"
    for words in (["topics", "list"], ["users", "list"], ["configs", "get", "--broker", "1"]):
        run.text(*words)
        began = time.monotonic()
        refused = run.error(*words, "-X", "sasl.password=another")
        assert "SASL_AUTHENTICATION_FAILED" in refused
        assert "another" not in refused
        assert time.monotonic() - began < 10


def test_what_is_refused(run: CommandLine, fresh: Callable[[str], str], tmp_path: Path) -> None:
    user = fresh("nobody")
    assert "the password is empty" in run.error("users", "add", user, stdin=b"\n")
    assert "the password is empty" in run.error("users", "add", user)
    assert "--mechanism is SCRAM-SHA-256 or SCRAM-SHA-512" in run.error("users", "add", user, "-m", "md5", exit_code=2)
    both = ["--generate", "--password-file", tmp_path / "p"]
    assert "exclude each other" in run.error("users", "add", user, *both, exit_code=2)
    assert "No such file" in run.error("users", "add", user, "--password-file", tmp_path / "missing")
    (tmp_path / "p").write_bytes(b"\xff\xfe")
    assert "not text" in run.error("users", "add", user, "--password-file", tmp_path / "p")
    run.error("users", "add", user, "--iterations", "16385", exit_code=2)
    assert f"there is no user '{user}'" in run.error("users", "list", user)


def test_at_a_terminal_it_is_asked_for_twice_and_not_shown(
    run: CommandLine, fresh: Callable[[str], str], logs_in: Callable[..., bool]
) -> None:
    user = fresh("person")
    ours, theirs = pty.openpty()
    environment = {**ENVIRONMENT, "MILLRACE_BOOTSTRAP": run.bootstrap}
    command = [sys.executable, "-m", "millrace", "users", "add", user]
    process = subprocess.Popen(
        command, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    shown = b""
    answers = iter([b"typed wrong\n", b"typed secret\n", b"typed secret\n", b"typed secret\n"])
    try:
        while True:
            assert select.select([ours], [], [], TIMEOUT_S)[0], shown
            try:
                part = os.read(ours, 1024)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
            if shown.endswith(b": "):
                os.write(ours, next(answers))
        assert process.wait(TIMEOUT_S) == 0, shown
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert b"typed" not in shown
    assert shown.count(b"Password of ") == 2
    assert f"added {user} (SCRAM-SHA-512)".encode() in shown
    assert logs_in(user, "typed secret")
