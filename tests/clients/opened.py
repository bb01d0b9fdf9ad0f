"""Clients that a test opens and does not have to close itself."""

from __future__ import annotations

from typing import TypeVar

from clients.adapters.interface import TRANSACTION_TIMEOUT_MS, Admin, Client, Reader, Sender, Transactions

T = TypeVar("T", bound="Sender | Transactions | Reader | Admin")


class Opened:
    """Clients that are closed at the end of the test, newest first."""

    def __init__(self, client: Client, bootstrap: str) -> None:
        self.client = client
        self.bootstrap = bootstrap
        self._open: list[Sender | Transactions | Reader | Admin] = []

    def sender(self, *, codec: str = "none", idempotent: bool = True) -> Sender:
        return self._keep(self.client.sender(self.bootstrap, codec=codec, idempotent=idempotent))

    def transactions(self, transactional_id: str, *, timeout_ms: int = TRANSACTION_TIMEOUT_MS) -> Transactions:
        return self._keep(self.client.transactions(self.bootstrap, transactional_id, timeout_ms=timeout_ms))

    def reader(self, *, group: str | None = None, committed_only: bool = False) -> Reader:
        return self._keep(self.client.reader(self.bootstrap, group=group, committed_only=committed_only))

    def admin(self) -> Admin:
        return self._keep(self.client.admin(self.bootstrap))

    def _keep(self, one: T) -> T:
        self._open.append(one)
        return one

    def close(self) -> None:
        while self._open:
            self._open.pop().close()
