"""The commands that make, fill, search, list, maintain and repair a gallery."""

import sys
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from nobackfill.client.cli.options import Command, Commands, integer, named_path, no_options
from nobackfill.client.output import Output, format_bytes
from nobackfill.errors import ConfigurationError, DamagedError, InvalidInputError, join_few
from nobackfill.extras import load_plugin

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nobackfill.client.search import DeviceAnswer
    from nobackfill.gallery.filters import Filter, Scalar


def add_texts(arguments: Namespace) -> None:
    """Add the texts of a JSON Lines file, and print a report.

    Refused lines and texts are printed on stderr, with reasons. Earlier batches stay after an
    error.

    Args:
        arguments: `texts` is the file, and `gallery` the gallery. With `json`, the report is JSON.

    Raises:
        SystemExit: some lines or texts were refused, and the others were added; the code is 65.
        NotFoundError: the file or the gallery cannot be found or read, or the release of a space is
            not installed.
        InvalidInputError: the file is neither regular nor a pipe.
        NoEncoderError: the active release embeds no texts.
        ConfigurationError: the extra `text` is not installed.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.notes import add
    from nobackfill.text import read_text_lines

    output, refusals = Output(arguments.json), dict[str, str]()
    with Device(arguments.gallery) as device:
        report = add(device, read_text_lines(arguments.texts, refusals))
        total = device.store.count()
    refusals |= report.refusals
    for name, reason in refusals.items():
        output.print_note(f"{name}: {reason}")
    output.print_result(
        {"added": report.added, "refused": refusals, "items": total},
        f"{len(report.added)} added, {len(refusals)} refused; {total} items",
    )
    if refusals:
        raise SystemExit(InvalidInputError.exit_code)


def init(arguments: Namespace) -> None:
    """Make an empty gallery that follows the releases of SOURCE.

    Downloads and tries the models of the newest release. An existing file is not replaced.

    Args:
        arguments: the parsed words: gallery, root (None: show the fingerprint and ask on stdin),
            source and json.

    Raises:
        ConfigurationError: the root metadata is not confirmed or cannot be read, or the source has
            an unknown form.
        AlreadyExistsError: the gallery exists.
        InvalidInputError: the gallery's path is not UTF-8.
        NotFoundError: the source has published no release.
        VerificationError: the publication fails verification, or a model fails its trial.
        NotPermittedError, UnavailableError: the source refuses the token, or does not answer.
        BusyError: another process makes this gallery.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.creation import init as make
    from nobackfill.client.gallery_file import create_reserve
    from nobackfill.images import read_file

    try:
        trusted = None if arguments.root is None else read_file(arguments.root)
    except InvalidInputError as error:
        raise ConfigurationError(f"--root {arguments.root}: {error}") from error
    output = Output(arguments.json)
    report = make(arguments.gallery, arguments.source, trusted, _confirm, output)
    create_reserve(arguments.gallery)
    output.print_result(
        report,
        f"{report['gallery']}: made in the space of release {report['release']} "
        f"({format_bytes(report['bytes'])} downloaded). Add images with `edge-client add`.",
    )


def _confirm(root: bytes) -> None:
    from nobackfill.release.trust.trust import format_root_fingerprint

    print(
        f"The publication's root metadata has the fingerprint\n{format_root_fingerprint(root)}\n"
        "Is this the fingerprint that its publisher gave you? [y/N]: ",
        end="", file=sys.stderr, flush=True,
    )  # fmt: skip
    if sys.stdin is None or sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise ConfigurationError(
            "the root metadata is not trusted, so no gallery was made. Get 1.root.json from the "
            "publisher and name it with --root FILE"
        )


