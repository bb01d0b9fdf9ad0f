"""What `millrace up --secure` keeps in its folder: made once, kept, renewed in time, and for its owner alone."""

from __future__ import annotations

import contextlib
import json
import stat
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from millrace.client.settings import ClientSettings, parse_jaas
from millrace.clock import ManualClock, SystemClock
from millrace.cluster.image import ClusterImage
from millrace.cluster.offline import change_offline
from millrace.config import BrokerConfig
from millrace.config.files import parse_properties
from millrace.errors import ConfigError
from millrace.local.folder import Folder
from millrace.local.secured import ADMIN, APPLICATION, BROKER, MECHANISM, Secured, jaas, secure
from millrace.metadata.deltas import AclsChanged, ScramChanged
from millrace.metadata.embedded import EmbeddedStore
from millrace.security.certificates import Authority, is_issued_by, make_authority, write_private
from millrace.security.scram import ScramCredential, ScramMechanism, new_credential
from support.up import wait_for

CLOCK = SystemClock()
HOST = "127.0.0.1"
DAY_MS = 24 * 3600 * 1000


def store_in(folder: Path) -> EmbeddedStore:
    return EmbeddedStore.at(folder / "data" / "metadata.db")


async def image_in(folder: Path) -> ClusterImage:
    return await change_offline(store_in(folder), (), CLOCK)


def content(secured: Secured) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in secured.directory.iterdir()}


def serial(secured: Secured) -> int:
    return x509.load_pem_x509_certificates((secured.directory / "broker.pem").read_bytes())[0].serial_number


def issue(secured: Secured, *, days_left: int) -> None:
    """Give the brokers a certificate that ends then."""
    ca = Authority((secured.directory / "ca.pem").read_bytes(), (secured.directory / "ca.key").read_bytes())
    issued = ManualClock(wall_ms=CLOCK.wall_ms() + (days_left - 397) * DAY_MS)
    ca.issue(BROKER, hosts=secured.names, client=True, days=397, clock=issued).write(secured.directory / "broker.pem")


