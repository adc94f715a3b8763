"""What every command shares: the application, --server and --json, exit codes, tables."""

import contextlib
import json
from collections.abc import Iterator
from importlib.metadata import version
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nobackfill.errors import NobackfillError
from nobackfill.extras import extra
from nobackfill.terminal import visible

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="`gateway`: serve, and the operator's commands over the same gRPC calls.",
)

Server = Annotated[
    str,
    typer.Option("--server", envvar="NOBACKFILL_SERVER", help="HOST:PORT, or grpcs://HOST:PORT"),
]
Json = Annotated[bool, typer.Option("--json", help="one JSON object on stdout")]
Rollout = Annotated[
    str | None,
    typer.Option(
        help="direct, dual or cutover",
        show_default="direct where the release declares it, else cutover",
    ),
]
SpareCores = Annotated[
    float | None, typer.Option(help="share of cores left to searches", show_default="0.5")
]
DEFAULT_SERVER = "127.0.0.1:50051"


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Say an error in one sentence on stderr, and exit with its code."""
    try:
        with extra("server"):
            yield
    except NobackfillError as error:
        typer.echo(visible(f"gateway: {error}"), err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def show(as_json: bool, result: dict[str, Any], rows: list[list[str]]) -> None:
    """Print `result` as JSON, or `rows`, the first one being the heads, as a table."""
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table()
    for head in rows[0]:
        # A narrow terminal breaks a long cell; rich's default would cut it off.
        table.add_column(head, overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(visible(cell)) for cell in row))
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
