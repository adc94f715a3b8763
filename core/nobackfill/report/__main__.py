"""The command `python -m nobackfill.report`: write the page of an upgrade."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.durable import write_file
from nobackfill.errors import NobackfillError
from nobackfill.extras import require_extra
from nobackfill.terminal import escape_hidden


def command(
    model_repo: Annotated[Path, typer.Option(help="The publication folder.")],
    release: Annotated[int, typer.Option(min=1, help="The new release.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="The HTML file to write.")],
    images: Annotated[
        Path | None,
        typer.Option(help="A folder of class folders to measure on and to show; it is only read."),
    ] = None,
    console: Annotated[
        str, typer.Option(help="Link to the gateway's console at this address.")
    ] = "",
    browse: Annotated[
        str, typer.Option(help="Link to the pages of edge-client browse at this address.")
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
        print(escape_hidden(f"report: {error}"), file=sys.stderr)
        sys.exit(error.exit_code)