def add(arguments: Namespace) -> None:
    """Add images or texts to the gallery.

    Images that the gallery holds are skipped. A text replaces the one with the same id. The gallery
    stores vectors, not the images and texts. Refused files and texts are listed with a reason; the
    exit code is then 65.

    Args:
        arguments: the parsed words: gallery, images, texts, note and json; `refuse` ends the
            process with a usage error.

    Raises:
        SystemExit: code 2 if neither or both of images and texts are given, or notes with texts.
            Code 65 if some files or texts were refused, and the others were added.
        InvalidInputError: a path cannot be read, or metadata is not valid.
        NoEncoderError: the release embeds no images, or no texts.
        NotFoundError: there is no gallery, no file of texts, or the release of a space is not
            installed.
        ConfigurationError: the extra `text` is needed and not installed.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
    """
    images, notes, texts = arguments.images, dict(arguments.note or ()), arguments.texts
    if bool(images) == (texts is not None) or (texts is not None and notes):
        arguments.refuse(
            "expected either images, optionally with --set, or --texts FILE alone; got both or "
            "neither"
        )
    if texts is not None:
        add_texts(arguments)
        return
    from nobackfill.client.device import Device
    from nobackfill.client.photos import add as store

    output = Output(arguments.json)
    with Device(arguments.gallery) as device, output.progress("adding") as advance:
        report = store(device, images, notes, advance)
        total = device.store.count()
    output.print_reasons(report.refusals)
    if report.system_files:
        output.print_note(
            f"{join_few(report.system_files)}: skipped, because hidden or part of a system, "
            "program or gallery"
        )
    if notes and report.duplicate_count:
        output.print_note(
            f"{report.duplicate_count} images were in the gallery already and keep their metadata; "
            "change it with `edge-client set`"
        )
    answer = {
        "added": report.added_names, "held": report.duplicate_count, "refused": report.refusals,
        "items": total, "skipped": report.system_files,
    }  # fmt: skip
    output.print_result(
        answer,
        f"{len(report.added_names)} added, {report.duplicate_count} already there, "
        f"{len(report.refusals)} refused; {total} items",
    )
    if report.refusals:
        raise SystemExit(InvalidInputError.exit_code)


def search(arguments: Namespace) -> None:
    """Search, exactly and offline, for the items nearest to images, a text or an item.

    Args:
        arguments: the parsed words: gallery, images, item, text, k, where, sheet and json; `refuse`
            ends the process with a usage error. With `sheet`, a picture of the hits is written.

    Raises:
        SystemExit: code 2 if not exactly one kind of query is given, or a condition cannot be
            parsed.
        InvalidInputError: a query cannot be read or embedded, or the sheet's name has another
            suffix than that of a picture. Or `k` is not 1 to 1000.
        NotFoundError: there is no gallery, no such item, or the active release is not installed.
        NoEncoderError: the release has no encoder for this kind of query.
        ConfigurationError: the extra `text` is needed and not installed.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the sheet or a file of the gallery cannot be written.
        IncompatibleSpaceError: a sync dropped the searched space meanwhile.
        OSError: the sheet has more pixels than its format allows.
    """
    images, item, text = arguments.images, arguments.item, arguments.text
    if bool(images) + (item is not None) + (text is not None) != 1:
        arguments.refuse(
            "expected exactly one of images, --text and --id as the query; got none or several"
        )
    where: Filter | Mapping[str, Scalar] = {}
    if arguments.where:
        from nobackfill.client.conditions import parse_conditions

        try:
            where = parse_conditions(arguments.where)
        except InvalidInputError as error:
            arguments.refuse(f"--where: {error}")
    from nobackfill.client.device import Device
    from nobackfill.client.search import Search

    with Device(arguments.gallery) as device:
        view = Search(device, where)
        if item is not None:
            answers = [view.by_id(item, arguments.k)]
        elif text is not None:
            answers = view.by_texts([text], arguments.k)
        else:
            answers = view.by_images(images, arguments.k)
        if arguments.sheet is not None:
            from nobackfill.client.pictures import write_contact_sheet

            write_contact_sheet(device, answers, arguments.sheet)
    one = answers[0].as_json() if len(answers) == 1 else None
    Output(arguments.json).print_result(
        one or {"answers": [answer.as_json() for answer in answers]},
        *(line for answer in answers for line in _table(answer, len(answers) > 1)),
    )


