"""What is on the Grafana dashboards of deploy/monitoring/grafana, in the order in which it is seen.

Queries are PromQL with three shorthands: `@broker` and `@cluster` are the label matchers of the variables at the top of
the dashboard (with and without the chosen brokers), `@rate` is the time over which Grafana takes a rate. Numbers that
every broker tells of the whole cluster are taken once, with `max`. `generate_monitoring.py` makes JSON of this.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

Query = tuple[str, str]
"""PromQL and the legend of its lines (in a table, the heading of its column)."""


class Kind(Enum):
    """How a panel shows its queries, by Grafana's names."""

    TIMESERIES = "timeseries"
    STAT = "stat"
    TABLE = "table"


@dataclass(frozen=True)
class Panel:
    """One picture. Units are Grafana's ids."""

    title: str
    description: str
    unit: str
    queries: tuple[Query, ...]
    kind: Kind = Kind.TIMESERIES
    width: int = 8
    height: int = 7
    stacked: bool = False
    base_color: str = "green"
    thresholds: tuple[tuple[float, str], ...] = ()
    """From which value on it has which colour."""
    words: tuple[tuple[int, str], ...] = ()
    """What a number of a stat is called."""


@dataclass(frozen=True)
class Row:
    """Panels under a heading; one that is closed asks nothing before somebody opens it."""

    title: str
    panels: tuple[Panel, ...]
    closed: bool = True


@dataclass(frozen=True)
class Variable:
    """A choice at the top, of all values of a label."""

    name: str
    label: str
    query: str
    chosen: tuple[str, ...] = ()
    """At first; nothing stands for all."""


