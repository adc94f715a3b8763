"""`gateway`: serve, and the operator's commands over the same gRPC calls."""

import contextlib
import json
import signal
import threading
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from release.errors import NobackfillError

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__
)

Server = Annotated[
    str,
    typer.Option("--server", envvar="NOBACKFILL_SERVER", help="HOST:PORT, or grpcs://HOST:PORT"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
DEFAULT_SERVER = "127.0.0.1:50051"

_stderr = Console(stderr=True)


def main() -> None:
    """The command `gateway`; exit codes as in docs/operations.md."""
    # The commands put themselves into `app`.
    from server import operate, safekeep  # noqa: F401

    app()


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Say an error in one sentence on stderr, and exit with its code."""
    try:
        yield
    except NobackfillError as error:
        typer.echo(f"gateway: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def show(as_json: bool, result: dict[str, Any], rows: list[list[str]]) -> None:
    """Print `result` as JSON, or `rows`, the first one being the heads, as a table."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    Console().print(table)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"gateway {version('nobackfill')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    pass


@app.command()
def serve(
    model_repo: Annotated[Path | None, typer.Option(help="publication folder")] = None,
    data: Annotated[Path | None, typer.Option(help="what the gateway keeps")] = None,
    address: Annotated[str | None, typer.Option(help="HOST:PORT of gRPC")] = None,
    metrics_address: Annotated[str | None, typer.Option(help="HOST:PORT of /metrics")] = None,
    triton: Annotated[
        str | None, typer.Option(help="HOST:PORT of a tritonserver, or in-process")
    ] = None,
    triton_venv: Annotated[Path | None, typer.Option(help="where nvidia-pytriton is")] = None,
    root: Annotated[Path | None, typer.Option(help="the first root metadata to trust")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="certificate chain (PEM)")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its private key (PEM)")] = None,
    tls_client_ca: Annotated[Path | None, typer.Option(help="demand client certificates")] = None,
    tokens_file: Annotated[Path | None, typer.Option(help="NAME ROLE SHA256 [EXPIRES]")] = None,
    config: Annotated[Path | None, typer.Option(help="settings file (TOML)")] = None,
) -> None:
    """Serve until SIGTERM or SIGINT. Each flag may also be NOBACKFILL_* or in --config."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    # Imported here: the operator's commands need neither numpy nor Triton's client.
    from server.gateway import Gateway
    from server.logs import configure
    from server.settings import load_settings

    with exit_codes():
        settings = load_settings(flags, config)
        configure()
        ended = threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: ended.set())
        gateway = Gateway(settings)
        gateway.start()
        ended.wait()
        gateway.stop()