def _table(answer: "DeviceAnswer", with_query: bool) -> list[str]:
    answer_json = answer.as_json()
    lines = [f"{answer_json['query']}:"] if with_query else []
    for hit in answer_json["hits"]:
        score = "" if hit["score"] is None else f"{hit['score']:7.1%}"
        lines.append(f"{hit['id']}  {hit['distance']:8.4f}{score}  {hit['path']}")
    if answer.beyond_calibration:
        lines.append(
            "every hit lies beyond the distances that the release was calibrated on, so the scores "
            "cannot distinguish these hits"
        )
    return lines or ["no hits: the gallery is empty, or no item passes --where"]


def list_items(arguments: Namespace) -> None:
    """List the items with their metadata, oldest first.

    Args:
        arguments: the parsed words: gallery, after (a label; items after it), limit and json. If
            more items follow, a note on stderr names the next page.

    Raises:
        NotFoundError: there is no gallery.
        VerificationError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        IncompatibleSpaceError: a sync dropped the space during the call.
        CannotWriteError: the gallery file cannot be opened, or the disk fails.
    """
    from nobackfill.client.device import Device

    with Device(arguments.gallery) as device:
        page = device.store.list_items(arguments.after, arguments.limit)
        space = device.store.active().spec.space
        items = [i for i in device.store.items([i.label for i in page], space) if i is not None]
        more = bool(device.store.list_items(page[-1].label, 1)) if page else False
    answer = [
        {"label": i.label, "id": i.id, "origin": i.origin, "metadata": dict(i.metadata)}
        for i in items
    ]
    lines = (f"{i.id}  {i.origin or 'not searchable':12}  {i.metadata.get('path')}" for i in items)
    Output(arguments.json).print_result({"items": answer}, *lines)
    if more:
        Output(arguments.json).print_note(f"more items: edge-client list --after {page[-1].label}")


def remove(arguments: Namespace) -> None:
    """Remove items from the gallery for good; the next push removes them from the vault.

    The image files stay.

    Args:
        arguments: the parsed words: gallery, items (ids or paths) and json.

    Raises:
        NotFoundError: there is no gallery, or a name is neither an id nor a path; nothing was
            removed.
        VerificationError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import remove as forget

    with Device(arguments.gallery) as device:
        report = forget(device, arguments.items)
    later = f"; the next push deletes {report['left_in_vault']} of them in the vault"
    Output(arguments.json).print_result(
        report, f"{report['removed']} removed{later if report['left_in_vault'] else ''}"
    )


def set_metadata(arguments: Namespace) -> None:
    """Set metadata of items; their other metadata stays.

    Args:
        arguments: the parsed words: gallery, items (ids or paths), note (pairs of key and value;
            the last one of a key counts) and json.

    Raises:
        NotFoundError: there is no gallery, or a name is neither an id nor a path; nothing was
            changed.
        InvalidInputError: a key locates the file, or a key or value is not valid, or an item's
            metadata would become too large. Earlier batches of 4,096 items stay.
        VerificationError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import change_metadata

    with Device(arguments.gallery) as device:
        changed = change_metadata(device, arguments.items, dict(arguments.note))
    Output(arguments.json).print_result({"changed": changed}, f"{changed} items changed")


