"""`gateway data …`: copy, check and move what a gateway keeps; and `gateway audit`.

They read folders and databases themselves, also beside a gateway that serves them.
"""

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill import durable
from nobackfill.server.cli.app import Json, app, exit_codes, show

Data = Annotated[Path, typer.Option("--data", envvar="NOBACKFILL_DATA", help="the data folder")]
DEFAULT_DATA = Path("gateway-data")


data_commands = typer.Typer(no_args_is_help=True, help="Copy, check and move what a gateway keeps.")
app.add_typer(data_commands, name="data")


@data_commands.command()
def backup(
    target: Annotated[Path, typer.Argument(help="a new folder for the backup")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Back up a data folder: all galleries and the vault, in one verified copy.

    The copy is consistent while a gateway serves the folder.
    """
    with exit_codes():
        from nobackfill.server.backup import backup

        _show(asdict(backup(data, target)), as_json)


@data_commands.command()
def restore(
    source: Annotated[Path, typer.Argument(help="a backup")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make a data folder from a backup.

    The backup is verified first. The folder must be new or empty.
    """
    with exit_codes():
        from nobackfill.server.backup import restore

        _show(asdict(restore(source, data)), as_json)


@data_commands.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="a backup or a data folder")] = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Check that a backup or a data folder is intact.

    It reads every digest, what a start reads, every page of every gallery, and every vector.
    """
    with exit_codes():
        from nobackfill.server.backup import verify

        _show(asdict(verify(folder)), as_json)


def _show(summary: dict[str, object], as_json: bool) -> None:
    galleries = summary["galleries"]
    assert isinstance(galleries, dict)
    rows = [["gallery", "items"], *([name, str(count)] for name, count in galleries.items())]
    show(as_json, summary, [*rows, ["blobs", str(summary["blobs"])]])


# `gateway data export`: a gallery's vectors as Parquet files.


@data_commands.command()
def export(
    gallery: Annotated[str, typer.Argument(help="its name")],
    store: Annotated[str, typer.Option("--from", help="sqlite:FOLDER or postgresql://…")],
    out: Annotated[Path, typer.Option(help="folder to make: a Parquet file for each release")],
    release: Annotated[
        list[int] | None, typer.Option(help="only these; may be repeated", show_default="all")
    ] = None,
    native: Annotated[
        bool, typer.Option("--native", help="only vectors that the release's own model made")
    ] = False,
    side: Annotated[bool, typer.Option("--side", help="side-information, too")] = False,
    as_json: Json = False,
) -> None:
    """Write a gallery's vectors as Parquet files.

    They are of one snapshot. A gateway may serve the store meanwhile.
    """
    with exit_codes():
        from nobackfill.errors import NotFoundError
        from nobackfill.server import export as exporting
        from nobackfill.server.storage import Storage, folder_of, need_store

        need_store(store)
        folder = folder_of(store, Path())
        if folder is not None:
            durable.refuse_inside(out, folder)
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


# `gateway data migrate`: a database in the format of another version.


@data_commands.command()
def migrate(
    store: Annotated[
        str, typer.Option("--store", envvar="NOBACKFILL_STORE", help="postgresql://…")
    ],
    to: Annotated[
        int | None, typer.Option("--to", help="format", show_default="that of this version")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring a database to the format of this version, or back to the one before.

    No gateway may serve it. A gateway brings its database to its own format when it starts.
    """
    with exit_codes():
        from nobackfill.errors import ConfigurationError
        from nobackfill.server.settings import DATABASES
        from nobackfill.server.storage import migrate_database

        if not store.startswith(DATABASES):
            raise ConfigurationError("expected a database, postgresql://USER@HOST/DATABASE")
        before, after = migrate_database(store, to)
        show(
            as_json,
            {"before": before, "after": after},
            [["format before", "format now"], [str(before), str(after)]],
        )


# `gateway data move`.

_HOLDS_VAULT = "its gateway's data folder, which holds the vault"


@data_commands.command()
def move(
    source: Annotated[str, typer.Option("--from", help="sqlite:FOLDER or postgresql://…")],
    target: Annotated[str, typer.Option("--to", help="the other; no gateway may serve it")],
    from_data: Annotated[
        Path | None, typer.Option(help=_HOLDS_VAULT, show_default="the folder of --from")
    ] = None,
    to_data: Annotated[
        Path | None, typer.Option(help="the same of --to", show_default="the folder of --to")
    ] = None,
    as_json: Json = False,
) -> None:
    """Move every gallery and the vault to another store.

    While a gateway serves --from, everything but its state is copied, and the exit code is 75. Run
    the command again once that gateway has ended: it copies what has changed, and the state, and
    compares both. `gateway serve` refuses a folder that was moved, but with --force.
    """
    with exit_codes():
        from nobackfill.errors import BusyError, ConfigurationError
        from nobackfill.server.storage import Storage, folder_of, mark_moved, need_store
        from nobackfill.server.transfer import transfer_all, vaults_of

        if source == target:
            raise ConfigurationError("expected two stores, got the same twice")
        need_store(source)
        old, new = folder_of(source, Path()), folder_of(target, Path())
        if old is not None and new is not None:
            durable.refuse_inside(new, old)
        vaults = vaults_of(from_data or old, to_data or new)
        with TemporaryDirectory() as scratch:
            ended = True
            try:
                first = Storage(source, Path(scratch))
            except BusyError:
                ended = False
                first = Storage(source, Path(scratch), lock=None)
            with closing(first), closing(Storage(target, Path(scratch))) as second:
                found, vault = transfer_all(first, second, vaults, with_state=ended)
                if ended and old is not None:
                    mark_moved(old, target)
        rows = [["gallery", "items", "written", "deleted", "alike"]]
        shown = dict(found) if vault is None else {**found, "(vault)": vault}
        rows += [
            [name, str(one.items), str(one.written), str(one.deleted), "yes" if one.alike else "no"]
            for name, one in shown.items()
        ]
        result = {
            "finished": ended,
            "galleries": {name: vars(one) for name, one in found.items()},
            "vault": None if vault is None else vars(vault),
        }
        show(as_json, result, rows)
        if not ended:
            raise BusyError(
                "the move is not finished: a gateway still serves --from, and its state stays "
                "there; end that gateway, and run the same command again"
            )


# `gateway audit`: who activated, rolled back, retired and deleted what.


@app.command()
def audit(
    store: Annotated[
        str,
        typer.Option("--store", envvar="NOBACKFILL_STORE", help="sqlite:FOLDER or postgresql://…"),
    ] = "sqlite:gateway-data",
    as_json: Json = False,
) -> None:
    """List who activated, rolled back, retired and deleted what.

    They are the latest 1000 deeds, by the names of tokens. A gateway may serve the store meanwhile.
    """
    with exit_codes():
        from nobackfill.server.storage import Storage, need_store

        need_store(store)
        with (
            TemporaryDirectory() as scratch,
            closing(Storage(store, Path(scratch), lock=None)) as storage,
        ):
            found = storage.state.deeds()
        rows = [["when (UTC)", "who", "what", "of what"]]
        rows += [
            [f"{datetime.fromtimestamp(one.time, UTC):%Y-%m-%d %H:%M:%S}", *one[1:]]
            for one in found
        ]
        show(as_json, {"audit": [one._asdict() for one in found]}, rows)
