"""`gateway audit`: who activated, rolled back, retired and deleted what."""

from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show


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
