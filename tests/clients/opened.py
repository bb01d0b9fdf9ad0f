"""Clients that a test opens and does not have to close itself."""

from __future__ import annotations

from typing import TypeVar

from clients.adapters.interface import Admin, Client, Reader, Sender

T = TypeVar("T", bound="Sender | Reader | Admin")


class Opened:
    """Clients that are closed at the end of the test, newest first."""

    def __init__(self, client: Client, bootstrap: str) -> None:
        self.client = client
        self.bootstrap = bootstrap
        self._open: list[Sender | Reader | Admin] = []

    def sender(self, *, codec: str = "none", idempotent: bool = True) -> Sender:
        return self._keep(self.client.sender(self.bootstrap, codec=codec, idempotent=idempotent))

    def reader(self, *, group: str | None = None) -> Reader:
        return self._keep(self.client.reader(self.bootstrap, group=group))

    def admin(self) -> Admin:
        return self._keep(self.client.admin(self.bootstrap))

    def _keep(self, one: T) -> T:
        self._open.append(one)
        return one

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
