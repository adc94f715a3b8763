"""The command for a gallery that is damaged."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli.options import Json
from nobackfill.client.output import Output
from nobackfill.errors import DamagedError


def rescue(
    context: typer.Context,
    to: Annotated[Path, typer.Option(help="The file of the new gallery.")],
    json: Json = False,
) -> None:
    """Make a new gallery of every intact row of a damaged one; exit 65 if some were not."""
    from nobackfill.client.rescue import rescue as save

    output = Output(json)
    done = save(context.obj, to)
    vectors = ", ".join(f"{n} vectors of release {r}" for r, n in done["vectors"].items())
    for name in done["not_copied"]:
        output.note(f"{name}: cannot be read and was not copied; `edge-client sync` brings models")
    for table, count in done["unreadable"].items():
        output.note(f"{table}: {count} rows, or places for rows, lie on damaged pages")
    for table, count in done["refused"].items():
        output.note(f"{table}: {count} rows are not as they were written")
    output.result(
        done,
        f"{to}: {done['items']} items and {vectors} saved"
        + ("; add the images of lost items again" if done["lost"] else ", nothing was lost"),
    )
    if done["lost"]:
        raise typer.Exit(DamagedError.exit_code)
