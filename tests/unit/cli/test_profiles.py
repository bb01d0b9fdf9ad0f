"""Profiles: what is in the file, which one counts, and that its login goes nowhere but to its own cluster."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.cli.profiles import Profile, Profiles, _parse, render
from millrace.cli.root import run
from millrace.security.hiding import is_secret
from millrace.testing import Cluster

DEAD = "127.0.0.1:1"


@pytest.fixture(scope="module")
def broker() -> Iterator[str]:
    with Cluster() as cluster:
        cluster.create_topic("orders")
        yield cluster.bootstrap_servers


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config" / "profiles.toml"
    monkeypatch.setenv("MILLRACE_CONFIG", str(path))
    monkeypatch.delenv("MILLRACE_BOOTSTRAP", raising=False)
    monkeypatch.delenv("MILLRACE_PROFILE", raising=False)
    return path


class Said:
    """Runs commands and keeps what they said."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *words: str, exit_code: int = 0) -> str:
        self._capsys.readouterr()
        status = run(list(words))
        out, err = self._capsys.readouterr()
        assert status == exit_code, (status, out, err)
        return err if exit_code else out


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str], path: Path) -> Said:
    return Said(capsys)


def test_profiles_are_made_shown_used_and_removed(said: Said, path: Path) -> None:
    assert said("profile", "list") == f"there are no profiles in {path}\n"
    assert (
        said("profile", "set", "prod", "-b", "one:9092,two:9092", "-X", 'sasl.password=a=b"c')
        == "created profile prod\n"
    )
    assert said("profile", "set", "prod", "--client", "security.protocol=SASL_SSL") == "changed profile prod\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    shown = said("profile", "show", "prod")
    assert "one:9092,two:9092" in shown and "SASL_SSL" in shown and "a=b" not in shown
    assert json.loads(said("profile", "show", "prod", "--json", "--secrets")) == {
        "profile": "prod",
        "bootstrap": "one:9092,two:9092",
        "client": {"sasl.password": 'a=b"c', "security.protocol": "SASL_SSL"},
    }
    assert "no profile is in use" in said("profile", "show", exit_code=1)
    assert said("profile", "use", "prod") == "profile prod is in use\n"
    assert json.loads(said("profile", "list", "--json")) == [
        {"profile": "prod", "in_use": True, "bootstrap": "one:9092,two:9092", "settings": 2}
    ]
    assert "(in use)" in said("profile", "show")
    assert said("profile", "unset", "prod", "sasl.password", "bootstrap")
    assert json.loads(said("profile", "show", "--json"))["client"] == {"security.protocol": "SASL_SSL"}
    assert said("profile", "unset", "prod", "--yes") == "removed profile prod\n"
    assert path.read_text() == ""


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["profile", "use", "nope"], "there is no profile 'nope' in"),
        (["profile", "show", "nope"], "; the profiles are prod"),
        (["topics", "list", "--profile", "nope"], "there is no profile 'nope' in"),
        (["profile", "use"], "name a profile, or say --none"),
        (["profile", "set", "more"], "nothing to set"),
        (["profile", "set", "more", "-X", "novalue"], "-X wants name=value"),
    ],
)
def test_what_is_refused(said: Said, words: list[str], text: str) -> None:
    said("profile", "set", "prod", "-b", DEAD)
    assert text in said(*words, exit_code=2)


