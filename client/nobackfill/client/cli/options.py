"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.conditions import value_of
from nobackfill.gallery.filters import Scalar

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def named_path(text: str) -> Path:
    """A path of the command line; an empty name would mean the folder one is in."""
    if not text:
        raise typer.BadParameter("expected a path, got an empty name")
    return Path(text)


def metadata_values(pairs: list[str] | None) -> dict[str, Scalar]:
    """KEY=VALUE pairs."""
    values: dict[str, Scalar] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}")
        values[key] = value_of(text)
    return values
