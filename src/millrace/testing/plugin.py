"""The pytest plugin: a `millrace` fixture, which is a running `Cluster`.

    def test_orders(millrace):
        producer = Producer({"bootstrap.servers": millrace.bootstrap_servers})

Each test gets a broker of its own, which takes well under 100 ms. A suite that prefers one broker for many tests says
so in its pytest configuration, and may give broker settings there:

    millrace_scope = session            # function (default), class, module, package or session
    millrace_settings =
        num.partitions=4

Not here: anything that costs time at the start of pytest; the broker is imported by the first test that asks for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import pytest

if TYPE_CHECKING:
    from millrace.testing.cluster import Cluster

Scope = Literal["function", "class", "module", "package", "session"]
SCOPES: Final = ("function", "class", "module", "package", "session")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("millrace_scope", f"how long a millrace broker lives: {', '.join(SCOPES)}", default="function")
    parser.addini("millrace_settings", "broker settings of the millrace fixture, name=value", type="linelist")


def pytest_configure(config: pytest.Config) -> None:
    """Look at the configuration here: what is raised while pytest collects fixtures is an internal error of its own."""
    chosen = config.getini("millrace_scope")
    if chosen not in SCOPES:
        raise pytest.UsageError(f"millrace_scope is one of {', '.join(SCOPES)}, not '{chosen}'")
    _settings(config)


def _scope(*, fixture_name: str, config: pytest.Config) -> Scope:  # noqa: ARG001  # the arguments that pytest gives
    return cast(Scope, config.getini("millrace_scope"))


def _settings(config: pytest.Config) -> dict[str, str]:
    settings: dict[str, str] = {}
    for line in cast("list[str]", config.getini("millrace_settings")):
        name, equals, value = line.partition("=")
        if not equals:
            raise pytest.UsageError(f"millrace_settings wants name=value, not '{line}'")
        settings[name.strip()] = value.strip()
    return settings


@pytest.fixture(scope=cast(Any, _scope))
def millrace(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A running broker on a free port, in this process, with temporary data; `.bootstrap_servers` is its address."""
    from millrace.testing.cluster import Cluster  # noqa: PLC0415

    with Cluster(settings=_settings(request.config)) as cluster:
        yield cluster