async def test_everything_is_made_once_and_for_its_owner(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    assert await secured.prepare(store_in(tmp_path), CLOCK) == []
    secured.write_client_files("127.0.0.1:9092")
    made = content(secured)
    assert stat.S_IMODE(secured.directory.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in secured.directory.iterdir()}
    assert {name for name, mode in modes.items() if mode != 0o600} == {"ca.pem", "prepared"}
    before = await image_in(tmp_path)

    again = secure(tmp_path, HOST)
    assert again == secured
    assert await again.prepare(store_in(tmp_path), CLOCK) == []
    again.write_client_files("127.0.0.1:9092")
    assert content(again) == made
    assert (await image_in(tmp_path)).index == before.index, "nothing was written anew"
    secrets = [*secured.passwords.values(), secured.token_secret]
    assert not any(secret in repr(secured) for secret in secrets)
    assert len(set(secrets)) == 4


async def test_the_settings_fit_brokers_and_clients(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    config = BrokerConfig({"listeners": secured.listener(HOST, 0), "log.dirs": "x", **secured.broker_settings()})
    assert [each.security_protocol for each in config.listeners] == ["SASL_SSL"]
    assert not config.get_bool("allow.everyone.if.no.acl.found")
    secured.write_client_files("127.0.0.1:9092,127.0.0.1:9093")
    for name, user in (("client.properties", APPLICATION), ("admin.properties", ADMIN)):
        found = parse_properties((secured.directory / name).read_text())
        settings = ClientSettings.from_properties(found)
        assert settings.bootstrap_servers == ((HOST, 9092), (HOST, 9093))
        assert (settings.security.username, settings.security.password) == (user, secured.passwords[user])
        assert settings.security.verify_certificate and settings.security.verify_host_name
    spark = json.loads((secured.directory / "spark.json").read_text())
    assert all(name.startswith("kafka.") for name in spark)
    assert spark["kafka.bootstrap.servers"] == "127.0.0.1:9092,127.0.0.1:9093"


def test_a_login_for_java_is_read_back() -> None:
    password = r"""a"quote 'and\ back\slash"""
    assert parse_jaas(jaas("app", password))[:2] == ("app", password)


async def test_the_log_says_who_may_log_in(tmp_path: Path) -> None:
    """A password that was changed there stays; that of the brokers, which nobody else uses, is set right."""
    await secure(tmp_path, HOST).prepare(store_in(tmp_path), CLOCK)
    changed, removed = new_credential(MECHANISM, "another"), ScramChanged(ADMIN, MECHANISM, None)
    changes = [ScramChanged(user, MECHANISM, changed) for user in (APPLICATION, BROKER)]
    await change_offline(store_in(tmp_path), [*changes, removed], CLOCK)
    assert await secure(tmp_path, HOST).prepare(store_in(tmp_path), CLOCK) == [ADMIN, APPLICATION]
    image = await image_in(tmp_path)
    assert image.users[APPLICATION, MECHANISM] == changed
    assert image.users[BROKER, MECHANISM] != changed
    assert (ADMIN, MECHANISM) not in image.users
    # Whoever knows the new password writes it into the file.
    path = tmp_path / "security" / "users.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), APPLICATION: "another"}))
    assert await secure(tmp_path, HOST).prepare(store_in(tmp_path), CLOCK) == [ADMIN]


async def test_data_or_passwords_that_are_gone_are_made_anew(tmp_path: Path) -> None:
    first = secure(tmp_path, HOST)
    await first.prepare(store_in(tmp_path), CLOCK)
    for path in (tmp_path / "data").iterdir():
        path.unlink()
    assert await secure(tmp_path, HOST).prepare(store_in(tmp_path), CLOCK) == []
    (first.directory / "users.json").unlink()
    second = secure(tmp_path, HOST)
    assert second.passwords[ADMIN] != first.passwords[ADMIN]
    assert await second.prepare(store_in(tmp_path), CLOCK) == []


async def test_the_application_may_use_topics_and_nothing_else(tmp_path: Path) -> None:
    await secure(tmp_path, HOST).prepare(store_in(tmp_path), CLOCK)
    image = await image_in(tmp_path)
    users: dict[tuple[str, ScramMechanism], ScramCredential] = dict(image.users.items())
    assert set(users) == {(user, each) for user in (ADMIN, APPLICATION, BROKER) for each in ScramMechanism}
    (rules,) = [change for change in image.as_changes() if isinstance(change, AclsChanged)]
    assert {each.principal for each in rules.added} == {"User:app"}
    assert {(each.resource.name, each.operation.name) for each in rules.added} == {
        ("TOPIC", "ALL"),
        ("GROUP", "ALL"),
        ("TRANSACTIONAL_ID", "ALL"),
        ("CLUSTER", "IDEMPOTENT_WRITE"),
    }


@pytest.mark.parametrize("days_left", [-3, 59])
def test_a_certificate_that_ends_is_replaced_at_the_start(tmp_path: Path, days_left: int) -> None:
    secured = secure(tmp_path, HOST)
    trusted = secured.authorities.read_bytes()
    issue(secured, days_left=days_left)
    old = serial(secured)
    assert serial(secure(tmp_path, HOST)) != old
    assert secured.authorities.read_bytes() == trusted
    issue(secured, days_left=61)
    kept = serial(secured)
    assert serial(secure(tmp_path, HOST)) == kept
    assert serial(secure(tmp_path, "192.0.2.7")) != kept, "for another address"
    (secured.directory / "broker.pem").write_bytes(b"damaged")
    assert serial(secure(tmp_path, HOST))


def test_a_certificate_that_ends_is_replaced_while_brokers_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secured = secure(tmp_path, HOST)
    issue(secured, days_left=59)
    old = serial(secured)
    with secured.kept_valid(look_every_s=0.01):
        wait_for(lambda: serial(secured) != old)
        (secured.directory / "ca.key").rename(tmp_path / "elsewhere")
        (secured.directory / "broker.pem").unlink()
        wait_for(lambda: "could not be renewed" in caplog.text)
        (tmp_path / "elsewhere").rename(secured.directory / "ca.key")
        wait_for((secured.directory / "broker.pem").exists)


def test_the_authority_is_never_replaced(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    key, trusted = secured.directory / "ca.key", secured.authorities
    (key_bytes, trusted_bytes) = key.read_bytes(), trusted.read_bytes()
    key.unlink()
    secure(tmp_path, HOST)  # it can be kept elsewhere until it is needed
    with pytest.raises(ConfigError, match=r"ca\.key is missing, and the brokers need a certificate for 192\.0\.2\.7"):
        secure(tmp_path, "192.0.2.7")
    key.write_bytes(key_bytes)
    trusted.unlink()
    with pytest.raises(ConfigError, match=r"ca\.pem is missing: put it back"):
        secure(tmp_path, HOST)
    trusted.write_bytes(trusted_bytes)
    key.write_bytes(b"not a key")
    with pytest.raises(ConfigError, match="is damaged"):
        secure(tmp_path, "192.0.2.7")


@pytest.mark.parametrize("writes", range(12))
async def test_a_start_that_is_killed_at_any_write_is_taken_up_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    replace, left = Path.replace, [writes]

    def killed(draft: Path, target: Path) -> Path:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        return replace(draft, target)

    async def start() -> Secured:
        secured = secure(tmp_path, HOST)
        await secured.prepare(store_in(tmp_path), CLOCK)
        secured.write_client_files("127.0.0.1:9092")
        return secured

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)  # who is killed does not clean up
        with contextlib.suppress(KeyboardInterrupt):
            await start()
    secured = await start()
    assert await secured.prepare(store_in(tmp_path), CLOCK) == [], "all can log in"
    assert not list(secured.directory.glob(".*")), "drafts, with keys in them"
    pem = (secured.directory / "broker.pem").read_bytes()
    assert is_issued_by(pem, secured.authorities.read_bytes())
    assert await start() == secured


def test_a_certificate_of_another_authority_is_replaced(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    old = serial(secured)
    # Both halves were put there by somebody who has an authority already, which is trusted beside the old one.
    own, trusted = make_authority("own"), secured.authorities.read_bytes()
    write_private(secured.directory / "ca.key", own.key)
    secured.authorities.write_bytes(own.certificate)
    secure(tmp_path, HOST)
    assert serial(secured) != old
    assert is_issued_by((secured.directory / "broker.pem").read_bytes(), own.certificate)
    secured.authorities.write_bytes(trusted + own.certificate)
    kept = serial(secured)
    assert serial(secure(tmp_path, HOST)) == kept
    assert serial(secure(tmp_path, "192.0.2.7")) != kept
    assert is_issued_by((secured.directory / "broker.pem").read_bytes(), own.certificate)


def test_what_cannot_be_an_authority_is_an_error(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    key = secured.directory / "ca.key"
    rsa_key = rsa.generate_private_key(65537, 2048)
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    encrypted = serialization.BestAvailableEncryption(b"secret")
    for found, problem in (
        (make_authority("another").key, "the key is not that of the certificate"),
        (rsa_key.private_bytes(pem, pkcs8, serialization.NoEncryption()), "not one of an elliptic curve"),
        (rsa_key.private_bytes(pem, pkcs8, encrypted), "the key is encrypted"),
    ):
        key.write_bytes(found)
        with pytest.raises(ConfigError, match=f"ca.key is damaged: .*{problem}"):
            secure(tmp_path, "192.0.2.7")
    with pytest.raises(ConfigError, match="no certificates for 'müller"):
        secure(tmp_path, "müller.example")


def test_a_certificate_without_names_is_replaced(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    authority = Authority(secured.authorities.read_bytes(), (secured.directory / "ca.key").read_bytes())
    authority.issue("nameless").write(secured.directory / "broker.pem")
    old = serial(secured)
    assert serial(secure(tmp_path, HOST)) != old


def test_a_folder_is_private_from_its_first_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "chmod", lambda *_, **__: None)
        secured = secure(tmp_path, HOST)
        secured.close_to_others(tmp_path / "broker-1")
    (tmp_path / "broker-2").mkdir()
    secured.close_to_others(tmp_path / "broker-2")
    for path in (secured.directory, tmp_path / "broker-1", tmp_path / "broker-2"):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("found", [b"", b"\n", b"\xff"])
def test_a_damaged_secret_of_tokens_is_an_error(tmp_path: Path, found: bytes) -> None:
    secured = secure(tmp_path, HOST)
    (secured.directory / "tokens.key").write_bytes(found)
    with pytest.raises(ConfigError, match=r"tokens\.key is damaged"):
        secure(tmp_path, HOST)


def test_a_damaged_list_of_users_is_not_written_over(tmp_path: Path) -> None:
    secured = secure(tmp_path, HOST)
    path = secured.directory / "users.json"
    for text in ("{", "3", "[1]", '{"admin": 3}', '{"admin": ""}'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="is damaged"):
            secure(tmp_path, HOST)
        assert path.read_text() == text


def test_a_start_that_fails_takes_back_what_it_made(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "data")
    with pytest.raises(ConfigError), folder.use():
        secure(folder.path, HOST)
        raise ConfigError("no start")
    assert not folder.path.exists()
    with folder.use() as use:
        first = secure(folder.path, HOST)
        use.ready({1: "127.0.0.1:9092"})
    with pytest.raises(ConfigError), folder.use():
        secure(folder.path, HOST)
        raise ConfigError("no start")
    assert secure(folder.path, HOST) == first
