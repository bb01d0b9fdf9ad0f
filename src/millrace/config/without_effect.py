"""Kafka 4.3's broker settings that have no effect here, by name: known, checked, kept and described, and that is all.

An administrator's tools and files name them, so a name has to be told from a typing error, and a wrong value from a
right one. A row is name, type, default, where it may change, and its limits; `internal` are those that Kafka neither
describes nor documents. Settings that do something are in `table`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from millrace.config.setting import Check, Kind, Scope, Setting, Update, Value, at_least, between, parse_value

NO_EFFECT: Final = " Accepted so that existing files work; it has no effect here."
"""The end of the text of each setting that nothing reads; a test finds whoever does not say so, or need not."""
ONLY_DEFAULT: Final = " No other value than the default is possible."
"""The same for settings that need no reader, because their rule refuses every other value."""

_KRAFT: Final = """
controller.listener.names list none read-only -
controller.performance.always.log.threshold.ms long 2000 read-only >=0 internal
controller.performance.sample.period.ms long 60000 read-only >=100 internal
controller.quorum.append.linger.ms int 25 read-only >=0
controller.quorum.auto.join.enable boolean false read-only -
controller.quorum.bootstrap.servers list empty read-only -
controller.quorum.election.backoff.max.ms int 1000 read-only >=0
controller.quorum.election.timeout.ms int 1000 read-only >=0
controller.quorum.fetch.max.bytes int 1048576 read-only >=1
controller.quorum.fetch.snapshot.max.bytes int 1048576 read-only >=1
controller.quorum.fetch.timeout.ms int 2000 read-only >=0
controller.quorum.request.timeout.ms int 2000 read-only >=0
controller.quorum.retry.backoff.ms int 20 read-only >=0
controller.quorum.voters list empty read-only -
controller.socket.timeout.ms int 30000 read-only -
early.start.listeners list none read-only -
initial.broker.registration.timeout.ms int 60000 read-only -
internal.metadata.delete.delay.millis long 60000 read-only - internal
internal.metadata.log.segment.bytes int none read-only - internal
internal.metadata.max.batch.size.in.bytes int 8388608 read-only - internal
metadata.log.dir string none read-only -
metadata.log.max.record.bytes.between.snapshots long 20971520 read-only >=1
metadata.log.max.snapshot.interval.ms long 3600000 read-only >=0
metadata.log.segment.bytes int 1073741824 read-only >=8388608
metadata.log.segment.ms long 604800000 read-only -
metadata.max.idle.interval.ms int 500 read-only >=0
metadata.max.retention.bytes long 104857600 read-only -
metadata.max.retention.ms long 604800000 read-only -
process.roles list none read-only -
sasl.mechanism.controller.protocol string GSSAPI read-only -
server.max.startup.time.ms long 9223372036854775807 read-only >=0 internal
unclean.leader.election.interval.ms long 300000 read-only >=1 internal
unstable.api.versions.enable boolean false read-only - internal
unstable.feature.versions.enable boolean false read-only - internal
"""

_TIERED: Final = """
follower.fetch.last.tiered.offset.enable boolean false cluster-wide -
remote.fetch.max.wait.ms int 500 cluster-wide >=1
remote.list.offsets.request.timeout.ms long 30000 cluster-wide >=1
remote.log.index.file.cache.total.size.bytes long 1073741824 cluster-wide >=1
remote.log.index.file.cache.ttl.ms long 900000 read-only >=-1 internal
remote.log.manager.copier.thread.pool.size int 10 cluster-wide >=1
remote.log.manager.copy.max.bytes.per.second long 9223372036854775807 cluster-wide >=1
remote.log.manager.copy.quota.window.num int 11 read-only >=1
remote.log.manager.copy.quota.window.size.seconds int 1 read-only >=1
remote.log.manager.expiration.thread.pool.size int 10 cluster-wide >=1
remote.log.manager.fetch.max.bytes.per.second long 9223372036854775807 cluster-wide >=1
remote.log.manager.fetch.quota.window.num int 11 read-only >=1
remote.log.manager.fetch.quota.window.size.seconds int 1 read-only >=1
remote.log.manager.follower.thread.pool.size int 2 cluster-wide >=1
remote.log.manager.task.interval.ms long 30000 read-only >=1
remote.log.manager.task.retry.backoff.max.ms long 30000 read-only >=1 internal
remote.log.manager.task.retry.backoff.ms long 500 read-only >=1 internal
remote.log.manager.task.retry.jitter double 0.2 read-only 0..0.5 internal
remote.log.manager.thread.pool.size int 2 read-only >=1
remote.log.metadata.custom.metadata.max.bytes int 128 read-only >=0
remote.log.metadata.manager.class.name string \
    org.apache.kafka.server.log.remote.metadata.storage.TopicBasedRemoteLogMetadataManager read-only -
