from __future__ import annotations

import copy
import pickle
from uuid import UUID

import pytest

from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.fetch import FetchRequest, FetchResponse
from millrace.wire.messages.groups import HeartbeatRequest
from millrace.wire.messages.sasl import SaslAuthenticateRequest
from millrace.wire.schema import Data, Struct, Versions, array, int32, nested, string


def test_versions() -> None:
    assert Versions.parse("3") == (3, 3)
    assert Versions.parse("3-5") == (3, 5)
    assert Versions.parse("3+").include(9000)
    assert not Versions.parse("none").include(0)


def test_defaults_are_the_specs() -> None:
    request = FetchRequest()
    assert request.replica_id == -1
    assert request.max_bytes == 0x7FFFFFFF
    assert request.cluster_id is None
    assert request.topics == []
    assert request.replica_state == FetchRequest.ReplicaState(replica_id=-1, replica_epoch=-1)
    assert FetchRequest.FetchTopic().topic_id == UUID(int=0)


def test_defaults_are_not_shared() -> None:
    first, second = FetchRequest(), FetchRequest()
    first.topics.append(FetchRequest.FetchTopic())
    first.replica_state.replica_id = 4
    assert second.topics == []
    assert second.replica_state.replica_id == -1


def test_null_and_missing_differ() -> None:
    assert MetadataRequest().topics == []
    assert MetadataRequest(topics=None).topics is None


def test_arguments_are_by_keyword_and_known() -> None:
    with pytest.raises(TypeError):
        HeartbeatRequest("group")  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        HeartbeatRequest(grup_id="group")  # type: ignore[call-arg]


def test_slots() -> None:
    request = HeartbeatRequest()
    with pytest.raises(AttributeError):
        request.grup_id = "x"  # type: ignore[attr-defined]
    assert not hasattr(request, "__dict__")


def test_equality_is_by_value_and_type() -> None:
    assert HeartbeatRequest(group_id="a") == HeartbeatRequest(group_id="a")
    assert HeartbeatRequest(group_id="a") != HeartbeatRequest(group_id="b")
    assert FetchRequest.FetchTopic() != FetchRequest.ForgottenTopic()
    with pytest.raises(TypeError):
        hash(HeartbeatRequest())


def test_repr_shows_what_was_set_and_hides_bytes() -> None:
    assert repr(HeartbeatRequest(group_id="g", generation_id=3)) == "HeartbeatRequest(group_id='g', generation_id=3)"
    assert repr(SaslAuthenticateRequest(auth_bytes=b"secret")) == "SaslAuthenticateRequest(auth_bytes=<6 bytes>)"
    data = FetchResponse.PartitionData(records=memoryview(b"abc"))
    assert repr(data) == "FetchResponse.PartitionData(records=<3 bytes>)"
    many = FetchRequest.ForgottenTopic(partitions=list(range(100)))
    assert "100 in all" in repr(many)


def test_messages_can_be_pickled_and_copied() -> None:
    request = FetchRequest(topics=[FetchRequest.FetchTopic(topic="t")])
    assert pickle.loads(pickle.dumps(request)) == request
    assert copy.deepcopy(request) == request


def test_class_facts() -> None:
    assert (FetchRequest.api_key, FetchRequest.min_version, FetchRequest.max_version) == (1, 4, 18)
    assert FetchRequest.flexible_from == 12
    assert FetchRequest.field_names()[:2] == ("cluster_id", "replica_id")


def test_unknown_reference_is_an_error_at_declaration() -> None:
    with pytest.raises(TypeError, match="Missing"):

        class Broken(Data, versions="0"):
            items: list[int] = array("Missing")


def test_references_reach_siblings_and_inner_classes() -> None:
    class Outer(Data, versions="0"):
        class Leaf(Struct):
            number: int = int32()

        class Branch(Struct):
            class Own(Struct):
                name: str = string()

            leaves: list[Outer.Leaf] = array("Leaf")
            own: Outer.Branch.Own = nested("Own")

        branches: list[Branch] = array(Branch)

    made = Outer.Branch()
    assert made.own == Outer.Branch.Own(name="")
    assert made.leaves == []
