"""The list of metrics: names that stay what they say, and nothing that grows with what clients invent."""

from __future__ import annotations

import re

import pytest

from millrace.metrics.catalog import CATALOG, PREFIX, Detail, Family, Kind

FAMILIES = pytest.mark.parametrize("family", CATALOG.values(), ids=lambda family: family.name)
UNBOUNDED = {"topic", "partition", "group"}
"""Labels with as many values as somebody makes."""


@FAMILIES
def test_a_name_says_what_it_is(family: Family) -> None:
    assert re.fullmatch(rf"{PREFIX}[a-z][a-z0-9_]*[a-z0-9]", family.name)
    assert family.name.endswith("_total") == (family.kind is Kind.COUNTER)
    assert not family.name.endswith(("_count", "_sum", "_bucket")) or family.name == "millrace_group_member_count"
    assert family.help.endswith(".") and "\n" not in family.help
    assert family.kind is not Kind.HISTOGRAM or family.name.endswith("_seconds")


@FAMILIES
def test_labels_are_few_and_only_details_have_many_values(family: Family) -> None:
    assert len(set(family.labels)) == len(family.labels) <= 3
    assert "le" not in family.labels
    assert all(re.fullmatch(r"[a-z_]+", label) for label in family.labels)
    assert bool(UNBOUNDED & {*family.labels}) == (family.detail is not None)


def test_every_detail_has_something_to_tell() -> None:
    assert {family.detail for family in CATALOG.values()} == {None, *Detail}
