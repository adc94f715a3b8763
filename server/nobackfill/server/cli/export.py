"""`gateway export`: a gallery's vectors as Parquet files."""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show


@app.command()
def export(
    gallery: Annotated[str, typer.Argument(help="its name")],
    store: Annotated[str, typer.Option("--from", help="sqlite:FOLDER or postgresql://…")],
    out: Annotated[Path, typer.Option(help="folder to make: a Parquet file for each release")],
    release: Annotated[list[int] | None, typer.Option(help="only these; may be repeated")] = None,
    native: Annotated[
        bool, typer.Option("--native", help="only vectors that the release's own model made")
    ] = False,
    side: Annotated[bool, typer.Option("--side", help="side-information, too")] = False,
    as_json: Json = False,
) -> None:
    """Write every vector of one snapshot, also beside a gateway that serves the store."""
    with exit_codes():
        from nobackfill.errors import NotFoundError
        from nobackfill.server import export as exporting
        from nobackfill.server.storage import Storage, need_store

        need_store(store)
        with (
            TemporaryDirectory() as scratch,
            closing(Storage(store, Path(scratch), lock=None)) as storage,
        ):
            if gallery not in storage.home.names():
                raise NotFoundError(f"the store has no gallery {gallery!r}; look at its name")
            with closing(storage.home.open(gallery)) as hosted:
                found = exporting.export(hosted.store, out, release or (), native=native, side=side)
        rows = [["release", "vectors", "file"]]
        rows += [[str(n), str(many), str(out / f"release-{n}.parquet")]
                 for n, many in found.rows.items()]  # fmt: skip
        show(as_json, {"items": found.items, "rows": found.rows, "out": str(out)}, rows)
