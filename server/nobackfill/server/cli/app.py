"""Share one application among all commands: its options, its exit codes and its tables."""

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

from nobackfill.errors import ConfigurationError, NobackfillError, error_from_os
from nobackfill.extras import require_extra
from nobackfill.terminal import escape_control

_EPILOG = """\b
Examples:
  gateway serve --model-repo model_repo --data gateway-data
  gateway put photos ~/Pictures
  gateway estimate photos 2
  gateway activate 2

Exit codes: 0 done, or nothing to do, 1 failure, 2 wrong usage, 65 refused data or failed
verification, 66 not found, 69 no gateway answers, 73 cannot write or exists already,
75 busy: run it again, 77 not permitted, 78 an extra is missing or the configuration is wrong.
"""


def format_examples(*lines: str) -> str:
    """Format command lines as the section `Examples` of a command's help, in their order.

    Args:
        lines: complete command lines, each without a line break.
    """
    return "\n".join(["\b", "Examples:", *(f"  {line}" for line in lines)])


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    epilog=_EPILOG,
    help="Serve searches of galleries, and change the model behind them without an interruption."
    "\n\nA gallery is a named set of items with vectors. A release is one published version of the "
    "models, in a publication folder. An upgrade computes a "
    "gallery's vectors of a newer release from those of an older one.",
)

Server = Annotated[
    str,
    typer.Option(
        "--server",
        envvar="NOBACKFILL_SERVER",
        metavar="ADDRESS",
        help="Call the gateway at this address: HOST:PORT, or grpcs://HOST:PORT for TLS. Several "
        "addresses with commas between them may be given; the first that answers is used.",
    ),
]
Json = Annotated[
    bool,
    typer.Option(
        "--json",
        help="Print the result on stdout as JSON, for programs. Without it, print a table or lines "
        "of text.",
    ),
]
Rollout = Annotated[
    str | None,
    typer.Option(
        metavar="direct|dual|cutover",
        help="How queries are answered while galleries are upgraded. With direct, the new model "
        "searches the old vectors. With dual, both models search. With cutover, the old model "
        "answers until all vectors are upgraded.",
        show_default="direct if the release declares it, else cutover",
    ),
]
Number = Annotated[
    int,
    typer.Argument(
        min=1, max=2**31 - 1, help="Number of a published release; `gateway releases` lists them."
    ),
]
DEFAULT_SERVER = "127.0.0.1:50051"

# Keys that --settings FILE.toml may set, with the gateway's defaults.
ACTIVATION: Mapping[str, float] = {"spare_cores": 0.5, "old_space_seconds": 0}
CANARY: Mapping[str, float] = {**ACTIVATION, "most_errors": 0.01, "largest_p99_ratio": 2.0}
# Limits on what re-embedding from a gallery's source may cost.
HEALING: Mapping[str, float] = {
    "hits": 100,
    "seconds": 1.0,
    "bytes_a_query": 64 << 20,
    "concurrency": 2,
    "a_day": 100_000,
}
_MEANINGS: Mapping[str, str] = {
    "spare_cores": "share of the cores that an upgrade leaves to searches",
    "old_space_seconds": "seconds for which queries of the old release are still answered, or 0 "
    "until `gateway retire`",
    "most_errors": "share of failed queries above which the canary stops",
    "largest_p99_ratio": "ratio of the new release's p99 latency to the old one's above which the "
    "canary stops",
    "hits": "first hits of a query that are re-embedded",
    "seconds": "seconds that the query waits for them",
    "bytes_a_query": "bytes that are read for a query",
    "concurrency": "batches that are embedded at a time",
    "a_day": "items that are re-embedded in a day",
}


def settings_option(defaults: Mapping[str, float]) -> Any:
    """Make the option --settings, whose help lists the keys and their defaults.

    The option is not required.

    Args:
        defaults: default value by key, of the keys of ACTIVATION, CANARY and HEALING.

    Raises:
        KeyError: a key is none of these.
    """
    listing = ", ".join(f"{name} = {value}" for name, value in defaults.items())
    meanings = "; ".join(f"{name}, the {_MEANINGS[name]}" for name in defaults)
    return typer.Option(
        "--settings",
        metavar="FILE",
        help=f"TOML file with some of these numbers: {meanings}.",
        show_default=listing,
    )


