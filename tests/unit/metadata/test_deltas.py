"""Deltas survive being written down, and damaged ones are refused."""

from __future__ import annotations

import json
import uuid
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.errors import StorageError
from millrace.metadata import deltas
from millrace.metadata.deltas import (
    AclsChanged,
    BrokerFenced,
    BrokerRegistered,
    BrokerUnregistered,
    Change,
    ClusterCreated,
    ConfigChanged,
    ControllerChanged,
    PartitionChanged,
    PartitionsAdded,
    PartitionState,
    ProducerIdsAllocated,
    QuotaChanged,
    ResourceType,
    ScramChanged,
    TokenChanged,
    TokenRemoved,
    TopicCreated,
    TopicDeleted,
    decode,
    encode,
)
from millrace.security.scram import ScramMechanism
from support.metadata import (
    acls,
    credentials,
    endpoints,
    partition_states,
    small_ints,
    texts,
    tokens,
    uuids,
)

several_partitions = st.lists(partition_states, max_size=4).map(tuple)
changes = st.one_of(
    st.builds(ClusterCreated, texts),
    st.builds(ControllerChanged, small_ints, small_ints),
    st.builds(
        BrokerRegistered,
        small_ints,
        st.integers(0, 2**63 - 1),
        st.lists(endpoints, max_size=2).map(tuple),
        st.none() | texts,
        st.booleans(),
    ),
    st.builds(BrokerFenced, small_ints, st.integers(0, 2**63 - 1), st.booleans()),
    st.builds(BrokerUnregistered, small_ints),
    st.builds(TopicCreated, texts, uuids, several_partitions),
    st.builds(TopicDeleted, texts, uuids),
    st.builds(PartitionsAdded, uuids, several_partitions),
    st.builds(PartitionChanged, uuids, st.integers(0, 9999), partition_states),
    st.builds(
        ConfigChanged,
        st.sampled_from(ResourceType),
        texts,
        st.lists(st.tuples(texts, st.none() | texts), max_size=3).map(tuple),
    ),
    st.builds(ProducerIdsAllocated, small_ints, st.integers(0, 2**63 - 1), st.integers(0, 1000)),
    st.builds(ScramChanged, texts, st.sampled_from(ScramMechanism), st.none() | credentials),
    st.builds(AclsChanged, st.lists(acls, max_size=2).map(tuple), st.lists(acls, max_size=2).map(tuple)),
    st.builds(
        QuotaChanged,
        st.lists(st.tuples(texts, st.none() | texts), max_size=2).map(tuple),
        st.lists(st.tuples(texts, st.none() | st.floats(0, 1e9)), max_size=2).map(tuple),
    ),
    st.builds(TokenChanged, tokens),
    st.builds(TokenRemoved, texts),
)


@settings(max_examples=300, deadline=None)
@given(st.lists(changes, max_size=5).map(tuple))
def test_round_trip(change_set: tuple[Change, ...]) -> None:
    assert decode(encode(change_set)) == change_set


def test_every_change_has_a_codec() -> None:
    assert set(get_args(Change)) == set(deltas._CODEC)


def test_the_format_is_readable_and_stable() -> None:
    topic_id = uuid.UUID(int=7)
    change_set = (
        TopicCreated("orders", topic_id, (PartitionState((1, 2), (1,), 1, 3, 4),)),
        ConfigChanged(ResourceType.TOPIC, "orders", (("retention.ms", "5"), ("flush.mode", None))),
    )
    assert json.loads(encode(change_set)) == {
        "v": 1,
        "changes": [
            ["topic_created", {"name": "orders", "topic_id": topic_id.hex, "partitions": [[[1, 2], [1], 1, 3, 4]]}],
            [
                "config_changed",
                {"type": "TOPIC", "name": "orders", "values": [["retention.ms", "5"], ["flush.mode", None]]},
            ],
        ],
    }


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"v":1}',
        b'{"v":2,"changes":[]}',
        b'{"v":1,"changes":[["no_such_change",{}]]}',
        b'{"v":1,"changes":[["cluster_created",{}]]}',
        b'{"v":1,"changes":[["cluster_created",{"cluster_id":"x","extra":1}]]}',
        b'{"v":1,"changes":[["topic_deleted",{"name":"x","topic_id":"zz"}]]}',
        b'{"v":1,"changes":[["topic_created",{"name":"x","topic_id":"00000000000000000000000000000007","partitions":[[1]]}]]}',
        b'{"v":1,"changes":[["config_changed",{"type":"SHOE","name":"x","values":[]}]]}',
        b'{"v":1,"changes":7}',
    ],
)
def test_damaged_deltas_are_refused(data: bytes) -> None:
    with pytest.raises(StorageError):
        decode(data)


@settings(max_examples=300, deadline=None)
@given(st.lists(changes, min_size=1, max_size=3).map(tuple), st.data())
def test_garbage_never_decodes_to_something_else(change_set: tuple[Change, ...], data: st.DataObject) -> None:
    """A damaged delta is refused, or it is a sound one that says what is written there."""
    written = bytearray(encode(change_set))
    place = data.draw(st.integers(0, len(written) - 1))
    if data.draw(st.booleans()):
        written[place] = data.draw(st.sampled_from(b'0123456789-.,:e_"[]{} atx') | st.integers(0, 255))
    else:
        del written[place]
    damaged = bytes(written)
    try:
        decoded = decode(damaged)
    except StorageError:
        return
    assert json.loads(_without_empty_ends(encode(decoded))) == json.loads(_without_empty_ends(damaged))


def _without_empty_ends(written: bytes) -> bytes:
    """Empty lists at the end of a partition's row may be left out, and are."""
    while b",[]]" in written:
        written = written.replace(b",[]]", b"]")
    return written


@pytest.mark.parametrize("row", ["[[1.2],[1],1,0,0]", "[[1],[1],1.5,0,0]", '[[1],[1],"1",0,0]', "[[1],[true],1,0,0]"])
def test_what_is_no_whole_number_is_not_rounded_to_one(row: str) -> None:
    change = f'["partition_changed",{{"topic_id":"{uuid.UUID(int=7).hex}","index":0,"state":{row}}}]'
    with pytest.raises(StorageError):
        decode(f'{{"v":1,"changes":[{change}]}}'.encode())


@given(st.lists(changes, min_size=1, max_size=3).map(tuple), st.data())
def test_an_unknown_field_is_refused(change_set: tuple[Change, ...], data: st.DataObject) -> None:
    body = json.loads(encode(change_set))
    fields = data.draw(st.sampled_from([fields for _, fields in body["changes"]]))
    fields["no_such_field"] = 1
    with pytest.raises(StorageError):
        decode(json.dumps(body).encode())


@given(st.lists(changes, min_size=1, max_size=3).map(tuple), st.data())
def test_a_delta_that_was_cut_is_refused(change_set: tuple[Change, ...], data: st.DataObject) -> None:
    written = encode(change_set)
    with pytest.raises(StorageError):
        decode(written[: data.draw(st.integers(0, len(written) - 1))])
