"""What every command shares: the application, --server and --json, exit codes, tables."""

import contextlib
import json
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from nobackfill.errors import ConfigurationError, NobackfillError
from nobackfill.extras import extra
from nobackfill.terminal import visible

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve searches of galleries, and change the model behind them while they are asked.",
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
Number = Annotated[int, typer.Argument(min=1, max=2**31 - 1, help="release")]
DEFAULT_SERVER = "127.0.0.1:50051"

# Numbers that --settings FILE.toml may change, and what the gateway takes without them: the share
# of cores that an upgrade leaves to searches, and how long queries of the old space are answered
# (0: until `gateway retire`).
ACTIVATION: Mapping[str, float] = {"spare_cores": 0.5, "old_space_seconds": 0}
# A canary stops at this share of errors, and at a p99 of so many times the old one's.
CANARY: Mapping[str, float] = {**ACTIVATION, "most_errors": 0.01, "largest_p99_ratio": 2.0}
# What a gallery's source may cost: the first hits of a query that are embedded again, the seconds
# that the query waits for them, the bytes that it reads, batches at once, and items a day.
HEALING: Mapping[str, float] = {
    "hits": 100,
    "seconds": 1.0,
    "bytes_a_query": 64 << 20,
    "concurrency": 2,
    "a_day": 100_000,
}


def settings_option(usual: Mapping[str, float]) -> Any:
    """Make the option that names a file of numbers; its help has their defaults."""
    shown = ", ".join(f"{name} = {value}" for name, value in usual.items())
    return typer.Option("--settings", help="TOML file of numbers", show_default=shown)


ActivationSettings = Annotated[Path | None, settings_option(ACTIVATION)]


def tuning(file: Path | None, usual: Mapping[str, float]) -> dict[str, float]:
    """Read the numbers of `usual` from a TOML file.

    Returns: every number; 0, which the gateway takes as absent, for those that the file lacks.
    Raises ConfigurationError naming the key that is wrong, and a file that cannot be read.
    """
    if file is None:
        return dict.fromkeys(usual, 0)
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(f"{file}: expected a settings file (TOML): {error}") from error
    for name, value in given.items():
        if name not in usual:
            raise ConfigurationError(f"{file}: expected keys of {', '.join(usual)}, got {name!r}")
        kind = int if isinstance(usual[name], int) else float
        # No number of the contract is larger. 0 would mean the default but for those that are 0.
        fits = type(value) in (int, kind) and 0 <= value < 1 << 32 and (value or not usual[name])
        if not fits:
            what = "a whole number" if kind is int else "a number"
            least = "0" if not usual[name] else "above 0"
            raise ConfigurationError(
                f"{file}: {name}: expected {what} from {least} to below 2**32, got {value!r}"
            )
    return {name: given.get(name, 0) for name in usual}


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
