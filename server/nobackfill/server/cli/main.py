"""The command `gateway`; exit codes as in docs/operations/troubleshoot.md."""

# The commands put themselves into `app`, in the order that --help shows.
from nobackfill.server.cli import serve, operations, canary, galleries, upgrade, data  # noqa: F401, I001
from nobackfill.server.cli.app import app


def main() -> None:
    """Run the command that the arguments name."""
    app()
