"""`gateway update-gallery`: how a gallery answers after an upgrade."""

from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration

from nobackfill.errors import few
from nobackfill.server.cli.app import (
    DEFAULT_SERVER,
    HEALING,
    Json,
    Server,
    app,
    exit_codes,
    settings_option,
    show,
    tuning,
)
from nobackfill.server.cli.operations import plain
from nobackfill.terminal import visible
from nobackfill.v1 import gallery_pb2
from nobackfill.wire.gateway import Gateway


@app.command("update-gallery")
def update_gallery(
    gallery: Annotated[str, typer.Argument(help="gallery")],
    source: Annotated[
        str | None,
        typer.Option(
            help="folder:DIR, folder:DIR/{id}.jpg, https://HOST/{id}.jpg, texts:FILE.jsonl, "
            "column:NAME, function:NAME, or none"
        ),
    ] = None,
    settings: Annotated[Path | None, settings_option(HEALING)] = None,
    both: Annotated[
        bool | None,
        typer.Option("--both/--no-both", help="the model before ranks carried items, too"),
    ] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Change how a gallery answers after an upgrade.

    With --source, the gateway embeds hits again from their images or texts, as people look.
    --settings bounds what that may cost. With --both, the model before helps to rank what was
    carried, by weights that the release brings. With neither, show the gallery.
    """
    if source is None and settings is not None:
        raise typer.BadParameter("expected --source with --settings: they bound what it may cost")
    with exit_codes(), Gateway(server, retries=False) as gateway:
        if source is None and both is None:
            answer = gateway.get_gallery(gallery)
        elif source is None:
            answer = gateway.update_gallery(gallery, both_models=both)
        else:
            numbers = tuning(settings, HEALING)
            patience = Duration()
            patience.FromNanoseconds(int(1e9 * numbers["seconds"]))
            message = gallery_pb2.ItemSource(
                address="" if source == "none" else source,
                hits=int(numbers["hits"]),
                patience=patience,
                bytes_a_query=int(numbers["bytes_a_query"]),
                concurrency=int(numbers["concurrency"]),
                items_a_day=int(numbers["a_day"]),
            )
            answer = gateway.update_gallery(gallery, source=message, both_models=both)
    found = answer.source
    rows = [["gallery", "both", "source", "hits", "seconds", "bytes a query", "at once", "a day"]]
    beside = f"with release {answer.both_with}" if answer.both_with else "none at present"
    asked = beside if answer.both_models else ""
    if answer.HasField("source"):
        rows.append([
            answer.name, asked, found.address, str(found.hits),
            f"{found.patience.ToTimedelta().total_seconds():g}", str(found.bytes_a_query),
            str(found.concurrency), str(found.items_a_day),
        ])  # fmt: skip
    else:
        rows.append([answer.name, asked, "none", "", "", "", "", ""])
    show(as_json, plain(answer), rows)


# `gateway put`: a folder's pictures, or a file's texts, into a gallery.

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
    """Put every picture of a folder, or every text of a file, into a gallery.

    A picture's id is its path in the folder. A line of FILE.jsonl is an object with `id` and
    `text`; its other keys are metadata. Items that are refused are named, and the exit code is 65.
    The command may be repeated.
    """
    with exit_codes():
        from nobackfill.errors import InvalidInputError
        from nobackfill.server.bulk import fill, fill_by_ray

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
