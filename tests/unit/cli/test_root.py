"""The command as a whole, without a broker: help, exit codes, one-line errors, and what is not imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace import __version__
from millrace.cli.root import NOUNS, run

SRC = Path(__file__).resolve().parents[3] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])}
SUBCOMMANDS = [
    *([noun] for noun in NOUNS),
    *(["topics", verb] for verb in ("create", "list", "describe", "alter", "delete")),
    *(["groups", verb] for verb in ("list", "describe", "reset", "export", "import", "delete-offsets", "delete")),
    *(["queues", verb] for verb in ("list", "describe", "reset", "alter", "delete")),
    *(
        ["transactions", verb]
        for verb in ("list", "describe", "describe-producers", "find-hanging", "abort", "terminate")
    ),
    *(["tokens", verb] for verb in ("create", "list", "renew", "expire")),
    *(["configs", verb] for verb in ("get", "set", "unset")),
    *(["users", verb] for verb in ("list", "add", "passwd", "remove")),
    *(["acls", verb] for verb in ("list", "add", "remove", "check")),
    *(["quotas", verb] for verb in ("list", "set", "remove")),
    *(["pipeline", verb] for verb in ("list", "show", "copy", "run")),
    *(["cluster", verb] for verb in ("describe", "health", "elect", "reassign", "remove")),
    ["log", "dump"],
    *(["profile", verb] for verb in ("list", "show", "set", "use", "unset")),
    ["records", "delete"],
    *(["perf", verb] for verb in ("produce", "consume", "end-to-end")),
]


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr."""
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("millrace: error: ")
    return line


@pytest.mark.parametrize("words", SUBCOMMANDS, ids=" ".join)
def test_every_command_has_help(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*words, "--help"]) == 0
    out = capsys.readouterr().out
    assert f"Usage: millrace {' '.join(words)}" in out
    groups = {noun for noun, *verb in SUBCOMMANDS if verb}
    if len(words) > 1 or words[0] not in groups:
        assert "Example" in out


