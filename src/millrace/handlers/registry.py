"""The list of served APIs: one decorated function per API key.

From this list come dispatch, the ApiVersions answer, docs/compatibility.md and the conformance matrix. There is no
switch anywhere. A handler is a function `(context, request) -> response`, plain or async; what it knows of a version it
reads from `context.version`. It declares what its callers need (`needs`): without that it cannot be registered. Handler
modules register themselves when imported; `load` imports them all.
"""

from __future__ import annotations

import importlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeVar

from millrace.errors import ApiError, ErrorCode
from millrace.handlers import auditing
from millrace.handlers.context import RequestContext
from millrace.handlers.needs import Needs
from millrace.wire import frame
from millrace.wire.codec import decode
from millrace.wire.keys import ApiKey
from millrace.wire.messages import response_class

if TYPE_CHECKING:
    from millrace.config import BrokerConfig

Buffers = Sequence[bytes | bytearray | memoryview]
Handler = Callable[[RequestContext, Any], Any | Awaitable[Any]]
Refuse = Callable[[RequestContext, Any, ApiError], Any]
"""The answer to a request that is refused as a whole."""
REFUSE: Final = "refuse"
"""The attribute by which a handler that runs on the controller brings its `Refuse` along."""
THROTTLE: Final = "throttle_time_ms"
"""The field of a response that says how long its client is not heard."""
Decoder = Callable[[int, memoryview, int], Any]
Encoder = Callable[[int, int, Any], Buffers]

MODULES: Final = (
    "acls",
    "api_versions",
    "brokers",
    "cluster",
    "configs",
    "consumer_groups",
    "delegation_tokens",
    "envelope",
    "fetch",
    "group_offsets",
    "groups",
    "log_dirs",
    "markers",
    "offsets",
    "partitions",
    "produce",
    "producers",
    "quorum",
    "quotas",
    "records",
    "sasl",
    "scram_users",
    "share_fetch",
    "share_groups",
    "share_offsets",
    "share_state",
    "telemetry",
    "topics",
    "transaction_offsets",
    "transactions",
)


@dataclass(frozen=True, slots=True)
class Api:
    """One served API key: its versions, its function, and how its bytes are read and written."""

    key: ApiKey
    min_version: int
    max_version: int
    advertised_min: int
    handler: Handler
    decode: Decoder
    encode: Encoder
    overlaps: bool
    """The connection's next request may start while this one waits; its reply still leaves in order."""
    needs: Needs
    internal: bool = False
    """Between brokers: served, but not named in ApiVersions."""
    refuse: Refuse | None = None
    """For responses that have their errors in their items."""
    forwardable: bool = False
    """Whether brokers pass it on to the controller."""
    setting: str = ""
    """The broker setting without a value of which it is neither served nor named in ApiVersions."""
    counts_errors: bool = False
    """The handler counts the errors of its answers itself: where they arise, without a second look at all items."""

    @property
    def doc(self) -> str:
        return (self.handler.__doc__ or "").strip()

    def refused(self, context: RequestContext, request: Any) -> Buffers | None:
        """The answer to somebody who may not ask this at all; None for anybody else.

        It counts for the caller's quotas like any other: how long it has to be quiet then the meter knows, too.
        """
        refusal = context.whole_refusal()
        if refusal is None:
            return None
        auditing.tell(context, self.key, refusal)
        header = context.header
        response = None if self.refuse is None else self.refuse(context, request, refusal)
        throttle_ms = 0 if context.meter is None else context.meter.charge()
        if response is not None:
            if throttle_ms and hasattr(response, THROTTLE):
                setattr(response, THROTTLE, throttle_ms)
            return self.encode(header.correlation_id, header.api_version, response)
        answer = self.encode_error(
            header.correlation_id, header.api_version, refusal.code, refusal.message, throttle_ms=throttle_ms
        )
        if answer is None:
            raise RuntimeError(f"{self.key.name} v{header.api_version} has no place for a refusal, and no `refuse`")
        return answer

    def answered(self, context: RequestContext, response: Any) -> Buffers:
        """The response in bytes; RuntimeError where its handler has not judged: such an answer does not leave."""
        if self.needs.judged and not context.is_judged:
            raise RuntimeError(f"{self.key.name} has answered without asking for any right; declared: {self.needs}")
        if response is None:  # acks=0: the protocol has no reply
            return ()
        return self.encode(context.header.correlation_id, context.header.api_version, response)

    def encode_error(
        self, correlation_id: int, version: int, code: ErrorCode, message: str, *, throttle_ms: int = 0
    ) -> Buffers | None:
        """A response that is nothing but an error, or None where this version has no place for one."""
        cls = response_class(self.key)
        carried = {field.name for field in cls.declaration.fields if field.versions.include(version)}
        if "error_code" not in carried:
            return None
        response: Any = cls()
        response.error_code = int(code)
        if "error_message" in carried:
            response.error_message = message
        if THROTTLE in carried:
            setattr(response, THROTTLE, throttle_ms)
        return _encode_declared(correlation_id, version, response)


