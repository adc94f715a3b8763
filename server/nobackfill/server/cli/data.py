"""`gateway backup | restore | verify`: on the folders themselves, beside a gateway that serves."""

from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show

Data = Annotated[Path, typer.Option("--data", envvar="NOBACKFILL_DATA", help="the data folder")]
DEFAULT_DATA = Path("gateway-data")


@app.command()
def backup(
    target: Annotated[Path, typer.Argument(help="a new folder for the backup")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Copy all galleries and the vault, consistent under load, and verify the copy."""
    with exit_codes():
        from nobackfill.server.backup import backup

        _show(asdict(backup(data, target)), as_json)


@app.command()
def restore(
    source: Annotated[Path, typer.Argument(help="a backup")],
    data: Data = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Make a data folder from a verified backup, new or in an empty folder."""
    with exit_codes():
        from nobackfill.server.backup import restore

        _show(asdict(restore(source, data)), as_json)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(help="a backup or a data folder")] = DEFAULT_DATA,
    as_json: Json = False,
) -> None:
    """Check digests, what a start reads, every page of every gallery, and every vector."""
    with exit_codes():
        from nobackfill.server.backup import verify

        _show(asdict(verify(folder)), as_json)


def _show(summary: dict[str, object], as_json: bool) -> None:
    galleries = summary["galleries"]
    assert isinstance(galleries, dict)
    rows = [["gallery", "items"], *([name, str(count)] for name, count in galleries.items())]
    show(as_json, summary, [*rows, ["blobs", str(summary["blobs"])]])


# `gateway export`: a gallery's vectors as Parquet files.


@app.command()
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
    """Write every vector of one snapshot, also beside a gateway that serves the store."""
    with exit_codes():
        from nobackfill.errors import NotFoundError
        from nobackfill.server import export as exporting
        from nobackfill.server.storage import Storage, need_store

        need_store(store)
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


# `gateway migrate`: a database in the format of another version.


@app.command()
def migrate(
    store: Annotated[
        str, typer.Option("--store", envvar="NOBACKFILL_STORE", help="postgresql://…")
    ],
    to: Annotated[
        int | None, typer.Option("--to", help="format", show_default="that of this version")
    ] = None,
    as_json: Json = False,
) -> None:
    """Bring a database that no gateway serves to a format: this version's, or back to the one
    before, for the version that wrote it. A gateway does the first by itself when it starts."""
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


# `gateway move`.

_HOLDS_VAULT = "its gateway's data folder, which holds the vault"


@app.command()
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
    """Copy every gallery and the vault, also beside a gateway that serves --from: the exit code is
    75 then. Run again once that has ended: what changed since goes along, the gateway's state too,
    and both are compared. A folder that was moved is not served again without --force."""
    with exit_codes():
        from nobackfill.errors import BusyError, ConfigurationError
        from nobackfill.server.storage import Storage, folder_of, mark_moved, need_store
        from nobackfill.server.transfer import transfer_all, vaults_of

        if source == target:
            raise ConfigurationError("expected two stores, got the same twice")
        need_store(source)
        old = folder_of(source, Path())
        vaults = vaults_of(from_data or old, to_data or folder_of(target, Path()))
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
    """The latest 1000 activations, rollbacks, retirements and deletions, by the tokens' names; also
    beside a gateway that serves."""
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
