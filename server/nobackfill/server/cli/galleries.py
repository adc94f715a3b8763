"""`gateway gallery`, `search`, `put` and `update-gallery`: galleries and what is in them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from google.protobuf.duration_pb2 import Duration

from nobackfill.errors import join_few
from nobackfill.server.cli.app import (
    DEFAULT_SERVER,
    HEALING,
    Json,
    Server,
    app,
    exit_on_error,
    format_examples,
    print_result,
    read_tuning_file,
    settings_option,
)
from nobackfill.server.cli.operations import connect, message_to_json
from nobackfill.terminal import escape_control
from nobackfill.v1 import gallery_pb2
from nobackfill.wire.gateway import Gateway

gallery_commands = typer.Typer(no_args_is_help=True, help="Create, list and delete galleries.")
app.add_typer(gallery_commands, name="gallery")

_Name = Annotated[
    str, typer.Argument(help="Name of the gallery: 1 to 64 characters of a-z, 0-9, - and _.")
]


@gallery_commands.command(epilog=format_examples("gateway gallery create photos"))
def create(name: _Name, server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """Create an empty gallery.

    The release that answers at present embeds its queries. Fill it with `gateway put`.

    It fails if a gallery has this name, if no release is active yet, or while an activation runs.
    """
    with exit_on_error(), connect(server) as gateway:
        answer = gateway.create_gallery(name)
    _show_galleries(message_to_json(answer), [answer], as_json)


@gallery_commands.command("list", epilog=format_examples("gateway gallery list"))
def list_command(server: Server = DEFAULT_SERVER, as_json: Json = False) -> None:
    """List the galleries: items, and the release that answers in each.

    They are sorted by name. A gallery that is not served is listed with the reason.
    """
    with exit_on_error(), connect(server) as gateway:
        found = list(gateway.list_galleries())
    whole = gallery_pb2.ListGalleriesResponse(galleries=found)
    _show_galleries(message_to_json(whole), found, as_json)


@gallery_commands.command(epilog=format_examples("gateway gallery delete photos --yes"))
def delete(
    name: _Name,
    confirm: Annotated[
        bool,
        typer.Option(
            "--yes", help="Delete the gallery. Without it, only count its items and change nothing."
        ),
    ] = False,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Delete a gallery and all its items, for good.

    Without --yes, only count the items.

    It fails if there is no such gallery, while an activation runs, or if calls use it for a minute.
    """
    with exit_on_error(), connect(server) as gateway:
        items = gateway.get_gallery(name).items
        if confirm:
            gateway.delete_gallery(name)
    result = {"gallery": name, "items": items, "deleted": confirm}
    done = "yes" if confirm else "no; repeat with --yes"
    print_result(as_json, result, [["gallery", "items", "deleted"], [name, str(items), done]])


def _show_galleries(
    result: dict[str, Any], galleries: Sequence[gallery_pb2.Gallery], as_json: bool
) -> None:
    rows = [["gallery", "items", "release", "note"]]
    rows += [
        [one.name, str(one.items), str(one.release or ""), one.set_aside or one.note]
        for one in galleries
    ]
    print_result(as_json, result, rows)