_apis: dict[int, Api] = {}

H = TypeVar("H", bound=Callable[..., Any])


def api(
    key: ApiKey,
    request: type[Any],
    versions: str,
    *,
    needs: Needs,
    overlaps: bool = False,
    internal: bool = False,
    refuse: Refuse | None = None,
    forwardable: bool = False,
    setting: str = "",
    counts_errors: bool = False,
    advertised_min: int | None = None,
    decoder: Decoder | None = None,
    encoder: Encoder | None = None,
) -> Callable[[H], H]:
    """Serve `key` at `versions` ("lo-hi") with the decorated function.

    `internal` is for what only brokers ask. `refuse` answers who may not ask at all, where the response has no error of
    its own; what is under `on_controller` brings that along, and is forwardable. `setting` names the broker setting
    without which the API is not there. With `counts_errors` the handler calls `note_error` for each. `advertised_min`
    lets ApiVersions name an older minimum than is decoded. `decoder` and `encoder` replace the declared codec on the
    hot path.
    """
    low, _, high = versions.partition("-")

    def register(handler: H) -> H:
        if key in _apis:
            raise RuntimeError(f"{key.name} is registered twice")
        min_version = int(low)
        _apis[key] = Api(
            key=key,
            min_version=min_version,
            max_version=int(high or low),
            advertised_min=min_version if advertised_min is None else advertised_min,
            handler=handler,
            decode=decoder or _declared_decoder(request),
            encode=encoder or _encode_declared,
            overlaps=overlaps,
            needs=needs,
            internal=internal,
            refuse=refuse or getattr(handler, REFUSE, None),
            forwardable=forwardable or hasattr(handler, REFUSE),
            setting=setting,
            counts_errors=counts_errors,
        )
        return handler

    return register


def _declared_decoder(request: type[Any]) -> Decoder:
    """Bytes behind the body are ignored, as in Kafka: librdkafka's request for the metadata of all topics has some."""

    def decode_declared(version: int, buffer: memoryview, pos: int) -> Any:
        return decode(request, version, buffer, pos)[0]

    return decode_declared


def _encode_declared(correlation_id: int, version: int, response: Any) -> Buffers:
    return (frame.encode_response(correlation_id, version, response),)


def load() -> dict[int, Api]:
    """Import every handler module and return the finished table, by API key."""
    for module in MODULES:
        importlib.import_module(f"millrace.handlers.{module}")
    return _apis


def find(key: int) -> Api | None:
    """A served API; `load` comes first."""
    return _apis.get(key)


def settings_given(config: BrokerConfig) -> frozenset[str]:
    """Of the settings without which some API is not there, those that have a value."""
    return frozenset(each.setting for each in _apis.values() if each.setting and config.get(each.setting))


def served(given: frozenset[str]) -> dict[int, Api]:
    """The APIs of a broker with these settings, in the order of their keys."""
    return {key: _apis[key] for key in sorted(_apis) if not _apis[key].setting or _apis[key].setting in given}
