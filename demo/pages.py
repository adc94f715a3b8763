"""A life that was run, to be looked at: its report, the device's gallery, the gateway's console."""

import json
import threading
import time
from pathlib import Path

from demo import serve
from demo.children import Child, Children
from demo.device import COMMAND as EDGE_CLIENT
from nobackfill.errors import UnavailableError

# Until a command prints the address of its pages, in seconds.
_START_SECONDS = 60


def start(out: Path, children: Children) -> dict[str, str]:
    """Start both; what each shows -> its address. Call it when every step was done."""
    _lay_back(out)
    address, metrics, console = serve.free_addresses(3)
    gateway = serve.start(
        children, out / "model_repo", out / "gateway", (address, metrics),
        "--console", "--console-address", console,
    )  # fmt: skip
    browse = children.start(
        "browse",
        [EDGE_CLIENT, "--gallery", out / "device" / "gallery.sqlite", "browse", "--json"],
    )
    shown = first_line(browse, "{")
    return {
        "the device's gallery": str(json.loads(shown)["address"]),
        "the gateway's console": first_line(gateway, "console: ").split()[1],
    }


def wait() -> None:
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


def first_line(child: Child, beginning: str) -> str:
    """A command's first line that begins so. Raises UnavailableError; where the command has ended
    without one, its failure."""
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        ended = child.process.poll() is not None
        for line in child.output.read_text(encoding="utf-8").splitlines():
            if line.startswith(beginning):
                return line
        if ended:
            raise child.failure()
        time.sleep(0.1)
    raise UnavailableError(f"no address came within {_START_SECONDS} s; see {child.output}")
