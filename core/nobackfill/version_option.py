"""Define the option --version of a command."""

from typing import Annotated

import typer


def _print_version(requested: bool) -> None:
    if requested:
        # Imported here: most runs of a command do not need it.
        from importlib.metadata import version

        print(version("nobackfill"))
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version",
        callback=_print_version,
        is_eager=True,
        help="Print the version of nobackfill, and run no command.",
    ),
]
