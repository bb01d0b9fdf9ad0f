"""What changes in a cluster's security while records flow: certificates, their authority, and whether there is any.

None of it is a fault, and none of it may show: no record fails. Brokers are killed in between, so that everybody has to
connect anew with what is there by then.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)

from cluster.faults import Row, Variant
from cluster.rounds import FULL, Fault, Result, Scale, Stage, run_round
from cluster.workload import CLIENT
from millrace.local.ports import free_ports
from millrace.local.secured import APPLICATION_RULES
from millrace.metadata.zookeeper_access import ZooKeeperAccess
from millrace.security.certificates import Authority, make_authority, write_public
from support.cluster_processes import PASSWORDS, RULES, BrokerProcess, ClusterProcesses
from support.servers import HOST, ServerFailed

SHORT_SECURITY: Final = Scale(acked=5_000, bounces=1, rate=400, session_timeout_ms=6000, outage_s=0)
_SEEN_WITHIN_S: Final = 10.0
_IN_SYNC_S: Final = 30.0
SECURED: Final = "SECURED"
"""The listener that a plain cluster gets."""

# --- certificates -----------------------------------------------------------------------------------------------------


def rotate_certificates(stage: Stage) -> None:
    """New certificates, a second authority beside the first, certificates of the second, the second alone."""
    cluster = stage.cluster
    old = cluster.authority
    new = make_authority("the authority")  # of the same name: only the keys differ
    for broker in cluster.brokers.values():
        _certify(stage, broker, old)
    stage.mark("every broker has a new certificate")
    _kill_leader(stage)
    _trust(stage, old.certificate + new.certificate)
    stage.mark("two authorities are trusted")
    for broker in cluster.brokers.values():
        _certify(stage, broker, new)
    stage.mark("every broker has a certificate of the new one")
    _kill_leader(stage)
    _trust(stage, new.certificate)
    stage.mark("only the new one is trusted")
    _kill_leader(stage)
    for broker in cluster.brokers.values():
        _check_refused(broker, old)
    cluster.authority = new


def _certify(stage: Stage, broker: BrokerProcess, authority: Authority) -> None:
    """A new certificate for a broker; returns when it shows it."""
    since = broker.log_size()
    certificate = stage.cluster.certify(broker, authority)
    _wait_taken(broker, since)
    for port in (broker.client_port, broker.replication_port):
        if ssl.get_server_certificate((HOST, port)).strip().encode() != certificate.strip():
            raise ServerFailed(f"{broker} shows another certificate at {port} than the one it has got")


def _trust(stage: Stage, authorities: bytes) -> None:
    """Brokers take new authorities while they run, one by one; librdkafka's clients when they are started."""
    for broker in stage.cluster.brokers.values():
        since = broker.log_size()
        write_public(broker.trust_path, authorities)
        _wait_taken(broker, since)
    write_public(stage.cluster.security.authorities, authorities)
    stage.clients.replace(stage.cluster.client_settings)


def _wait_taken(broker: BrokerProcess, since: int) -> None:
    for listener in ("CLIENT", "REPLICATION"):
        broker.wait_logged(f"listener {listener} shows the certificate", _SEEN_WITHIN_S, since=since)


def _kill_leader(stage: Stage) -> None:
    leader = stage.leader()
    stage.mark(f"kill -9 of leader {leader}")
    stage.cluster.kill(leader)
    stage.goes_on()
    stage.cluster.start_brokers([leader])
    stage.cluster.wait_whole(stage.topic, _IN_SYNC_S)


def _check_refused(broker: BrokerProcess, authority: Authority) -> None:
    try:
        ssl.get_server_certificate((HOST, broker.client_port), ca_certs=_as_file(broker, authority))
    except ssl.SSLCertVerificationError:
        return
    raise ServerFailed(f"{broker} still shows a certificate of the authority that is gone")


def _as_file(broker: BrokerProcess, authority: Authority) -> str:
    path = broker.directory / "gone.pem"
    write_public(path, authority.certificate)
    return str(path)


# --- from plain to secured --------------------------------------------------------------------------------------------


