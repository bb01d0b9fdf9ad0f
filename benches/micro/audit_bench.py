"""What the audit log adds to a Produce request: `PYTHONPATH=. python benches/micro/audit_bench.py`.

One request of one topic, as dispatch has it noted and told of (`handlers.auditing`) and as Produce asks for its right,
by an authorizer with 1,000 rules: without an audit log, with one that writes down changes (the default) and one that
writes down everything, and the same for a request that is denied. Its queue is there and is emptied; no file is
written, because that is not the event loop's. The ways take turns, so that a busy machine is busy for all of them.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from benches.micro.rights_bench import RULES, rules

from millrace.clock import SystemClock
from millrace.handlers import auditing, produce
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.needs import WRITE_TOPIC, WRITE_TRANSACTIONAL_ID, judged
from millrace.security.audit import Allowed, Audit
from millrace.security.authorizer import Authorizer
from millrace.wire.frame import RequestHeader
from millrace.wire.keys import ApiKey

CALLS = 10_000
ROUNDS = 21
NEEDS = judged(WRITE_TOPIC, WRITE_TRANSACTIONAL_ID)


def request(authorizer: Authorizer, allowed: Allowed | None, topic: str) -> Callable[[], None]:
    """One request; `allowed` is None where there is no audit log."""
    audit = None
    if allowed is not None:
        audit = Audit(
            broker_id=1, cluster_id=lambda: "c", allowed=allowed, explain=authorizer.explain, clock=SystemClock()
        )
        audit.outbox("a bench")
    replicas = SimpleNamespace(name_of=lambda key: key)
    broker: Any = SimpleNamespace(authorizer=authorizer, replicas=replicas, audit=audit)
    item = SimpleNamespace(records=memoryview(bytes(200)), partition=0)
    header = RequestHeader(ApiKey.PRODUCE, 9, 7, "bench")

    def serve() -> None:
        call: Any = SimpleNamespace(topics=[(topic, [item])], transactional_id=None)
        context = RequestContext(broker, header, 9, "127.0.0.1", "PLAINTEXT", needs=NEEDS)
        auditing.begin(context, ApiKey.PRODUCE, call)
        may_write = context.rights(*WRITE_TOPIC)
        answer = [] if may_write is anything else produce._judge(context, call, may_write)  # noqa: SLF001
        if context.notes is not None:
            auditing.tell(context, ApiKey.PRODUCE, answer)

    return serve


def main() -> None:
    table = rules()
    authorizer = Authorizer(enabled=True, acls=lambda: table)
    ways = {
        (name, outcome): request(authorizer, allowed, topic)
        for name, allowed in (("off", None), ("changes", Allowed.CHANGES), ("all", Allowed.ALL))
        for outcome, topic in (("allowed", "bench-1"), ("denied", "other"))
    }
    taken: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS):
        for way, serve in ways.items():
            taken[way].append(timeit.timeit(serve, number=CALLS) / CALLS * 1e6)
    print(f"{RULES:,} rules; microseconds per request, median of {ROUNDS} interleaved rounds, and the ratio to off:")
    for (name, outcome), each in taken.items():
        ratio = statistics.median(one / off for one, off in zip(each, taken["off", outcome], strict=True))
        print(f"{name:<8} {outcome:<8} {statistics.median(each):6.2f}  {ratio:5.2f}")


if __name__ == "__main__":
    main()
