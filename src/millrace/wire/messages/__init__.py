"""Every message that clients and brokers exchange, one module per family.

The families are imported when one of their messages is first asked for: a broker's start pays for what it serves.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple, cast

from millrace.wire.keys import ApiKey
from millrace.wire.schema import Request, Response


class Declaration(NamedTuple):
    """Where the two messages of an API are declared: `<family>.<name>Request` and `<family>.<name>Response`."""

    family: str
    name: str


DECLARATIONS: Final[dict[ApiKey, Declaration]] = {
    ApiKey.PRODUCE: Declaration("produce", "Produce"),
    ApiKey.FETCH: Declaration("fetch", "Fetch"),
    ApiKey.LIST_OFFSETS: Declaration("offsets", "ListOffsets"),
    ApiKey.METADATA: Declaration("cluster", "Metadata"),
    ApiKey.OFFSET_COMMIT: Declaration("group_offsets", "OffsetCommit"),
    ApiKey.OFFSET_FETCH: Declaration("group_offsets", "OffsetFetch"),
    ApiKey.FIND_COORDINATOR: Declaration("groups", "FindCoordinator"),
    ApiKey.JOIN_GROUP: Declaration("groups", "JoinGroup"),
    ApiKey.HEARTBEAT: Declaration("groups", "Heartbeat"),
    ApiKey.LEAVE_GROUP: Declaration("groups", "LeaveGroup"),
    ApiKey.SYNC_GROUP: Declaration("groups", "SyncGroup"),
    ApiKey.DESCRIBE_GROUPS: Declaration("groups", "DescribeGroups"),
    ApiKey.LIST_GROUPS: Declaration("groups", "ListGroups"),
    ApiKey.SASL_HANDSHAKE: Declaration("sasl", "SaslHandshake"),
    ApiKey.API_VERSIONS: Declaration("api_versions", "ApiVersions"),
    ApiKey.CREATE_TOPICS: Declaration("topics", "CreateTopics"),
    ApiKey.DELETE_TOPICS: Declaration("topics", "DeleteTopics"),
    ApiKey.DELETE_RECORDS: Declaration("records", "DeleteRecords"),
    ApiKey.INIT_PRODUCER_ID: Declaration("producers", "InitProducerId"),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: Declaration("offsets", "OffsetForLeaderEpoch"),
    ApiKey.ADD_PARTITIONS_TO_TXN: Declaration("transactions", "AddPartitionsToTxn"),
    ApiKey.ADD_OFFSETS_TO_TXN: Declaration("transactions", "AddOffsetsToTxn"),
    ApiKey.END_TXN: Declaration("transactions", "EndTxn"),
    ApiKey.WRITE_TXN_MARKERS: Declaration("transactions", "WriteTxnMarkers"),
    ApiKey.TXN_OFFSET_COMMIT: Declaration("transactions", "TxnOffsetCommit"),
    ApiKey.DESCRIBE_ACLS: Declaration("acls", "DescribeAcls"),
    ApiKey.CREATE_ACLS: Declaration("acls", "CreateAcls"),
    ApiKey.DELETE_ACLS: Declaration("acls", "DeleteAcls"),
    ApiKey.DESCRIBE_CONFIGS: Declaration("configs", "DescribeConfigs"),
    ApiKey.ALTER_CONFIGS: Declaration("configs", "AlterConfigs"),
    ApiKey.ALTER_REPLICA_LOG_DIRS: Declaration("log_dirs", "AlterReplicaLogDirs"),
    ApiKey.DESCRIBE_LOG_DIRS: Declaration("log_dirs", "DescribeLogDirs"),
    ApiKey.SASL_AUTHENTICATE: Declaration("sasl", "SaslAuthenticate"),
    ApiKey.CREATE_PARTITIONS: Declaration("topics", "CreatePartitions"),
    ApiKey.CREATE_DELEGATION_TOKEN: Declaration("delegation_tokens", "CreateDelegationToken"),
    ApiKey.RENEW_DELEGATION_TOKEN: Declaration("delegation_tokens", "RenewDelegationToken"),
    ApiKey.EXPIRE_DELEGATION_TOKEN: Declaration("delegation_tokens", "ExpireDelegationToken"),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: Declaration("delegation_tokens", "DescribeDelegationToken"),
    ApiKey.DELETE_GROUPS: Declaration("groups", "DeleteGroups"),
    ApiKey.ELECT_LEADERS: Declaration("partitions", "ElectLeaders"),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: Declaration("configs", "IncrementalAlterConfigs"),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: Declaration("partitions", "AlterPartitionReassignments"),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: Declaration("partitions", "ListPartitionReassignments"),
    ApiKey.OFFSET_DELETE: Declaration("group_offsets", "OffsetDelete"),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: Declaration("quotas", "DescribeClientQuotas"),
    ApiKey.ALTER_CLIENT_QUOTAS: Declaration("quotas", "AlterClientQuotas"),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: Declaration("scram", "DescribeUserScramCredentials"),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: Declaration("scram", "AlterUserScramCredentials"),
    ApiKey.DESCRIBE_QUORUM: Declaration("quorum", "DescribeQuorum"),
    ApiKey.ALTER_PARTITION: Declaration("partitions", "AlterPartition"),
    ApiKey.UPDATE_FEATURES: Declaration("features", "UpdateFeatures"),
    ApiKey.ENVELOPE: Declaration("brokers", "Envelope"),
    ApiKey.DESCRIBE_CLUSTER: Declaration("cluster", "DescribeCluster"),
    ApiKey.DESCRIBE_PRODUCERS: Declaration("producers", "DescribeProducers"),
    ApiKey.BROKER_HEARTBEAT: Declaration("brokers", "BrokerHeartbeat"),
    ApiKey.UNREGISTER_BROKER: Declaration("cluster", "UnregisterBroker"),
    ApiKey.DESCRIBE_TRANSACTIONS: Declaration("transactions", "DescribeTransactions"),
    ApiKey.LIST_TRANSACTIONS: Declaration("transactions", "ListTransactions"),
    ApiKey.ALLOCATE_PRODUCER_IDS: Declaration("brokers", "AllocateProducerIds"),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: Declaration("consumer_groups", "ConsumerGroupHeartbeat"),
    ApiKey.CONSUMER_GROUP_DESCRIBE: Declaration("consumer_groups", "ConsumerGroupDescribe"),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: Declaration("telemetry", "GetTelemetrySubscriptions"),
    ApiKey.PUSH_TELEMETRY: Declaration("telemetry", "PushTelemetry"),
    ApiKey.ASSIGN_REPLICAS_TO_DIRS: Declaration("brokers", "AssignReplicasToDirs"),
    ApiKey.LIST_CONFIG_RESOURCES: Declaration("configs", "ListConfigResources"),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: Declaration("cluster", "DescribeTopicPartitions"),
    ApiKey.SHARE_GROUP_HEARTBEAT: Declaration("share_groups", "ShareGroupHeartbeat"),
    ApiKey.SHARE_GROUP_DESCRIBE: Declaration("share_groups", "ShareGroupDescribe"),
    ApiKey.SHARE_FETCH: Declaration("share_groups", "ShareFetch"),
    ApiKey.SHARE_ACKNOWLEDGE: Declaration("share_groups", "ShareAcknowledge"),
    ApiKey.INITIALIZE_SHARE_GROUP_STATE: Declaration("share_state", "InitializeShareGroupState"),
    ApiKey.READ_SHARE_GROUP_STATE: Declaration("share_state", "ReadShareGroupState"),
    ApiKey.WRITE_SHARE_GROUP_STATE: Declaration("share_state", "WriteShareGroupState"),
    ApiKey.DELETE_SHARE_GROUP_STATE: Declaration("share_state", "DeleteShareGroupState"),
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY: Declaration("share_state", "ReadShareGroupStateSummary"),
    ApiKey.STREAMS_GROUP_HEARTBEAT: Declaration("streams_groups", "StreamsGroupHeartbeat"),
    ApiKey.STREAMS_GROUP_DESCRIBE: Declaration("streams_groups", "StreamsGroupDescribe"),
    ApiKey.DESCRIBE_SHARE_GROUP_OFFSETS: Declaration("share_groups", "DescribeShareGroupOffsets"),
    ApiKey.ALTER_SHARE_GROUP_OFFSETS: Declaration("share_groups", "AlterShareGroupOffsets"),
    ApiKey.DELETE_SHARE_GROUP_OFFSETS: Declaration("share_groups", "DeleteShareGroupOffsets"),
    ApiKey.GET_REPLICA_LOG_INFO: Declaration("brokers", "GetReplicaLogInfo"),
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
    family, name = DECLARATIONS[cast(ApiKey, key)]
    return getattr(import_module(f"{__name__}.{family}"), name + suffix)
