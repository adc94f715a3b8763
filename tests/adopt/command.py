"""The command `nobackfill` in the process of a test."""

import pytest

from nobackfill.adopt.cli import main


def run_nobackfill(*words: str) -> int:
    """Run the command `nobackfill` in this process, and return its exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["nobackfill", *words])
        try:
            main()
        except SystemExit as ended:
            return int(ended.code or 0)
    return 0
