"""`millrace acls`: who may do what; list, add and remove the rules, and ask what they decide.

Not here: rules as the cluster has them, and the words for them (`admin.acls`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Annotated, Any, Final

import typer

from millrace.admin.acls import (
    Entry,
    Named,
    Question,
    check_access,
    create_rules,
    needed_kinds,
    operation_of,
    principal_of,
    read_rules,
    remove_rules,
    role_rules,
    word,
)
from millrace.cli.choices import exclude
from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, Json, Yes, confirm, name_values
from millrace.cli.output import CommandError, count_text, print_error, print_json, print_remark, print_table
from millrace.cli.queue_consume import open_client
from millrace.client.cluster import ClusterClient
from millrace.errors import ApiError
from millrace.security.acls import (
    CLUSTER_NAME,
    WILDCARD,
    Acl,
    AclFilter,
    Decision,
    Operation,
    PatternKind,
    Permission,
    ResourceKind,
)

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Say who may do what, and ask what somebody may.")

Topic = Annotated[list[str] | None, typer.Option("--topic", "-t", metavar="TOPIC", help="A topic; '*' for all.")]
Group = Annotated[list[str] | None, typer.Option("--group", "-g", metavar="GROUP", help="A group, or queue.")]
Cluster = Annotated[bool, typer.Option("--cluster", help="The cluster as a whole.")]
TransactionalId = Annotated[
    list[str] | None, typer.Option("--transactional-id", metavar="ID", help="The id of transactional producers.")
]
User = Annotated[
    list[str] | None,
    typer.Option("--user", metavar="PRINCIPAL", help="Tokens of a user, such as User:bob (create-tokens)."),
]
Token = Annotated[list[str] | None, typer.Option("--delegation-token", metavar="ID", help="A delegation token.")]
Prefixed = Annotated[
    bool, typer.Option("--prefixed", "-p", help="The names are beginnings: all that begin so are meant.")
]
Principals = Annotated[
    list[str] | None,
    typer.Option("--principal", "--as", metavar="PRINCIPAL", help="Whom, such as User:alice; 'User:*' for everybody."),
]
Operations = Annotated[
    list[str] | None, typer.Option("--operation", "-o", metavar="OPERATION", help="What: read, write, ... or all.")
]
Hosts = Annotated[list[str] | None, typer.Option("--host", metavar="ADDRESS", help="From this address only.")]
Permitted = Annotated[bool | None, typer.Option("--allow/--deny", help="What the rule says.")]

_RESOURCES: Final = "--topic, --group, --cluster, --transactional-id, --user or --delegation-token"


def _resources(
    topic: Sequence[str] | None,
    group: Sequence[str] | None,
    cluster: bool,
    transactional_id: Sequence[str] | None,
    user: Sequence[str] | None,
    token: Sequence[str] | None,
) -> list[Named]:
    named = {
        ResourceKind.TOPIC: topic,
        ResourceKind.GROUP: group,
        ResourceKind.CLUSTER: [CLUSTER_NAME] if cluster else None,
        ResourceKind.TRANSACTIONAL_ID: transactional_id,
        ResourceKind.USER: user,
        ResourceKind.DELEGATION_TOKEN: token,
    }
    found = [(kind, name) for kind, names in named.items() for name in names or ()]
    if not all(name for _, name in found):
        raise CommandError("a name is empty; '*' stands for all", exit_code=2)
    return found


def _filters(
    resources: Sequence[Named],
    pattern: PatternKind,
    principals: Sequence[str] | None,
    operations: Sequence[str] | None,
    hosts: Sequence[str] | None,
    allow: bool | None,
) -> list[AclFilter]:
    """One for each combination of what was given several times; nothing given is a filter that means all."""
    permission = Permission.ANY if allow is None else Permission.ALLOW if allow else Permission.DENY
    named: Sequence[tuple[ResourceKind, str | None]] = resources or [(ResourceKind.ANY, None)]
    return [
        AclFilter(
            kind,
            name,
            PatternKind.LITERAL if kind is ResourceKind.CLUSTER else pattern,
            None if principal is None else principal_of(principal),
            host,
            Operation.ANY if operation is None else operation_of(operation),
            permission,
        )
        for (kind, name), principal, host, operation in product(
            named, _each(principals), _each(hosts), _each(operations)
        )
    ]


def _each(given: Sequence[str] | None) -> Sequence[str | None]:
    """What was given; None, once, where nothing was."""
    return given or [None]


@app.command(
    "list",
    epilog="Examples: `millrace acls list`, `millrace acls list --topic orders`, "
    "`millrace acls list --principal User:alice --json`",
)
def list_rules(
    *,
    topic: Topic = None,
    group: Group = None,
    cluster: Cluster = False,
    transactional_id: TransactionalId = None,
    user: User = None,
    token: Token = None,
    prefixed: Prefixed = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Only rules that have this very name, not what holds by a prefix or '*'.")
    ] = False,
    principal: Principals = None,
    operation: Operations = None,
    host: Hosts = None,
    allow: Permitted = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """List the rules that are in force: all, or those for which everything holds that is given here.

    With the name of a resource, all rules that hold for it: those that name it, those by a prefix, and those for all.
    """
    exclude(("--exact", exact), ("--prefixed", prefixed), "a rule has a name or a prefix")
    resources = _resources(topic, group, cluster, transactional_id, user, token)
    if (exact or prefixed) and not resources:
        raise CommandError(f"--exact and --prefixed say how a name is meant: give {_RESOURCES}", exit_code=2)
    pattern = PatternKind.LITERAL if exact else PatternKind.PREFIXED if prefixed else PatternKind.MATCH
    filters = _filters(resources, pattern, principal, operation, host, allow)
    with open_client(bootstrap, name_values(client, "--client")) as asked:
        rules = read_rules(asked, filters)
    if as_json:
        print_json([_json(acl) for acl in rules])
    elif rules:
        _print_rules(rules)
    else:
        print_remark("there is no such rule" if resources or principal or operation or host else "there are no rules")


@app.command(
    epilog="Examples: `millrace acls add --principal User:alice --producer --topic orders`, "
    "`millrace acls add --principal User:bob --consumer --topic orders --group billing`, "
    "`millrace acls add --principal User:carol --operation read --operation describe --topic team-a. --prefixed`, "
    "`millrace acls add --deny --principal 'User:*' --operation delete --topic '*'`"
)
def add(
    *,
    topic: Topic = None,
    group: Group = None,
    cluster: Cluster = False,
    transactional_id: TransactionalId = None,
    user: User = None,
    token: Token = None,
    prefixed: Prefixed = False,
    principal: Principals = None,
    operation: Operations = None,
    producer: Annotated[
        bool, typer.Option("--producer", help="All that a producer needs on the topics and transactional ids.")
    ] = False,
    consumer: Annotated[
        bool, typer.Option("--consumer", help="All that a consumer needs on the topics and groups, or queues.")
    ] = False,
    host: Hosts = None,
    allow: Annotated[bool, typer.Option("--allow/--deny", help="What the rules say.")] = True,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Add rules, one for each combination of what is given several times; they hold at once.

    A rule that denies wins over all that allow. Nobody may what no rule allows, except super users.
    """
    resources = _resources(topic, group, cluster, transactional_id, user, token)
    if not principal:
        raise CommandError("for whom? give --principal User:NAME, or 'User:*' for everybody", exit_code=2)
    if not resources:
        raise CommandError(f"on what? give {_RESOURCES}", exit_code=2)
    permission = Permission.ALLOW if allow else Permission.DENY
    entry = Entry([principal_of(each) for each in principal], host or [WILDCARD], permission, prefixed)
    if prefixed and any(name == WILDCARD for kind, name in resources if kind is not ResourceKind.CLUSTER):
        text = "--prefixed with '*' means names that begin with a star; without --prefixed '*' stands for all"
        raise CommandError(text, exit_code=2)
    if producer or consumer:
        _check_roles({kind for kind, _ in resources}, producer=producer, consumer=consumer)
        exclude(("--operation", operation), ("--producer and --consumer", True), "they stand for operations")
        rules = role_rules(entry, resources, producer=producer, consumer=consumer)
    elif operation:
        rules = entry.rules(resources, [operation_of(each) for each in operation])
    else:
        raise CommandError("which operation? give --operation, --producer or --consumer", exit_code=2)
    with open_client(bootstrap, name_values(client, "--client")) as asked:
        present = set(read_rules(asked, [AclFilter(kind, name, PatternKind.ANY) for kind, name in resources]))
        new = [acl for acl in dict.fromkeys(rules) if acl not in present]
        errors = dict(zip(new, create_rules(asked, new), strict=True))
    _report(rules, errors, done="added", otherwise="exists", as_json=as_json)


