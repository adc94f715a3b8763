"""The commands that make, fill, search and keep a gallery."""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli.notes import Texts, add_texts
from nobackfill.client.cli.options import Json, metadata_values, named_path
from nobackfill.client.output import Output, size
from nobackfill.errors import ConfigurationError, InvalidInputError, few

Sheet = Annotated[Path | None, typer.Option(help="Also draw query and hits as a picture, OUT.png.")]


def init(
    context: typer.Context,
    source: Annotated[
        str,
        typer.Option(
            "--from",
            help="A gateway (grpc://HOST:PORT, grpcs:// with TLS), a static host (http(s)://…), or "
            "a publication folder.",
        ),
    ],
    root: Annotated[
        Path | None,
        typer.Option(
            help="Root metadata to trust: the publisher's 1.root.json, got by another way than "
            "SOURCE (with the app, over HTTPS, by hand). Without it you are shown its fingerprint: "
            "compare it with the one that the publisher gave you."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Make an empty gallery that follows the releases published at SOURCE."""
    from nobackfill.client import ballast
    from nobackfill.client.creation import init as make
    from nobackfill.images import read_file

    try:
        trusted = None if root is None else read_file(root)
    except InvalidInputError as error:
        raise ConfigurationError(f"--root {root}: {error}") from error
    output = Output(json)
    made = make(context.obj, source, trusted, _confirm, output)
    ballast.keep(context.obj)
    output.result(
        made,
        f"{made['gallery']}: made in the space of release {made['release']} "
        f"({size(made['bytes'])} downloaded). Add images with `edge-client add`.",
    )


def _confirm(root: bytes) -> None:
    from nobackfill.release.trust.trust import fingerprint

    typer.echo(
        f"The publication's root metadata has the fingerprint\n{fingerprint(root)}", err=True
    )
    try:
        trusted = typer.confirm("Is this the one that its publisher gave you?", err=True)
    except typer.Abort:
        trusted = False
    if not trusted:
        raise ConfigurationError(
            "the root metadata is not trusted: nothing was made. Ask the publisher for 1.root.json "
            "and name it with --root FILE"
        )


def add(
    context: typer.Context,
    images: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="PATHS...",
            help="Images and folders (JPEG, PNG, WebP; HEIC and AVIF with the extra heic).",
            parser=named_path,
        ),
    ] = None,
    texts: Texts = None,
    note: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Metadata of every image added (repeatable)."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Add images; those that the gallery holds are skipped, and what is not taken is named and ends
    with exit code 65. Or texts, by their ids, in place of what is there."""
    if bool(images) == (texts is not None) or (texts is not None and note):
        raise typer.BadParameter("expected either images, with --set or without, or --texts FILE")
    if texts is not None:
        add_texts(context, texts, json)
        return
    from nobackfill.client.device import Device
    from nobackfill.client.photos.adding import add as store

    output = Output(json)
    with Device(context.obj) as device, output.progress("adding") as advance:
        done = store(device, images or [], metadata_values(note), advance)
        total = device.store.count()
    for reason, paths in done.reasons().items():
        output.note(f"{few(paths)}: {reason}")
    if done.skipped:
        output.note(
            f"{few(done.skipped)}: hidden, or a system's, program's or gallery's own; passed over"
        )
    if note and done.held:
        output.note(f"{done.held} were held already and keep their metadata; see `edge-client set`")
    answer = {
        "added": done.added, "held": done.held, "refused": done.refused, "items": total,
        "skipped": done.skipped,
    }  # fmt: skip
    output.result(
        answer,
        f"{len(done.added)} added, {done.held} held already, {len(done.refused)} refused; "
        f"{total} items",
    )
    if done.refused:
        raise typer.Exit(InvalidInputError.exit_code)


def search(
    context: typer.Context,
    images: Annotated[
        list[Path] | None,
        typer.Argument(metavar="IMAGE...", help="What to look for.", parser=named_path),
    ] = None,
    item: Annotated[str | None, typer.Option("--id", help="An item of the gallery.")] = None,
    text: Annotated[str | None, typer.Option("--text", help="A text to look for.")] = None,
    k: Annotated[int, typer.Option("-k", min=1, max=1000, help="Number of hits.")] = 10,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=VALUE",
            help="Only items with this metadata: folder, name, or what add --set gave; also "
            "KEY!=VALUE, KEY>VALUE (or <, >=, <=) and 'KEY exists' (repeatable).",
        ),
    ] = None,
    sheet: Sheet = None,
    json: Json = False,
) -> None:
    """Find the items nearest to images, a text, or an item of the gallery. Exact and offline."""
    from nobackfill.client.cli.searching import Asked, answer
    from nobackfill.client.conditions import read

    if bool(images) + (item is not None) + (text is not None) != 1:
        raise typer.BadParameter("expected either images, --text or --id")
    try:
        conditions = read(where) if where else None
    except InvalidInputError as error:
        raise typer.BadParameter(f"--where: {error}") from error
    answer(Asked(context.obj, images or [], item, text, k, conditions, sheet, json))


def list_items(
    context: typer.Context,
    after: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Begin after this item's label.")
    ] = 0,
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Items at most.")] = 1000,
    json: Json = False,
) -> None:
    """List the items, oldest first."""
    from nobackfill.client.device import Device

    with Device(context.obj) as device:
        page = device.store.listing(after, limit)
        space = device.store.active().spec.space
        items = [i for i in device.store.items([i.label for i in page], space) if i is not None]
        more = bool(device.store.listing(page[-1].label, 1)) if page else False
    answer = [
        {"label": i.label, "id": i.id, "origin": i.origin, "metadata": dict(i.metadata)}
        for i in items
    ]
    lines = (f"{i.id}  {i.origin or 'not searchable':12}  {i.metadata.get('path')}" for i in items)
    Output(json).result({"items": answer}, *lines)
    if more:
        Output(json).note(f"more: edge-client list --after {page[-1].label}")


