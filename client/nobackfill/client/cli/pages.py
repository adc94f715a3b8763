"""The command that shows the gallery in a browser."""

import os
import tempfile
import threading
import webbrowser
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated

import typer

from nobackfill.client.cli.options import Json
from nobackfill.client.output import Output
from nobackfill.extras import extra


def browse(
    context: typer.Context,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Of 127.0.0.1; 0: one that is free.")
    ] = 0,
    show: Annotated[bool, typer.Option("--open", help="Open it in your browser, too.")] = False,
    json: Json = False,
) -> None:
    """Look at the gallery in a browser on this device, until Ctrl-C: search, sync, compare."""
    with extra("web"):
        from nobackfill.client.browse.app import pages
        from nobackfill.pages import Listener, new_token
    from nobackfill.client.device import Device

    token = new_token()
    with Device(context.obj) as device, Listener("127.0.0.1", port) as listener:
        address = f"{listener.address}/{token}/"
        guard = pages(device, listener.hosts, token)
        listener.serve(guard, guard.knows)
        Output(json).result(
            {"address": address}, address,
            "Anybody who knows this address sees the gallery. Ctrl-C ends it.",
        )  # fmt: skip
        with _shown(address, context.obj) if show else nullcontext():
            threading.Event().wait()


@contextmanager
def _shown(address: str, gallery: Path) -> Iterator[None]:
    """Open a browser at a page that leads to `address`, and keep that page to the end of the block.

    The browser's command line, which every user of the machine can read, names the page's file, and
    the file (mode 0600) holds the secret. It lies beside the gallery, as some browsers may not read
    the system's temporary files, or there where the gallery's folder is read only.
    """
    try:
        handle, name = tempfile.mkstemp(".html", f"{gallery.name}.", gallery.absolute().parent)
    except OSError:
        handle, name = tempfile.mkstemp(".html", "nobackfill-")
    try:
        with os.fdopen(handle, "w") as page:
            page.write(f'<!doctype html><meta http-equiv="refresh" content="0; url={address}">\n')
        webbrowser.open(Path(name).as_uri())
        yield
    finally:
        Path(name).unlink(missing_ok=True)