def secure(stage: Stage) -> None:
    """A plain cluster becomes a secured one; this is the order that docs/security.md describes.

    1. Restart one by one: `listeners`, `advertised.listeners` and `listener.security.protocol.map` get a listener with
       SASL_SSL beside the plain ones, with its certificates (`ssl.keystore.location`, `ssl.truststore.location`),
       `sasl.enabled.mechanisms`, and what brokers will need to call each other there
       (`sasl.mechanism.inter.broker.protocol`, `listener.name.secured.scram-sha-512.sasl.jaas.config`). Brokers get a
       login to ZooKeeper (`zookeeper.digest.username`, `.password`) with `zookeeper.set.acl=false`: a broker without it
       must still read what they write.
    2. Restart one by one: `zookeeper.set.acl=true`. The first one closes all znodes, which by now all brokers can open.
       Nothing secret has been in them.
    3. The users, by a client on the plain listener: those of brokers, administrators and applications.
    4. Restart one by one: `inter.broker.listener.name` is the new listener. The same restart brings
       `authorizer.class.name` and `super.users` (brokers and administrators), with
       `allow.everyone.if.no.acl.found=true`: there are no rules yet, so clients and brokers on the plain listener, who
       have no name, may still do everything.
    5. Clients move to the new listener, each when it likes.
    6. The rules, by an administrator on the new listener. From here on nobody without a name gets anything.
    7. Restart one by one: the plain listeners and `allow.everyone.if.no.acl.found` go.
    """
    cluster = stage.cluster
    cluster.make_certificates()
    steps = _Steps(stage)
    access = cluster.zookeeper_access = ZooKeeperAccess("brokers", "znodes-of-brokers", set_acl=True)
    steps.add(replace(access, set_acl=False).as_settings())
    steps.add_listener()
    steps.roll("a second listener, and a login to ZooKeeper")
    steps.add(access.as_settings())
    steps.roll("znodes are closed")
    _make_users(AdminClient({**cluster.admin_settings, **CLIENT}))
    steps.add({"inter.broker.listener.name": SECURED, "allow.everyone.if.no.acl.found": "true", **RULES})
    steps.roll("brokers call each other on the new listener, and ask for rules")
    steps.turn_to_listener()
    stage.clients.replace(cluster.client_settings)
    stage.mark("clients have moved")
    _make_rules(AdminClient({**cluster.admin_settings, **CLIENT}))
    steps.remove_others()
    steps.roll("nothing is plain any more")


class _Steps:
    """The settings of every broker, as they change from restart to restart."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._cluster = stage.cluster
        self._ports = dict(zip(self._cluster.brokers, free_ports(HOST, len(self._cluster.brokers)), strict=True))
        self._settings = {number: self._cluster.settings(each) for number, each in self._cluster.brokers.items()}

    def add(self, settings: Mapping[str, str]) -> None:
        for each in self._settings.values():
            each.update(settings)

    def add_listener(self) -> None:
        for broker_id, settings in self._settings.items():
            for name in ("listeners", "advertised.listeners"):
                settings[name] += f",{SECURED}://{HOST}:{self._ports[broker_id]}"
            settings["listener.security.protocol.map"] += f",{SECURED}:SASL_SSL"
            settings.update(self._cluster.login_settings(self._cluster.brokers[broker_id], SECURED.lower()))

    def turn_to_listener(self) -> None:
        """Whoever asks for the cluster's addresses is sent to the new listener."""
        for broker_id, broker in self._cluster.brokers.items():
            broker.client_port = broker.advertised_port = self._ports[broker_id]
        self._cluster.asks_for_login = True

    def remove_others(self) -> None:
        for broker_id, settings in self._settings.items():
            for name in ("listeners", "advertised.listeners"):
                settings[name] = f"{SECURED}://{HOST}:{self._ports[broker_id]}"
            settings["listener.security.protocol.map"] = f"{SECURED}:SASL_SSL"
            del settings["allow.everyone.if.no.acl.found"]

    def roll(self, what: str) -> None:
        """Restart one broker after the other; nobody is missed between two of them."""
        for broker_id, broker in self._cluster.brokers.items():
            broker.terminate()
            broker.configure(self._settings[broker_id])
            self._cluster.start_brokers([broker_id])
            self._cluster.wait_whole(self._stage.topic, _IN_SYNC_S)
        self._stage.goes_on()
        self._stage.mark(what)


def _make_users(admin: AdminClient) -> None:
    login = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 4096)
    users: list[UserScramCredentialAlteration] = [
        UserScramCredentialUpsertion(user, login, word.encode()) for user, word in PASSWORDS.items()
    ]
    for made in admin.alter_user_scram_credentials(users).values():
        made.result(30)


def _make_rules(admin: AdminClient) -> None:
    rules = [
        AclBinding(
            ResourceType(acl.resource),
            acl.name,
            ResourcePatternType(acl.pattern),
            acl.principal,
            acl.host,
            AclOperation(acl.operation),
            AclPermissionType(acl.permission),
        )
        for acl in APPLICATION_RULES
    ]
    for made in admin.create_acls(rules).values():
        made.result(30)


# --- a round ----------------------------------------------------------------------------------------------------------


def run_security_round(cluster: ClusterProcesses, fault: Fault, scale: Scale, seed: int = 0) -> Result:
    """A round in which no record may fail, nor a login."""
    result = run_round(cluster, fault, scale, seed)
    if result.report.failed or result.report.unknown:
        result.failures.append(f"{result.report.failed} records failed, of {result.report.unknown} it is not known")
    result.failures += complaints(cluster)
    return result


def complaints(cluster: ClusterProcesses) -> list[str]:
    """Lines of brokers' logs that tell of a login that failed, or a secret."""
    wrong = ("could not log in", *PASSWORDS.values(), cluster.zookeeper_access.password)
    return [
        f"{broker}: {line}"
        for broker in cluster.brokers.values()
        for line in broker.log_path.read_text().splitlines()
        if any(each in line for each in wrong if each)
    ]


SECURITY_ROWS: Final = (
    Row(
        "certificates and their authority replaced",
        (Variant("certificates rotated", rotate_certificates, secured=True),),
        2,
        30_000,
        SHORT_SECURITY,
        FULL,
        run_security_round,
    ),
)
