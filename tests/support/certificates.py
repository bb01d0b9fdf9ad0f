"""Certificates for tests: an authority, what it has issued, and the files that settings name."""

from __future__ import annotations

import ssl
from pathlib import Path

from millrace.clock import ManualClock
from millrace.security.certificates import Authority, Identity, make_authority

LONG_AGO = ManualClock(wall_ms=1_500_000_000_000)


class Pki:
    """One authority in a folder of its own, with a broker's certificate (`server.pem`)."""

    def __init__(self, home: Path, name: str = "the authority") -> None:
        self.home = home
        self.authority: Authority = make_authority(name)
        self.trusted = home / "trusted.pem"
        self.server = home / "server.pem"
        self.authority.write(self.trusted, home / "authority.key")
        self.renew()

    def __repr__(self) -> str:
        return f"Pki({self.home})"

    def renew(self, name: str = "broker", *, expired: bool = False, hosts: tuple[str, ...] = ()) -> Identity:
        """Another certificate for the broker."""
        identity = self.authority.issue(
            name,
            hosts=hosts or ("localhost", "127.0.0.1"),
            days=30,
            clock=LONG_AGO if expired else None,
        )
        identity.write(self.server)
        return identity

    def client(self, name: str = "alice", *, organization: str = "", expired: bool = False) -> Path:
        """The file with the certificate and key of a new client."""
        clock = LONG_AGO if expired else None
        identity = self.authority.issue(name, organization=organization, days=30, clock=clock)
        path = self.home / f"{name}{'-expired' if expired else ''}.pem"
        identity.write(path)
        return path

    def settings(self, client_auth: str = "none") -> dict[str, str]:
        """Those of a broker."""
        return {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(self.server),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(self.trusted),
            "ssl.client.auth": client_auth,
        }

    def context(self, certificate: Path | None = None) -> ssl.SSLContext:
        """A client's, that trusts this authority."""
        context = ssl.create_default_context(cafile=str(self.trusted))
        if certificate is not None:
            context.load_cert_chain(certificate)
        return context
