"""A life that was run, to be looked at: its report, the device's gallery, the gateway's console."""

import json
import threading
from pathlib import Path

from demo.children import Children, wait_for_line
from demo.device import COMMAND as EDGE_CLIENT
from demo.gateways import Gateways, Store
from demo.serve import free_addresses

# Until a command prints the address of its pages, in seconds.
_START_SECONDS = 60


def start_pages(out: Path, children: Children, store: Store = "sqlite") -> dict[str, str]:
    """Start both; what each shows -> its address. Call it when every step was done."""
    _lay_back(out)
    (console,) = free_addresses(1)
    gateway = Gateways(children, out, store).start(0, "--console", "--console-address", console)
    browse = children.start(
        "browse",
        [EDGE_CLIENT, "--gallery", out / "device" / "gallery.sqlite", "browse", "--json"],
    )
    shown = wait_for_line(browse, r"\{", _START_SECONDS)
    return {
        "the device's gallery": str(json.loads(shown)["address"]),
        "the gateway's console": wait_for_line(gateway, "console: ", _START_SECONDS).split()[1],
    }


def wait_for_interrupt() -> None:
    """Until Ctrl-C."""
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        return


def _lay_back(out: Path) -> None:
    """The device's images are deleted in the middle of the life. Its copies for measuring come
    back to where they were, only to be looked at."""
    images = out / "data" / "device"
    if not images.exists():
        images.symlink_to(out / "measuring-only" / "device")
