"""The address at which a broker tells of itself: `/metrics`, `/livez` and `/readyz`.

`/metrics` is for Prometheus; `?detail=partitions` and so on, repeatable, adds what has a line per partition, topic or
group (`metrics.detail` are those that are always there). `/livez` answers while the loop turns. `/readyz` answers 503
with a line for each reason while the broker is not to be relied on (`health`).

Owner of the server, of the scrapes and of the task that samples the loop's lag.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millrace.metrics.catalog import Detail
from millrace.metrics.exposition import CONTENT_TYPE
from millrace.monitoring.collector import Collector, Pace
from millrace.monitoring.health import reasons_not_ready
from millrace.monitoring.parts import Observed, Parts
from millrace.monitoring.web import UNAVAILABLE, Answer, BadRequest, Parameters, WebServer, told
from millrace.tasks import Tasks

if TYPE_CHECKING:
    from millrace.cluster.controller import Controller

SAMPLE_S: Final = 0.1
_DETAILS: Final = {each.value: each for each in Detail}


class MetricsEndpoint:
    """One broker's."""

    def __init__(self, host: str, port: int, observed: Observed) -> None:
        self._observed = observed
        self._services = observed.services
        self._clock = observed.services.clock
        self._parts = Parts(observed)
        self._collector = Collector(self._parts.by_name, self._clock)
        self._server = WebServer(
            host,
            port,
            {"/metrics": self._metrics, "/livez": self._livez, "/readyz": self._readyz},
            self._clock,
        )
        self._tasks = Tasks(self._clock)
        self._is_stopping = False

    def __repr__(self) -> str:
        return f"MetricsEndpoint({self.url})"

    @property
    def url(self) -> str:
        host, port = self._server.host, self._server.port
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/metrics"

    def bind(self) -> None:
        """Take the address; ConfigError where it cannot be had."""
        self._server.bind()

    async def serve(self, controller: Controller) -> None:
        """Answer; until `started` the broker is not ready."""
        controller.on_image(self._parts.elections.note)
        self._tasks.keep("loop lag", self._sample_loop)
        await self._server.serve()

    def started(self) -> None:
        """Clients are answered."""
        self._observed.started_ms = self._clock.wall_ms()

    def stopping(self) -> None:
        """Clients should go elsewhere."""
        self._is_stopping = True

    async def stop(self) -> None:
        await self._server.stop()
        await self._collector.stop()
        await self._tasks.stop()

    async def _sample_loop(self) -> None:
        while True:
            due_s = self._clock.monotonic() + SAMPLE_S
            await self._clock.sleep(SAMPLE_S)
            self._observed.loop_lag.record(max(self._clock.monotonic() - due_s, 0.0))

    # --- pages --------------------------------------------------------------------------------------------------------

    async def _metrics(self, parameters: Parameters) -> Answer:
        wanted = {*self._services.config.get_list("metrics.detail")}
        for name, values in parameters.items():
            if name != "detail":
                raise BadRequest(f"the only parameter is detail: one or more of {', '.join(_DETAILS)}")
            wanted.update(values)
        if unknown := wanted - _DETAILS.keys():
            told_names = ", ".join(repr(each[:100]) for each in sorted(unknown))
            raise BadRequest(f"no such detail: {told_names}; there are {', '.join(_DETAILS)}")
        pieces = await self._collector.text(frozenset(_DETAILS[each] for each in wanted))
        return Answer(pieces, content_type=CONTENT_TYPE)

    async def _livez(self, _parameters: Parameters) -> Answer:
        return told("ok")

    async def _readyz(self, _parameters: Parameters) -> Answer:
        if self._is_stopping:
            reasons = ["the broker is stopping"]
        elif not self._observed.started_ms:
            reasons = ["the broker is starting"]
        else:
            reasons = await reasons_not_ready(self._services, Pace(self._clock))
        return told("\n".join(reasons), UNAVAILABLE) if reasons else told("ready")
