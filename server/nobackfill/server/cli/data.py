"""Define `gateway data …`, which copies, checks and moves stored data, and `gateway audit`.

The commands open folders and databases themselves; a gateway may serve them at the same time unless
the help of a command says otherwise.
"""

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill import durable
from nobackfill.server.cli.app import Json, app, exit_on_error, format_examples, print_result

Data = Annotated[
    Path,
    typer.Option(
        "--data",
        envvar="NOBACKFILL_DATA",
        metavar="FOLDER",
        help="Use this data folder of a gateway. `backup` only reads it; `restore` creates it.",
    ),
]
DEFAULT_DATA = Path("gateway-data")


data_commands = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Copy, check and move a gateway's data."
)
app.add_typer(data_commands, name="data")


@data_commands.command(
    epilog=format_examples("gateway data backup /backups/monday --data gateway-data")
)
def backup(
    target: Annotated[
        Path, typer.Argument(help="Folder that the backup is written to. It must not exist yet.")
    ],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Back up a data folder: all galleries and the vault of encrypted images, in one verified copy.

    The copy is consistent even while a gateway serves the folder.

    An error leaves no backup. Search indexes are left out, because the gateway builds them again.
    """
    with exit_on_error():
        from nobackfill.server.backup import backup

        _show(asdict(backup(data, target)), as_json)


@data_commands.command(
    epilog=format_examples("gateway data restore /backups/monday --data gateway-data")
)
def restore(
    source: Annotated[
        Path, typer.Argument(help="Folder that `gateway data backup` wrote. It is only read.")
    ],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make a data folder from a backup.

    The backup is verified first. The data folder must be new or empty.

    An error leaves the data folder as it was. No gateway may serve it.
    """
    with exit_on_error():
        from nobackfill.server.backup import restore

        _show(asdict(restore(source, data)), as_json)


@data_commands.command(epilog=format_examples("gateway data verify /backups/monday"))
def verify(
    folder: Annotated[
        Path, typer.Argument(help="Folder to check: a backup or a data folder. It is only read.")
    ] = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Check that a backup or a data folder is intact.

    Reads every file and checks its digest, every page of every gallery, and every vector.

    Counts the unfinished uploads to the vault, which use up quotas; --json names their files.

    It stops at the first damage, and exits with 65.
    """
    with exit_on_error():
        from nobackfill.server.backup import verify

        _show(asdict(verify(folder)), as_json)


def _show(summary: dict[str, object], as_json: bool) -> None:
    galleries = summary["galleries"]
    assert isinstance(galleries, dict)
    rows = [["gallery", "items"], *([name, str(count)] for name, count in galleries.items())]
    rows.append(["blobs", str(summary["blobs"])])
    unfinished_uploads = summary["unfinished_uploads"]
    assert isinstance(unfinished_uploads, dict)
    if unfinished_uploads:
        size = sum(unfinished_uploads.values())
        rows.append(["unfinished uploads", f"{len(unfinished_uploads)} ({size} bytes)"])
    print_result(as_json, summary, rows)


@data_commands.command(
    epilog=format_examples("gateway data export photos --from sqlite:gateway-data --out vectors")
)
def export(
    gallery: Annotated[str, typer.Argument(help="Name of the gallery whose vectors are exported.")],
    store: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="STORE",
            help="Read the gallery from this store: sqlite:FOLDER, where FOLDER is a gateway's "
            "data folder, or postgresql://USER@HOST/DATABASE.",
        ),
    ],
    out: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER",
            help="Write to this new folder, one file release-N.parquet for each release N.",
        ),
    ],
    release: Annotated[
        list[int] | None,
        typer.Option(
            metavar="N",
            help="Export only vectors of the release with this number. Repeat the option for more "
            "releases.",
            show_default="all",
        ),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native",
            help="Export only vectors that the release's own model computed from the items. "
            "Without it, export migrated vectors as well.",
        ),
    ] = False,
    side: Annotated[
        bool,
        typer.Option(
            "--side",
            help="Export side-information too, the second vector that upgrades read. Without it, "
            "export embeddings alone.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a gallery's vectors as Parquet files, from one snapshot.

    A gateway may serve the store at the same time.

    An error leaves no folder.
    """
    with exit_on_error():
        from nobackfill.errors import NotFoundError, join_few
        from nobackfill.server import export as exporting
        from nobackfill.server.storage import Storage, check_store_folder, store_folder

        check_store_folder(store)
        folder = store_folder(store, Path())
        if folder is not None:
            durable.refuse_copy_into_itself(out, folder)
        with (
            TemporaryDirectory() as scratch,
            closing(Storage(store, Path(scratch), lock=None)) as storage,
        ):
            if gallery not in storage.galleries.names():
                names = join_few(storage.galleries.names()) or "none"
                raise NotFoundError(
                    f"--from: the store has no gallery {gallery!r}; correct the name. The "
                    f"galleries are {names}"
                )
            with closing(storage.galleries.open(gallery)) as hosted:
                exported = exporting.export(
                    hosted.store, out, release or (), native_only=native, with_side=side
                )
        rows = [["release", "vectors", "file"]]
        rows += [[str(number), str(count), str(out / f"release-{number}.parquet")]
                 for number, count in exported.vector_counts.items()]  # fmt: skip
        result = {"items": exported.item_count, "rows": exported.vector_counts, "out": str(out)}
        print_result(as_json, result, rows)


@data_commands.command(
    epilog=format_examples("gateway data migrate --store postgresql://gateway@db/vectors")
)
def migrate(
    store: Annotated[
        str,
        typer.Option(
            "--store",
            envvar="NOBACKFILL_STORE",
            metavar="STORE",
            help="Convert the tables of this database: postgresql://USER@HOST/DATABASE.",
        ),
    ],
    to: Annotated[
        int | None,
        typer.Option(
            "--to",
            metavar="N",
            help="Convert to the format with this number, for example back to that of an earlier "
            "version before a downgrade.",
            show_default="this version's format",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Convert a database to the format of this version, or back to an earlier one.

    No gateway may serve the database. A gateway converts its own database when it starts.

    If the database has that format already, nothing changes. An error changes nothing.
    """
    with exit_on_error():
        from nobackfill.errors import ConfigurationError
        from nobackfill.server.settings import DATABASES
        from nobackfill.server.storage import migrate_database

        if not store.startswith(DATABASES):
            raise ConfigurationError(
                "--store: expected a database, postgresql://USER@HOST/DATABASE, got another "
                "address; a folder of galleries needs no `gateway data migrate`"
            )
        before, after = migrate_database(store, to)
        rows = [["format before", "format now"], [str(before), str(after)]]
        print_result(as_json, {"before": before, "after": after}, rows)


@data_commands.command(
    epilog=format_examples(
        "gateway data move --from sqlite:gateway-data --to postgresql://gateway@db/vectors"
    )
)
def move(
    source: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="STORE",
            help="Copy from this store: sqlite:FOLDER, where FOLDER is a gateway's data folder, or "
            "postgresql://USER@HOST/DATABASE.",
        ),
    ],
    target: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="STORE",
            help="Write to this store, in the same form as --from. No gateway may serve it, or "
            "have served it before.",
        ),
    ],
    from_data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Read the vault from this data folder. Required if --from is a database.",
            show_default="the folder of --from",
        ),
    ] = None,
    to_data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write the vault to this data folder. Required if --to is a database and the "
            "vault has blobs.",
            show_default="the folder of --to",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Move every gallery and the vault of encrypted images to another store.

    While a gateway serves --from, the command copies everything except its state, and exits with
    75. Stop that gateway and run the command again: it copies the changes and the state, and
    compares both stores. Afterwards `gateway serve` refuses the old folder unless --force is given.
    """
    with exit_on_error():
        from nobackfill.errors import BusyError, ConfigurationError
        from nobackfill.server.storage import Storage, check_store_folder, mark_moved, store_folder
        from nobackfill.server.transfer import transfer_all, vault_folders

        if source == target:
            raise ConfigurationError(
                "--from and --to name the same store; name another store with --to"
            )
        check_store_folder(source)
        old, new = store_folder(source, Path()), store_folder(target, Path())
        if old is not None and new is not None:
            durable.refuse_copy_into_itself(new, old)
        vaults = vault_folders(from_data or old, to_data or new)
        with TemporaryDirectory() as scratch:
            is_stopped = True
            try:
                first = Storage(source, Path(scratch))
            except BusyError:
                is_stopped = False
                first = Storage(source, Path(scratch), lock=None)
            with closing(first), closing(Storage(target, Path(scratch))) as second:
                galleries, vault = transfer_all(first, second, vaults, with_state=is_stopped)
                if is_stopped and old is not None:
                    mark_moved(old, target)
        rows = [["gallery", "items", "written", "deleted", "alike"]]
        entries = dict(galleries) if vault is None else {**galleries, "(vault)": vault}
        for name, one in entries.items():
            counts = map(str, (one.item_count, one.written_count, one.deleted_count))
            rows.append([name, *counts, "yes" if one.is_identical else "no"])
        result = {
            "finished": is_stopped,
            "galleries": {name: transferred.to_json() for name, transferred in galleries.items()},
            "vault": None if vault is None else vault.to_json(),
        }
        print_result(as_json, result, rows)
        if not is_stopped:
            raise BusyError(
                "the move is not finished: a gateway still serves --from, so its state was not "
                "copied; stop that gateway and run the same command again"
            )


@app.command(
    epilog=format_examples("gateway audit", "gateway audit --store sqlite:/srv/gateway-data")
)
def audit(
    store: Annotated[
        str,
        typer.Option(
            "--store",
            envvar="NOBACKFILL_STORE",
            metavar="STORE",
            help="Read the entries from this store: sqlite:FOLDER, where FOLDER is a gateway's "
            "data folder, or postgresql://USER@HOST/DATABASE.",
        ),
    ] = "sqlite:gateway-data",
    as_json: Json = False,
) -> None:
    """List who activated, rolled back, retired and deleted what.

    The list has the latest 1000 entries. A caller is shown by the name of its token. A gateway may
    serve the store at the same time.

    The latest entry comes last.
    """
    with exit_on_error():
        from nobackfill.server.storage import Storage, check_store_folder

        check_store_folder(store)
        with (
            TemporaryDirectory() as scratch,
            closing(Storage(store, Path(scratch), lock=None)) as storage,
        ):
            entries = storage.state.audit_entries()
        rows = [["when (UTC)", "who", "what", "of what"]]
        rows += [
            [f"{datetime.fromtimestamp(entry.time, UTC):%Y-%m-%d %H:%M:%S}", *entry[1:]]
            for entry in entries
        ]
        print_result(as_json, {"audit": [entry._asdict() for entry in entries]}, rows)
