"""What makes the brokers of a folder secure, `millrace up --secure`: certificates, users, and settings for both sides.

    DATA/security/ca.pem                the certificate authority: what clients have to trust
    DATA/security/ca.key                its key: whoever has it can be a broker
    DATA/security/broker.pem            key and certificate of the brokers, which all run on this machine
    DATA/security/users.json            the users that were made, and their passwords
    DATA/security/tokens.key            from which the passwords of delegation tokens follow
    DATA/security/prepared              that the users have been written into the metadata log
    DATA/security/client.properties     how the application user logs in: for Java,
    DATA/security/librdkafka.json       for librdkafka (confluent-kafka and others),
    DATA/security/spark.json            for Spark's `format("millrace")` and `format("kafka")`
    DATA/security/admin.properties      how the administrator does,
    DATA/security/admin.json            and the same for librdkafka and `millrace` commands

Three users log in by SCRAM: `admin`, who may do everything; `app`, who may use every topic, group and transactional id
but neither sees nor changes anything else of the cluster; and `broker`, as which the brokers log in to each other. They
have to exist before the first broker starts, so they are written into the metadata log while none runs
(`cluster.offline`).

Invariants
- **What is there is kept**, and what is missing is made; a start that was killed half way is taken up by the next. The
  authority that clients trust is never replaced: where half of it is missing, that is an error. The certificate of the
  brokers is replaced when it is about to end, also while they run, when another address is to be listened on, and when
  it is not the authority's.
- **The metadata log says who may log in.** The passwords here are written into it once. A password that was changed
  there later stays changed; files here then have the old one, and a start says so. Only `broker` is set right, because
  nobody else uses it.
- Keys and passwords are readable by their owner alone, and so is what the brokers keep: a rule guards a topic, and not
  the file that its records are in.
"""

from __future__ import annotations

import hmac
import json
import logging
import secrets
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from millrace.clock import Clock
from millrace.cluster.image import ClusterImage
from millrace.cluster.offline import change_offline
from millrace.errors import ConfigError
from millrace.local.brokers import write_properties
from millrace.metadata.deltas import AclsChanged, Change, ScramChanged
from millrace.metadata.store import MetadataStore
from millrace.security.acls import CLUSTER_NAME, WILDCARD, Acl, Operation, PatternKind, Permission, ResourceKind
from millrace.security.certificates import (
    Authority,
    is_good_for,
    is_issued_by,
    make_authority,
    remove_drafts,
    write_private,
    write_public,
)
from millrace.security.scram import ScramCredential, ScramMechanism, credential_of, new_credential, salted_password

logger = logging.getLogger(__name__)

FOLDER: Final = "security"
ADMIN: Final = "admin"
APPLICATION: Final = "app"
BROKER: Final = "broker"
LISTENER: Final = "SASL_SSL"
MECHANISM: Final = ScramMechanism.SCRAM_SHA_512
_DAYS: Final = 397
"""Longer than this, some clients do not believe a server's certificate."""
_RENEWED_WITH_DAYS_LEFT: Final = 60
_LOOK_EVERY_S: Final = 24 * 3600.0
_PREPARED: Final = "prepared"
_USERS: Final = "users.json"
_TOKENS: Final = "tokens.key"
_AUTHORITY: Final = "millrace"
_SCRAM_MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"

CLIENT_FILES: Final = {
    "client.properties": "the application user, for Java",
    "librdkafka.json": "the same for confluent-kafka and others on librdkafka",
    "spark.json": "the same as options of Spark's source and sink",
    "ca.pem": "the authority that clients trust",
    "admin.properties": "the administrator, for Kafka's tools",
    "admin.json": "the same for millrace commands: millrace profile set admin --from FILE",
}
"""What clients are given, and what it is."""
_WRITTEN: Final = (*CLIENT_FILES, "ca.key", "broker.pem", _USERS, _TOKENS, _PREPARED)


