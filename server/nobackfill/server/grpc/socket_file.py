"""A socket file in the data folder, for what runs in this process beside the gRPC server."""

import os
from contextlib import ExitStack
from pathlib import Path


def socket_in(folder: Path, closing: ExitStack) -> str:
    """Its name for gRPC: by way of a descriptor of `folder`, open until `closing`, for a socket's
    path may have 107 bytes only."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    closing.callback(os.close, descriptor)
    return f"unix:/proc/{os.getpid()}/fd/{descriptor}/console.sock"
