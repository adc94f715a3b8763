"""`gateway move`."""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show

_HOLDS_VAULT = "its gateway's data folder, which holds the vault, where that is another"


@app.command()
def move(
    source: Annotated[str, typer.Option("--from", help="sqlite:FOLDER or postgresql://…")],
    target: Annotated[str, typer.Option("--to", help="the other; no gateway may serve it")],
    from_data: Annotated[Path | None, typer.Option(help=_HOLDS_VAULT)] = None,
    to_data: Annotated[Path | None, typer.Option(help="the same of --to")] = None,
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
