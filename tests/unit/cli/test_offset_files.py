"""Offsets in files: what we write, what Kafka's tool writes, and what nobody should."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.cli.offset_files import as_json, csv_text, read_offsets
from millrace.cli.output import CommandError
from millrace.model import TopicPartition

OFFSETS = {TopicPartition("orders", 0): 5, TopicPartition("orders", 1): 0, TopicPartition("a.b-c_d", 7): 2**62}


def test_the_form_of_kafkas_tool() -> None:
    assert csv_text(OFFSETS) == f"a.b-c_d,7,{2**62}\norders,0,5\norders,1,0\n"


_TOPICS = st.from_regex(r"[a-zA-Z0-9._-]{1,249}", fullmatch=True)
_PLACES = st.builds(TopicPartition, _TOPICS, st.integers(0, 2**31 - 1))


@given(st.dictionaries(_PLACES, st.integers(0, 2**63 - 1), min_size=1))
def test_what_is_written_can_be_read(offsets: dict[TopicPartition, int]) -> None:
    assert read_offsets(csv_text(offsets), "g") == offsets
    assert read_offsets(json.dumps(as_json("g", offsets)), "g") == offsets


@pytest.mark.parametrize(
    "text",
    [
        '"orders",0,5\n',
        "orders,0,5\r\n",
        "topic,partition,offset\norders,0,5\n\n",
        "billing,orders,0,5\nothers,orders,0,9\n",
        '"billing","orders",0,5\n',
        '[{"topic": "orders", "partition": 0, "offset": 5}]',
        '{"offsets": [{"topic": "orders", "partition": 0, "offset": 5}]}',
    ],
)
def test_other_forms(text: str) -> None:
    assert read_offsets(text, "billing") == {TopicPartition("orders", 0): 5}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no offset of group 'billing'"),
        ("others,orders,0,5\n", "no offset of group 'billing'"),
        ("orders,0\n", "line 1: not topic,partition,offset"),
        ("orders,0,5\norders,x,5\n", "line 2: 'x' is no partition"),
        ("orders,0,-1\n", "line 1: '-1' is no offset"),
        ("orders,0,1.5\n", "'1.5' is no offset"),
        (",0,5\n", "line 1: no topic"),
        ("orders,0,5\norders,0,6\n", "line 2: orders-0 a second time"),
        ("{not json", "not JSON"),
        ('{"offsets": 3}', "the JSON is not"),
        ('[{"topic": "orders", "partition": true, "offset": 5}]', "offset 1: 'True' is no partition"),
    ],
)
def test_what_cannot_be_understood(text: str, says: str) -> None:
    with pytest.raises(CommandError, match=says):
        read_offsets(text, "billing")
