"""An identity provider: keys, the tokens it signs, and an https endpoint for its key set."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import ssl
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import trustme
from joserfc import jws
from joserfc.jwk import ECKey, Key, OKPKey, RSAKey

ISSUER: Final = "https://id.example"
AUDIENCE: Final = "millrace"
_REGISTRY: Final = jws.JWSRegistry(algorithms=list(jws.JWSRegistry.algorithms), strict_check_header=False)


@cache
def key(kind: str = "RSA", key_id: str = "one") -> Key:
    """A private key; the same one for the same name."""
    parameters: Any = {"kid": key_id}
    if kind == "RSA":
        return RSAKey.generate_key(2048, parameters)
    if kind in ("Ed25519", "Ed448"):
        return OKPKey.generate_key(kind, parameters)  # type: ignore[arg-type]
    return ECKey.generate_key(kind, parameters)


def key_set(*keys: Key, **members: str) -> bytes:
    """A document with the public halves, each with the same further members."""
    return json.dumps({"keys": [{**each.as_dict(private=False), **members} for each in keys]}).encode()


def claims(now_ms: int | None = None, **changed: Any) -> dict[str, Any]:
    """What a good token says; None leaves a claim out."""
    now_s = time.time() if now_ms is None else now_ms / 1000
    said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "iat": int(now_s), "exp": int(now_s) + 300, **changed}
    return {name: value for name, value in said.items() if value is not None}


def token(
    said: Mapping[str, Any] | None = None,
    *,
    by: Key | None = None,
    algorithm: str = "RS256",
    header: Mapping[str, Any] | None = None,
) -> str:
    """A signed token."""
    signer = by or key()
    head = {"alg": algorithm, "kid": signer.kid, **(header or {})}
    payload = json.dumps(claims() if said is None else said)
    return jws.serialize_compact(
        {name: value for name, value in head.items() if value is not None}, payload, signer, registry=_REGISTRY
    )


def unsigned(said: Mapping[str, Any], header: Mapping[str, Any]) -> str:
    """A token with whatever header, and without a signature."""
    return f"{segment(header)}.{segment(said)}."


def signed_with_public_key(said: Mapping[str, Any], public: bytes, key_id: str | None = None) -> str:
    """An HMAC, with what everybody knows for its secret."""
    body = f"{segment({'alg': 'HS256', 'kid': key_id})}.{segment(said)}"
    mac = hmac.digest(public, body.encode(), hashlib.sha256)
    return f"{body}.{base64.urlsafe_b64encode(mac).decode().rstrip('=')}"


def segment(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).decode().rstrip("=")


def first_message(shown: str, authorization_id: str = "", *extensions: str) -> bytes:
    """What a client of OAUTHBEARER begins with."""
    authzid = f"a={authorization_id}" if authorization_id else ""
    pairs = "".join(f"{each}\x01" for each in (f"auth=Bearer {shown}", *extensions))
    return f"n,{authzid},\x01{pairs}\x01".encode()


class Endpoint:
    """An https server that answers every GET with `status`, `headers` and `body`."""

    def __init__(self, folder: Path) -> None:
        self.status = 200
        self.body = key_set(key())
        self.headers: dict[str, str] = {}
        self.asked = 0
        self.entered = threading.Event()
        self.open = threading.Event()
        """Cleared, requests wait."""
        self.open.set()
        endpoint = self
        self.authority = trustme.CA()
        self.authorities = folder / "authority.pem"
        self.authority.cert_pem.write_to_path(str(self.authorities))

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                endpoint.asked += 1
                endpoint.entered.set()
                endpoint.open.wait(30)
                self.send_response(endpoint.status)
                for name, value in {"Content-Length": str(len(endpoint.body)), **endpoint.headers}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(endpoint.body)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.authority.issue_cert("localhost").configure_cert(context)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self.url = f"https://localhost:{self._server.server_port}/keys"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @contextmanager
    def serving(self) -> Iterator[Endpoint]:
        self._thread.start()
        try:
            yield self
        finally:
            self.stop()

    def stop(self) -> None:
        """Answer nobody any more; harmless the second time."""
        self.open.set()
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
