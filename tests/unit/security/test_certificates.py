"""Certificates made here, as OpenSSL and the file system see them."""

from __future__ import annotations

import stat
import subprocess
import sys
from pathlib import Path

from cryptography import x509

from millrace.clock import ManualClock
from millrace.security.certificates import make_authority, write_private
from millrace.security.principals import distinguished_name
from millrace.security.x509 import pem_certificates, read_certificate


def test_dates_and_name_are_read_as_they_were_made() -> None:
    clock = ManualClock(wall_ms=1_900_000_000_000)  # beyond what two digits of a year can tell from the last century
    for days in (30, 10_000):  # the second ends after 2049, which is written in another form
        identity = make_authority("a", clock=clock).issue("alice", organization="acme", days=days, clock=clock)
        (der,) = pem_certificates(identity.certificate)
        certificate = read_certificate(der)
        assert distinguished_name(certificate.name) == "CN=alice,O=acme"
        assert certificate.starts_ms == clock.wall_ms() - 3_600_000
        assert certificate.ends_ms == clock.wall_ms() + days * 86_400_000


def test_what_a_certificate_is_good_for() -> None:
    authority = make_authority("a")

    def uses(pem: bytes) -> set[str]:
        certificate = x509.load_pem_x509_certificate(pem)
        return {use._name for use in certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value}

    assert uses(authority.issue("b", hosts=["h"]).certificate) == {"serverAuth"}
    assert uses(authority.issue("b", hosts=["h"], client=True).certificate) == {"serverAuth", "clientAuth"}
    assert uses(authority.issue("c").certificate) == {"clientAuth"}


def test_hosts_are_names_and_addresses() -> None:
    identity = make_authority("a").issue("b", hosts=["localhost", "127.0.0.1", "::1"])
    certificate = x509.load_pem_x509_certificate(identity.certificate)
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["localhost"]
    assert [str(address) for address in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1", "::1"]


def test_only_the_user_can_read_keys(tmp_path: Path) -> None:
    authority = make_authority("a")
    authority.write(tmp_path / "ca.pem", tmp_path / "ca.key")
    authority.issue("b", hosts=["h"]).write(tmp_path / "b.pem")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"ca.pem": 0o644, "ca.key": 0o600, "b.pem": 0o600}
    assert b"PRIVATE" not in (tmp_path / "ca.pem").read_bytes()


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "key.pem"
    write_private(path, b"old")
    with path.open("rb") as reading:
        write_private(path, b"new")
        assert reading.read() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_keys_are_not_shown() -> None:
    authority = make_authority("a")
    assert "PRIVATE" not in repr(authority) + repr(authority.issue("b"))


def test_the_library_is_loaded_only_when_it_is_needed() -> None:
    code = (
        "import sys, millrace.broker, millrace.security.certificates; print(sorted(m for m in sys.modules if m =="
        " 'cryptography'))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
