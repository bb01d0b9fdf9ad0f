"""What a field of a record means, as Spark columns: text, times and JSON.

Invariant: whatever bytes a record holds, none of these raises. A record must never stop a pipeline: Spark would read it
again after every restart. So each answers NULL, or a reason, for what it cannot take.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

__all__ = ["is_json", "json_string", "text_of", "time_error", "time_of"]

_MILLISECONDS_FROM: Final = 1e11
"""A number of seconds from here on would be a year after 5000: it is taken for milliseconds."""
_BEFORE_ALL_S: Final = -1.0
_AFTER_ALL_S: Final = 253_402_300_800.0  # the year 10000, which neither Python nor most databases know
_DATED: Final = r"^\s*[+-]?\d{4,6}-\d"


def text_of(value: Column) -> Column:
    """Bytes as text. What is no UTF-8 becomes replacement characters: no table and no reader takes it as it is."""
    return F.make_valid_utf8(value.cast("string"))


def time_of(text: Column) -> Column:
    """ISO 8601 with a date, or seconds or milliseconds since 1970, as a time; NULL if it is neither.

    A number before 1970 or beyond the years that are known becomes some time out there, for `time_error` to find.
    """
    number = text.try_cast("double")
    seconds = F.when(number > _MILLISECONDS_FROM, number / 1000).otherwise(number)
    bounded = F.greatest(F.lit(_BEFORE_ALL_S), F.least(F.lit(_AFTER_ALL_S), seconds))
    dated = F.when(text.rlike(_DATED), text.try_cast("timestamp"))
    return F.when(number.isNotNull(), F.timestamp_seconds(bounded)).otherwise(dated)


def time_error(at: Column, written: Column, future: str) -> Column:
    """Why an event cannot have happened at `at`: before 1970, or more than `future` after it was written; else NULL.

    When it was written is the record's own time, so that every query, today and when a topic is read again, decides
    alike. A record whose own time lies ahead of now, or which has none, is measured by the clock.
    """
    now, epoch = F.current_timestamp(), F.timestamp_seconds(F.lit(0))
    known = F.when((written > epoch) & (written <= now), written).otherwise(now)
    return F.when(at < epoch, "its time is before 1970").when(
        at > known + F.expr(f"INTERVAL {future}"), f"its time is more than {future} in the future"
    )


def is_json(text: Column) -> Column:
    """Whether the text is one JSON value and nothing else.

    Spark's parser stops after the first value. Inside brackets and inside braces it goes on: both hold only if nothing
    follows the value, or a comma, and after a comma there is a second element.
    """
    listed = F.try_parse_json(F.concat(F.lit("["), text, F.lit("]")))
    named = F.try_parse_json(F.concat(F.lit('{"":'), text, F.lit("}")))
    second = F.try_variant_get(listed, "$[1]", "variant")
    return F.coalesce(F.is_valid_utf8(text) & listed.isNotNull() & named.isNotNull() & second.isNull(), F.lit(False))


def json_string(text: Column) -> Column:
    """The text as a JSON string, in quotes."""
    return F.to_json(text.cast("variant"))
