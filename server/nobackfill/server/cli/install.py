"""`gateway install-triton`."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show


@app.command()
def install_triton(
    folder: Annotated[
        Path | None,
        typer.Argument(metavar="[DIR]", help="a new folder; else where `serve` looks for it"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make the virtual environment that holds Triton, with packages from pip's index."""
    with exit_codes():
        from nobackfill.server.triton.installation import default_folder, install

        default = default_folder()
        target = default if folder is None else folder
        install(target)
        used = "gateway serve" + ("" if target == default else f" --triton-venv {target}")
        show(
            as_json,
            {"triton_venv": str(target), "used_by": used},
            [["Triton", "used by"], [str(target), used]],
        )