remote.log.metadata.manager.class.path string none read-only -
remote.log.metadata.manager.impl.prefix string rlmm.config. read-only -
remote.log.metadata.manager.listener.name string none read-only -
remote.log.reader.max.pending.tasks int 100 read-only >=1
remote.log.reader.threads int 10 cluster-wide >=1
remote.log.storage.manager.class.name string none read-only -
remote.log.storage.manager.class.path string none read-only -
remote.log.storage.manager.impl.prefix string rsm.config. read-only -
remote.log.storage.system.enable boolean false read-only -
"""

_STREAMS: Final = """
group.streams.assignment.interval.ms int 1000 cluster-wide >=0
group.streams.heartbeat.interval.ms int 5000 read-only >=1
group.streams.initial.rebalance.delay.ms int 3000 read-only >=0
group.streams.max.assignment.interval.ms int 15000 read-only >=0
group.streams.max.heartbeat.interval.ms int 15000 read-only >=1
group.streams.max.session.timeout.ms int 60000 read-only >=1
group.streams.max.size int 2147483647 read-only >=1
group.streams.max.standby.replicas int 2 read-only >=0
group.streams.min.assignment.interval.ms int 0 read-only >=0
group.streams.min.heartbeat.interval.ms int 5000 read-only >=1
group.streams.min.session.timeout.ms int 45000 read-only >=1
group.streams.num.standby.replicas int 0 read-only >=0
group.streams.session.timeout.ms int 45000 read-only >=1
"""

_METRICS: Final = """
kafka.metrics.polling.interval.secs int 10 read-only >=1
kafka.metrics.reporters list empty read-only -
metric.reporters list org.apache.kafka.common.metrics.JmxReporter cluster-wide -
metrics.num.samples int 2 read-only >=1
metrics.recording.level string INFO read-only -
metrics.sample.window.ms long 30000 read-only >=1
"""

_PLUGINS: Final = """
alter.config.policy.class.name class none read-only -
client.quota.callback.class class none read-only -
config.providers list empty cluster-wide -
create.topic.policy.class.name class none read-only -
group.share.persister.class.name string \
    org.apache.kafka.server.share.persister.DefaultStatePersister read-only - internal