def gc(arguments: Namespace) -> None:
    """Confirm the active release, and delete the vectors and models that only a rollback needs.

    No rollback is possible afterwards. Free space of the file goes back to the file system.

    Args:
        arguments: the parsed words: gallery and json. The reserve file is freed first on a full
            disk, and made again at the end, but not after an error.

    Raises:
        NotFoundError: there is no gallery, or the release of a space is not installed.
        VerificationError: a manifest or the gallery file is damaged.
        BusyError: a sync is writing vectors, or another process holds the gallery file.
        CannotWriteError: the disk is full or read-only.
        OSError: a file of the gallery disappears meanwhile.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.gallery_file import create_reserve, free_reserve
    from nobackfill.client.maintenance import collect_garbage

    free_reserve(arguments.gallery)
    with Device(arguments.gallery) as device:
        report = collect_garbage(device)
    create_reserve(arguments.gallery)
    Output(arguments.json).print_result(report, f"{format_bytes(report['freed_bytes'])} freed")


def verify(arguments: Namespace) -> None:
    """Check the file, every vector, the models, the keys and the vault.

    Nothing is changed. The exit code is 65 if something is damaged or missing.

    Args:
        arguments: the parsed words: gallery and json. Notes on the vault go to stderr.

    Raises:
        SystemExit: something is damaged or missing; the code is 65.
        NotFoundError: there is no gallery.
        VerificationError: the gallery file cannot be opened, or its state is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the gallery file cannot be opened, or the disk fails.
        OSError: a model file or ciphertext cannot be read.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.maintenance import verify as check

    with Device(arguments.gallery) as device:
        report = check(device)
    fine = f"{report['items']} items, {report['vectors']} vectors: no problem found"
    output = Output(arguments.json)
    for note in report["notes"]:
        output.print_note(note)
    output.print_result(report, *(report["problems"] or [fine]))
    if report["problems"]:
        raise SystemExit(InvalidInputError.exit_code)


def status(arguments: Namespace) -> None:
    """Show the number of items, the active release, disk use and the least certain items.

    Args:
        arguments: the parsed words: gallery and json.

    Raises:
        NotFoundError: there is no gallery.
        VerificationError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        IncompatibleSpaceError: another process dropped a space meanwhile.
        CannotWriteError: the gallery file cannot be opened, or the disk fails.
        OSError: a file of the gallery disappears meanwhile, or cannot be read.
    """
    from nobackfill.client.device import Device
    from nobackfill.client.status import status as look

    with Device(arguments.gallery) as device:
        report = look(device)
    lines = [
        f"{report['gallery']}: {report['items']} items, release {report['release']}, "
        f"{format_bytes(report['bytes_on_disk'])} on disk, follows {report['source']}"
    ]
    lines += [
        f"  release {s['release']} ({s['state']}): {s['items']} items, {format_bytes(s['bytes'])}"
        for s in report["spaces"]
    ]
    if report["rollback_to"] is not None:
        lines.append(f"  `edge-client rollback` returns to release {report['rollback_to']}")
    lines += [f"  held back: {reason}" for reason in report["held_back"].values()]
    lines += [f"  vault: {n} {state}" for state, n in report["vault"].items() if n]
    lines += [f"  {report['vault_key_problem']}"] if report["vault_key_problem"] else []
    lines += [
        f"  uncertain {i['uncertainty']:.4g}: {i['id']}  {i['path']}"
        for i in report["least_certain"]
    ]
    Output(arguments.json).print_result(report, *lines)


def rescue(arguments: Namespace) -> None:
    """Save every intact row of a damaged gallery to a new file.

    The exit code is 65 if some rows were lost.

    Args:
        arguments: the parsed words: gallery (the damaged one), to and json. Counts of lost rows go
            to stderr.

    Raises:
        SystemExit: some rows were lost; the code is 65.
        NotFoundError: there is no gallery.
        AlreadyExistsError: the new file exists, or files of an earlier gallery of its name.
        VerificationError: nothing can be saved.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
    """
    from nobackfill.client.maintenance import rescue as save

    output = Output(arguments.json)
    report = save(arguments.gallery, arguments.to)
    vectors = ", ".join(f"{n} vectors of release {r}" for r, n in report["vectors"].items())
    for name in report["not_copied"]:
        output.print_note(
            f"{name}: cannot be read and was not copied; `edge-client sync` gets models"
        )
    for table, count in report["unreadable"].items():
        output.print_note(f"{table}: {count} rows, or places for rows, lie on damaged pages")
    for table, count in report["refused"].items():
        output.print_note(f"{table}: {count} rows fail their checks")
    output.print_result(
        report,
        f"{arguments.to}: {report['items']} items and {vectors} saved"
        + ("; add the images of lost items again" if report["lost"] else ", nothing was lost"),
    )
    if report["lost"]:
        raise SystemExit(DamagedError.exit_code)


