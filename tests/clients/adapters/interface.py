"""What the shared scenarios ask of a Kafka client, in blocking calls; one adapter per real client library.

An adapter translates and nothing else: no retries, no defaults that would hide what a broker does. Settings that only
make tests quick (heartbeats, backoffs) are the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

HEARTBEAT_MS = 300
SESSION_TIMEOUT_MS = 10_000
RETRY_BACKOFF_MS = 100
DELIVERY_TIMEOUT_MS = 60_000
TRANSACTION_TIMEOUT_MS = 60_000
END_TIMEOUT_S = 20.0
"""No call of a transaction takes longer, whatever the broker does: one that hangs is a failure of the test."""

Partition = tuple[str, int]
Headers = Sequence[tuple[str, bytes]]


class Login(NamedTuple):
    """How a client proves who it is: by a password unless `mechanism` is empty, with `ca_file` over TLS, and there by
    the certificate and key in the file `certificate`, if any."""

    mechanism: str = ""
    user: str = ""
    password: str = ""
    ca_file: str = ""
    token: Callable[[], tuple[str, float]] | None = None
    """For OAUTHBEARER: an access token, and when it ends."""
    certificate: str = ""

    @property
    def protocol(self) -> str:
        return ("SASL_" if self.mechanism else "") + ("SSL" if self.ca_file else "PLAINTEXT")


class Received(NamedTuple):
    """One record as a consumer returned it."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...]


class Sent(NamedTuple):
    """Where an acknowledged record lies."""

    partition: int
    offset: int


class Pending(Protocol):
    """A record on its way."""

    def result(self, timeout_s: float) -> Sent:
        """Wait for the acknowledgement; raises what the client reported."""


class Sender(Protocol):
    """A producer."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        key: bytes | None = None,
        *,
        headers: Headers = (),
        timestamp_ms: int | None = None,
        partition: int | None = None,
    ) -> Pending: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Transactions(Protocol):
    """A transactional producer. A refusal is an exception of the client whose text names the error."""

    def begin(self) -> None: ...

    def send(self, topic: str, value: bytes, partition: int = 0) -> None: ...

    def flush(self) -> None:
        """Wait until what was sent is in the log."""

    def send_offsets(self, offsets: Mapping[Partition, int], membership: object) -> None:
        """Make offsets a part of the transaction; `membership` is what the reader of them said of itself."""

    def commit(self) -> None: ...

    def abort(self) -> None: ...

    def abandon(self) -> None:
        """Go as a crash does: the transaction stays open."""

    def close(self) -> None: ...


class Reader(Protocol):
    """A consumer. Offsets are committed only by `commit`."""

    def subscribe(self, topic: str) -> None: ...

    def assign(self, partitions: Sequence[Partition]) -> None: ...

    def seek(self, partition: Partition, offset: int) -> None: ...

    def poll(self, timeout_s: float) -> list[Received]: ...

    def assignment(self) -> set[Partition]: ...

    def commit(self) -> None:
        """Commit what has been polled so far."""

    def committed(self, partition: Partition) -> int | None: ...

    def offsets_for_time(self, partitions: Sequence[Partition], timestamp_ms: int) -> dict[Partition, int | None]: ...

    def bounds(self, partition: Partition) -> tuple[int, int]:
        """First offset and the one after the last."""

    def membership(self) -> object:
        """What a transaction must know of the reader whose offsets it commits."""

    def close(self) -> None: ...


class Admin(Protocol):
    """The administrative calls; a refusal is an exception of the client whose text names the error."""

    def create_topic(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None: ...

    def topics(self) -> dict[str, int]:
        """Topic names and their number of partitions."""

    def delete_topic(self, topic: str) -> None: ...

    def create_partitions(self, topic: str, total: int) -> None: ...

    def topic_config(self, topic: str) -> dict[str, str]: ...

    def set_topic_config(self, topic: str, name: str, value: str) -> None: ...

    def delete_records(self, partition: Partition, before_offset: int) -> int:
        """Returns the new first offset."""

    def groups(self) -> set[str]: ...

    def group_state(self, group: str) -> tuple[str, int]:
        """State in lower case without separators, and the number of members."""

    def group_offsets(self, group: str) -> dict[Partition, int]: ...

    def delete_group(self, group: str) -> None: ...

    def close(self) -> None: ...


class Client(Protocol):
    """One client library."""

    name: str
    deletes_groups: bool
    fences_zombies: bool
    """Whether it sends member and generation along with the offsets of a transaction (KIP-447)."""

    def sender(self, bootstrap: str, *, codec: str = "none", idempotent: bool = True) -> Sender: ...

    def transactions(
        self, bootstrap: str, transactional_id: str, *, timeout_ms: int = TRANSACTION_TIMEOUT_MS
    ) -> Transactions:
        """A producer that has been initialised: it knows its coordinator, and older ones of its id are fenced."""

    def reader(self, bootstrap: str, *, group: str | None = None, committed_only: bool = False) -> Reader: ...

    def admin(self, bootstrap: str) -> Admin: ...

    def running(self) -> AbstractContextManager[None]:
        """Whatever the library needs around a test."""
