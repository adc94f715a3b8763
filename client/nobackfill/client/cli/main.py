"""The command `edge-client`: the plainest search at once, all else by its application."""

import gc
import os
import sys

from nobackfill.client.cli.refusals import refusing
from nobackfill.client.cli.search_line import read


def main() -> None:
    """Run the command line; a refusal becomes one sentence on stderr and its exit code."""
    asked = read(sys.argv[1:], os.environ)
    if asked is None:
        from nobackfill.client.cli import app

        app.main()
        return
    from nobackfill.client.cli.searching import answer

    # Nothing of what a search makes is garbage before its end.
    gc.disable()
    with refusing():
        answer(asked)
        # There is no sys.stdout where the caller closed it.
        print(end="", flush=True)