@dataclass(frozen=True, slots=True)
class Secured:
    """The security of one folder, in place."""

    directory: Path
    names: tuple[str, ...]
    """By which clients may call the brokers."""
    passwords: Mapping[str, str] = field(repr=False)
    token_secret: str = field(repr=False)

    @property
    def authorities(self) -> Path:
        return self.directory / "ca.pem"

    def console_settings(self) -> dict[str, str]:
        """How a console reaches the brokers; who uses it logs in there."""
        return {
            "security.protocol": LISTENER,
            "ssl.ca.location": str(self.authorities),
            "sasl.mechanism": MECHANISM.label,
        }

    def broker_settings(self) -> dict[str, str]:
        """What each broker is told, besides its address."""
        own = f"listener.name.{LISTENER.lower()}"
        return {
            "inter.broker.listener.name": LISTENER,
            "sasl.enabled.mechanisms": ",".join(mechanism.label for mechanism in reversed(ScramMechanism)),
            "sasl.mechanism.inter.broker.protocol": MECHANISM.label,
            f"{own}.{MECHANISM.label.lower()}.sasl.jaas.config": jaas(BROKER, self.passwords[BROKER]),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.directory / "broker.pem"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authorities),
            "delegation.token.secret.key": self.token_secret,
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": f"User:{ADMIN};User:{BROKER}",
        }

    def listener(self, address: str, port: int) -> str:
        return f"{LISTENER}://{address}:{port}"

    async def prepare(self, store: MetadataStore, clock: Clock) -> list[str]:
        """Before brokers start: see that they find their users. Those whose password is not the one here any more."""
        prepared = self.directory / _PREPARED
        anew = not prepared.exists()
        image = await change_offline(store, lambda found: self._changes(found, anew=anew), clock)
        if anew:
            write_public(prepared, b"")
        return [user for user, password in self.passwords.items() if not _logs_in(image, user, password)]

    def _changes(self, image: ClusterImage, *, anew: bool) -> tuple[Change, ...]:
        if anew or (BROKER, MECHANISM) not in image.users:  # or the data was removed, and this was not
            users = [change for user in self.passwords for change in self._password_of(user)]
            return (*users, AclsChanged(added=APPLICATION_RULES))
        return () if _logs_in(image, BROKER, self.passwords[BROKER]) else self._password_of(BROKER)

    def _password_of(self, user: str) -> tuple[Change, ...]:
        password = self.passwords[user]
        return tuple(ScramChanged(user, each, new_credential(each, password)) for each in ScramMechanism)

    def close_to_others(self, home: Path) -> None:
        """Have the folder of a broker for this user alone, from its first moment or from now on."""
        _make_private(home)

    def renew(self) -> bool:
        """Have another certificate for the brokers if theirs is about to end; they see that by themselves."""
        return _certify(self.directory, self.names)

    @contextmanager
    def kept_valid(self, look_every_s: float = _LOOK_EVERY_S) -> Iterator[None]:
        """While the brokers run, however long."""
        ended = threading.Event()

        def look() -> None:
            while not ended.wait(look_every_s):
                try:
                    self.renew()
                except Exception as error:  # noqa: BLE001 - whatever it is, tomorrow it is tried again
                    logger.warning("the certificate of the brokers could not be renewed: %s", error)

        thread = threading.Thread(target=look, name="millrace-certificate", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def write_client_files(self, bootstrap: str) -> None:
        """The settings of clients, with where the brokers answer."""
        for name, user in (("client.properties", APPLICATION), ("admin.properties", ADMIN)):
            write_properties(self.directory / name, self.java_settings(user, bootstrap))
        for name, settings in (
            ("librdkafka.json", self.librdkafka_settings(APPLICATION, bootstrap)),
            ("spark.json", self.spark_options(APPLICATION, bootstrap)),
            ("admin.json", self.librdkafka_settings(ADMIN, bootstrap)),
        ):
            write_private(self.directory / name, (json.dumps(settings, indent=2) + "\n").encode())

    def java_settings(self, user: str, bootstrap: str) -> dict[str, str]:
        return {
            "bootstrap.servers": bootstrap,
            "security.protocol": LISTENER,
            "sasl.mechanism": MECHANISM.label,
            "sasl.jaas.config": jaas(user, self.passwords[user]),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.authorities),
        }

    def librdkafka_settings(self, user: str, bootstrap: str) -> dict[str, str]:
        return {
            "bootstrap.servers": bootstrap,
            "security.protocol": LISTENER,
            "sasl.mechanism": MECHANISM.label,
            "sasl.username": user,
            "sasl.password": self.passwords[user],
            "ssl.ca.location": str(self.authorities),
        }

    def spark_options(self, user: str, bootstrap: str) -> dict[str, str]:
        return {f"kafka.{name}": value for name, value in self.java_settings(user, bootstrap).items()}


APPLICATION_RULES: Final = tuple(
    Acl(kind, name, PatternKind.LITERAL, f"User:{APPLICATION}", WILDCARD, operation, Permission.ALLOW)
    for kind, name, operation in (
        (ResourceKind.TOPIC, WILDCARD, Operation.ALL),
        (ResourceKind.GROUP, WILDCARD, Operation.ALL),
        (ResourceKind.TRANSACTIONAL_ID, WILDCARD, Operation.ALL),
        (ResourceKind.CLUSTER, CLUSTER_NAME, Operation.IDEMPOTENT_WRITE),
    )
)


