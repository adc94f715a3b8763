"""The option --version of a command."""

from typing import Annotated

import typer


def _print_version(wanted: bool) -> None:
    if wanted:
        # Most runs of a command need it not.
        from importlib.metadata import version

        print(version("nobackfill"))
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version."),
]
