"""`gateway backup | restore | verify`: on the folders themselves, beside a gateway that serves."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show

Data = Annotated[Path, typer.Option("--data", envvar="NOBACKFILL_DATA", help="the data folder")]
DEFAULT_DATA = Path("gateway-data")


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="a new folder for the backup")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Copy all galleries and the vault, consistent under load, and verify the copy."""
    with exit_codes():
        from nobackfill.server.backup import backup

        _show(asdict(backup(data, target)), as_json)


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="a backup")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make a data folder from a verified backup, new or in an empty folder."""
    with exit_codes():
        from nobackfill.server.backup import restore

        _show(asdict(restore(source, data)), as_json)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="a backup or a data folder")] = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Check digests, what a start reads, every page of every gallery, and every vector."""
    with exit_codes():
        from nobackfill.server.backup import verify

        _show(asdict(verify(folder)), as_json)


def _show(summary: dict[str, object], as_json: bool) -> None:
    galleries = summary["galleries"]
    assert isinstance(galleries, dict)
    rows = [["gallery", "items"], *([name, str(count)] for name, count in galleries.items())]
    show(as_json, summary, [*rows, ["blobs", str(summary["blobs"])]])
