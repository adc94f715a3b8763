"""The commands that make, fill, search, show, keep and repair a gallery."""

import os
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli.options import Json, metadata_values, named_path
from nobackfill.client.output import Output, size
from nobackfill.errors import ConfigurationError, DamagedError, InvalidInputError, few
from nobackfill.extras import extra

Texts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="JSONL: an object with id and text a line, the other keys as metadata.",
        parser=named_path,
    ),
]


def add_texts(context: typer.Context, file: Path, json: bool) -> None:
    """Add the texts of a file. Exits with 65 where some were refused; they are named."""
    from nobackfill.client.device import Device
    from nobackfill.client.notes import add
    from nobackfill.text_lines import read_texts

    output, refused = Output(json), dict[str, str]()
    with Device(context.obj) as device:
        done = add(device, read_texts(file, refused))
        total = device.store.count()
    refused |= done.refused
    for name, reason in refused.items():
        output.note(f"{name}: {reason}")
    output.result(
        {"added": done.added, "refused": refused, "items": total},
        f"{len(done.added)} added, {len(refused)} refused; {total} items",
    )
    if refused:
        raise typer.Exit(InvalidInputError.exit_code)


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
    from nobackfill.client.creation import init as make
    from nobackfill.client.gallery_file import keep_reserve
    from nobackfill.images import read_file

    try:
        trusted = None if root is None else read_file(root)
    except InvalidInputError as error:
        raise ConfigurationError(f"--root {root}: {error}") from error
    output = Output(json)
    made = make(context.obj, source, trusted, _confirm, output)
    keep_reserve(context.obj)
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
    from nobackfill.client.photos import add as store

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
    from nobackfill.client.cli.searching import SearchLine, answer
    from nobackfill.client.conditions import read

    if bool(images) + (item is not None) + (text is not None) != 1:
        raise typer.BadParameter("expected either images, --text or --id")
    try:
        conditions = read(where) if where else None
    except InvalidInputError as error:
        raise typer.BadParameter(f"--where: {error}") from error
    answer(SearchLine(context.obj, images or [], item, text, k, conditions, sheet, json))


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
    from nobackfill.client.device import Device
    from nobackfill.client.gallery_file import free_reserve, keep_reserve
    from nobackfill.client.maintenance import collect

    free_reserve(context.obj)
    with Device(context.obj) as device:
        done = collect(device)
    keep_reserve(context.obj)
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


def rescue(
    context: typer.Context,
    to: Annotated[Path, typer.Option(help="The file of the new gallery.")],
    json: Json = False,
) -> None:
    """Make a new gallery of every intact row of a damaged one; exit 65 if some were not."""
    from nobackfill.client.maintenance import rescue as save

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


def browse(
    context: typer.Context,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0: one that is free.")
    ] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open it in your browser, too.")] = False,
    json: Json = False,
) -> None:
    """Look at the gallery in a browser on this device, until Ctrl-C: search, sync, compare."""
    with extra("web"):
        from nobackfill.client.browse.app import pages
        from nobackfill.pages import Listener, new_token
    from nobackfill.client.device import Device

    token = new_token()
    with Device(context.obj) as device, Listener("127.0.0.1", port) as listener:
        address = f"{listener.address}/{token}/"
        guard = pages(device, listener.hosts, token)
        listener.serve(guard, guard.knows)
        Output(json).result(
            {"address": address}, address,
            "Anybody who knows this address sees the gallery. Ctrl-C ends it.",
        )  # fmt: skip
        with _shown(address, context.obj) if show else nullcontext():
            threading.Event().wait()


@contextmanager
def _shown(address: str, gallery: Path) -> Iterator[None]:
    """Open a browser at a page that leads to `address`, and keep that page to the end of the block.

    The browser's command line, which every user of the machine can read, names the page's file, and
    the file (mode 0600) holds the secret. It lies beside the gallery, as some browsers may not read
    the system's temporary files, or there where the gallery's folder is read only.
    """
    try:
        handle, name = tempfile.mkstemp(".html", f"{gallery.name}.", gallery.absolute().parent)
    except OSError:
        handle, name = tempfile.mkstemp(".html", "nobackfill-")
    try:
        with os.fdopen(handle, "w") as page:
            page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">\n')
        webbrowser.open(Path(name).as_uri())
        yield
    finally:
        Path(name).unlink(missing_ok=True)
