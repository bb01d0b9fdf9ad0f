"""`millrace console`: a web page for a cluster, of this machine or another, millrace's or any Kafka."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Final

import typer

from millrace.cli.options import DEFAULT_BOOTSTRAP, Bootstrap, Client, name_values
from millrace.cli.output import CommandError, print_remark
from millrace.spark.pipelines.status import RUNS_VARIABLE

TOKEN_VARIABLE: Final = "MILLRACE_CONSOLE_TOKEN"  # noqa: S105  # the name of a variable
_LOGINS: Final = ("auto", "none", "token", "brokers")

app = typer.Typer(add_completion=False)


@app.command(
    epilog="Examples: `millrace console`; `millrace console --bootstrap broker1:9092 --read-only`; "
    "`millrace console --listen 0.0.0.0:9080 -X security.protocol=SASL_SSL -X ssl.ca.location=ca.pem "
    "-X sasl.mechanism=SCRAM-SHA-512 --role alice=admin --default-role viewer`"
)
def console(
    *,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    listen: Annotated[
        str, typer.Option("--listen", "-l", metavar="HOST:PORT", help="Where to listen; port 0 for a free one.")
    ] = "127.0.0.1:9080",
    read_only: Annotated[bool, typer.Option("--read-only", help="Show everything, change nothing.")] = False,
    login: Annotated[
        str,
        typer.Option(
            "--login",
            help="Who may come in: `brokers` asks for a user of the brokers, `token` for a word that is printed at the "
            f"start (or given as {TOKEN_VARIABLE}), `none` for nothing. `auto`: brokers, if --client says SASL and no "
            "user; nothing on the loopback address; a token elsewhere.",
        ),
    ] = "auto",
    roles: Annotated[
        list[str] | None,
        typer.Option("--role", metavar="USER=ROLE", help="viewer, operator or admin; repeatable. It only takes away."),
    ] = None,
    default_role: Annotated[str, typer.Option("--default-role", help="Of everybody else.")] = "admin",
    certificate: Annotated[
        Path | None, typer.Option("--certificate", help="A PEM file with the certificate (chain): speak https.")
    ] = None,
    key: Annotated[Path | None, typer.Option("--key", help="The PEM file with its key.")] = None,
    public_url: Annotated[
        str, typer.Option("--public-url", metavar="URL", help="The address that people open, if a proxy is before it.")
    ] = "",
    pipelines: Annotated[
        Path | None,
        typer.Option(
            "--pipelines",
            metavar="DIR",
            help="A folder of pipelines (.py) that can be started, too; it also lets the brokers' users start some.",
        ),
    ] = None,
    pipeline_runs: Annotated[
        Path | None,
        typer.Option(
            "--pipeline-runs",
            metavar="DIR",
            envvar=RUNS_VARIABLE,
            help="Where runs note how they are (`millrace pipeline run --runs`) "
            "[default: ~/.local/state/millrace/pipelines].",
        ),
    ] = None,
    client: Client = None,
) -> None:
    """Serve the console; prints `console=URL` once a browser can open it. Ctrl-C ends it."""
    from millrace.cli.serve import configure_logging
    from millrace.console import serving, settings
    from millrace.console.roles import Role

    host, port = parse_listen(listen)
    properties = name_values(client, "--client")
    if login not in _LOGINS:
        raise CommandError(f"--login is one of {', '.join(_LOGINS)}, not '{login}'", exit_code=2)
    if (certificate is None) != (key is None):
        raise CommandError("--certificate and --key belong together", exit_code=2)
    if pipelines is not None and not pipelines.is_dir():
        raise CommandError(f"--pipelines: there is no folder {pipelines}", exit_code=2)
    if public_url and not public_url.startswith(("http://", "https://")):
        raise CommandError(
            f"--public-url is http://HOST[:PORT] or https://HOST[:PORT], not '{public_url}'", exit_code=2
        )
    try:
        by_user = {user: Role.named(role) for user, role in name_values(roles, "--role").items()}
        everybody = Role.named(default_role)
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from None
    wanted = None if login == "auto" else settings.Login(login)
    kind = settings.choose_login(properties, host, wanted)
    if kind is settings.Login.NONE and not settings.is_loopback(host):
        print_remark(f"millrace: everybody who reaches {host} may use this console as you do: no login is asked")
    given = settings.ConsoleSettings(
        bootstrap=bootstrap,
        client=properties,
        host=host,
        port=port,
        login=kind,
        token=os.environ.get(TOKEN_VARIABLE) or secrets.token_urlsafe(18),
        read_only=read_only,
        roles=by_user,
        default_role=everybody,
        pipelines=pipelines,
        pipeline_runs=pipeline_runs,
        public_url=public_url.rstrip("/"),
        certificate=certificate,
        key=key,
    )
    if kind is not settings.Login.BROKERS:
        given.client_settings()  # a mistake is one line here instead of one on every page
    configure_logging("warning")

    def ready(url: str) -> None:
        print(f"console={url}", flush=True)
        if text := serving.login_text(given):
            print_remark(f"millrace: {text}")

    serving.serve(given, ready=ready)


def parse_listen(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise CommandError(f"--listen wants HOST:PORT, not '{text}'", exit_code=2)
    return host, int(port)