def remove(
    context: typer.Context,
    items: Annotated[list[str], typer.Argument(metavar="ITEMS...", help="Ids or paths.")],
    json: Json = False,
) -> None:
    """Remove items from the gallery, for good; from the vault too, at the next push."""
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import remove as forget

    with Device(context.obj) as device:
        done = forget(device, items)
    later = f"; {done['left_in_vault']} vault objects go with the next push"
    Output(json).result(done, f"{done['removed']} removed{later if done['left_in_vault'] else ''}")


def set_metadata(
    context: typer.Context,
    items: Annotated[list[str], typer.Argument(metavar="ITEMS...", help="Ids or paths.")],
    note: Annotated[
        list[str], typer.Option("--to", metavar="KEY=VALUE", help="Metadata (repeatable).")
    ],
    json: Json = False,
) -> None:
    """Set metadata of items that the gallery holds; their other metadata stays."""
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import describe

    with Device(context.obj) as device:
        changed = describe(device, items, metadata_values(note))
    Output(json).result({"changed": changed}, f"{changed} items changed")


def gc(context: typer.Context, json: Json = False) -> None:
    """Confirm the active release and free what only a rollback would need."""
    from nobackfill.client import ballast
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import collect

    ballast.give_back(context.obj)
    with Device(context.obj) as device:
        done = collect(device)
    ballast.keep(context.obj)
    Output(json).result(done, f"{size(done['freed_bytes'])} freed")


def verify(context: typer.Context, json: Json = False) -> None:
    """Check the file, every vector, the models, the keys and what the vault holds; exit 65 if
    something is wrong."""
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import verify as check

    with Device(context.obj) as device:
        found = check(device)
    fine = f"{found['items']} items, {found['vectors']} vectors: all is well"
    output = Output(json)
    for note in found["notes"]:
        output.note(note)
    output.result(found, *(found["problems"] or [fine]))
    if found["problems"]:
        raise typer.Exit(InvalidInputError.exit_code)


def status(context: typer.Context, json: Json = False) -> None:
    """Show what the gallery holds, which release answers, and what is least certain."""
    from nobackfill.client.device import Device
    from nobackfill.client.status import status as look

    with Device(context.obj) as device:
        found = look(device)
    lines = [
        f"{found['gallery']}: {found['items']} items, release {found['release']}, "
        f"{size(found['bytes_on_disk'])} on disk, follows {found['source']}"
    ]
    lines += [
        f"  release {s['release']} ({s['state']}): {s['items']} items, {size(s['bytes'])}"
        for s in found["spaces"]
    ]
    if found["rollback_to"] is not None:
        lines.append(f"  `edge-client rollback` returns to release {found['rollback_to']}")
    lines += [f"  held back: {reason}" for reason in found["held_back"].values()]
    lines += [f"  vault: {n} {state}" for state, n in found["vault"].items() if n]
    lines += [f"  {found['vault_key_problem']}"] if found["vault_key_problem"] else []
    lines += [
        f"  uncertain {i['uncertainty']:.4g}: {i['id']}  {i['path']}"
        for i in found["least_certain"]
    ]
    Output(json).result(found, *lines)
