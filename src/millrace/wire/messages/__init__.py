"""Every message that clients and brokers exchange, one module per family.

The families are imported when one of their messages is first asked for: a broker's start pays for what it serves.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple, cast

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response


class Place(NamedTuple):
    """Where the two messages of an API are declared: `<family>.<name>Request` and `<family>.<name>Response`."""

    family: str
    name: str


PLACES: Final[dict[ApiKey, Place]] = {
    ApiKey.PRODUCE: Place("produce", "Produce"),
    ApiKey.FETCH: Place("fetch", "Fetch"),
    ApiKey.LIST_OFFSETS: Place("offsets", "ListOffsets"),
    ApiKey.METADATA: Place("cluster", "Metadata"),
    ApiKey.OFFSET_COMMIT: Place("group_offsets", "OffsetCommit"),
    ApiKey.OFFSET_FETCH: Place("group_offsets", "OffsetFetch"),
    ApiKey.FIND_COORDINATOR: Place("groups", "FindCoordinator"),
    ApiKey.JOIN_GROUP: Place("groups", "JoinGroup"),
    ApiKey.HEARTBEAT: Place("groups", "Heartbeat"),
    ApiKey.LEAVE_GROUP: Place("groups", "LeaveGroup"),
    ApiKey.SYNC_GROUP: Place("groups", "SyncGroup"),
    ApiKey.DESCRIBE_GROUPS: Place("groups", "DescribeGroups"),
    ApiKey.LIST_GROUPS: Place("groups", "ListGroups"),
    ApiKey.SASL_HANDSHAKE: Place("sasl", "SaslHandshake"),
    ApiKey.API_VERSIONS: Place("api_versions", "ApiVersions"),
    ApiKey.CREATE_TOPICS: Place("topics", "CreateTopics"),
    ApiKey.DELETE_TOPICS: Place("topics", "DeleteTopics"),
    ApiKey.DELETE_RECORDS: Place("records", "DeleteRecords"),
    ApiKey.INIT_PRODUCER_ID: Place("producers", "InitProducerId"),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: Place("offsets", "OffsetForLeaderEpoch"),
    ApiKey.ADD_PARTITIONS_TO_TXN: Place("transactions", "AddPartitionsToTxn"),
    ApiKey.ADD_OFFSETS_TO_TXN: Place("transactions", "AddOffsetsToTxn"),
    ApiKey.END_TXN: Place("transactions", "EndTxn"),
    ApiKey.WRITE_TXN_MARKERS: Place("transactions", "WriteTxnMarkers"),
    ApiKey.TXN_OFFSET_COMMIT: Place("transactions", "TxnOffsetCommit"),
    ApiKey.DESCRIBE_ACLS: Place("acls", "DescribeAcls"),
    ApiKey.CREATE_ACLS: Place("acls", "CreateAcls"),
    ApiKey.DELETE_ACLS: Place("acls", "DeleteAcls"),
    ApiKey.DESCRIBE_CONFIGS: Place("configs", "DescribeConfigs"),
    ApiKey.ALTER_CONFIGS: Place("configs", "AlterConfigs"),
    ApiKey.ALTER_REPLICA_LOG_DIRS: Place("log_dirs", "AlterReplicaLogDirs"),
    ApiKey.DESCRIBE_LOG_DIRS: Place("log_dirs", "DescribeLogDirs"),
    ApiKey.SASL_AUTHENTICATE: Place("sasl", "SaslAuthenticate"),
    ApiKey.CREATE_PARTITIONS: Place("topics", "CreatePartitions"),
    ApiKey.CREATE_DELEGATION_TOKEN: Place("delegation_tokens", "CreateDelegationToken"),
    ApiKey.RENEW_DELEGATION_TOKEN: Place("delegation_tokens", "RenewDelegationToken"),
    ApiKey.EXPIRE_DELEGATION_TOKEN: Place("delegation_tokens", "ExpireDelegationToken"),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: Place("delegation_tokens", "DescribeDelegationToken"),
    ApiKey.DELETE_GROUPS: Place("groups", "DeleteGroups"),
    ApiKey.ELECT_LEADERS: Place("partitions", "ElectLeaders"),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: Place("configs", "IncrementalAlterConfigs"),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: Place("partitions", "AlterPartitionReassignments"),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: Place("partitions", "ListPartitionReassignments"),
    ApiKey.OFFSET_DELETE: Place("group_offsets", "OffsetDelete"),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: Place("quotas", "DescribeClientQuotas"),
    ApiKey.ALTER_CLIENT_QUOTAS: Place("quotas", "AlterClientQuotas"),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: Place("scram", "DescribeUserScramCredentials"),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Place("scram", "AlterUserScramCredentials"),
    ApiKey.DESCRIBE_QUORUM: Place("quorum", "DescribeQuorum"),
    ApiKey.ALTER_PARTITION: Place("partitions", "AlterPartition"),
    ApiKey.UPDATE_FEATURES: Place("features", "UpdateFeatures"),
    ApiKey.ENVELOPE: Place("brokers", "Envelope"),
    ApiKey.DESCRIBE_CLUSTER: Place("cluster", "DescribeCluster"),
    ApiKey.DESCRIBE_PRODUCERS: Place("producers", "DescribeProducers"),
    ApiKey.BROKER_HEARTBEAT: Place("brokers", "BrokerHeartbeat"),
    ApiKey.UNREGISTER_BROKER: Place("cluster", "UnregisterBroker"),
    ApiKey.DESCRIBE_TRANSACTIONS: Place("transactions", "DescribeTransactions"),
    ApiKey.LIST_TRANSACTIONS: Place("transactions", "ListTransactions"),
    ApiKey.ALLOCATE_PRODUCER_IDS: Place("brokers", "AllocateProducerIds"),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: Place("consumer_groups", "ConsumerGroupHeartbeat"),
    ApiKey.CONSUMER_GROUP_DESCRIBE: Place("consumer_groups", "ConsumerGroupDescribe"),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: Place("telemetry", "GetTelemetrySubscriptions"),
    ApiKey.PUSH_TELEMETRY: Place("telemetry", "PushTelemetry"),
    ApiKey.ASSIGN_REPLICAS_TO_DIRS: Place("brokers", "AssignReplicasToDirs"),
    ApiKey.LIST_CONFIG_RESOURCES: Place("configs", "ListConfigResources"),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: Place("cluster", "DescribeTopicPartitions"),
    ApiKey.SHARE_GROUP_HEARTBEAT: Place("share_groups", "ShareGroupHeartbeat"),
    ApiKey.SHARE_GROUP_DESCRIBE: Place("share_groups", "ShareGroupDescribe"),
    ApiKey.SHARE_FETCH: Place("share_groups", "ShareFetch"),
    ApiKey.SHARE_ACKNOWLEDGE: Place("share_groups", "ShareAcknowledge"),
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: Place("share_state", "InitializeShareGroupState"),
    ApiKey.READ_SHARE_GROUP_STATE: Place("share_state", "ReadShareGroupState"),
    ApiKey.WRITE_SHARE_GROUP_STATE: Place("share_state", "WriteShareGroupState"),
    ApiKey.DELETE_SHARE_GROUP_STATE: Place("share_state", "DeleteShareGroupState"),
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: Place("share_state", "ReadShareGroupStateSummary"),
    ApiKey.STREAMS_GROUP_HEARTBEAT: Place("streams_groups", "StreamsGroupHeartbeat"),
    ApiKey.STREAMS_GROUP_DESCRIBE: Place("streams_groups", "StreamsGroupDescribe"),
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: Place("share_groups", "DescribeShareGroupOffsets"),
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: Place("share_groups", "AlterShareGroupOffsets"),
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: Place("share_groups", "DeleteShareGroupOffsets"),
    ApiKey.GET_REPLICA_LOG_INFO: Place("brokers", "GetReplicaLogInfo"),
}

_requests: dict[int, type[Request]] = {}
_responses: dict[int, type[Response]] = {}


def request_class(key: int) -> type[Request]:
    """The request of an API; KeyError where it is not declared."""
    found = _requests.get(key)
    if found is None:
        found = _requests[key] = cast("type[Request]", _declared(key, "Request"))
    return found


def response_class(key: int) -> type[Response]:
    """The response of an API; KeyError where it is not declared."""
    found = _responses.get(key)
    if found is None:
        found = _responses[key] = cast("type[Response]", _declared(key, "Response"))
    return found


def _declared(key: int, suffix: str) -> object:
    family, name = PLACES[cast(ApiKey, key)]
    return getattr(import_module(f"{__name__}.{family}"), name + suffix)