def browse(arguments: Namespace) -> None:
    """Search, sync and compare in a browser on this device, until Ctrl-C.

    Needs the extra `web`. Prints the address of the pages, which contains a secret.

    Args:
        arguments: the parsed words: gallery, port (0: a free one), show and json. With `show`, a
            browser is opened by a temporary page file, which is deleted at the end.

    Raises:
        ConfigurationError: the extra `web` is not installed, or the port cannot be used.
        NotFoundError: there is no gallery.
        VerificationError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the gallery file cannot be opened, or the disk fails.
        KeyboardInterrupt: always, in the end.
    """
    import threading

    from nobackfill.client.device import Device

    serve_pages = load_plugin("pages", "browse")
    with Device(arguments.gallery) as device, serve_pages(device, arguments.port) as address:
        Output(arguments.json).print_result(
            {"address": address}, address,
            "Anybody who knows this address sees the gallery. Press Ctrl-C to stop.",
        )  # fmt: skip
        with _browser_page(address, arguments.gallery) if arguments.show else nullcontext():
            threading.Event().wait()


@contextmanager
def _browser_page(address: str, gallery: Path) -> Iterator[None]:
    """Open a browser at a page that redirects to `address`; delete that page at the end.

    Every user of the machine can read the browser's command line. It therefore names a page file of
    mode 0600, which holds the secret address. The file lies in the gallery's folder, because some
    browsers cannot read the system's temporary folder. If the gallery's folder is read-only, the
    file lies in the temporary folder.
    """
    import os
    import tempfile
    import webbrowser

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


def parse_key_value(text: str) -> "tuple[str, Scalar]":
    """Convert a word KEY=VALUE of the command line to a key and its value.

    Numbers, true and false are parsed as in JSON; any other value, also an empty one, is a text.

    Returns:
        The key, and a flag, an integer of 64 bits, a finite float or a text. Only the first "="
        separates.

    Raises:
        ArgumentTypeError: the word has no "=", or nothing before it.
    """
    from nobackfill.client.conditions import parse_value

    key, equals, value = text.partition("=")
    if not key or not equals:
        raise ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    return key, parse_value(value)


def _init_options(command: Command) -> None:
    command.add_argument(
        "--from",
        dest="source",
        required=True,
        metavar="SOURCE",
        help="Publication whose releases the gallery follows: the address of a gateway "
        "(grpc://HOST:PORT, grpcs:// with TLS), of a static host (http(s)://…), or a folder. It is "
        "only read.",
    )
    command.add_argument(
        "--root",
        type=named_path,
        metavar="FILE",
        help="File with the root metadata to trust, which is only read: the publisher's "
        "1.root.json, received by another way than SOURCE (with the app, over HTTPS, by hand). "
        "[default: print the fingerprint of SOURCE's root metadata, and ask]",
    )


def _add_options(command: Command) -> None:
    command.add_argument(
        "images",
        nargs="*",
        type=named_path,
        metavar="PATHS...",
        help="Image files, and folders to search for images, which are only read: JPEG, PNG, WebP; "
        "HEIC and AVIF with the extra heic. Either PATHS or --texts is required.",
    )
    command.add_argument(
        "--texts",
        type=named_path,
        metavar="FILE",
        help="In place of PATHS, a JSON Lines file of texts, which is only read. Each line has id "
        "and text; its other keys become metadata. The release must embed texts.",
    )
    command.add_argument(
        "--set",
        dest="note",
        action="append",
        type=parse_key_value,
        metavar="KEY=VALUE",
        help="Metadata to store with every added image, which `search --where` can filter by "
        "(repeatable). Without this, an image has the keys path, folder and name.",
    )


