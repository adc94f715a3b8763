"""The command that shows the gallery in a browser."""

import threading
import webbrowser
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
            {"address": address}, f"{address}\nAnybody who knows this address sees the gallery. "
            "Ctrl-C ends it.",
        )  # fmt: skip
        if show:
            webbrowser.open(address)
        threading.Event().wait()
