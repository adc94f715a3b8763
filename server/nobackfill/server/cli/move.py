"""`gateway move`: galleries from one store to another."""

from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show


@app.command()
def move(
    source: Annotated[str, typer.Option("--from", help="sqlite:FOLDER or postgresql://…")],
    target: Annotated[str, typer.Option("--to", help="the other; no gateway may serve it")],
    as_json: Json = False,
) -> None:
    """Copy every gallery, also beside a gateway that serves --from. Run again once that has ended:
    what changed since goes along, the gateway's state too, and both are compared."""
    with exit_codes():
        from nobackfill.errors import BusyError, ConfigurationError
        from nobackfill.server.storage import Storage, need_store
        from nobackfill.server.transfer import transfer_all

        if source == target:
            raise ConfigurationError("expected two stores, got the same twice")
        need_store(source)
        with TemporaryDirectory() as scratch:
            ended = True
            try:
                first = Storage(source, Path(scratch))
            except BusyError:
                ended = False
                first = Storage(source, Path(scratch), lock=None)
            with closing(first), closing(Storage(target, Path(scratch))) as second:
                found = transfer_all(first, second, with_state=ended)
        rows = [["gallery", "items", "written", "deleted", "alike"]]
        rows += [
            [name, str(one.items), str(one.written), str(one.deleted), "yes" if one.alike else "no"]
            for name, one in found.items()
        ]
        if not ended:
            rows.append(["", "", "", "", "a gateway still serves --from: end it, and move again"])
        show(
            as_json, {"finished": ended, "galleries": {n: vars(o) for n, o in found.items()}}, rows
        )
