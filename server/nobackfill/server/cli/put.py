"""`gateway put`: a folder's pictures, or a file's texts, into a gallery."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.errors import few
from nobackfill.server.cli.app import DEFAULT_SERVER, Json, Server, app, exit_codes, show
from nobackfill.terminal import visible
from nobackfill.wire.gateway import Gateway

_SECONDS = 120.0


@app.command()
def put(
    gallery: Annotated[str, typer.Argument(help="its name; it is there already")],
    place: Annotated[str, typer.Argument(help="a folder, s3://BUCKET/…, gs://…, or FILE.jsonl")],
    ray: Annotated[
        str | None, typer.Option(help="embed on this Ray cluster: auto or HOST:PORT")
    ] = None,
    model_repo: Annotated[
        Path, typer.Option(envvar="NOBACKFILL_MODEL_REPO", help="publication folder, for --ray")
    ] = Path("model_repo"),
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Put every picture below a folder, under its path there; or every text of FILE.jsonl, an
    object with `id` and `text` a line, the other keys as metadata. Right to be repeated. Exit
    status 65 where some were refused; they are named."""
    with exit_codes():
        from nobackfill.errors import InvalidInputError
        from nobackfill.server.bulk.filling import fill, fill_by_ray

        def on_stored(stored: int) -> None:
            typer.echo(f"{stored} stored", err=True)

        with Gateway(server, seconds=_SECONDS) as gateway:
            done = (
                fill(gateway, gallery, place, on_stored)
                if ray is None
                else fill_by_ray(gateway, gallery, place, model_repo, ray, on_stored)
            )
        rows = [["stored", "refused"], [str(done.stored), str(len(done.refused))]]
        show(as_json, {"stored": done.stored, "refused": dict(done.refused)}, rows)
        for name, why in done.refused.items():
            typer.echo(visible(f"{name}: {why}"), err=True)
        if done.refused:
            raise InvalidInputError(f"refused: {few(done.refused)}; mend them and put again")