def test_the_root_lists_every_noun(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f" {noun} " in out for noun in NOUNS)


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"millrace {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["topics"], ["groups"], ["queues"], ["configs"], ["log"], ["cluster"]], ids=" ".join
)
def test_a_bare_noun_shows_its_help_once(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert (captured.out + captured.err).count("Usage:") == 1


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["tpoics", "list"], "did you mean 'topics'?"),
        (["frobnicate"], "the commands are up, down"),
        (["cluster", "elect", "--partition", "1"], "--partition needs --topic"),
        (["cluster", "reassign", "--status", "--drain", "1"], "exclude each other"),
        (["cluster", "reassign", "--add-brokers", "four"], "--add-brokers wants ids such as 4,5"),
        (["topics", "describe"], "which topics?"),
        (["pipeline", "show", "metrcs"], "did you mean 'metrics'?"),
        (["pipeline", "run", "metrics", "--option", "windw=1 minute"], "did you mean 'window'?"),
        (["pipeline", "run", "no/such.py"], "there is no file no/such.py"),
        (["pipeline", "run", "metrics", "--py-file", "no.py"], "--py-file: there is no file no.py"),
        (["pipeline", "run", "metrics", "--json", "--quiet"], "leave out one of them"),
        (["pipeline", "run", "metrics", "--run-id", "../x"], "'../x' cannot be the name of a file"),
        (["console", "--pipelines", "no/such"], "--pipelines: there is no folder no/such"),
        (["up", "--set", "broken"], "--set wants name=value"),
        (["topics", "create"], "Missing argument"),
        (["topics", "create", "t", "--partitions", "0"], "--partitions"),
        (["topics", "alter", "t"], "nothing to alter"),
        (["produce", "t", "--compression", "rar"], "--compression is none, gzip"),
        (["produce", "t", "--acks", "2"], "--acks is all, 1 or 0"),
        (["produce", "t", "--header", "x"], "--header wants name=value"),
        (["consume", "t", "--from-beginning", "--from-offset", "3"], "exclude each other"),
        (["consume", "t", "--group", "g", "--from-offset", "3"], "millrace groups reset"),
        (["consume", "t", "--from-time", "whenever"], "is no time"),
        (["consume", "t", "--format", "{no}"], "no field '{no}'"),
        (["groups", "list", "--type", "modern"], "--type is classic, consumer, share or streams, not 'modern'"),
        (["groups", "list", "--state", "idle"], "--state is empty, stable,"),
        (["groups", "describe"], "which groups? name them, or say --all"),
        (["groups", "delete-offsets", "g"], "which topics? say --topic"),
        (["groups", "reset", "g", "--all-topics"], "give one of --to-earliest"),
        (["groups", "reset", "g", "--to-latest"], "give either --topic or --all-topics"),
        (["queues", "alter", "q"], "nothing to alter"),
        (["configs", "get"], "whose settings? give one of --topic"),
        (["configs", "get", "--topic", "t", "--brokers"], "whose settings? give one of --topic"),
        (["configs", "get", "--group", ""], "needs a name"),
        (["configs", "set", "retention.ms", "--topic", "t"], "set wants name=value, not 'retention.ms'"),
        (["topics", "list", "--bootstrap", "nowhere"], "--bootstrap wants HOST:PORT"),
        (["log", "dump", __file__], "is no file of a log directory"),
        (["up", "--no-such-option"], "No such option"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    assert says in error_line(capsys)


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["topics", "list", "--bootstrap", "127.0.0.1:1"], "no broker answers at 127.0.0.1:1 (Connection refused)"),
        (["cluster", "describe", "--bootstrap", "127.0.0.1:1"], "no broker answers (127.0.0.1:1"),
        (["log", "dump", "/nowhere/0.log"], "there is no file"),
        (["broker", "--config", "/nowhere/server.properties"], "there is no file"),
        (["up", "--set", "num.partitons=3"], "num.partitons"),
        (["up", "--set", "num.partitions=many"], "num.partitions"),
        (["topics", "delete", "t", "--bootstrap", "127.0.0.1:1"], "say --yes"),
        (["queues", "delete", "q", "--bootstrap", "127.0.0.1:1"], "say --yes"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_failures_are_one_line_and_exit_code_1(
    argv: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(argv) == 1
    assert says in error_line(capsys)


def test_a_broker_is_told_where_to_keep_its_data(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    properties = tmp_path / "server.properties"
    properties.write_text("node.id=1\nlisteners=PLAINTEXT://127.0.0.1:0\n")
    assert run(["broker", "--config", str(properties)]) == 1
    assert "log.dirs is not set" in error_line(capsys)
    assert list(tmp_path.iterdir()) == [properties]


def test_the_environment_names_the_bootstrap(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MILLRACE_BOOTSTRAP", "127.0.0.1:2")
    assert run(["topics", "list"]) == 1
    assert "127.0.0.1:2" in error_line(capsys)


@pytest.mark.parametrize("argv", [["up", "--set", "broken"], ["broker", "--config", "/nowhere"]])
def test_a_broker_does_not_pay_for_client_libraries(argv: list[str]) -> None:
    code = (
        "import sys\n"
        "from millrace.cli.root import run\n"
        f"run({argv!r})\n"
        "import millrace.broker\n"
        "print([name for name in ('rich', 'confluent_kafka', 'kafka', 'aiokafka') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
    assert done.stdout.strip() == "[]"


def test_ctrl_c_while_a_client_is_freed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What the interpreter makes of it: confluent-kafka leaves the interrupt behind, and the next call is blamed."""
    from millrace.cli import produce

    def read_rules(*_: object) -> None:
        raise SystemError("<built-in method> returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr(produce, "read_rules", read_rules)
    assert run(["produce", "orders", "--bootstrap", "127.0.0.1:2"]) == 130
    assert capsys.readouterr().err == ""
