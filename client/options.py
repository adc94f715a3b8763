"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


def named_path(text: str) -> Path:
    """A path of the command line; an empty name would mean the folder one is in."""
    if not text:
        raise typer.BadParameter("expected a path, got an empty name")
    return Path(text)


def metadata_values(pairs: list[str] | None) -> dict[str, str | float | bool]:
    """KEY=VALUE pairs; numbers, true and false are told from text as in JSON."""
    values: dict[str, str | float | bool] = {}
    for pair in pairs or []:
        key, equals, text = pair.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"expected KEY=VALUE, got {pair!r}")
        values[key] = _value(text)
    return values


def _value(text: str) -> str | float | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text
