"""Texts on the command line of a device."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli.options import named_path
from nobackfill.client.output import Output
from nobackfill.errors import InvalidInputError

Texts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSONL: an object with id and text a line, the other keys as metadata.",
        parser=named_path,
    ),
]


def add_texts(context: typer.Context, file: Path, json: bool) -> None:
    """Add the texts of a file. Exits with 65 where some were refused; they are named."""
    from nobackfill.client.device import Device
    from nobackfill.client.notes import add
    from nobackfill.text_lines import read_texts

    output, refused = Output(json), dict[str, str]()
    with Device(context.obj) as device:
        done = add(device, read_texts(file, refused))
        total = device.store.count()
    refused |= done.refused
    for name, reason in refused.items():
        output.note(f"{name}: {reason}")
    output.result(
        {"added": done.added, "refused": refused, "items": total},
        f"{len(done.added)} added, {len(refused)} refused; {total} items",
    )
    if refused:
        raise typer.Exit(InvalidInputError.exit_code)
