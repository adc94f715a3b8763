"""`edge-client`: its commands and exit codes. main.py is what a shell calls.

Modules that do the work are imported inside the commands, so that a search does not wait for
libraries that only a sync needs.
"""

from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli import galleries, releases
from nobackfill.client.cli.refusals import refusing
from nobackfill.client.cli.search_line import GALLERY, VARIABLE
from nobackfill.version_option import Version

_EPILOG = (
    "A gallery's life; only init, sync, push and pull need a network:\n"
    "  edge-client init --from grpc://127.0.0.1:50051 --root 1.root.json\n"
    "  edge-client add photos\n"
    "  edge-client search photos/a.jpg\n"
    "  edge-client sync\n\n"
    "sync follows the newest release, also over releases that this device skipped. 1.root.json "
    "lies in the publication folder: get it from the publisher, another way than the releases. "
    "Another gallery: edge-client --gallery FILE COMMAND. Whatever was interrupted: run it again. "
    "Every COMMAND has its own --help.\n\n"
    "Exit codes: 0 done, 1 failure, 2 wrong usage, 65 refused data or failed verification, "
    "66 no such file, item or release, 69 server unavailable, 73 cannot write, 75 busy, try again, "
    "77 not permitted, 78 configuration, 130 interrupted."
)

app = typer.Typer(
    help="An image gallery in one file that follows new models without its images.",
    epilog=_EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def common(
    context: typer.Context,
    gallery: Annotated[
        Path, typer.Option(envvar=VARIABLE, help="The gallery's SQLite file.")
    ] = Path(GALLERY),
    version: Version = False,
) -> None:
    """Take the options of every command."""
    context.obj = gallery


for command in (
    galleries.init, galleries.add, galleries.search, releases.sync, galleries.status,
    releases.report, releases.rollback, galleries.remove, releases.push, releases.pull,
    galleries.gc, galleries.verify, galleries.rescue, galleries.browse,
):  # fmt: skip
    app.command()(command)
app.command("list")(galleries.list_items)
app.command("set")(galleries.set_metadata)


def main() -> None:
    """Run the command line; a refusal becomes one sentence on stderr and its exit code."""
    with refusing():
        app()
