"""The tables of docs/metrics.md, written from the catalogue."""

from __future__ import annotations

from millrace.metrics.catalog import CATALOG, Detail, Family

BEGIN = "<!-- generated from src/millrace/metrics/catalog.py: begin -->"
END = "<!-- generated: end -->"


def metrics_tables() -> str:
    """Every metric beside Kafka's, those of each detail in a table of their own."""
    parts = []
    for detail in (None, *Detail):
        title = "Always" if detail is None else f"detail={detail.value}"
        parts.append(f"### {title}\n\n| name | kind | labels | meaning | in Kafka |\n|---|---|---|---|---|")
        parts += [_row(family) for family in CATALOG.values() if family.detail is detail]
        parts.append("")
    return "\n".join(parts)


def with_tables(page: str) -> str:
    """A page with the tables between its marks as they are now; ValueError where the marks are missing."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page has no place for the tables: {BEGIN} and {END}")
    return f"{before}{begin}\n\n{metrics_tables()}\n{end}{after}"


def _row(family: Family) -> str:
    labels = ", ".join(f"`{label}`" for label in family.labels) or "-"
    only = f" Only there if {family.only}." if family.only else ""
    kafka = f"`{family.kafka}`" if family.kafka else "-"
    return f"| `{family.name}` | {family.kind.value} | {labels} | {family.help}{only} | {kafka} |"
