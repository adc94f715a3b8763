"""Run the command `gateway`; docs/operations/troubleshoot.md lists its exit codes."""

# Each import registers its commands with `app`; the order is the order of --help.
from nobackfill.server.cli import serve, operations, canary, galleries, upgrade, data  # noqa: F401, I001
from nobackfill.server.cli.app import app


def main() -> None:
    """Run the command that the arguments of this process name; it ends the process with the
    command's exit code.
    """
    app()
