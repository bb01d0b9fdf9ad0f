"""What asking for a right adds to a Produce request: `PYTHONPATH=tests python benches/micro/rights_bench.py`.

The question of one topic, as Produce asks it, without an authorizer and with one that has 1,000 rules. No bar of its
own: `make bench-security ARGS="--only acls"` has it, and is noisier than this.
"""

from __future__ import annotations

import timeit
from types import SimpleNamespace
from typing import Any

from millrace.handlers import produce
from millrace.handlers.context import RequestContext, anything
from millrace.handlers.needs import WRITE_TOPIC, WRITE_TRANSACTIONAL_ID, judged
from millrace.security.acls import Acl, AclTable, Operation, PatternKind, Permission, ResourceKind
from millrace.security.authorizer import NO_AUTHORIZER, Authorizer

RULES = 1000
CALLS = 100_000


def rules() -> AclTable:
    def rule(prefix: str, principal: str) -> Acl:
        kind, pattern = ResourceKind.TOPIC, PatternKind.PREFIXED
        return Acl(kind, prefix, pattern, principal, "*", Operation.ALL, Permission.ALLOW)

    others = [rule(f"team-{number}-", f"User:member-{number}") for number in range(RULES - 1)]
    return AclTable([*others, rule("bench-", "User:ANONYMOUS")])


def microseconds(authorizer: Authorizer) -> float:
    replicas = SimpleNamespace(name_of=lambda key: key)
    broker: Any = SimpleNamespace(authorizer=authorizer, replicas=replicas, audit=None)
    header: Any = None
    needs = judged(WRITE_TOPIC, WRITE_TRANSACTIONAL_ID)
    context = RequestContext(broker, header, 9, "127.0.0.1", "PLAINTEXT", needs=needs)
    item = SimpleNamespace(records=memoryview(bytes(200)), partition=0)
    call: Any = SimpleNamespace(topics=[("bench-1", [item])], transactional_id=None)

    def ask() -> None:
        may_write = context.rights(*WRITE_TOPIC)
        if may_write is not anything and produce._judge(context, call, may_write):  # noqa: SLF001
            raise RuntimeError("it may, by the rules")

    return min(timeit.repeat(ask, number=CALLS, repeat=5)) / CALLS * 1e6


def main() -> None:
    table = rules()
    without, with_rules = microseconds(NO_AUTHORIZER), microseconds(Authorizer(enabled=True, acls=lambda: table))
    print(f"{without:.2f} us without an authorizer, {with_rules:.2f} us with {RULES:,} rules")


if __name__ == "__main__":
    main()