@dataclass(frozen=True)
class Dashboard:
    """One dashboard; `uid` is its name in Grafana, and that of its file."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]


BAD_FROM_ONE: Final = ((1, "red"),)
WORSE_FROM_ONE: Final = ((1, "orange"),)


def stat(
    title: str,
    description: str,
    query: str,
    thresholds: tuple[tuple[float, str], ...] = (),
    *,
    unit: str = "short",
    words: tuple[tuple[int, str], ...] = (),
    base_color: str = "green",
) -> Panel:
    """One number on a coloured ground."""
    return Panel(title, description, unit, ((query, title),), Kind.STAT, 3, 4, False, base_color, thresholds, words)


def table(title: str, description: str, unit: str, *queries: Query, width: int = 24, height: int = 7) -> Panel:
    return Panel(title, description, unit, queries, Kind.TABLE, width, height)


def lines(title: str, description: str, unit: str, *queries: Query, width: int = 8, stacked: bool = False) -> Panel:
    """Lines over time."""
    return Panel(title, description, unit, queries, width=width, stacked=stacked)


def quantile(which: float, histogram: str, by: str, chosen: str = "") -> str:
    rate = f"rate({histogram}_bucket{{@broker{chosen}}}[@rate])"
    return f"histogram_quantile({which}, sum by ({by}, le) ({rate}))"


def quotient(above: str, below: str) -> str:
    return f"{above} / {below}"


CHOSEN_API: Final = ',api=~"$api"'
UPTIME: Final = (
    "(time() - millrace_start_time_seconds{@broker}) * on (cluster, job, instance)"
    " group_left (broker_id, cluster_id, rack) millrace_broker_info{@broker} * on (cluster, job, instance)"
    " group_left (version, python) millrace_build_info{@broker}"
)
BEHIND: Final = (
    "max by (cluster, job) (millrace_metadata_version{@cluster})"
    " - on (cluster, job) group_right () millrace_metadata_version{@broker}"
)

# --- the cluster ------------------------------------------------------------------------------------------------------

HEALTH: Final = Row(
    "Cluster health",
    (
        stat(
            "Live brokers",
            "Brokers that are registered and not fenced, as the brokers themselves see it.",
            'max(millrace_brokers{@cluster,state="live"})',
            ((1, "green"),),
            base_color="red",
        ),
        stat(
            "Fenced brokers",
            "Brokers that are registered and get no leadership: they start, stop, or were given up.",
            'max(millrace_brokers{@cluster,state="fenced"})',
            WORSE_FROM_ONE,
        ),
        stat(
            "Not answering",
            "Targets of Prometheus that did not answer its last scrape.",
            "sum(up{@cluster} == bool 0)",
            BAD_FROM_ONE,
        ),
        stat(
            "Controllers",
            "Brokers that say they are controller: one. For a moment after a failover there may be none or two.",
            "sum(millrace_active_controller{@cluster})",
            ((1, "green"), (2, "red")),
            base_color="red",
        ),
        stat(
            "Offline partitions",
            "Partitions without a leader: neither written nor read. millrace cluster describe says why.",
            "max(millrace_offline_partitions{@cluster})",
            BAD_FROM_ONE,
        ),
        stat(
            "Under min ISR",
            "Partitions with fewer replicas in sync than min.insync.replicas: acks=all is refused.",
            "sum(millrace_under_min_isr_partitions{@cluster})",
            BAD_FROM_ONE,
        ),
        stat(
            "Under-replicated",
            "Partitions with a replica that is not in sync.",
            "sum(millrace_under_replicated_partitions{@cluster})",
            WORSE_FROM_ONE,
        ),
        stat(
            "Alerts",
            "Alerts of deploy/monitoring/alerts.yml that fire now.",
            'count(ALERTS{alertname=~"Millrace.+",alertstate="firing",cluster=~"$cluster"}) or vector(0)',
            BAD_FROM_ONE,
        ),
        stat(
            "Offline directories",
            "Data directories that have failed. Others lead what lay there.",
            "sum(millrace_log_dir_online{@cluster} == bool 0)",
            BAD_FROM_ONE,
        ),
        stat(
            "Full directories",
            "Data directories that take no more records (log.dirs.min.free.bytes).",
            "sum(millrace_log_dir_full{@cluster})",
            BAD_FROM_ONE,
        ),
        stat(
            "ZooKeeper",
            "Whether it answers every broker. While it does not, records flow and nothing can be decided.",
            "min(millrace_zookeeper_connected{@cluster})",
            ((1, "green"),),
            words=((0, "lost"), (1, "connected")),
            base_color="red",
        ),
        stat(
            "Hanging transactions",
            "Open for longer than transaction.max.timeout.ms: consumers of committed records wait behind them.",
            "sum(millrace_transactions_hanging{@cluster})",
            WORSE_FROM_ONE,
        ),
        stat("Topics", "Topics of the cluster.", "max(millrace_cluster_topics{@cluster})", base_color="blue"),
        stat(
            "Partitions", "Partitions of all topics.", "max(millrace_cluster_partitions{@cluster})", base_color="blue"
        ),
        stat(
            "Records in",
            "Records that clients produce per second.",
            "sum(rate(millrace_records_in_total{@cluster}[@rate]))",
            unit="cps",
            base_color="blue",
        ),
        stat(
            "Records out",
            "Records that consumers are sent per second.",
            "sum(rate(millrace_records_out_total{@cluster}[@rate]))",
            unit="cps",
            base_color="blue",
        ),
        table(
            "Brokers",
            "Each broker that answers: its id and rack, which version runs, and for how long.",
            "s",
            (UPTIME, "uptime"),
        ),
    ),
    closed=False,
)

TRAFFIC: Final = Row(
    "Traffic",
    (
        lines(
            "Bytes in",
            "Record batches that clients produce, as they came (compressed).",
            "Bps",
            ("sum by (instance) (rate(millrace_bytes_in_total{@broker}[@rate]))", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "Bytes out",
            "Record batches that consumers are sent; followers are not among them.",
            "Bps",
            ("sum by (instance) (rate(millrace_bytes_out_total{@broker}[@rate]))", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "Replication",
            "What followers fetch. In and out are the same bytes, seen from both ends.",
            "Bps",
            ("sum by (instance) (rate(millrace_replication_bytes_in_total{@broker}[@rate]))", "{{instance}} in"),
            ("sum by (instance) (rate(millrace_replication_bytes_out_total{@broker}[@rate]))", "{{instance}} out"),
        ),
        lines(
            "Records in",
            "Records that clients produce.",
            "cps",
            ("sum by (instance) (rate(millrace_records_in_total{@broker}[@rate]))", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "Records out",
            "Records that consumers are sent, counted by their offsets.",
            "cps",
            ("sum by (instance) (rate(millrace_records_out_total{@broker}[@rate]))", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "Requests",
            "Requests of clients and other brokers.",
            "reqps",
            ("sum by (instance) (rate(millrace_requests_total{@broker}[@rate]))", "{{instance}}"),
            stacked=True,
        ),
    ),
    closed=False,
)


REQUESTS: Final = Row(
    "Requests, by API and stage",
    (
        lines(
            "Requests by API",
            "Requests that were answered.",
            "reqps",
            ("sum by (api) (rate(millrace_requests_total{@broker}[@rate]))", "{{api}}"),
            stacked=True,
        ),
        lines(
            "Errors by API and code",
            "Errors in answers, one for each partition or item that failed. Some are part of normal work: "
            "NOT_LEADER_OR_FOLLOWER after a failover, REBALANCE_IN_PROGRESS in groups.",
            "cps",
            ("sum by (api, error) (rate(millrace_request_errors_total{@broker}[@rate]))", "{{api}} {{error}}"),
        ),
        lines(
            "Where the time goes",
            "Mean time of the chosen APIs by stage. queue: received, not begun; local: decoded and handled; remote: "
            "waits for replicas, the disk or records that are to come; response: ready, waits for its turn.",
            "s",
            (
                quotient(
                    f"sum by (stage) (rate(millrace_request_stage_seconds_sum{{@broker{CHOSEN_API}}}[@rate]))",
                    f"sum by (stage) (rate(millrace_request_stage_seconds_count{{@broker{CHOSEN_API}}}[@rate]))",
                ),
                "{{stage}}",
            ),
            stacked=True,
        ),
        lines(
            "p99 by API and stage",
            "99 of 100 requests of the chosen APIs took less. A Fetch waits in remote until there are records, for up "
            "to its fetch.max.wait.ms.",
            "s",
            (quantile(0.99, "millrace_request_stage_seconds", "api, stage", CHOSEN_API), "{{api}} {{stage}}"),
        ),
        lines(
            "Median by API and stage",
            "Half of the requests of the chosen APIs took less.",
            "s",
            (quantile(0.5, "millrace_request_stage_seconds", "api, stage", CHOSEN_API), "{{api}} {{stage}}"),
        ),
        lines(
            "Loop time by API",
            "How much of the event loop each API uses (local): what makes the others wait.",
            "percentunit",
            ('sum by (api) (rate(millrace_request_stage_seconds_sum{@broker,stage="local"}[@rate]))', "{{api}}"),
            stacked=True,
        ),
        lines(
            "Request sizes",
            "Bytes of requests by API.",
            "Bps",
            ("sum by (api) (rate(millrace_request_bytes_total{@broker}[@rate]))", "{{api}}"),
        ),
        lines(
            "Answer sizes",
            "Bytes of answers by API.",
            "Bps",
            ("sum by (api) (rate(millrace_response_bytes_total{@broker}[@rate]))", "{{api}}"),
        ),
        lines(
            "Waiting and in flight",
            "Requests that have not begun, and those that have and are not answered (long polls among them).",
            "short",
            ("sum by (instance) (millrace_requests_waiting{@broker})", "{{instance}} waiting"),
            ("sum by (instance) (millrace_requests_in_flight{@broker})", "{{instance}} in flight"),
        ),
        lines(
            "Memory of requests and answers",
            "What they hold now, and what they may (queued.max.request.bytes). At the limit nothing more is read.",
            "bytes",
            ("sum by (instance) (millrace_request_memory_bytes{@broker})", "{{instance}}"),
            ("min(millrace_request_memory_limit_bytes{@broker})", "limit"),
        ),
        lines(
            "Fetch sessions",
            "Incremental fetch sessions (KIP-227): about one for each consumer and follower.",
            "short",
            ("sum by (instance) (millrace_fetch_sessions{@broker})", "{{instance}}"),
        ),
        lines(
            "Protocol errors",
            "Connections that were closed because what came could not be understood or answered.",
            "cps",
            ("sum by (instance) (rate(millrace_protocol_errors_total{@broker}[@rate]))", "{{instance}}"),
        ),
    ),
    closed=False,
)

REPLICATION: Final = Row(
    "Replication and leadership",
    (
        lines(
            "Under-replicated partitions",
            "By the broker that leads them; the replica that is missing is on another.",
            "short",
            ("sum by (instance) (millrace_under_replicated_partitions{@broker})", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "At and under min ISR",
            "At: the next failure makes acks=all fail. Under: it fails.",
            "short",
            ("sum by (instance) (millrace_at_min_isr_partitions{@broker})", "{{instance}} at"),
            ("sum by (instance) (millrace_under_min_isr_partitions{@broker})", "{{instance}} under"),
        ),
        lines(
            "ISR changes",
            "Replicas that leave and join in-sync sets. Every shrink should be followed by an expand.",
            "cps",
            ("sum(rate(millrace_isr_shrinks_total{@broker}[@rate]))", "shrinks"),
            ("sum(rate(millrace_isr_expands_total{@broker}[@rate]))", "expands"),
        ),
        lines(
            "Elections",
            "Changes of leaders, by the controller. unclean: the new one was not in sync, and records may be lost.",
            "cps",
            ("sum by (kind) (rate(millrace_leader_elections_total{@cluster}[@rate]))", "{{kind}}"),
        ),
        lines(
            "Follower that is furthest behind",
            "Records that it lacks, of all partitions that a broker leads.",
            "short",
            ("max by (instance) (millrace_follower_max_lag_records{@broker})", "{{instance}}"),
        ),
        lines(
            "Partitions in motion, replicas that cannot be used",
            "Reassigning: replicas are being moved. Offline: the log is damaged or its directory has failed.",
            "short",
            ("sum by (instance) (millrace_reassigning_partitions{@broker})", "{{instance}} reassigning"),
            ("sum by (instance) (millrace_offline_replicas{@broker})", "{{instance}} offline"),
        ),
        lines(
            "Leaders",
            "Partitions that each broker leads. They should be about even: millrace cluster elect.",
            "short",
            ("sum by (instance) (millrace_leaders{@broker})", "{{instance}}"),
        ),
        lines(
            "Replicas",
            "Replicas on each broker, led or followed.",
            "short",
            ("sum by (instance) (millrace_partitions{@broker})", "{{instance}}"),
        ),
        lines(
            "Behind in metadata",
            "Changes of the metadata log that a broker has not applied yet and another has.",
            "short",
            (BEHIND, "{{instance}}"),
        ),
        lines(
            "Controller epoch",
            "It grows by one with every new controller; brokers that disagree for long are cut off.",
            "short",
            ("max by (instance) (millrace_controller_epoch{@broker})", "{{instance}}"),
        ),
        lines(
            "ZooKeeper by broker",
            "1 while it answers.",
            "short",
            ("min by (instance) (millrace_zookeeper_connected{@broker})", "{{instance}}"),
        ),
        lines(
            "Brokers by state",
            "As the brokers see it.",
            "short",
            ("max by (state) (millrace_brokers{@cluster})", "{{state}}"),
        ),
    ),
)

STORAGE: Final = Row(
    "Storage",
    (
        lines(
            "Free space",
            "Of the disk under each data directory.",
            "percentunit",
            (
                quotient("millrace_log_dir_free_bytes{@broker}", "millrace_log_dir_total_bytes{@broker}"),
                "{{instance}} {{directory}}",
            ),
        ),
        lines(
            "Size of logs",
            "All logs in each data directory.",
            "bytes",
            ("sum by (instance, directory) (millrace_log_size_bytes{@broker})", "{{instance}} {{directory}}"),
        ),
        lines(
            "Logs and segments",
            "Each segment that is read or written costs descriptors.",
            "short",
            ("sum by (instance) (millrace_logs{@broker})", "{{instance}} logs"),
            ("sum by (instance) (millrace_log_segments{@broker})", "{{instance}} segments"),
        ),
        lines(
            "Flush time, p99",
            "A sync of the disk, of one log or several. acks=all waits for it (flush.mode).",
            "s",
            (
                quantile(0.99, "millrace_log_flush_seconds", "instance, directory"),
                "{{instance}} {{directory}}",
            ),
        ),
        lines(
            "Flushes",
            "Syncs per second.",
            "ops",
            (
                "sum by (instance, directory) (rate(millrace_log_flush_seconds_count{@broker}[@rate]))",
                "{{instance}} {{directory}}",
            ),
        ),
        lines(
            "Compaction",
            "Rounds by outcome. stale: the log was cut or deleted meanwhile.",
            "cps",
            ("sum by (outcome) (rate(millrace_compaction_rounds_total{@broker}[@rate]))", "{{outcome}}"),
        ),
        lines(
            "Compaction at work",
            "Part of the time in which a broker compacts.",
            "percentunit",
            ("sum by (instance) (rate(millrace_compaction_seconds_total{@broker}[@rate]))", "{{instance}}"),
        ),
        lines(
            "Reclaimed by compaction",
            "What logs are smaller afterwards.",
            "Bps",
            ("sum by (instance) (rate(millrace_compaction_reclaimed_bytes_total{@broker}[@rate]))", "{{instance}}"),
        ),
        lines(
            "Dirtiest log, logs that fail",
            "Part of the dirtiest compacted log that was not compacted; and how many logs are not, because it failed.",
            "short",
            ("max by (instance) (millrace_compaction_max_dirty_ratio{@broker})", "{{instance}} dirty"),
            ("sum by (instance) (millrace_compaction_failing_logs{@broker})", "{{instance}} failing"),
        ),
    ),
)

GROUPS: Final = Row(
    "Consumer groups",
    (
        lines(
            "Lag in seconds, ten largest",
            "Age of the oldest record that a group has not committed. Needs detail=groups.",
            "s",
            ("topk(10, max by (group) (millrace_group_lag_seconds{@cluster}))", "{{group}}"),
        ),
        lines(
            "Lag in records, ten largest",
            "Records between what a group has committed and the end. Needs detail=groups.",
            "short",
            ("topk(10, max by (group) (millrace_group_lag_records{@cluster}))", "{{group}}"),
        ),
        lines(
            "Lag that is not known",
            "Partitions whose end could not be asked for, by group. Needs detail=groups.",
            "short",
            ("topk(10, max by (group) (millrace_group_lag_unknown_partitions{@cluster}))", "{{group}}"),
        ),
        lines(
            "Groups",
            "By type and state.",
            "short",
            ("sum by (type, state) (millrace_groups{@broker})", "{{type}} {{state}}"),
            width=6,
        ),
        lines(
            "Members",
            "Of all groups, by type.",
            "short",
            ("sum by (type) (millrace_group_members{@broker})", "{{type}}"),
            width=6,
        ),
        lines(
            "Rebalances",
            "New generations or epochs. Many of them: members come and go, or are too slow for their session.",
            "cps",
            ("sum by (type) (rate(millrace_group_rebalances_total{@broker}[@rate]))", "{{type}}"),
            width=6,
        ),
        lines(
            "Offset commits",
            "Committed offsets, one per partition.",
            "cps",
            ("sum by (instance) (rate(millrace_group_offset_commits_total{@broker}[@rate]))", "{{instance}}"),
            width=6,
        ),
    ),
)

QUEUES: Final = Row(
    "Queues (share groups)",
    (
        lines(
            "Delivered",
            "Records that consumers were given; again: for the second time or more.",
            "cps",
            ("sum(rate(millrace_queue_records_delivered_total{@broker}[@rate]))", "delivered"),
            ("sum(rate(millrace_queue_records_redelivered_total{@broker}[@rate]))", "again"),
        ),
        lines(
            "Acknowledged",
            "By what consumers said of the records.",
            "cps",
            ("sum by (kind) (rate(millrace_queue_records_acknowledged_total{@broker}[@rate]))", "{{kind}}"),
        ),
        lines(
            "Given up",
            "Locks that ran out, records that were archived (rejected, or tried too often), and their dead letters.",
            "cps",
            ("sum(rate(millrace_queue_lock_timeouts_total{@broker}[@rate]))", "lock timeouts"),
            ("sum(rate(millrace_queue_records_archived_total{@broker}[@rate]))", "archived"),
            ("sum(rate(millrace_queue_dead_letters_total{@broker}[@rate]))", "dead letters"),
            ("sum(rate(millrace_queue_dead_letter_failures_total{@broker}[@rate]))", "letters that failed"),
        ),
        lines(
            "In flight",
            "Records that consumers have, or that wait to be delivered again.",
            "short",
            ("sum by (instance) (millrace_queue_records_in_flight{@broker})", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "Share-partitions",
            "Partitions as a share group reads them, loaded by their leaders.",
            "short",
            ("sum by (instance) (millrace_queue_partitions{@broker})", "{{instance}}"),
            stacked=True,
        ),
        lines(
            "Backlog, ten largest",
            "Records from a share group's start to the end. Needs detail=groups.",
            "short",
            ("topk(10, sum by (group) (millrace_queue_group_backlog_records{@cluster}))", "{{group}}"),
        ),
    ),
)

TRANSACTIONS: Final = Row(
    "Transactions",
    (
        lines(
            "Open and hanging",
            "Hanging ones are older than transaction.max.timeout.ms: millrace transactions find-hanging.",
            "short",
            ("sum(millrace_transactions_open{@broker})", "open"),
            ("sum(millrace_transactions_hanging{@broker})", "hanging"),
        ),
        lines(
            "Completed",
            "By outcome.",
            "cps",
            ("sum by (outcome) (rate(millrace_transactions_completed_total{@broker}[@rate]))", "{{outcome}}"),
        ),
        lines(
            "Transactional ids",
            "That a broker coordinates. They are forgotten after transactional.id.expiration.ms.",
            "short",
            ("sum by (instance) (millrace_transactional_ids{@broker})", "{{instance}}"),
            stacked=True,
        ),
    ),
)

CONNECTIONS: Final = Row(
    "Connections, logins and quotas",
    (
        lines(
            "Connections",
            "By listener.",
            "short",
            ("sum by (instance, listener) (millrace_connections{@broker})", "{{instance}} {{listener}}"),
            stacked=True,
        ),
        lines(
            "New connections",
            "Clients that come again and again cost more than those that stay, most of all with TLS.",
            "cps",
            ("sum by (listener) (rate(millrace_connections_accepted_total{@broker}[@rate]))", "{{listener}}"),
        ),
        lines(
            "Refused connections",
            "limit: max.connections; rate: they came too fast; tls: no handshake; certificate: it names nobody.",
            "cps",
            (
                "sum by (listener, reason) (rate(millrace_connections_refused_total{@broker}[@rate]))",
                "{{listener}} {{reason}}",
            ),
        ),
        lines(
            "Logins",
            "By mechanism and outcome. Nothing is here where nobody has to log in.",
            "cps",
            (
                "sum by (mechanism, outcome) (rate(millrace_authentications_total{@broker}[@rate]))",
                "{{mechanism}} {{outcome}}",
            ),
        ),
        lines(
            "Throttled",
            "How often clients were told to wait, by quota.",
            "cps",
            ("sum by (quota) (rate(millrace_throttled_total{@broker}[@rate]))", "{{quota}}"),
        ),
        lines(
            "Time throttled",
            "Seconds of waiting that clients were told per second, all of them together.",
            "s",
            ("sum by (quota) (rate(millrace_throttle_seconds_total{@broker}[@rate]))", "{{quota}}"),
        ),
        lines(
            "Audit events lost",
            "What takes them was too slow or failed. Nothing is here where there is no audit log.",
            "cps",
            (
                "sum by (instance, destination) (rate(millrace_audit_events_dropped_total{@broker}[@rate]))",
                "{{instance}} {{destination}}",
            ),
        ),
    ),
)

PROCESS: Final = Row(
    "Process",
    (
        lines(
            "CPU",
            "Of a core. A broker uses one, and a little of others for disks, compression and compaction.",
            "percentunit",
            (
                "sum by (instance, mode) (rate(millrace_process_cpu_seconds_total{@broker}[@rate]))",
                "{{instance}} {{mode}}",
            ),
            stacked=True,
        ),
        lines(
            "Loop lag",
            "How much later than asked for timers run: how long everything waits behind something.",
            "s",
            (quantile(0.99, "millrace_loop_lag_seconds", "instance"), "{{instance}} p99"),
            (quantile(0.5, "millrace_loop_lag_seconds", "instance"), "{{instance}} median"),
        ),
        lines(
            "Memory",
            "In RAM. What the system caches of the logs is not counted here.",
            "bytes",
            ("sum by (instance) (millrace_process_resident_memory_bytes{@broker})", "{{instance}}"),
        ),
        lines(
            "File descriptors",
            "Open ones, and how many there may be.",
            "short",
            ("sum by (instance) (millrace_process_open_fds{@broker})", "{{instance}}"),
            ("min(millrace_process_max_fds{@broker})", "limit"),
        ),
        lines(
            "What a scrape costs",
            "How long it took to collect, and for how long the event loop was held at a time.",
            "s",
            ("max by (instance) (millrace_scrape_seconds{@broker})", "{{instance}} collected in"),
            ("max by (instance) (millrace_scrape_loop_held_seconds{@broker})", "{{instance}} loop held"),
        ),
        lines(
            "Scrape errors",
            "Parts of the metrics that could not be collected.",
            "cps",
            ("sum by (part) (rate(millrace_scrape_errors_total{@broker}[@rate]))", "{{part}}"),
        ),
    ),
)

# --- topics, partitions and groups, one by one ------------------------------------------------------------------------


def top_topics(query: str) -> Query:
    return f"topk(10, sum by (topic) ({query}))", "{{topic}}"


def of_partition(aggregate: str, name: str) -> str:
    """A number that every replica tells, taken once."""
    return f'{aggregate} by (topic, partition) (millrace_partition_{name}{{@cluster,topic=~"$topic"}})'


def busiest_partitions(name: str) -> Query:
    rate = f'rate(millrace_partition_{name}_total{{@cluster,topic=~"$topic"}}[@rate])'
    return f"topk(10, sum by (topic, partition) ({rate}))", "{{topic}}-{{partition}}"


TOPICS: Final = Row(
    "Topics (detail=topics)",
    (
        lines(
            "Bytes in, ten busiest",
            "What clients produce to a topic.",
            "Bps",
            top_topics('rate(millrace_topic_bytes_in_total{@cluster,topic=~"$topic"}[@rate])'),
        ),
        lines(
            "Bytes out, ten busiest",
            "What consumers are sent of a topic.",
            "Bps",
            top_topics('rate(millrace_topic_bytes_out_total{@cluster,topic=~"$topic"}[@rate])'),
        ),
        lines(
            "Size, ten largest",
            "All replicas together.",
            "bytes",
            top_topics('millrace_topic_size_bytes{@cluster,topic=~"$topic"}'),
        ),
        lines(
            "Records in, ten busiest",
            "What clients produce to a topic.",
            "cps",
            top_topics('rate(millrace_topic_records_in_total{@cluster,topic=~"$topic"}[@rate])'),
        ),
        lines(
            "Records out, ten busiest",
            "What consumers are sent of a topic.",
            "cps",
            top_topics('rate(millrace_topic_records_out_total{@cluster,topic=~"$topic"}[@rate])'),
        ),
        lines(
            "Leaders by broker",
            "Partitions of the chosen topics that each broker leads.",
            "short",
            ('sum by (instance) (millrace_topic_leaders{@cluster,topic=~"$topic"})', "{{instance}}"),
            stacked=True,
        ),
    ),
    closed=False,
)

PARTITIONS: Final = Row(
    "Partitions (detail=partitions)",
    (
        table(
            "Partitions",
            "As their leaders tell it: how many replicas there should be and how many are in sync, and the offsets "
            "where the log starts, up to which records are committed, and which the next one gets.",
            "short",
            (of_partition("max", "replicas"), "replicas"),
            (of_partition("max", "isr"), "in sync"),
            (of_partition("max", "log_start_offset"), "log start"),
            (of_partition("max", "high_watermark"), "high watermark"),
            (of_partition("max", "log_end_offset"), "log end"),
            (of_partition("sum", "leader"), "leaders"),
            height=10,
        ),
        lines(
            "Records in, ten busiest",
            "A partition that gets far more than the others has a key that is too popular.",
            "cps",
            busiest_partitions("records_in"),
        ),
        lines(
            "Bytes in, ten busiest",
            "What clients produce.",
            "Bps",
            busiest_partitions("bytes_in"),
        ),
        lines(
            "Size of a replica, ten largest",
            "The largest of its replicas.",
            "bytes",
            (f"topk(10, {of_partition('max', 'size_bytes')})", "{{topic}}-{{partition}}"),
        ),
        lines(
            "Records out, ten busiest",
            "What consumers are sent.",
            "cps",
            busiest_partitions("records_out"),
        ),
        lines(
            "Bytes out, ten busiest",
            "What consumers are sent.",
            "Bps",
            busiest_partitions("bytes_out"),
        ),
        lines(
            "Replicas that are missing",
            "How many of a partition are not in sync.",
            "short",
            (f"topk(10, {of_partition('max', 'replicas')} - {of_partition('max', 'isr')})", "{{topic}}-{{partition}}"),
        ),
    ),
)


def of_group(aggregate: str, name: str) -> str:
    return f'{aggregate} by (group) ({name}{{@cluster,group=~"$group"}})'


def of_group_partition(before: str, after: str = "") -> str:
    return f'max by (group, topic, partition) ({before}{{@cluster,group=~"$group",topic=~"$topic"}}{after})'


GROUP_DETAILS: Final = Row(
    "Groups (detail=groups, detail=group-partitions)",
    (
        table(
            "Groups",
            "Type and state of each group, and how many members it has.",
            "short",
            (
                'max by (group, type, state) (millrace_group_info{@cluster,group=~"$group"})'
                " * on (group) group_left () " + of_group("max", "millrace_group_member_count"),
                "members",
            ),
            width=12,
            height=10,
        ),
        table(
            "Lag",
            "Records and seconds that each group is behind, and of how many partitions that is not known.",
            "short",
            (of_group("max", "millrace_group_lag_records"), "records"),
            (of_group("max", "millrace_group_lag_seconds"), "seconds"),
            (of_group("max", "millrace_group_lag_unknown_partitions"), "unknown partitions"),
            width=12,
            height=10,
        ),
        lines(
            "Lag in seconds",
            "Age of the oldest record that a group has not committed.",
            "s",
            (of_group("max", "millrace_group_lag_seconds"), "{{group}}"),
        ),
        lines(
            "Lag in records",
            "Records between what a group has committed and the end.",
            "short",
            (of_group("max", "millrace_group_lag_records"), "{{group}}"),
        ),
        lines(
            "Read per second",
            "How fast a group's committed offsets move.",
            "cps",
            (
                f"sum by (group) ({of_group_partition('deriv(millrace_group_partition_committed_offset', '[@rate])')})",
                "{{group}}",
            ),
        ),
        lines(
            "Lag by partition in records, ten largest",
            "One partition that stays behind: its consumer is stuck, or its key too popular.",
            "short",
            (
                f"topk(10, {of_group_partition('millrace_group_partition_lag_records')})",
                "{{group}} {{topic}}-{{partition}}",
            ),
        ),
        lines(
            "Lag by partition in seconds, ten largest",
            "Age of the oldest record that is not committed.",
            "s",
            (
                f"topk(10, {of_group_partition('millrace_group_partition_lag_seconds')})",
                "{{group}} {{topic}}-{{partition}}",
            ),
        ),
        lines(
            "Queues: backlog and in flight",
            "Of share groups: records from the start to the end, and those that consumers have.",
            "short",
            (of_group("sum", "millrace_queue_group_backlog_records"), "{{group}} backlog"),
            (of_group("sum", "millrace_queue_group_records_in_flight"), "{{group}} in flight"),
        ),
    ),
    closed=False,
)

# --- both -------------------------------------------------------------------------------------------------------------

CLUSTER_VARIABLE: Final = Variable("cluster", "Cluster", 'label_values({__name__=~"millrace_.+"}, cluster)')

DASHBOARDS: Final = (
    Dashboard(
        "millrace",
        "millrace",
        "A cluster of millrace: is it well, what does it do, and where does the time go.",
        (
            CLUSTER_VARIABLE,
            Variable("job", "Job", 'label_values({__name__=~"millrace_.+",cluster=~"$cluster"}, job)'),
            Variable("broker", "Broker", "label_values(millrace_build_info{@cluster}, instance)"),
            Variable("api", "API", "label_values(millrace_requests_total{@broker}, api)", ("Fetch", "Produce")),
        ),
        (HEALTH, TRAFFIC, REQUESTS, REPLICATION, STORAGE, GROUPS, QUEUES, TRANSACTIONS, CONNECTIONS, PROCESS),
    ),
    Dashboard(
        "millrace-details",
        "millrace: topics and groups",
        "Topics, partitions and groups one by one: what brokers tell when they are asked for details.",
        (
            CLUSTER_VARIABLE,
            Variable(
                "job",
                "Job",
                'label_values({__name__=~"millrace_topic_leaders|millrace_group_info",cluster=~"$cluster"}, job)',
            ),
            Variable("topic", "Topic", "label_values(millrace_topic_leaders{@cluster}, topic)"),
            Variable("group", "Group", "label_values(millrace_group_info{@cluster}, group)"),
        ),
        (TOPICS, GROUP_DETAILS, PARTITIONS),
    ),
)
