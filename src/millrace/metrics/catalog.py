"""Every metric of a broker, declared once: from here come the text that is scraped, its check, and docs/metrics.md.

A name, once it was in a release, stays: dashboards and alerts are built on it. Labels without a detail have few values,
whatever clients do: no topic, no group, no client id. What has one per topic, partition or group belongs to a `Detail`,
and is told only where that is asked for.

`kafka` is where Apache Kafka tells the same: an MBean, or one of its client-library style metrics (`group:name`). Empty
where Kafka has nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final

PREFIX: Final = "millrace_"


class Kind(Enum):
    """What a number means: one that only grows, one that is what it is now, or how many were how large."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Detail(Enum):
    """What a scrape may ask for on top: as many lines as there are topics, partitions or groups."""

    TOPICS = "topics"
    PARTITIONS = "partitions"
    GROUPS = "groups"
    GROUP_PARTITIONS = "group-partitions"


@dataclass(frozen=True, slots=True)
class Family:
    """One metric: all its lines share a name."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    kafka: str = ""
    detail: Detail | None = None
    only: str = ""
    """When it is there, if that is not always: without such a thing there is no line of it."""


_SERVER: Final = "kafka.server:type="
_NETWORK: Final = "kafka.network:type="
_TOPIC: Final = "kafka.server:type=BrokerTopicMetrics,name="
_REPLICAS: Final = "kafka.server:type=ReplicaManager,name="
_CONTROLLER: Final = "kafka.controller:type=KafkaController,name="
_CLEANER: Final = "kafka.log:type=LogCleaner,name="
_SOCKETS: Final = "socket-server-metrics:"
_ONCE_ASKED: Final = "a request of that API was answered"

_FAMILIES: Final = (
    # --- the broker itself --------------------------------------------------------------------------------------------
    Family(
        "millrace_build_info",
        Kind.GAUGE,
        "Always 1; which millrace runs, on which Python.",
        ("version", "python"),
        f"{_SERVER}app-info",
    ),
    Family(
        "millrace_broker_info",
        Kind.GAUGE,
        "Always 1; which broker of which cluster this is.",
        ("broker_id", "cluster_id", "rack"),
        f"{_SERVER}KafkaServer,name=ClusterId",
    ),
    Family("millrace_start_time_seconds", Kind.GAUGE, "When the broker began to answer, in seconds since 1970."),
    Family(
        "millrace_process_cpu_seconds_total",
        Kind.COUNTER,
        "CPU time of the broker's process.",
        ("mode",),
        "java.lang:type=OperatingSystem (ProcessCpuTime)",
    ),
    Family(
        "millrace_process_resident_memory_bytes",
        Kind.GAUGE,
        "Memory of the broker's process that is in RAM.",
        (),
        "java.lang:type=Memory (HeapMemoryUsage)",
    ),
    Family(
        "millrace_process_open_fds",
        Kind.GAUGE,
        "Open file descriptors: connections, segment files, pipes.",
        (),
        "java.lang:type=OperatingSystem (OpenFileDescriptorCount)",
    ),
    Family(
        "millrace_process_max_fds",
        Kind.GAUGE,
        "How many file descriptors the process may have open.",
        (),
        "java.lang:type=OperatingSystem (MaxFileDescriptorCount)",
    ),
    Family(
        "millrace_loop_lag_seconds",
        Kind.HISTOGRAM,
        "How much later than asked for a timer of the event loop ran, sampled ten times a second: how long everything "
        "waits behind something.",
        (),
        f"{_SERVER}KafkaRequestHandlerPool,name=RequestHandlerAvgIdlePercent",
    ),
    # --- requests -----------------------------------------------------------------------------------------------------
    Family(
        "millrace_requests_total",
        Kind.COUNTER,
        "Requests that were answered, or needed no answer (acks=0).",
        ("api",),
        f"{_NETWORK}RequestMetrics,name=RequestsPerSec,request=*",
        only=_ONCE_ASKED,
    ),
    Family(
        "millrace_request_errors_total",
        Kind.COUNTER,
        "Errors in answers, by code: of a request with several partitions or other items, one for each that failed.",
        ("api", "error"),
        f"{_NETWORK}RequestMetrics,name=ErrorsPerSec,request=*,error=*",
        only="there was such an error",
    ),
    Family(
        "millrace_request_stage_seconds",
        Kind.HISTOGRAM,
        "Time of a request in each stage. queue: received, not begun; local: decoded and handled; remote: waits for "
        "others (replicas, the disk, records that are to come, another broker); response: ready, waits for its turn.",
        ("api", "stage"),
        f"{_NETWORK}RequestMetrics,name={{RequestQueueTimeMs,LocalTimeMs,RemoteTimeMs,ResponseQueueTimeMs}},request=*",
        only=_ONCE_ASKED,
    ),
    Family(
        "millrace_request_bytes_total",
        Kind.COUNTER,
        "Size of requests that were answered.",
        ("api",),
        f"{_NETWORK}RequestMetrics,name=RequestBytes,request=*",
        only=_ONCE_ASKED,
    ),
    Family(
        "millrace_response_bytes_total",
        Kind.COUNTER,
        "Size of answers.",
        ("api",),
        only=_ONCE_ASKED,
    ),
    Family(
        "millrace_requests_waiting",
        Kind.GAUGE,
        "Requests that were received and have not begun.",
        (),
        f"{_NETWORK}RequestChannel,name=RequestQueueSize",
    ),
    Family(
        "millrace_requests_in_flight",
        Kind.GAUGE,
        "Requests that have begun and are not answered; long polls are among them.",
        (),
        f"{_SERVER}DelayedOperationPurgatory,name=PurgatorySize,delayedOperation=*",
    ),
    Family(
        "millrace_protocol_errors_total",
        Kind.COUNTER,
        "Connections that were closed because what came could not be understood, or could not be answered.",
    ),
    Family(
        "millrace_request_memory_bytes",
        Kind.GAUGE,
        "Memory that requests and answers hold now, of queued.max.request.bytes.",
        (),
        f"{_SOCKETS}MemoryPoolUsed",
    ),
    Family(
        "millrace_request_memory_limit_bytes",
        Kind.GAUGE,
        "What they may hold before nothing more is read.",
        (),
        f"{_SOCKETS}MemoryPoolAvailable",
    ),
    Family(
        "millrace_fetch_sessions",
        Kind.GAUGE,
        "Incremental fetch sessions (KIP-227).",
        (),
        f"{_SERVER}FetchSessionCache,name=NumIncrementalFetchSessions",
    ),
    # --- records in and out -------------------------------------------------------------------------------------------
    Family(
        "millrace_bytes_in_total",
        Kind.COUNTER,
        "Bytes of record batches that clients have produced here.",
        (),
        f"{_TOPIC}BytesInPerSec",
    ),
    Family(
        "millrace_records_in_total",
        Kind.COUNTER,
        "Records that clients have produced here.",
        (),
        f"{_TOPIC}MessagesInPerSec",
    ),
    Family(
        "millrace_bytes_out_total",
        Kind.COUNTER,
        "Bytes of record batches that were sent to consumers.",
        (),
        f"{_TOPIC}BytesOutPerSec",
    ),
    Family(
        "millrace_records_out_total",
        Kind.COUNTER,
        "Records that were sent to consumers, counted by their offsets: what compaction took away counts as well.",
    ),
    Family(
        "millrace_replication_bytes_in_total",
        Kind.COUNTER,
        "Bytes that this broker has fetched as a follower.",
        (),
        f"{_TOPIC}ReplicationBytesInPerSec",
    ),
    Family(
        "millrace_replication_bytes_out_total",
        Kind.COUNTER,
        "Bytes that followers have fetched here.",
        (),
        f"{_TOPIC}ReplicationBytesOutPerSec",
    ),
    # --- replicas -----------------------------------------------------------------------------------------------------
    Family("millrace_partitions", Kind.GAUGE, "Replicas on this broker.", (), f"{_REPLICAS}PartitionCount"),
    Family("millrace_leaders", Kind.GAUGE, "Partitions that this broker leads.", (), f"{_REPLICAS}LeaderCount"),
    Family(
        "millrace_under_replicated_partitions",
        Kind.GAUGE,
        "Partitions led here with a replica that is not in sync.",
        (),
        f"{_REPLICAS}UnderReplicatedPartitions",
    ),
    Family(
        "millrace_under_min_isr_partitions",
        Kind.GAUGE,
        "Partitions led here with fewer in sync than min.insync.replicas: acks=all is refused.",
        (),
        f"{_REPLICAS}UnderMinIsrPartitionCount",
    ),
    Family(
        "millrace_at_min_isr_partitions",
        Kind.GAUGE,
        "Partitions led here with just as many in sync as min.insync.replicas, of more replicas.",
        (),
        f"{_REPLICAS}AtMinIsrPartitionCount",
    ),
    Family(
        "millrace_reassigning_partitions",
        Kind.GAUGE,
        "Partitions led here whose replicas are being moved.",
        (),
        f"{_REPLICAS}ReassigningPartitions",
    ),
    Family(
        "millrace_offline_replicas",
        Kind.GAUGE,
        "Replicas on this broker whose log is damaged or lies in a directory that is offline.",
        (),
        f"{_REPLICAS}OfflineReplicaCount",
    ),
    Family(
        "millrace_follower_max_lag_records",
        Kind.GAUGE,
        "How many records the follower that is furthest behind lacks, of all partitions led here.",
        (),
        f"{_SERVER}ReplicaFetcherManager,name=MaxLag,clientId=Replica",
    ),
    Family(
        "millrace_isr_shrinks_total",
        Kind.COUNTER,
        "Replicas that have left the ISR of a partition led here.",
        (),
        f"{_REPLICAS}IsrShrinksPerSec",
    ),
    Family(
        "millrace_isr_expands_total",
        Kind.COUNTER,
        "Replicas that have joined the ISR of a partition led here.",
        (),
        f"{_REPLICAS}IsrExpandsPerSec",
    ),
    # --- the cluster, as this broker sees it --------------------------------------------------------------------------
    Family(
        "millrace_active_controller",
        Kind.GAUGE,
        "1 on the broker that is controller, 0 on the others.",
        (),
        f"{_CONTROLLER}ActiveControllerCount",
    ),
    Family(
        "millrace_controller_epoch",
        Kind.GAUGE,
        "The epoch of the controller that this broker has heard from last.",
        (),
        f"{_CONTROLLER}NewActiveControllersCount",
    ),
    Family(
        "millrace_leader_elections_total",
        Kind.COUNTER,
        "Elections of another leader while this broker was controller. kind: clean, or unclean if the new leader was "
        "not in sync, so that records may be lost.",
        ("kind",),
        "kafka.controller:type=ControllerStats,name={LeaderElectionRateAndTimeMs,UncleanLeaderElectionsPerSec}",
    ),
    Family(
        "millrace_offline_partitions",
        Kind.GAUGE,
        "Partitions of the cluster without a leader. Every broker tells it: take the max.",
        (),
        f"{_CONTROLLER}OfflinePartitionsCount",
    ),
    Family(
        "millrace_brokers",
        Kind.GAUGE,
        "Registered brokers by state, live or fenced. Every broker tells it: take the max.",
        ("state",),
        f"{_CONTROLLER}{{ActiveBrokerCount,FencedBrokerCount}}",
    ),
    Family(
        "millrace_cluster_topics",
        Kind.GAUGE,
        "Topics of the cluster. Every broker tells it: take the max.",
        (),
        f"{_CONTROLLER}GlobalTopicCount",
    ),
    Family(
        "millrace_cluster_partitions",
        Kind.GAUGE,
        "Partitions of the cluster. Every broker tells it: take the max.",
        (),
        f"{_CONTROLLER}GlobalPartitionCount",
    ),
    Family(
        "millrace_metadata_version",
        Kind.GAUGE,
        "The last change of the metadata log that this broker has applied: one that stays behind the others is stale.",
        (),
        "broker-metadata-metrics:last-applied-record-offset",
    ),
    Family(
        "millrace_zookeeper_connected",
        Kind.GAUGE,
        "1 while ZooKeeper answers this broker, 0 otherwise.",
        (),
        f"{_SERVER}SessionExpireListener,name=SessionState",
        only="the broker uses ZooKeeper",
    ),
    # --- logs and disks -----------------------------------------------------------------------------------------------
    Family(
        "millrace_log_dir_online",
        Kind.GAUGE,
        "1 while a data directory can be used, 0 once it has failed.",
        ("directory",),
        "kafka.log:type=LogManager,name=LogDirectoryOffline,logDirectory=*",
    ),
    Family(
        "millrace_log_dir_full",
        Kind.GAUGE,
        "1 while a data directory takes no more records for want of space (log.dirs.min.free.bytes).",
        ("directory",),
    ),
    Family("millrace_log_dir_free_bytes", Kind.GAUGE, "Free space of the disk under a data directory.", ("directory",)),
    Family("millrace_log_dir_total_bytes", Kind.GAUGE, "Size of the disk under a data directory.", ("directory",)),
    Family(
        "millrace_log_size_bytes",
        Kind.GAUGE,
        "Size of all logs in a data directory.",
        ("directory",),
        "kafka.log:type=Log,name=Size,topic=*,partition=*",
    ),
    Family(
        "millrace_log_segments",
        Kind.GAUGE,
        "Segments of all logs in a data directory.",
        ("directory",),
        "kafka.log:type=Log,name=NumLogSegments,topic=*,partition=*",
    ),
    Family("millrace_logs", Kind.GAUGE, "Logs in a data directory.", ("directory",)),
    Family(
        "millrace_log_flush_seconds",
        Kind.HISTOGRAM,
        "Time of a sync of the disk, of one log or several together.",
        ("directory",),
        "kafka.log:type=LogFlushStats,name=LogFlushRateAndTimeMs",
    ),
    Family(
        "millrace_compaction_rounds_total",
        Kind.COUNTER,
        "Rounds of compaction on a log. outcome: done, stale (the log was cut or deleted meanwhile) or failed.",
        ("outcome",),
    ),
    Family(
        "millrace_compaction_seconds_total",
        Kind.COUNTER,
        "Time that rounds of compaction have taken.",
        (),
        f"{_CLEANER}max-clean-time-secs",
    ),
    Family(
        "millrace_compaction_reclaimed_bytes_total",
        Kind.COUNTER,
        "What logs were smaller after compaction than before.",
        (),
        f"{_CLEANER}cleaner-recopy-percent",
    ),
    Family(
        "millrace_compaction_max_dirty_ratio",
        Kind.GAUGE,
        "How much of the dirtiest compacted log was not compacted when it was last looked.",
        (),
        "kafka.log:type=LogCleanerManager,name=max-dirty-percent",
    ),
    Family(
        "millrace_compaction_failing_logs",
        Kind.GAUGE,
        "Logs that are not compacted now because it failed.",
        (),
        "kafka.log:type=LogCleanerManager,name=uncleanable-partitions-count,logDirectory=*",
    ),
    # --- groups -------------------------------------------------------------------------------------------------------
    Family(
        "millrace_groups",
        Kind.GAUGE,
        "Groups that this broker coordinates, by type (classic, consumer, share) and state.",
        ("type", "state"),
        "group-coordinator-metrics:{group-count,consumer-group-count,share-group-count}",
        only="there is such a group",
    ),
    Family(
        "millrace_group_members",
        Kind.GAUGE,
        "Members of the groups that this broker coordinates.",
        ("type",),
    ),
    Family(
        "millrace_group_rebalances_total",
        Kind.COUNTER,
        "Rebalances of groups coordinated here: new generations of classic ones, new epochs of the others.",
        ("type",),
        "group-coordinator-metrics:{group-completed-rebalance-count,consumer-group-rebalance-count,"
        "share-group-rebalance-count}",
    ),
    Family(
        "millrace_group_offset_commits_total",
        Kind.COUNTER,
        "Committed offsets that were written, one per partition.",
        (),
        "group-coordinator-metrics:offset-commit-count",
    ),
    # --- queues (share groups) ----------------------------------------------------------------------------------------
    Family(
        "millrace_queue_partitions",
        Kind.GAUGE,
        "Share-partitions that this broker has loaded: a partition led here, as one share group reads it.",
    ),
    Family(
        "millrace_queue_records_in_flight",
        Kind.GAUGE,
        "Records of queues that consumers have and have not acknowledged, or that wait to be delivered again.",
        (),
        f"{_SERVER}SharePartitionMetrics,name=InFlightMessageCount,group=*,topic=*,partition=*",
    ),
    Family(
        "millrace_queue_records_delivered_total",
        Kind.COUNTER,
        "Records that consumers of queues were given, for the first time or again.",
    ),
    Family(
        "millrace_queue_records_redelivered_total",
        Kind.COUNTER,
        "Those among them that were given again.",
    ),
    Family(
        "millrace_queue_records_acknowledged_total",
        Kind.COUNTER,
        "Records of queues that were acknowledged. kind: accept, release, reject or renew.",
        ("kind",),
        f"{_SERVER}ShareGroupMetrics,name=RecordAcknowledgementsPerSec,ackType=*",
    ),
    Family(
        "millrace_queue_lock_timeouts_total",
        Kind.COUNTER,
        "Records that went back because their consumer took too long.",
        (),
        f"{_SERVER}SharePartitionMetrics,name=AcquisitionLockTimeoutPerSec,group=*,topic=*,partition=*",
    ),
    Family(
        "millrace_queue_records_archived_total",
        Kind.COUNTER,
        "Records of queues that were given up: rejected, or delivered too often.",
    ),
    Family(
        "millrace_queue_dead_letters_total",
        Kind.COUNTER,
        "Dead letters that were written.",
    ),
    Family(
        "millrace_queue_dead_letter_failures_total",
        Kind.COUNTER,
        "Attempts to write dead letters that failed; they are repeated.",
    ),
    # --- transactions -------------------------------------------------------------------------------------------------
    Family(
        "millrace_transactional_ids",
        Kind.GAUGE,
        "Transactional ids that this broker coordinates.",
    ),
    Family(
        "millrace_transactions_open",
        Kind.GAUGE,
        "Transactions that this broker coordinates and that are open, or decided and not yet completed.",
    ),
    Family(
        "millrace_transactions_hanging",
        Kind.GAUGE,
        "Open transactions in partitions led here that are older than transaction.max.timeout.ms: consumers of "
        "committed records wait for them.",
        (),
        f"{_REPLICAS}PartitionsWithLateTransactionsCount",
    ),
    Family(
        "millrace_transactions_completed_total",
        Kind.COUNTER,
        "Transactions that were completed by this broker as coordinator. outcome: committed or aborted.",
        ("outcome",),
    ),
    # --- connections and who is behind them ---------------------------------------------------------------------------
    Family(
        "millrace_connections",
        Kind.GAUGE,
        "Connections of a listener.",
        ("listener",),
        f"{_SOCKETS}connection-count,listener=*",
    ),
    Family(
        "millrace_connections_accepted_total",
        Kind.COUNTER,
        "Connections that a listener has taken in.",
        ("listener",),
        f"{_SOCKETS}connection-creation-total,listener=*",
    ),
    Family(
        "millrace_connections_refused_total",
        Kind.COUNTER,
        "Connections that a listener has turned away. reason: limit (max.connections), rate (they came too fast), tls "
        "(no handshake), certificate (it names nobody).",
        ("listener", "reason"),
        f"{_NETWORK}Acceptor,name=AcceptorBlockedPercent,listener=*",
    ),
    Family(
        "millrace_authentications_total",
        Kind.COUNTER,
        "Logins. outcome: success or failure; mechanism: SSL for certificates, none if the client has named no "
        "mechanism that is offered.",
        ("listener", "mechanism", "outcome"),
        f"{_SOCKETS}{{successful-authentication-total,failed-authentication-total}},listener=*",
        only="somebody has tried to log in",
    ),
    Family(
        "millrace_throttled_total",
        Kind.COUNTER,
        "How often a client was told to wait, by the quota that asked for it.",
        ("quota",),
    ),
    Family(
        "millrace_throttle_seconds_total",
        Kind.COUNTER,
        "For how long in all.",
        ("quota",),
        f"{_SERVER}{{Produce,Fetch,Request,ControllerMutation}} (throttle-time)",
    ),
    Family(
        "millrace_audit_events_dropped_total",
        Kind.COUNTER,
        "Events of the audit log that were lost because what takes them was too slow or failed.",
        ("destination",),
        only="there is an audit log",
    ),
    # --- the scrape itself --------------------------------------------------------------------------------------------
    Family(
        "millrace_scrape_errors_total",
        Kind.COUNTER,
        "Parts of a scrape that failed; the others were told.",
        ("part",),
    ),
    Family(
        "millrace_scrape_seconds",
        Kind.GAUGE,
        "How long it took to collect what this answer has.",
    ),
    Family(
        "millrace_scrape_loop_held_seconds",
        Kind.GAUGE,
        "For how long the event loop was held at a time for this answer, at the most.",
    ),
    # --- detail=topics ------------------------------------------------------------------------------------------------
    *(
        Family(f"millrace_topic_{name}", kind, text, ("topic",), kafka, Detail.TOPICS, "there is a topic")
        for name, kind, text, kafka in (
            ("bytes_in_total", Kind.COUNTER, "Bytes produced to a topic here.", f"{_TOPIC}BytesInPerSec,topic=*"),
            ("records_in_total", Kind.COUNTER, "Records produced here.", f"{_TOPIC}MessagesInPerSec,topic=*"),
            ("bytes_out_total", Kind.COUNTER, "Bytes sent to consumers.", f"{_TOPIC}BytesOutPerSec,topic=*"),
            ("records_out_total", Kind.COUNTER, "Records sent to consumers.", ""),
            (
                "size_bytes",
                Kind.GAUGE,
                "Size of the replicas of a topic on this broker.",
                "kafka.log:type=Log,name=Size,topic=*",
            ),
            ("leaders", Kind.GAUGE, "Partitions of a topic that this broker leads.", ""),
        )
    ),
    # --- detail=partitions --------------------------------------------------------------------------------------------
    *(
        Family(
            f"millrace_partition_{name}",
            kind,
            text,
            ("topic", "partition"),
            kafka,
            Detail.PARTITIONS,
            "there is a topic",
        )
        for name, kind, text, kafka in (
            ("leader", Kind.GAUGE, "1 if this broker leads the partition, 0 if it follows.", ""),
            (
                "log_start_offset",
                Kind.GAUGE,
                "First offset of a replica.",
                "kafka.log:type=Log,name=LogStartOffset,topic=*,partition=*",
            ),
            (
                "log_end_offset",
                Kind.GAUGE,
                "The offset that the next record gets.",
                "kafka.log:type=Log,name=LogEndOffset,topic=*,partition=*",
            ),
            (
                "high_watermark",
                Kind.GAUGE,
                "Up to where records are committed.",
                "kafka.cluster:type=Partition,name=LastStableOffsetLag,topic=*,partition=*",
            ),
            ("size_bytes", Kind.GAUGE, "Size of a replica.", "kafka.log:type=Log,name=Size,topic=*,partition=*"),
            (
                "replicas",
                Kind.GAUGE,
                "Replicas that the partition should have.",
                "kafka.cluster:type=Partition,name=ReplicasCount,topic=*,partition=*",
            ),
            (
                "isr",
                Kind.GAUGE,
                "Replicas that are in sync.",
                "kafka.cluster:type=Partition,name=InSyncReplicasCount,topic=*,partition=*",
            ),
            ("bytes_in_total", Kind.COUNTER, "Bytes that clients have produced here.", ""),
            ("records_in_total", Kind.COUNTER, "Records that clients have produced here.", ""),
            ("bytes_out_total", Kind.COUNTER, "Bytes that were sent to consumers.", ""),
            ("records_out_total", Kind.COUNTER, "Records that were sent to consumers.", ""),
        )
    ),
    # --- detail=groups and detail=group-partitions --------------------------------------------------------------------
    Family(
        "millrace_group_info",
        Kind.GAUGE,
        "Always 1; type and state of a group that this broker coordinates.",
        ("group", "type", "state"),
        "",
        Detail.GROUPS,
        "there is a group",
    ),
    Family(
        "millrace_group_member_count",
        Kind.GAUGE,
        "Members of a group.",
        ("group",),
        "",
        Detail.GROUPS,
        "there is a group",
    ),
    Family(
        "millrace_group_lag_records",
        Kind.GAUGE,
        "Records between what a group has committed and the end, of all partitions together.",
        ("group",),
        "consumer-fetch-manager-metrics:records-lag (in each client)",
        Detail.GROUPS,
        "there is a group with committed offsets",
    ),
    Family(
        "millrace_group_lag_seconds",
        Kind.GAUGE,
        "Age of the oldest record that a group has not committed, of all partitions.",
        ("group",),
        "",
        Detail.GROUPS,
        "there is a group with committed offsets",
    ),
    Family(
        "millrace_group_lag_unknown_partitions",
        Kind.GAUGE,
        "Partitions whose end could not be asked for: they are missing in the lag.",
        ("group",),
        "",
        Detail.GROUPS,
        "there is a group with committed offsets",
    ),
    Family(
        "millrace_queue_group_backlog_records",
        Kind.GAUGE,
        "Records from a share group's start offsets to the end, of the partitions led here. Sum it over the brokers.",
        ("group",),
        "",
        Detail.GROUPS,
        "there is a share group that reads",
    ),
    Family(
        "millrace_queue_group_records_in_flight",
        Kind.GAUGE,
        "Records of a share group in flight, of the partitions led here. Sum it over the brokers.",
        ("group",),
        "",
        Detail.GROUPS,
        "there is a share group that reads",
    ),
    Family(
        "millrace_group_partition_committed_offset",
        Kind.GAUGE,
        "What a group has committed.",
        ("group", "topic", "partition"),
        "",
        Detail.GROUP_PARTITIONS,
        "there is a group with committed offsets",
    ),
    Family(
        "millrace_group_partition_lag_records",
        Kind.GAUGE,
        "Records between what a group has committed and the end of a partition.",
        ("group", "topic", "partition"),
        "consumer-fetch-manager-metrics:records-lag,topic=*,partition=* (in each client)",
        Detail.GROUP_PARTITIONS,
        "there is a group with committed offsets",
    ),
    Family(
        "millrace_group_partition_lag_seconds",
        Kind.GAUGE,
        "Age of the oldest record of a partition that a group has not committed.",
        ("group", "topic", "partition"),
        "",
        Detail.GROUP_PARTITIONS,
        "there is a group with committed offsets",
    ),
)

CATALOG: Final[Mapping[str, Family]] = {family.name: family for family in _FAMILIES}
"""By name, in the order in which they are told."""
