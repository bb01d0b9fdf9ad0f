"""Who leads a partition, who coordinates a group or a transaction, as any broker of a cluster tells it.

Changes are waited for, with deadlines. For tests that stop or kill exactly that broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, Self, TypeVar

from millrace.client.cluster import LATEST, ClusterClient
from millrace.client.requests import PartitionInfo
from millrace.client.retrying import is_retriable
from millrace.client.settings import ClientSettings
from millrace.errors import ApiError, ErrorCode
from millrace.model import NO_BROKER, TopicPartition
from millrace.wire.messages.cluster import MetadataRequest
from millrace.wire.messages.groups import DescribeGroupsRequest, FindCoordinatorRequest
from millrace.wire.messages.topics import CreateTopicsRequest

DEADLINE_S: Final = 30.0
_COORDINATOR_VERSION: Final = 3
_OF_GROUPS: Final = 0
_OF_TRANSACTIONS: Final = 1
_PAUSE_S: Final = 0.02

T = TypeVar("T")


class Roles:
    """One cluster, asked from outside. Brokers that are away are passed over."""

    def __init__(self, bootstrap: str) -> None:
        self._client = ClusterClient(ClientSettings.from_properties({"bootstrap.servers": bootstrap}))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def create_topic(self, name: str, partitions: int, replication_factor: int = 3) -> None:
        """A topic whose replicas are all in sync when this returns."""
        wanted = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=partitions, replication_factor=replication_factor
        )

        def made() -> Any:
            (answer,) = self._ask(CreateTopicsRequest(topics=[wanted], timeout_ms=10_000)).topics
            return answer

        answer = wait_for(made, f"{name} could not be created")
        assert answer.error_code == 0, answer
        self.wait_in_sync(name, replication_factor)

    def partitions(self, topic: str) -> Mapping[int, PartitionInfo]:
        found = self._client.topics([topic]).get(topic)
        return {} if found is None else found.partitions

    def leader(self, topic: str, index: int = 0, *, but: int | None = None) -> int:
        """The leader, once there is one and it is not `but`."""

        def known() -> int | None:
            info = self.partitions(topic).get(index)
            return None if info is None or info.leader in (NO_BROKER, but) else info.leader

        return wait_for(known, f"{topic}-{index} has no leader other than {but}")

    def coordinator(self, group: str, *, but: int | None = None) -> int:
        """The broker that coordinates a group, once there is one and it is not `but`."""
        return self._coordinator(group, _OF_GROUPS, but)

    def transaction_coordinator(self, transactional_id: str, *, but: int | None = None) -> int:
        """The broker that coordinates the transactions of an id, once there is one and it is not `but`."""
        return self._coordinator(transactional_id, _OF_TRANSACTIONS, but)

    def _coordinator(self, key: str, key_type: int, but: int | None) -> int:
        def known() -> int | None:
            answer = self._ask(FindCoordinatorRequest(key=key, key_type=key_type), _COORDINATOR_VERSION)
            return int(answer.node_id) if answer.error_code == ErrorCode.NONE and answer.node_id != but else None

        return wait_for(known, f"{key} has no coordinator other than {but}")

    def committed(self, group: str, topic: str, partitions: int) -> dict[int, int | None]:
        """What a group committed of a topic, from whoever coordinates it by now."""
        wanted = [TopicPartition(topic, index) for index in range(partitions)]
        found = self._client.committed_offsets(group, wanted)
        return {each.partition: offset for each, offset in found.items()}

    def members(self, group: str) -> list[str]:
        """The ids of a group's members, from its coordinator, once the group is stable."""

        def known() -> list[str] | None:
            self._client.forget_coordinator(group)
            (found,) = self._client.ask(self._client.coordinator(group), DescribeGroupsRequest(groups=[group])).groups
            stable = found.error_code == ErrorCode.NONE and found.group_state == "Stable"
            return sorted(each.member_id for each in found.members) if stable else None

        return wait_for(known, f"group {group} does not become stable")

    def size(self, topic: str) -> int:
        """How many records were ever written."""
        ends = self._client.list_offsets({TopicPartition(topic, index): LATEST for index in self.partitions(topic)})
        return sum(end or 0 for end in ends.values())

    def wait_in_sync(self, topic: str, replicas: int = 3) -> None:
        def whole() -> bool | None:
            asked = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)])
            (found,) = self._ask(asked).topics
            in_sync = [len(each.isr_nodes) for each in found.partitions]
            return True if in_sync and set(in_sync) == {replicas} else None

        wait_for(whole, f"{topic} has not got {replicas} replicas in sync")

    def _ask(self, message: Any, version: int | None = None) -> Any:
        return self._client.ask(self._client._any_connection(), message, at_most=version)


def wait_for(probe: Callable[[], T | None], failure: str, within_s: float = DEADLINE_S) -> T:
    """What `probe` returns, once that is something; a broker that went while it was asked is no failure yet."""
    ends_at = time.monotonic() + within_s
    while True:
        try:
            found = probe()
        except ApiError as error:
            if not is_retriable(error.code):
                raise
            found = None
        if found is not None:
            return found
        assert time.monotonic() < ends_at, failure
        time.sleep(_PAUSE_S)
