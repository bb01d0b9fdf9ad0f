"""Completion as shells ask for it: topics, groups and choices; nothing, and in time, where nobody answers."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clients.adapters.confluent import Confluent
from clients.test_command_line import ENVIRONMENT, TIMEOUT_S
from millrace.cli import completion
from millrace.cli.root import run
from millrace.clock import SystemClock
from millrace.testing import Cluster

LIMIT_S = completion.LIMIT_S


def test_the_limit_is_one_that_a_person_can_wait_for() -> None:
    assert LIMIT_S < 1


@pytest.fixture(scope="module")
def bootstrap() -> Iterator[str]:
    with Cluster() as cluster:
        for topic in ("orders", "orders-archive", "payments"):
            cluster.create_topic(topic)
        sender = Confluent().sender(cluster.bootstrap_servers)
        sender.send("orders", b"one").result(TIMEOUT_S)
        sender.close()
        # Whoever was given a record is in its group, however long that took.
        for options in (["--group", "billing"], ["--queue", "bills"]):
            subprocess.run(
                [sys.executable, "-m", "millrace", "consume", "orders", *options, "--from-beginning", "--max", "1"],
                env={**ENVIRONMENT, "MILLRACE_BOOTSTRAP": cluster.bootstrap_servers},
                timeout=TIMEOUT_S,
                check=True,
            )
        yield cluster.bootstrap_servers


class Shell:
    """Asks in this process, in the way of the scripts of `--show-completion`."""

    def __init__(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bootstrap: str) -> None:
        self._capsys = capsys
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("MILLRACE_BOOTSTRAP", bootstrap)
        monkeypatch.setattr(completion, "LIMIT_S", TIMEOUT_S)

    def bash(self, *words: str) -> list[str]:
        self._monkeypatch.setenv("COMP_WORDS", "\n".join(["millrace", *words]))
        self._monkeypatch.setenv("COMP_CWORD", str(len(words)))
        return self._answer("complete_bash").split()

    def zsh(self, line: str) -> str:
        self._monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        return self._answer("complete_zsh")

    def fish(self, line: str) -> list[str]:
        self._monkeypatch.setenv("_TYPER_COMPLETE_ARGS", line)
        self._monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
        return self._answer("complete_fish").splitlines()

    def _answer(self, instruction: str) -> str:
        self._monkeypatch.setenv("_MILLRACE_COMPLETE", instruction)
        assert run([]) == 0
        captured = self._capsys.readouterr()
        assert captured.err == ""
        return captured.out


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, bootstrap: str) -> Shell:
    return Shell(capsys, monkeypatch, bootstrap)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (["topics", "describe", "o"], ["orders", "orders-archive"]),
        (["topics", "describe", "orders", ""], ["orders-archive", "payments"]),
        (["topics", "describe", "__con"], ["__consumer_offsets"]),
        (["topics", "delete", "pa"], ["payments"]),
        (["consume", "pa"], ["payments"]),
        (["produce", "pa"], ["payments"]),
        (["groups", "describe", ""], ["billing", "bills"]),
        (["groups", "export", "billi"], ["billing"]),
        (["groups", "reset", "billing", "--topic", "pa"], ["payments"]),
        (["consume", "orders", "--group", "b"], ["billing", "bills"]),
        (["consume", "orders", "-q", "bills"], ["bills"]),
        (["queues", "describe", "bills"], ["bills"]),
        (["cluster", "elect", "-t", "pa"], ["payments"]),
        (["groups", "list", "--type", "c"], ["classic", "consumer"]),
        (["groups", "list", "--state", "e"], ["empty"]),
        (["produce", "orders", "-z", "z"], ["zstd"]),
        (["produce", "orders", "--acks", ""], ["0", "1", "all"]),
        (["consume", "orders", "--isolation", "read-c"], ["read-committed"]),
        (["top", "--sort", "r"], ["rate"]),
        (["transactions", "list", "--state", "prepare-a"], ["prepare-abort"]),
        (["up", "--log-level", "w"], ["warning"]),
        (["pipeline", "show", "me"], ["metrics"]),
        (["produce", "orders", "--state", ""], []),
        (["topics", "de"], ["describe", "delete"]),
        (["acls", "add", "--operation", "de"], ["delete", "describe", "describe-configs", "describe-tokens"]),
        (["acls", "check", "--topic", "pa"], ["payments"]),
        (["users", "add", "ann", "--mechanism", "SCRAM-SHA-5"], ["SCRAM-SHA-512"]),
        (["top"], ["top", "topics"]),
        (["nonsense", "x"], []),
    ],
    ids=lambda value: " ".join(value) or "-",
)
def test_bash(shell: Shell, words: list[str], offered: list[str]) -> None:
    assert shell.bash(*words) == offered


def test_zsh(shell: Shell) -> None:
    assert shell.zsh("millrace topics describe orders") == '_arguments \'*: :(("orders"\n"orders-archive"))\'\n'
    assert shell.zsh("millrace groups describe ") == '_arguments \'*: :(("billing"\n"bills"))\'\n'


def test_fish(shell: Shell) -> None:
    assert shell.fish("millrace topics describe orders") == ["orders", "orders-archive"]
    assert shell.fish("millrace groups list --type s") == ["share", "streams"]


def test_the_address_that_was_typed(shell: Shell, bootstrap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MILLRACE_BOOTSTRAP", "127.0.0.1:1")
    assert shell.bash("topics", "describe", "--bootstrap", bootstrap, "pa") == ["payments"]


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere", "SILENT", "SILENT,SILENT"])
def test_nobody_answers(shell: Shell, monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Also one that takes the connection and says nothing."""
    monkeypatch.setattr(completion, "LIMIT_S", LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        where = address.replace("SILENT", f"127.0.0.1:{silent.getsockname()[1]}")
        monkeypatch.setenv("MILLRACE_BOOTSTRAP", where)
        started = SystemClock().monotonic()
        assert shell.bash("topics", "describe", "o") == []
        assert SystemClock().monotonic() - started < LIMIT_S + 5, "one limit, however often it is tried"
        assert shell.bash("groups", "list", "--type", "c") == ["classic", "consumer"]


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_a_real_bash(tmp_path: Path) -> None:
    """The script that is installed, in the shell that it is for."""
    command = tmp_path / "millrace"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m millrace "$@"\n')
    command.chmod(0o755)
    environment = {
        **ENVIRONMENT,
        "PATH": os.pathsep.join([str(tmp_path), os.environ["PATH"]]),
        "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1",
    }
    script = """
        source <(millrace --show-completion bash)
        COMP_WORDS=(millrace groups list --type c) COMP_CWORD=4
        _millrace_completion millrace
        printf '%s\\n' "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, ["classic", "consumer"], "")
