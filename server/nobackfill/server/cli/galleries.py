"""`gateway update-gallery`: how a gallery answers after an upgrade."""

from pathlib import Path
from typing import Annotated

import typer
from google.protobuf.duration_pb2 import Duration

from nobackfill.errors import few
from nobackfill.server.cli.app import DEFAULT_SERVER, Json, Server, app, exit_codes, show
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
    hits: Annotated[
        int | None,
        typer.Option(help="first hits embedded again, 20 to 200", show_default="100"),
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(help="what a query waits for them", show_default="1")
    ] = None,
    bytes_a_query: Annotated[
        int | None, typer.Option(help="what it may read", show_default="67108864")
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(help="batches at once", show_default="2")
    ] = None,
    a_day: Annotated[int | None, typer.Option(help="items of a day", show_default="100000")] = None,
    both: Annotated[
        bool | None,
        typer.Option("--both/--no-both", help="the model before ranks carried items, too"),
    ] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Register where a gallery's images or texts are: hits that an upgrade has carried are
    embedded again from there as people look. Or have both models rank what was carried, by weights
    that the release measured. Without --source or --both: show it."""
    if source is None and (hits or seconds or bytes_a_query or concurrency or a_day):
        raise typer.BadParameter("expected --source with what it may cost")
    with exit_codes(), Gateway(server, retries=False) as gateway:
        if source is None and both is None:
            answer = gateway.get_gallery(gallery)
        elif source is None:
            answer = gateway.update_gallery(gallery, both_models=both)
        else:
            patience = Duration()
            numbers = (hits, bytes_a_query, concurrency, a_day, seconds)
            if not all(number is None or 0 < number < 1 << 32 for number in numbers):
                raise typer.BadParameter("expected numbers above 0 and below 2**32")
            patience.FromNanoseconds(int(1e9 * (seconds or 0)))
            message = gallery_pb2.ItemSource(
                address="" if source == "none" else source, hits=hits, patience=patience,
                bytes_a_query=bytes_a_query, concurrency=concurrency, items_a_day=a_day,
            )  # fmt: skip
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
    """Put every picture below a folder, under its path there; or every text of FILE.jsonl, an
    object with `id` and `text` a line, the other keys as metadata. Right to be repeated. Exit
    status 65 where some were refused; they are named."""
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
