"""Tables that are searched, sorted and cut into pages on the server: 10,000 rows cost a browser no more than fifty."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar
from urllib.parse import urlencode

from starlette.datastructures import QueryParams

PAGE_ROWS: Final = 50
MAX_ROWS: Final = 500

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asked:
    """What a query says of a table: the words to look for, the column to sort by, the page."""

    words: str = ""
    sort: str = ""
    descending: bool = False
    page: int = 1
    rows: int = PAGE_ROWS

    @classmethod
    def from_query(cls, query: QueryParams) -> Asked:
        """Nonsense in an address is no error: it is a table from its beginning."""
        return cls(
            words=query.get("q", "").strip()[:500],
            sort=query.get("sort", "")[:50],
            descending=query.get("order") == "desc",
            page=max(_number(query.get("page", ""), 1), 1),
            rows=min(max(_number(query.get("rows", ""), PAGE_ROWS), 1), MAX_ROWS),
        )


@dataclass(frozen=True, slots=True)
class Listing(Generic[T]):
    """A page of a table, and the addresses of what lies around it."""

    rows: Sequence[T]
    asked: Asked
    matching: int
    total: int
    kept: Mapping[str, str]
    """What else is in the address, and stays there."""

    @property
    def page(self) -> int:
        return min(self.asked.page, self.pages)

    @property
    def pages(self) -> int:
        return max(-(-self.matching // self.asked.rows), 1)

    @property
    def first(self) -> int:
        """The number of the first row that is shown, from 1."""
        return (self.page - 1) * self.asked.rows + 1 if self.matching else 0

    def address(self, **changes: Any) -> str:
        """The query of this table with something else in it."""
        asked = self.asked
        values: dict[str, Any] = {
            **self.kept,
            "q": asked.words,
            "sort": asked.sort,
            "order": "desc" if asked.descending else "",
            "rows": "" if asked.rows == PAGE_ROWS else asked.rows,
            **changes,
        }
        return "?" + urlencode({name: value for name, value in values.items() if value != ""})

    def by(self, column: str) -> str:
        """The query that sorts by a column, or turns the order round if it is sorted by it already."""
        turned = self.asked.sort == column and not self.asked.descending
        return self.address(sort=column, order="desc" if turned else "")


def listed(
    rows: Iterable[T],
    query: QueryParams,
    *,
    text: Callable[[T], str],
    columns: Mapping[str, Callable[[T], Any]],
    keep: Sequence[str] = (),
) -> Listing[T]:
    """The page of `rows` that a query asks for.

    `text` is what words are looked for in, all of them and in any case; `columns` are those that can be sorted by, the
    first of them if nothing is said. None sorts last in either direction.
    """
    asked = Asked.from_query(query)
    everything = list(rows)
    words = asked.words.lower().split()
    found = [row for row in everything if all(word in text(row).lower() for word in words)] if words else everything
    key = columns.get(asked.sort) or next(iter(columns.values()))
    known = [(value, row) for row in found if (value := key(row)) is not None]
    known.sort(key=lambda pair: pair[0], reverse=asked.descending)
    ordered = [row for _, row in known]
    if len(ordered) < len(found):
        ordered += [row for row in found if key(row) is None]
    kept = {name: query[name] for name in keep if name in query}
    listing: Listing[T] = Listing((), asked, len(ordered), len(everything), kept)
    begin = (listing.page - 1) * asked.rows
    return Listing(ordered[begin : begin + asked.rows], asked, listing.matching, listing.total, listing.kept)


def _number(text: str, default: int) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else default
