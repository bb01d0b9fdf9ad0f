"""What the shell offers for a word: topics and groups of the cluster, and words that an option takes.

A parameter is known by what it is called (`TOPIC`, `--group`, `--type`), so that every command has this without a word
of its own. The cluster is asked within `LIMIT_S`; where it cannot be reached nothing is offered and nothing is said,
because the person is in the middle of a line. Not here: the shells' side (`millrace --install-completion`, typer).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from typer.core import TyperArgument

from millrace.cli.choices import ACKS, COMPRESSIONS, ISOLATIONS, TOP_SORTS

if TYPE_CHECKING:
    from millrace.client.cluster import ClusterClient

LIMIT_S: Final = 0.7
_Words = Callable[[Any], Iterable[str]]


def offer_words(parameter: Any) -> None:
    """Have the shell offer words for a parameter, if it is one of those that are known here."""
    words = _words_of(parameter)
    if words is None:
        return

    def complete(ctx: Any, _: Any, incomplete: str) -> list[str]:
        given = ctx.params.get(parameter.name)
        said = set(given) if isinstance(given, (list, tuple)) else set()
        found = sorted(word for word in words(ctx) if word.startswith(incomplete) and word not in said)
        # Internal topics are offered to those who ask for them.
        return [word for word in found if incomplete.startswith("_") or not word.startswith("__")]

    # typer takes this where a parameter is declared, which here would be in every command.
    parameter._custom_shell_complete = complete  # noqa: SLF001


def _words_of(parameter: Any) -> _Words | None:
    if isinstance(parameter, TyperArgument):
        return _ARGUMENTS.get((parameter.metavar or "").strip("[]").removesuffix("..."))
    if parameter.metavar in _METAVARS:
        return _METAVARS[parameter.metavar]
    for name in parameter.opts:
        if name in _OPTIONS:
            return _OPTIONS[name]
        if name in _CHOICES and parameter.metavar is None:  # with a metavar it is something else of this name
            return _CHOICES[name]
    return None


def _topics(ctx: Any) -> Iterable[str]:
    return _asked(ctx, lambda cluster: list(cluster.topics()))


def _groups(ctx: Any) -> Iterable[str]:
    from millrace.admin.groups import list_groups

    return _asked(ctx, lambda cluster: [group.name for group in list_groups(cluster)])


def _pipelines(_: Any) -> Iterable[str]:
    from millrace.spark.pipelines.contract import built_in

    return [pipeline.name for pipeline in built_in()]


def _group_types(_: Any) -> Iterable[str]:
    from millrace.admin.groups import TYPES

    return TYPES


def _group_states(_: Any) -> Iterable[str]:
    from millrace.admin.groups import STATES

    return STATES


def _transactional_ids(ctx: Any) -> Iterable[str]:
    from millrace.admin.transactions import list_transactions

    return _asked(ctx, lambda cluster: [each.transactional_id for each in list_transactions(cluster)])


def _transaction_states(_: Any) -> Iterable[str]:
    from millrace.admin.transactions import STATES

    return STATES


def _operations(_: Any) -> Iterable[str]:
    from millrace.admin.acls import OPERATIONS

    return OPERATIONS


def _scram_mechanisms(_: Any) -> Iterable[str]:
    from millrace.admin.users import MECHANISMS

    return MECHANISMS


def _log_levels(_: Any) -> Iterable[str]:
    from millrace.cli.serve import LOG_LEVELS

    return LOG_LEVELS


_ARGUMENTS: Final[dict[str, _Words]] = {
    "TOPIC": _topics,
    "GROUP": _groups,
    "NAME|FILE.py": _pipelines,
    "TRANSACTIONAL_ID": _transactional_ids,
}
_OPTIONS: Final[dict[str, _Words]] = {
    "--topic": _topics,
    "--group": _groups,
    "--queue": _groups,
    "--transactional-id": _transactional_ids,
    "--operation": _operations,
    "--mechanism": _scram_mechanisms,
}
_METAVARS: Final[dict[str, _Words]] = {"TRANSACTION-STATE": _transaction_states}
_CHOICES: Final[dict[str, _Words]] = {
    "--type": _group_types,
    "--state": _group_states,
    "--log-level": _log_levels,
    "--compression": lambda _: COMPRESSIONS,
    "--acks": lambda _: ACKS,
    "--isolation": lambda _: ISOLATIONS,
    "--sort": lambda _: TOP_SORTS,
}


def _asked(ctx: Any, ask: Callable[[ClusterClient], list[str]]) -> list[str]:
    """What the cluster answers in time, or nothing."""
    from millrace.cli.options import DEFAULT_BOOTSTRAP, name_values
    from millrace.client.cluster import ClusterClient
    from millrace.client.settings import ClientSettings

    answers: list[str] = []

    def work() -> None:
        with suppress(Exception):  # whatever it is, this is not the moment to say so
            properties = {
                "client.id": "millrace-cli",
                **name_values(ctx.params.get("client"), "--client"),
                "bootstrap.servers": ctx.params.get("bootstrap") or DEFAULT_BOOTSTRAP,
            }
            with ClusterClient(ClientSettings.from_properties(properties)) as cluster:
                answers.extend(ask(cluster))

    # A thread that is left behind, because a client has limits of its own for each address, and tries again.
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(LIMIT_S)
    return answers