@app.command(
    epilog=format_examples(
        "gateway search photos cat.jpg", 'gateway search notes --text "opening hours" -k 5'
    )
)
def search(
    gallery: Annotated[str, typer.Argument(help="Name of the gallery that is searched.")],
    image: Annotated[
        Path | None,
        typer.Argument(
            help="File whose picture is the query: JPEG, PNG or WebP. Give either this file or "
            "--text.",
            show_default="--text",
        ),
    ] = None,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="WORDS",
            help="Search for these words instead of an image. The gallery's release must embed "
            "texts. Without it, an image file is required.",
        ),
    ] = None,
    k: Annotated[
        int,
        typer.Option("-k", min=1, max=1000, help="Print at most this number of hits, best first."),
    ] = 10,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Search a gallery by an image file or by a text.

    The score is the probability of a match, where the release has a calibration.

    Hits are listed best first; an empty gallery has none. It fails if the gallery or the file does
    not exist, or if the release cannot read the query.
    """
    if (image is None) == (text is None):
        raise typer.BadParameter(
            "expected either an image file or --text WORDS, got both or none; give exactly one"
        )
    with exit_on_error(), connect(server) as gateway:
        answer = gateway.search(gallery, image=image, text=text, k=k)
    hits = [
        {
            "id": hit.id, "distance": hit.distance, "score": hit.score, "release": hit.release,
            "origin": hit.origin, "metadata": hit.metadata,
        }
        for hit in answer.hits
    ]  # fmt: skip
    result = {"release": answer.release, "space": answer.space, "hits": hits}
    if as_json:
        typer.echo(json.dumps(result, default=str))
        return
    rows = [["id", "score", "distance", "release", "vector", "metadata"]]
    rows += [
        [
            hit.id, "" if hit.score is None else f"{hit.score:.1%}", f"{hit.distance:.4f}",
            str(hit.release), hit.origin,
            ", ".join(f"{key}={value}" for key, value in hit.metadata.items()),
        ]
        for hit in answer.hits
    ]  # fmt: skip
    print_result(False, result, rows)


@app.command(
    "update-gallery",
    epilog=format_examples(
        "gateway update-gallery photos",
        "gateway update-gallery photos --source folder:/srv/photos",
        "gateway update-gallery photos --source none",
        "gateway update-gallery photos --both",
    ),
)
def update_gallery(
    gallery: Annotated[str, typer.Argument(help="Name of the gallery to change or to show.")],
    source: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Re-embed hits from their originals in this place: folder:DIR, "
            "folder:DIR/{id}.jpg, https://HOST/{id}.jpg or texts:FILE.jsonl; column:NAME or "
            "function:NAME, a column of a database or a Python function that the gateway's "
            "settings permit. With none, hits are re-embedded no more. Without --source, the "
            "present place stays.",
        ),
    ] = None,
    settings: Annotated[Path | None, settings_option(HEALING)] = None,
    both: Annotated[
        bool | None,
        typer.Option(
            "--both/--no-both",
            help="Rank migrated items, whose vectors were computed from older ones, by the "
            "distances of the new and of the previous model; with --no-both by the new model "
            "alone. Without either, this stays as it is.",
        ),
    ] = None,
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Change how a gallery answers after an upgrade, or show it.

    With --source, the gateway re-embeds hits from their images or texts when a query finds them;
    --settings bounds the cost. With --both, the previous model helps to rank items whose vectors
    were computed from its own. Without any option, the command only shows the gallery.
    """
    if source is None and settings is not None:
        raise typer.BadParameter(
            "--settings needs --source, because these settings limit what re-embedding from the "
            "source may cost; give --source, too"
        )
    with exit_on_error(), Gateway(server, retries=False) as gateway:
        if source is None and both is None:
            answer = gateway.get_gallery(gallery)
        elif source is None:
            answer = gateway.update_gallery(gallery, both_models=both)
        else:
            numbers = read_tuning_file(settings, HEALING)
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
    print_result(as_json, message_to_json(answer), rows)


_SECONDS = 120.0


@app.command(
    epilog=format_examples(
        "gateway put photos ~/Pictures",
        "gateway put photos s3://bucket/pictures",
        "gateway put notes notes.jsonl",
    )
)
def put(
    gallery: Annotated[
        str,
        typer.Argument(help="Name of an existing gallery; `gateway gallery create` creates one."),
    ],
    place: Annotated[
        str,
        typer.Argument(
            help="Where items are read from: a folder of pictures, s3://BUCKET/PREFIX or "
            "gs://BUCKET/PREFIX, or a file of texts FILE.jsonl."
        ),
    ],
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="CLUSTER",
            help="Embed the items on this Ray cluster: HOST:PORT, or auto for the one on this "
            "machine. Without it, the gateway embeds them.",
        ),
    ] = None,
    model_repo: Annotated[
        Path,
        typer.Option(
            envvar="NOBACKFILL_MODEL_REPO",
            metavar="FOLDER",
            help="Read the models for --ray from this publication folder. Without --ray, it is not "
            "read.",
        ),
    ] = Path("model_repo"),
    server: Server = DEFAULT_SERVER,
    as_json: Json = False,
) -> None:
    """Put a folder's pictures, or a file's texts, into a gallery.

    A picture's id is its path in the folder. A line of FILE.jsonl is an object with the keys `id`
    and `text`; its other keys are metadata. Running the command again is safe: it replaces items
    with the same id. The exit code is 65 if items were refused; each is printed with its reason.
    """
    with exit_on_error():
        from nobackfill.errors import InvalidInputError
        from nobackfill.server.bulk import fill, fill_by_ray

        def on_stored(count: int) -> None:
            typer.echo(f"{count} stored", err=True)

        with Gateway(server, seconds=_SECONDS) as gateway:
            summary = (
                fill(gateway, gallery, place, on_stored)
                if ray is None
                else fill_by_ray(gateway, gallery, place, model_repo, ray, on_stored)
            )
        rows = [["stored", "refused"], [str(summary.stored_count), str(len(summary.refusals))]]
        print_result(
            as_json, {"stored": summary.stored_count, "refused": dict(summary.refusals)}, rows
        )
        for name, why in summary.refusals.items():
            typer.echo(escape_control(f"{name}: {why}"), err=True)
        if summary.refusals:
            raise InvalidInputError(
                f"refused: {join_few(summary.refusals)}; correct them and run the command again, "
                "which stores only what is new or changed"
            )
