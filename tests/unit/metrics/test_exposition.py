"""The text, read by another program: prometheus_client's parser."""

from __future__ import annotations

import math

import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.metrics.catalog import CATALOG
from millrace.metrics.exposition import LINES_PER_PIECE, Sheet, render
from millrace.metrics.histogram import Histogram


def rendered(sheet: Sheet) -> str:
    return b"".join(render(sheet.tables)).decode()


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_lines_of_one_family_stand_together_whoever_tells_them() -> None:
    sheet = Sheet()
    sheet.add("millrace_connections", 3, "PLAINTEXT")
    sheet.add("millrace_partitions", 7)
    sheet.add("millrace_connections", 1, "SSL")
    text = rendered(sheet)
    assert text.splitlines() == [
        "# HELP millrace_partitions Replicas on this broker.",
        "# TYPE millrace_partitions gauge",
        "millrace_partitions 7",
        "# HELP millrace_connections Connections of a listener.",
        "# TYPE millrace_connections gauge",
        'millrace_connections{listener="PLAINTEXT"} 3',
        'millrace_connections{listener="SSL"} 1',
    ]
    assert text.endswith("\n")


def test_a_histogram_is_cumulative_and_ends_with_everything() -> None:
    histogram = Histogram((0.1, 1.0))
    for value in (0.05, 0.5, 0.6, 30.0):
        histogram.record(value)
    sheet = Sheet()
    sheet.add("millrace_loop_lag_seconds", histogram.value())
    sheet.add("millrace_request_stage_seconds", histogram.value(), "Fetch", "queue")
    found = samples(rendered(sheet))
    name = "millrace_request_stage_seconds"
    labels = (("api", "Fetch"), ("stage", "queue"))
    buckets = {dict(key)["le"]: value for (sample, key), value in found.items() if sample == f"{name}_bucket"}
    assert buckets == {"0.1": 1, "1.0": 3, "+Inf": 4}
    assert found[f"{name}_count", labels] == 4
    assert found[f"{name}_sum", labels] == pytest.approx(31.15)
    assert found["millrace_loop_lag_seconds_count", ()] == 4


@pytest.mark.parametrize("name", ["plain", 'quo"te', "back\\slash", "new\nline", "", "ünï☃", '\\n"', "a,b={}"])
def test_whatever_a_group_is_called_comes_back(name: str) -> None:
    sheet = Sheet()
    sheet.add_table(("millrace_group_member_count",), [((name,), (2,))])
    assert samples(rendered(sheet)) == {("millrace_group_member_count", (("group", name),)): 2}


def test_numbers_of_every_kind() -> None:
    sheet = Sheet()
    rows = [(("a",), (1.5,)), (("b",), (math.inf,)), (("c",), (math.nan,)), (("d",), (None,)), (("e",), (2**63,))]
    sheet.add_table(("millrace_group_lag_seconds",), rows)
    found = {dict(labels)["group"]: value for (_, labels), value in samples(rendered(sheet)).items()}
    assert found.pop("c") != found.get("c")
    assert found == {"a": 1.5, "b": math.inf, "e": 2**63}


def test_a_family_without_any_line_is_not_announced() -> None:
    sheet = Sheet()
    sheet.add_table(("millrace_group_lag_records",), [(("g",), (None,))])
    assert rendered(sheet) == ""


def test_who_writes_much_makes_pauses() -> None:
    families = ("millrace_topic_bytes_in_total", "millrace_topic_size_bytes")
    rows = [((f"topic-{number}",), (number, number)) for number in range(3 * LINES_PER_PIECE)]
    sheet = Sheet()
    sheet.add_table(families, rows)
    pauses = []
    pieces = render(sheet.tables, lambda: pauses.append(1))
    assert max(piece.count(b"\n") for piece in pieces) <= 2 * LINES_PER_PIECE
    assert len(pauses) >= 2 * len(rows) // LINES_PER_PIECE
    assert len(samples(b"".join(pieces).decode())) == 2 * len(rows)


def test_what_is_not_in_the_catalogue_is_a_mistake() -> None:
    sheet = Sheet()
    sheet.add("millrace_surprises", 1)
    with pytest.raises(KeyError):
        render(sheet.tables)
    sheet = Sheet()
    sheet.add_table(("millrace_partitions", "millrace_surprises"), [((), (1, 2))])
    with pytest.raises(KeyError, match="millrace_surprises"):
        render(sheet.tables)
    sheet = Sheet()
    sheet.add("millrace_partitions", 1, "a label that it does not have")
    with pytest.raises(ValueError, match="zip"):
        render(sheet.tables)


def test_help_is_one_line_each() -> None:
    sheet = Sheet()
    for family in CATALOG.values():
        value = Histogram().value() if family.kind.value == "histogram" else 1
        sheet.add(family.name, value, *(f"x{label}" for label in family.labels))
    found = list(text_string_to_metric_families(rendered(sheet)))
    assert {family.name for family in found} == {name.removesuffix("_total") for name in CATALOG}
    for family in found:
        declared = CATALOG.get(family.name) or CATALOG[f"{family.name}_total"]
        assert (family.type, family.documentation) == (declared.kind.value, declared.help)
