"""The simulation of replication finds bugs: each mutation of a rule is caught, within the runs that CI makes.

`MILLRACE_SIM_SEEDS=N python -m support.simulated_mutations` (with tests on the path) shows how many runs each takes.
"""

from __future__ import annotations

import pytest

from support.simulated_mutations import MUTATIONS, Mutation, hunt

MAX_RUNS = 1000
"""A mutation that survives these has not been caught. docs/testing.md has how many each takes: far fewer."""


@pytest.mark.planted
@pytest.mark.parametrize("mutation", MUTATIONS.values(), ids=MUTATIONS.keys())
def test_a_mutation_is_caught(mutation: Mutation) -> None:
    found = hunt(mutation, MAX_RUNS)
    assert found is not None, f"nobody noticed in {MAX_RUNS} runs: {mutation.description}"
