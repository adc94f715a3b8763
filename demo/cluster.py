"""Who carries upgrades beside a database: a Ray cluster of the demo's own, or worker processes."""

import importlib.util
import os
import secrets
import sys
from pathlib import Path

from demo.children import Children, wait_for_line
from demo.serve import free_addresses

_SECONDS = 120


def start_cluster(children: Children) -> list[str]:
    """Start a node with this machine's processors, where Ray is installed; the arguments of
    `gateway serve` for it. Raises UnavailableError."""
    processors = str(len(os.sched_getaffinity(0)))
    if importlib.util.find_spec("ray") is None:
        return ["--workers", processors]
    # Ray listens on every address of the machine, and does whatever it is told.
    children.environment |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    address, client = free_addresses(2)
    ray = children.start(
        "ray",
        [
            *(Path(sys.executable).with_name("ray"), "start", "--head", "--block"),
            *("--node-ip-address", "127.0.0.1", "--port", address.rpartition(":")[2]),
            *("--ray-client-server-port", client.rpartition(":")[2], "--num-cpus", processors),
            *("--include-dashboard", "false", "--disable-usage-stats"),
            *("--temp-dir", children.make_folder("ray-")),
        ],
    )
    wait_for_line(ray, r".*Ray runtime started", _SECONDS)
    return ["--ray", address]
