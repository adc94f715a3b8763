"""The command `python -m nobackfill.report`: write the page of an upgrade."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.durable import write_file
from nobackfill.errors import NobackfillError
from nobackfill.extras import require_extra
from nobackfill.terminal import escape_control


def command(
    model_repo: Annotated[
        Path,
        typer.Option(
            metavar="FOLDER", help="Publication folder with the new release; it is only read."
        ),
    ],
    release: Annotated[
        int, typer.Option(min=1, metavar="N", help="Number of the release whose upgrade is shown.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            metavar="FILE",
            help="HTML file to write; an existing file is replaced.",
        ),
    ],
    images: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Folder of images to measure on and to show, one folder in it for each class; it "
            "is only read. Without it, the page has only what the publisher measured.",
        ),
    ] = None,
    console: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address of the operators' pages, as `gateway serve --console` prints it; the "
            "page links to it. Without it, there is no such link.",
        ),
    ] = "",
    browse: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="Address of a device's pages, as `edge-client browse` prints it; the page links "
            "to it. Without it, there is no such link.",
        ),
    ] = "",
) -> None:
    """Write one HTML file that shows what an upgrade does to a gallery."""
    with require_extra("training"):
        from nobackfill.report.page import RunningPages, upgrade_page

    page = upgrade_page(model_repo, release, images, RunningPages(console, browse))
    # The addresses of these pages contain their secret.
    write_file(output, page.encode(), 0o600 if console or browse else 0o644)
    print(f"report: wrote {output}", file=sys.stderr)


if __name__ == "__main__":
    try:
        typer.run(command)
    except NobackfillError as error:
        print(escape_control(f"report: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