def _check_roles(kinds: set[ResourceKind], *, producer: bool, consumer: bool) -> None:
    """CommandError where something is missing or too much for a role, in the words of the options."""
    if ResourceKind.TOPIC not in kinds:
        raise CommandError("--producer and --consumer need a --topic", exit_code=2)
    if consumer and ResourceKind.GROUP not in kinds:
        raise CommandError("--consumer needs a --group: the group, or queue, that it reads in", exit_code=2)
    for kind in kinds - needed_kinds(producer=producer, consumer=consumer):
        roles = " and ".join([*["--producer"] * producer, *["--consumer"] * consumer])
        raise CommandError(f"{roles} says nothing about a {word(kind)}", exit_code=2)


@app.command(
    epilog="Examples: `millrace acls remove --principal User:alice`, "
    "`millrace acls remove --topic team-a. --prefixed`, "
    "`millrace acls remove --deny --topic orders --operation read --yes`"
)
def remove(
    *,
    topic: Topic = None,
    group: Group = None,
    cluster: Cluster = False,
    transactional_id: TransactionalId = None,
    user: User = None,
    token: Token = None,
    prefixed: Prefixed = False,
    principal: Principals = None,
    operation: Operations = None,
    host: Hosts = None,
    allow: Permitted = None,
    everything: Annotated[bool, typer.Option("--all", help="Every rule there is.")] = False,
    yes: Yes = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Remove the rules for which everything holds that is given here; they are shown before.

    A name means the rules that have this very name, with --prefixed this very prefix: one that holds for the resource
    by a shorter prefix or '*' stays. What is shown is what goes: a rule that is made meanwhile stays.
    """
    resources = _resources(topic, group, cluster, transactional_id, user, token)
    if prefixed and not resources:
        raise CommandError(f"--prefixed says how a name is meant: give {_RESOURCES}", exit_code=2)
    narrowed = bool(resources or principal or operation or host or allow is not None)
    if narrowed == everything:
        raise CommandError("which rules? give some of what they have, or --all alone", exit_code=2)
    pattern = PatternKind.PREFIXED if prefixed else PatternKind.LITERAL if resources else PatternKind.ANY
    filters = _filters(resources, pattern, principal, operation, host, allow)
    with open_client(bootstrap, name_values(client, "--client")) as asked:
        rules = read_rules(asked, filters)
        if rules and not yes:
            if not as_json:
                _print_rules(rules)
            confirm(f"Remove {count_text(len(rules), 'rule')}?", yes=yes)
        errors = dict(zip(rules, remove_rules(asked, rules), strict=True))
    if not rules:
        print_remark("there is no such rule")
    _report(rules, errors, done="removed", otherwise="missing", as_json=as_json)


def _report(
    rules: Sequence[Acl], errors: dict[Acl, ApiError | None], *, done: str, otherwise: str, as_json: bool
) -> None:
    """Print what became of each rule, `otherwise` where nothing was to be done; exit non-zero when one failed."""
    outcomes: list[dict[str, Any]] = []
    for acl in dict.fromkeys(rules):
        error = errors.get(acl)
        result = otherwise if acl not in errors else done if error is None else "failed"
        outcomes.append({**_json(acl), "result": result, **({} if error is None else {"error": str(error)})})
        if error is not None:
            print_error(f"{acl}: {error}")
        elif not as_json:
            print(f"{result} {acl}")
    if as_json:
        print_json(outcomes)
    if any(outcome["result"] == "failed" for outcome in outcomes):
        raise typer.Exit(1)


# --- asking -----------------------------------------------------------------------------------------------------------


@app.command(
    epilog="Examples: `millrace acls check --as User:alice --operation read --topic orders`, "
    "`millrace acls check --as User:alice --operation write --topic orders --host 10.0.0.7 --json`"
)
def check(
    *,
    principal: Annotated[
        str, typer.Option("--as", "--principal", metavar="PRINCIPAL", help="Who asks, such as User:alice.")
    ],
    operation: Annotated[
        str, typer.Option("--operation", "-o", metavar="OPERATION", help="What for: read, write, ...")
    ],
    topic: Annotated[str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="On this topic.")] = None,
    group: Annotated[
        str | None, typer.Option("--group", "-g", metavar="GROUP", help="On this group, or queue.")
    ] = None,
    cluster: Cluster = False,
    transactional_id: Annotated[
        str | None, typer.Option("--transactional-id", metavar="ID", help="On this transactional id.")
    ] = None,
    user: Annotated[str | None, typer.Option("--user", metavar="PRINCIPAL", help="On the tokens of this user.")] = None,
    token: Annotated[
        str | None, typer.Option("--delegation-token", metavar="ID", help="On this delegation token.")
    ] = None,
    host: Annotated[
        str | None,
        typer.Option("--host", metavar="ADDRESS", show_default=False, help="From here; one that no rule names if not."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: Client = None,
    as_json: Json = False,
) -> None:
    """Say whether somebody may do something, and which rule decides; the exit code is 0 for yes and 1 for no.

    Decided here, by the rules of the cluster and the settings of one of its brokers (super.users and
    allow.everyone.if.no.acl.found), in the way in which brokers decide.
    """
    one = [None if name is None else [name] for name in (topic, group, transactional_id, user, token)]
    resources = _resources(one[0], one[1], cluster, *one[2:])
    if len(resources) != 1:
        raise CommandError(f"on what? give one of {_RESOURCES}", exit_code=2)
    ((kind, name),) = resources
    who, what = principal_of(principal), operation_of(operation)
    with open_client(bootstrap, name_values(client, "--client")) as asked:
        decision = _decide(asked, Question(who, what, kind, name, host))
    if as_json:
        print_json(
            {
                "principal": who,
                "host": host,
                "operation": what.name,
                "resource": kind.name,
                "name": name,
                "allowed": decision.allowed,
                "rule": None if decision.rule is None else _json(decision.rule),
                "reason": decision.reason or None,
            }
        )
    else:
        print(f"{'yes' if decision.allowed else 'no'}: {decision.rule or decision.reason}")
    if not decision.allowed:
        raise typer.Exit(1)


def _decide(asked: ClusterClient, question: Question) -> Decision:
    answer = check_access(asked, question)
    if answer.left_out_hosts:
        print_remark("there are rules for single hosts, which were left out; say --host to ask for one")
    settings = answer.settings
    if settings is not None and settings.untold and not answer.decision.allowed:
        told = f"broker {settings.broker_id} does not tell its {' and '.join(settings.untold)}"
        print_remark(f"{told}, by which somebody may do more than the rules allow")
    return answer.decision


# --- showing ----------------------------------------------------------------------------------------------------------


def _print_rules(rules: Sequence[Acl]) -> None:
    print_table(
        ["principal", "host", "permission", "operation", "resource", "name", "pattern"],
        [
            (
                acl.principal,
                acl.host,
                word(acl.permission),
                word(acl.operation),
                word(acl.resource),
                acl.name,
                word(acl.pattern),
            )
            for acl in rules
        ],
    )


def _json(acl: Acl) -> dict[str, Any]:
    """In Kafka's words."""
    return {
        "principal": acl.principal,
        "host": acl.host,
        "permission": acl.permission.name,
        "operation": acl.operation.name,
        "resource": acl.resource.name,
        "name": acl.name,
        "pattern": acl.pattern.name,
    }
