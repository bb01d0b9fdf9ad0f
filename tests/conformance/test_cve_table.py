"""Each published vulnerability whose class could be ours has a test named after it. This is the list of them.

A name ends with what the test shows; the table has its beginning.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

TABLE = {
    "test_cve_2017_12610": "impersonation by authzid",
    "test_cve_2018_1288": "forged follower fetch",
    "test_cve_2018_17196": "Produce past the transactional ACL",
    "test_cve_2021_38153": "timing of password checks",
    "test_cve_2022_34917": "memory before authentication",
    "test_cve_2023_34455": "lengths of snappy chunks",
    "test_cve_2024_27309": "ACL lost on removal or migration",
    "test_cve_2024_56128": "SCRAM nonce unchecked",
    "test_cve_2025_27817": "OAuth URL reads files, SSRF",
    "test_cve_2026_10143": "the peer chooses the SCRAM iteration count",
    "test_cve_2026_33557": "JWT accepted unverified by default",
    "test_cve_2026_33558": "secrets in logs",
    "test_cve_2026_110985": "JWT accepted unverified where no keys are named",
    "test_cve_2026_111073": "decompression bombs",
    "test_cve_2026_111108": "array amplification",
    "test_cve_2026_111115": "tagged-field amplification",
    "test_redpanda_cve_2023_24619": "secrets in logs",
    "test_redpanda_cve_2023_50976": "API without authorization check",
    "test_redpanda_cve_2026_82266": "admin port open to the world",
}


def _tests(tree: ast.Module) -> Iterator[str]:
    """The names of the tests of a module that pytest would run: not of those that are skipped or expected to fail."""
    bodies = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for body in bodies:
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                marks = [ast.unparse(mark) for mark in node.decorator_list]
                if not any(mark.startswith(("pytest.mark.skip(", "pytest.mark.xfail")) for mark in marks):
                    yield node.name


@pytest.fixture(scope="module")
def names() -> set[str]:
    return {
        name for path in TESTS.rglob("test_*.py") for name in _tests(ast.parse(path.read_text())) if "_cve_" in name
    }


@pytest.mark.parametrize("row", TABLE)
def test_a_vulnerability_has_a_test_named_after_it(row: str, names: set[str]) -> None:
    assert [name for name in names if name.startswith(f"{row}_")], f"no test for {TABLE[row]}: {row}_..."


def test_every_test_that_is_named_after_one_is_in_the_table(names: set[str]) -> None:
    assert [name for name in names if not name.startswith(tuple(f"{row}_" for row in TABLE))] == []
