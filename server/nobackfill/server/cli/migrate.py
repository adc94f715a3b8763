"""`gateway migrate`: a database in the format of another version."""

from typing import Annotated

import typer

from nobackfill.server.cli.app import Json, app, exit_codes, show


@app.command()
def migrate(
    store: Annotated[
        str, typer.Option("--store", envvar="NOBACKFILL_STORE", help="postgresql://…")
    ],
    to: Annotated[int | None, typer.Option("--to", help="format; without: this version's")] = None,
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