def jaas(user: str, password: str) -> str:
    """A login as Java names it."""
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    return f'{_SCRAM_MODULE} required username="{user}" password="{quoted}";'


def _logs_in(image: ClusterImage, user: str, password: str) -> bool:
    known = image.users.get((user, MECHANISM))
    return known is not None and _fits(known, password)


def _fits(known: ScramCredential, password: str) -> bool:
    salted = salted_password(MECHANISM, password, known.salt, known.iterations)
    own = credential_of(MECHANISM, salted, known.salt, known.iterations)
    return hmac.compare_digest(own.stored_key, known.stored_key)


def secure(folder: Path, host: str) -> Secured:
    """Put everything in place that is not there yet."""
    directory = folder / FOLDER
    _make_private(directory)
    remove_drafts(directory, _WRITTEN)
    names = tuple(dict.fromkeys((host, "localhost", "127.0.0.1", "::1", socket.gethostname())))
    _certify(directory, names)
    return Secured(directory, names, _passwords(directory), _token_secret(directory / _TOKENS))


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)  # of one that was there, or was copied


def _certify(directory: Path, names: tuple[str, ...]) -> bool:
    """Whether a certificate was made. The authority's key is needed for that alone, and may be kept elsewhere."""
    authority_path, key_path, broker_path = (directory / name for name in ("ca.pem", "ca.key", "broker.pem"))
    for name in names:
        if not name.isascii():
            raise ConfigError(f"there are no certificates for '{name}': write it as xn--..., or give an address")
    if not key_path.exists() and not authority_path.exists():
        broker_path.unlink(missing_ok=True)
        make_authority(_AUTHORITY).write(authority_path, key_path)
    elif not authority_path.exists() and not broker_path.exists():  # the first start was ended in between
        with _damage_said(key_path):
            write_public(authority_path, make_authority(_AUTHORITY, key=key_path.read_bytes()).certificate)
    if not authority_path.exists():
        raise ConfigError(f"{authority_path} is missing: put it back, or remove {key_path} for a new authority")
    if broker_path.exists() and _is_good(broker_path, names, authority_path if key_path.exists() else None):
        return False
    if not key_path.exists():
        raise ConfigError(f"{key_path} is missing, and the brokers need a certificate for {', '.join(names)}")
    with _damage_said(authority_path, key_path):
        authority = Authority(authority_path.read_bytes(), key_path.read_bytes())
        authority.issue(BROKER, hosts=names, client=True, days=_DAYS).write(broker_path)
    return True


@contextmanager
def _damage_said(*paths: Path) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{' or '.join(map(str, paths))} is damaged: {error}") from None


def _is_good(path: Path, names: tuple[str, ...], authorities: Path | None) -> bool:
    """Whether the brokers can go on with their certificate; `authorities`: one of which it has to be from."""
    try:
        pem = path.read_bytes()
        is_theirs = authorities is None or is_issued_by(pem, authorities.read_bytes())
        return is_theirs and is_good_for(pem, names, days=_RENEWED_WITH_DAYS_LEFT)
    except ValueError:  # it is damaged
        return False


def _passwords(directory: Path) -> dict[str, str]:
    path = directory / _USERS
    known: dict[str, str] = {}
    if path.exists():
        try:
            found: dict[str, object] = dict(json.loads(path.read_text()))
        except (ValueError, TypeError):
            found = {ADMIN: None}
        known = {user: password for user, password in found.items() if isinstance(password, str) and password}
        if known != found:
            raise ConfigError(f"{path} is damaged: mend it, or remove it for new passwords")
    missing = [user for user in (ADMIN, APPLICATION, BROKER) if user not in known]
    if missing:
        (directory / _PREPARED).unlink(missing_ok=True)  # before they are there: they have to be written to the log
        known |= {user: secrets.token_urlsafe(24) for user in missing}
        write_private(path, (json.dumps(known, indent=2) + "\n").encode())
    return known


def _token_secret(path: Path) -> str:
    if not path.exists():
        write_private(path, secrets.token_urlsafe(48).encode())
    try:
        secret = path.read_text()
    except UnicodeDecodeError:
        secret = ""
    if not secret.strip():
        raise ConfigError(f"{path} is damaged: put it back, or remove it, which ends all delegation tokens")
    return secret
