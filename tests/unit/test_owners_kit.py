"""What whoever looks after the project relies on, hosted runs, hooks, pages for contributors, names what there is."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from support.deployment import documents

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = re.findall(r"Python :: (3\.\d+)$", "\n".join(PROJECT["classifiers"]), re.MULTILINE)
MAKEFILE = (ROOT / "Makefile").read_text()


def test_a_hosted_run_calls_what_everybody_can_run() -> None:
    (workflow,) = documents(ROOT / ".github" / "workflows" / "ci.yml")
    jobs = workflow["jobs"]
    assert [step["run"] for step in jobs["everything"]["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
    assert jobs["python"]["strategy"]["matrix"]["python"] == PYTHONS
    (command,) = [step["run"] for step in jobs["python"]["steps"] if "run" in step]
    assert command == "make PYTHON=python${{ matrix.python }} test"
    assert workflow["permissions"] == {"contents": "read"}
    # PyYAML reads the bare word `on` as true, as YAML 1.1 has it.
    assert {"push", "pull_request"} <= set(workflow[True])
    limits = re.findall(r"^section \w+ (\d+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert jobs["everything"]["timeout-minutes"] >= sum(map(int, limits)) > 0


def test_hooks_are_what_make_check_runs() -> None:
    (config,) = documents(ROOT / ".pre-commit-config.yaml")
    (local,) = config["repos"]
    assert local["repo"] == "local"
    recipe = MAKEFILE.partition("\ncheck:")[2].partition("\n\n")[0].replace("$(BIN)", ".venv/bin")
    checks = {tuple(shlex.split(line)) for line in recipe.splitlines()[1:]}
    for hook in local["hooks"]:
        words = tuple(word for word in shlex.split(hook["entry"]) if word != "--force-exclude")
        assert any(check[: len(words)] == words for check in checks), hook["id"]
        assert hook["language"] == "system"
    assert len(local["hooks"]) == len(checks)


def test_the_pythons_that_were_tested_are_those_that_are_named() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    assert re.findall(r"^\| (3\.\d+)", page, re.MULTILINE) == PYTHONS
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "SECURITY.md", "docs/api.md", "docs/deployment.md"])
def test_pages_name_what_is_there(name: str) -> None:
    page = ROOT / name
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)", text):
        assert target.startswith("http") or (page.parent / target).exists(), target
    for path in re.findall(r"`((?:src|tests|docs|deploy|scripts)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"(?:`|^    )make ([a-z][a-z-]+)\b", text, re.MULTILINE):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), f"make {target}"


def test_nobody_is_sent_to_an_address_that_was_made_up() -> None:
    assert re.findall(r"\S+@\S+\.\w+", (ROOT / "SECURITY.md").read_text()) == []
