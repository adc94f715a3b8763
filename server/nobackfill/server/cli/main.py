"""Run the command `gateway`; docs/operations/troubleshoot.md lists its exit codes."""

import os

# gRPC's core prints lines of its own; the errors carry the same information. It reads the variable
# when it is imported.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# Each import registers its commands with `app`; the order is the order of --help.
from nobackfill.server.cli import serve, operations, canary, galleries, upgrade, data  # noqa: F401, I001
from nobackfill.server.cli.app import app


def main() -> None:
    """Run the command that the arguments of this process name; it ends the process with the
    command's exit code.
    """
    app()