def _search_options(command: Command) -> None:
    command.add_argument(
        "images",
        nargs="*",
        type=named_path,
        metavar="IMAGE...",
        help="Image files to search by, one search each, which are only read. One of IMAGE, --id "
        "and --text is required.",
    )
    command.add_argument(
        "--id",
        dest="item",
        metavar="ID",
        help="In place of IMAGE, the id of an item of the gallery: search by its stored vector.",
    )
    command.add_argument(
        "--text",
        metavar="TEXT",
        help="In place of IMAGE, words to search by. The release must embed texts.",
    )
    command.add_argument(
        "-k",
        type=integer(1, 1000),
        default=10,
        metavar="N",
        help="Number of hits to return for each search, 1 to 1000.",
    )
    command.add_argument(
        "--where",
        action="append",
        metavar="KEY=VALUE",
        help="Condition on metadata that every hit meets; KEY is folder, name, or a key of add "
        "--set. Other forms: KEY!=VALUE, KEY>VALUE (or <, >=, <=) and 'KEY exists' (repeatable; "
        "all must hold). Without this, all items are searched.",
    )
    command.add_argument(
        "--sheet",
        type=named_path,
        metavar="FILE",
        help="Picture file to draw the queries and their hits into, for example OUT.png. Without "
        "this, the hits are only printed.",
    )


def _list_options(command: Command) -> None:
    command.add_argument(
        "--after",
        type=integer(0, 2**63 - 1),
        default=0,
        metavar="LABEL",
        help="Label of the last item of the previous page, which `list` printed: list the items "
        "after it. 0 lists from the first item on.",
    )
    command.add_argument(
        "--limit",
        type=integer(1, 100_000),
        default=1000,
        metavar="N",
        help="Largest number of items to list, 1 to 100000.",
    )


def _remove_options(command: Command) -> None:
    command.add_argument(
        "items",
        nargs="+",
        metavar="ITEMS...",
        help="Items of the gallery: their ids, or the paths of the files that they were added "
        "from. A path stands for all items of that file.",
    )


def _set_options(command: Command) -> None:
    _remove_options(command)
    command.add_argument(
        "--to",
        dest="note",
        action="append",
        type=parse_key_value,
        required=True,
        metavar="KEY=VALUE",
        help="Metadata to store with the items, in place of an earlier value of the same key "
        "(repeatable).",
    )


def _rescue_options(command: Command) -> None:
    command.add_argument(
        "--to",
        type=named_path,
        required=True,
        metavar="FILE",
        help="Gallery file to write the intact rows into; it must not exist yet.",
    )


def _browse_options(command: Command) -> None:
    command.add_argument(
        "--port",
        type=integer(0, 65535),
        default=0,
        metavar="PORT",
        help="Port of 127.0.0.1 to serve the pages at, 0 to 65535; 0 picks a free one.",
    )
    command.add_argument(
        "--open",
        dest="show",
        action="store_true",
        help="Also open the page in your browser. Without this, only its address is printed.",
    )


# By a command's name: the function that runs it, and the function that adds its options.
COMMANDS: Commands = {
    "init": (init, _init_options),
    "add": (add, _add_options),
    "search": (search, _search_options),
    "list": (list_items, _list_options),
    "status": (status, no_options),
    "set": (set_metadata, _set_options),
    "remove": (remove, _remove_options),
    "gc": (gc, no_options),
    "verify": (verify, no_options),
    "rescue": (rescue, _rescue_options),
    "browse": (browse, _browse_options),
}