def test_a_source_that_is_no_text_is_named(said: Said, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff")
    assert "binary: not text in UTF-8" in said("profile", "set", "p", "--from", str(tmp_path / "binary"), exit_code=1)


def test_a_setting_that_is_not_there_cannot_be_removed(said: Said) -> None:
    said("profile", "set", "prod", "-b", DEAD)
    assert "has no setting 'sasl.username'" in said("profile", "unset", "prod", "sasl.username", exit_code=1)


@pytest.mark.parametrize(
    "text",
    ["nonsense = 1", "current = [1]", "not toml", "[profiles.x]\nport = 1", "profiles = 1", "[profiles.x]\nclient = 1"],
)
def test_a_file_that_cannot_be_read_is_named(said: Said, path: Path, text: str) -> None:
    path.parent.mkdir()
    path.write_text(text)
    for words in (["topics", "list"], ["profile", "list"]):
        assert said(*words, exit_code=1).startswith(f"millrace: error: {path}: ")


def test_what_counts_is_option_then_environment_then_profile_then_default(
    said: Said, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said("profile", "set", "here", "-b", broker)
    said("profile", "set", "dead", "-b", DEAD)
    for words in (["topics", "list"], ["cluster", "describe"], ["groups", "list"]):
        assert said(*words, "--profile", "here")
        failed = said(*words, "--profile", "dead", exit_code=1)
        assert "no broker answers" in failed and "the address is that of profile 'dead'" in failed
    said("profile", "use", "here")
    assert "orders" in said("topics", "list")
    monkeypatch.setenv("MILLRACE_PROFILE", "dead")
    assert "profile 'dead'" in said("topics", "list", exit_code=1)
    assert "orders" in said("topics", "list", "--profile", "here")
    monkeypatch.setenv("MILLRACE_BOOTSTRAP", broker)
    assert "orders" in said("topics", "list")
    failed = said("topics", "list", "-b", "127.0.0.1:2", exit_code=1)
    assert "no broker answers at 127.0.0.1:2" in failed and "profile" not in failed
    monkeypatch.delenv("MILLRACE_BOOTSTRAP")
    monkeypatch.delenv("MILLRACE_PROFILE")
    said("profile", "use", "--none")
    assert "no profile is in use" in said("profile", "show", exit_code=1)


def test_the_settings_of_a_profile_reach_the_client_and_options_win(said: Said, broker: str) -> None:
    said("profile", "set", "here", "-b", broker, "-X", "no.such.setting=1")
    assert "no.such.setting" in said("topics", "list", "--profile", "here", exit_code=1)
    said("profile", "unset", "here", "no.such.setting")
    said("profile", "set", "here", "-X", "security.protocol=nonsense")
    assert "security.protocol" in said("topics", "list", "--profile", "here", exit_code=1)
    assert "orders" in said("topics", "list", "--profile", "here", "-X", "security.protocol=plaintext")


def test_the_login_of_the_profile_in_use_does_not_go_to_an_address_that_was_given(
    said: Said, broker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    said("profile", "set", "prod", "-b", DEAD, "-X", "no.such.setting=1")
    said("profile", "use", "prod")
    assert "orders" in said("topics", "list", "-b", broker)
    monkeypatch.setenv("MILLRACE_BOOTSTRAP", broker)
    assert "orders" in said("topics", "list")
    # Whoever names the profile wants it.
    assert "no.such.setting" in said("topics", "list", "--profile", "prod", exit_code=1)


@pytest.mark.parametrize("noun", ["topics", "produce", "consume", "groups", "queues", "cluster", "pipeline"])
def test_every_command_with_an_address_has_profiles(said: Said, noun: str) -> None:
    import importlib

    from typer.main import get_command

    from millrace.cli.profiles import add_profile_option

    def with_address(command: object) -> Iterator[set[str]]:
        for each in getattr(command, "commands", {}).values():
            yield from with_address(each)
        names = {param.name for param in command.params}  # type: ignore[attr-defined]
        if "bootstrap" in names:
            yield names

    command = get_command(importlib.import_module(f"millrace.cli.{noun}").app)
    add_profile_option(command)
    found = list(with_address(command))
    assert found and all("profile" in names for names in found)


texts = st.text(st.characters(codec="utf-8"), min_size=1, max_size=10)


@given(st.dictionaries(texts, st.tuples(st.none() | texts, st.dictionaries(texts, texts, max_size=3)), max_size=3))
def test_what_is_written_is_read_again(content: dict[str, tuple[str | None, dict[str, str]]]) -> None:
    import tomllib

    profiles = {name: Profile(name, bootstrap, client) for name, (bootstrap, client) in content.items()}
    whole = Profiles(profiles, next(iter(profiles), None))
    assert _parse(tomllib.loads(render(whole))) == whole


@pytest.mark.parametrize(
    ("setting", "secret"),
    [
        ("sasl.password", True),
        ("SASL.Password", True),
        ("ssl.key.password", True),
        ("ssl.keystore.password", True),
        ("ssl.key.pem", True),
        ("ssl.keystore.key", True),
        ("sasl.jaas.config", True),
        ("sasl.oauthbearer.config", True),
        ("sasl.oauthbearer.client.secret", True),
        ("sasl.oauthbearer.assertion.private.key.passphrase", True),
        ("sasl.oauthbearer.assertion.private.key.pem", True),
        ("sasl.username", False),
        ("security.protocol", False),
        ("ssl.ca.pem", False),
        ("ssl.certificate.pem", False),
        ("ssl.key.location", False),
        ("ssl.keystore.location", False),
    ],
)
def test_what_is_not_shown(setting: str, secret: bool) -> None:
    assert is_secret(setting) is secret