ActivationSettings = Annotated[Path | None, settings_option(ACTIVATION)]


def read_tuning_file(file: Path | None, defaults: Mapping[str, float]) -> dict[str, float]:
    """Read numbers from a TOML file.

    Args:
        file: the TOML file; None if the user named none.
        defaults: default value by key. The type of a default (int or float) is the type of the key.

    Returns:
        A value for every key of `defaults`, from 0 to below 2**32; 0, which the gateway reads as
        its default, for each key that the file lacks. The file may have 0 only where the default
        is 0.

    Raises:
        ConfigurationError: the file cannot be read, is no TOML, or has an unknown key or a value
            outside its range.
    """
    if file is None:
        return dict.fromkeys(defaults, 0)
    try:
        values = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigurationError(
            f"--settings: {file} cannot be read as TOML: {error}; correct the file"
        ) from error
    for name, value in values.items():
        if name not in defaults:
            raise ConfigurationError(
                f"--settings: {file} has the unknown key {name!r}; correct it to one of "
                f"{', '.join(defaults)}"
            )
        kind = int if isinstance(defaults[name], int) else float
        # The protocol's integers end at 2**32. 0 asks for the default, so it is valid only where
        # the default is 0.
        is_valid = (
            type(value) in (int, kind) and 0 <= value < 1 << 32 and (value or not defaults[name])
        )
        if not is_valid:
            expected = "a whole number" if kind is int else "a number"
            lowest = "0" if not defaults[name] else "above 0"
            raise ConfigurationError(
                f"--settings: {file}: {name}: expected {expected} from {lowest} to below 2**32, "
                f"got {value!r}; correct the file"
            )
    return {name: values.get(name, 0) for name in defaults}


@contextlib.contextmanager
def exit_on_error() -> Iterator[None]:
    """Print an error of the block as one sentence on stderr, and exit with its code; other errors
    pass.

    It silences gRPC's own log lines, unless GRPC_VERBOSITY is set.

    Raises:
        typer.Exit: the block raised a NobackfillError (its exit code), named a file that the system
            refuses (65, 73), lacks a module of the extra `server` (78), or was interrupted (130).
    """
    try:
        with require_extra("server"):
            yield
    except NobackfillError as error:
        raise _refuse(error) from error
    except OSError as error:
        translation = error_from_os(error)
        if translation is None:
            raise
        raise _refuse(translation) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _refuse(error: NobackfillError) -> typer.Exit:
    typer.echo(escape_control(f"gateway: {error}"), err=True)
    return typer.Exit(error.exit_code)


def print_result(as_json: bool, result: dict[str, Any], rows: list[list[str]]) -> None:
    """Print a result on stdout, as JSON or as a table.

    Characters that a terminal would obey are escaped in the table. Long cells are folded.

    Args:
        as_json: print `result` as one JSON object on one line, and no table.
        result: the object for JSON.
        rows: the table's cells; the first row, which must be there, holds the headings.

    Raises:
        TypeError: `result` has a value that JSON lacks; only with `as_json`.
        IndexError: there is no row; only without `as_json`.
    """
    if as_json:
        typer.echo(json.dumps(result))
        return
    table = Table()
    for head in rows[0]:
        # A narrow terminal breaks a long cell; rich's default would cut it off.
        table.add_column(head, overflow="fold")
    for row in rows[1:]:
        table.add_row(*(Text(escape_control(cell)) for cell in row))
    Console().print(table)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"gateway {version('nobackfill')}")
        raise typer.Exit


@app.callback()
def _options(
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            callback=_print_version,
            is_eager=True,
            help="Print the version of this program, and exit without running a command.",
        ),
    ] = False,
) -> None:
    pass
