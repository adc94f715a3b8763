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
    examples,
    exit_codes,
    settings_option,
    show,
    tuning,
)
from nobackfill.server.cli.operations import plain
from nobackfill.terminal import visible
from nobackfill.v1 import gallery_pb2
from nobackfill.wire.gateway import Gateway


@app.command(
    "update-gallery",
    epilog=examples(
        "gateway update-gallery photos",
        "gateway update-gallery photos --source folder:/srv/photos",
        "gateway update-gallery photos --source none",
        "gateway update-gallery photos --both",
    ),
)
def update_gallery(
    gallery: Annotated[str, typer.Argument(help="name of the gallery")],
    source: Annotated[
        str | None,
        typer.Option(
            help="where the items' originals are: folder:DIR, folder:DIR/{id}.jpg, "
            "https://HOST/{id}.jpg, texts:FILE.jsonl, column:NAME, function:NAME, or none"
        ),
    ] = None,
    settings: Annotated[Path | None, settings_option(HEALING)] = None,
    both: Annotated[
        bool | None,
        typer.Option("--both/--no-both", help="let the previous model help to rank migrated items"),
    ] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Change how a gallery answers after an upgrade, or show it.

    With --source, the gateway re-embeds hits from their images or texts when a query finds them;
    --settings bounds the cost. With --both, the previous model helps to rank migrated items, by
    weights from the release. Without any option, the command only shows the gallery.
    """
    if source is None and settings is not None:
        raise typer.BadParameter(
            "--settings needs --source: it bounds what re-embedding from the source may cost"
        )
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
    origin = answer.source
    rows = [["gallery", "both", "source", "hits", "seconds", "bytes a query", "at once", "a day"]]
    model = f"with release {answer.both_with}" if answer.both_with else "no previous model now"
    both_cell = model if answer.both_models else ""
    if answer.HasField("source"):
        rows.append([
            answer.name, both_cell, origin.address, str(origin.hits),
            f"{origin.patience.ToTimedelta().total_seconds():g}", str(origin.bytes_a_query),
            str(origin.concurrency), str(origin.items_a_day),
        ])  # fmt: skip
    else:
        rows.append([answer.name, both_cell, "none", "", "", "", "", ""])
    show(as_json, plain(answer), rows)


_SECONDS = 120.0


@app.command(
    epilog=examples(
        "gateway put photos ~/Pictures",
        "gateway put photos s3://bucket/pictures",
        "gateway put notes notes.jsonl",
    )
)
def put(
    gallery: Annotated[str, typer.Argument(help="name of an existing gallery")],
    place: Annotated[
        str, typer.Argument(help="folder, s3://BUCKET/…, gs://BUCKET/…, or FILE.jsonl")
    ],
    ray: Annotated[
        str | None, typer.Option(help="embed on this Ray cluster: auto or HOST:PORT")
    ] = None,
    model_repo: Annotated[
        Path, typer.Option(envvar="NOBACKFILL_MODEL_REPO", help="publication folder, for --ray")
    ] = Path("model_repo"),
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Put a folder's pictures, or a file's texts, into a gallery.

    A picture's id is its path in the folder. A line of FILE.jsonl is an object with the keys `id`
    and `text`; its other keys are metadata. Running the command again is safe: it replaces items
    with the same id. The exit code is 65 if items were refused; each is printed with its reason.
    """
    with exit_codes():
        from nobackfill.errors import InvalidInputError
        from nobackfill.server.bulk import fill, fill_by_ray

        def on_stored(stored: int) -> None:
            typer.echo(f"{stored} stored", err=True)

        with Gateway(server, seconds=_SECONDS) as gateway:
            summary = (
                fill(gateway, gallery, place, on_stored)
                if ray is None
                else fill_by_ray(gateway, gallery, place, model_repo, ray, on_stored)
            )
        rows = [["stored", "refused"], [str(summary.stored), str(len(summary.refused))]]
        show(as_json, {"stored": summary.stored, "refused": dict(summary.refused)}, rows)
        for name, why in summary.refused.items():
            typer.echo(visible(f"{name}: {why}"), err=True)
        if summary.refused:
            raise InvalidInputError(
                f"refused: {few(summary.refused)}; correct them and run the command again"
            )