principal.builder.class class org.apache.kafka.common.security.authenticator.DefaultKafkaPrincipalBuilder per-broker -
sasl.client.callback.handler.class class none read-only -
sasl.login.callback.handler.class class none read-only -
sasl.login.class class none read-only -
sasl.oauthbearer.jwt.retriever.class class org.apache.kafka.common.security.oauthbearer.DefaultJwtRetriever read-only -
sasl.oauthbearer.jwt.validator.class class org.apache.kafka.common.security.oauthbearer.DefaultJwtValidator read-only -
sasl.server.callback.handler.class class none read-only -
"""

_KERBEROS: Final = """
sasl.kerberos.kinit.cmd string /usr/bin/kinit per-broker -
sasl.kerberos.min.time.before.relogin long 60000 per-broker -
sasl.kerberos.principal.to.local.rules list DEFAULT per-broker -
sasl.kerberos.service.name string none per-broker -
sasl.kerberos.ticket.renew.jitter double 0.05 per-broker -
sasl.kerberos.ticket.renew.window.factor double 0.8 per-broker -
"""

_LOGINS_OF_CLIENTS: Final = """
sasl.login.connect.timeout.ms int none read-only -
sasl.login.read.timeout.ms int none read-only -
sasl.login.refresh.buffer.seconds short 300 per-broker -
sasl.login.refresh.min.period.seconds short 60 per-broker -
sasl.login.refresh.window.factor double 0.8 per-broker -
sasl.login.refresh.window.jitter double 0.05 per-broker -
sasl.login.retry.backoff.max.ms long 10000 read-only -
sasl.login.retry.backoff.ms long 100 read-only -
sasl.oauthbearer.assertion.algorithm string RS256 read-only -
sasl.oauthbearer.assertion.claim.aud string none read-only -
sasl.oauthbearer.assertion.claim.exp.seconds int 300 read-only 0..86400
sasl.oauthbearer.assertion.claim.iss string none read-only -
sasl.oauthbearer.assertion.claim.jti.include boolean false read-only -
sasl.oauthbearer.assertion.claim.nbf.seconds int 60 read-only 0..3600
sasl.oauthbearer.assertion.claim.sub string none read-only -
sasl.oauthbearer.assertion.file string none read-only -
sasl.oauthbearer.assertion.private.key.file string none read-only -
sasl.oauthbearer.assertion.private.key.passphrase password none read-only -
sasl.oauthbearer.assertion.template.file string none read-only -
sasl.oauthbearer.client.credentials.client.id string none read-only -
sasl.oauthbearer.client.credentials.client.secret password none read-only -
sasl.oauthbearer.scope string none read-only -
sasl.oauthbearer.token.endpoint.url string none read-only -
sasl.oauthbearer.scope.claim.name string scope read-only -
"""

_JAVA_TLS: Final = """
security.providers string none read-only -
ssl.engine.factory.class class none per-broker -
ssl.keymanager.algorithm string SunX509 per-broker -
ssl.protocol string TLSv1.3 per-broker -
ssl.provider string none per-broker -
ssl.secure.random.implementation string none per-broker -
ssl.trustmanager.algorithm string PKIX per-broker -
"""

_LACKING: Final = """
cordoned.log.dirs list empty per-broker -
transaction.two.phase.commit.enable boolean false read-only -
"""

_INSIDE: Final = """
alter.log.dirs.replication.quota.window.num int 11 read-only >=1
alter.log.dirs.replication.quota.window.size.seconds int 1 read-only >=1
delete.records.purgatory.purge.interval.requests int 1 read-only -
fetch.purgatory.purge.interval.requests int 1000 read-only -
group.coordinator.background.threads int 2 read-only >=1
group.coordinator.cached.buffer.max.bytes int 1048588 cluster-wide >=524288
group.share.initialize.retry.interval.ms int 30000 read-only >=1 internal
num.replica.alter.log.dirs.threads int none read-only -
producer.id.expiration.check.interval.ms int 600000 read-only >=1 internal
producer.purgatory.purge.interval.requests int 1000 read-only -
socket.connection.setup.timeout.max.ms long 30000 read-only -
socket.connection.setup.timeout.ms long 10000 read-only -
transaction.state.log.load.buffer.size int 5242880 read-only >=1
"""

_GROUPS: Final = (
    ("Of KRaft, Kafka's own quorum; metadata is kept in ZooKeeper or by a single broker.", _KRAFT),
    ("Of tiered storage; records lie in the log directories only.", _TIERED),
    ("Of Kafka Streams groups (KIP-1071), which are not served.", _STREAMS),
    ("Of Kafka's metrics and reporters, which do not exist here.", _METRICS),
    ("Names Java code for Kafka to load; none is loaded.", _PLUGINS),
    ("Of Kerberos (GSSAPI), which is not available: a listener that asks for it is refused.", _KERBEROS),
    ("Of how Java clients fetch tokens; brokers log in to each other by PLAIN or SCRAM.", _LOGINS_OF_CLIENTS),
    ("Of TLS in Java; here it is OpenSSL's.", _JAVA_TLS),
    ("Of something that Kafka can do and this broker cannot.", _LACKING),
    ("Of how Kafka works inside, where it works otherwise here.", _INSIDE),
)


def has_no_effect(setting: Setting) -> bool:
    """Whether a setting's own text says that it does nothing."""
    return NO_EFFECT in setting.doc


def settings_without_effect() -> Iterator[Setting]:
    """The rows as settings, each with a text that says why it does nothing."""
    for doc, rows in _GROUPS:
        for row in rows.strip().splitlines():
            yield _setting(row, doc + NO_EFFECT)


def _setting(row: str, doc: str) -> Setting:
    name, kind, default, update, limits, *rest = row.split()
    setting = Setting(
        name, Kind[kind.upper()], None, doc, Scope.BROKER, _check(limits), Update(update), hidden=bool(rest)
    )
    return replace(setting, default=_default(setting, default))


def _default(setting: Setting, text: str) -> Value:
    if text == "none":
        return None
    return parse_value(setting, "" if text == "empty" else text)


def _check(limits: str) -> Check | None:
    """`>=1` and `0..0.5` are limits, `-` is none."""
    if limits == "-":
        return None
    if limits.startswith(">="):
        return at_least(int(limits[2:]))
    low, high = map(float, limits.split(".."))
    return between(low, high)
