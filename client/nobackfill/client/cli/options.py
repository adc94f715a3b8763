"""Options that several commands share."""

import math
import re
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.gallery.filters import LARGEST_INTEGER, LEAST_INTEGER, Scalar

# No more digits than 64 bits have: Python refuses to read thousands.
_WHOLE = re.compile(r"-?[0-9]{1,19}")

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


def value_of(text: str) -> Scalar:
    """Numbers, true and false are written as in JSON; the rest is text."""
    if text in ("true", "false"):
        return text == "true"
    try:
        if _WHOLE.fullmatch(text) and LEAST_INTEGER <= int(text) <= LARGEST_INTEGER:
            return int(text)
        number = float(text)
    except ValueError:
        return text
    return number if math.isfinite(number) else text
