"""What an install has of compare.py: the reason why it cannot compare."""

import sys
from typing import NoReturn

from nobackfill.errors import ConfigurationError


def refuse() -> NoReturn:
    """Print why there is no comparison and what runs one; exit with 78."""
    error = ConfigurationError(
        "nobackfill.research is not installed: the comparison of methods is no part of the wheel, "
        "since its rows and tables belong to a checkout. In a checkout of nobackfill run "
        "`make setup`, then `.venv/bin/python training/compare.py`"
    )
    print(f"compare.py: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    refuse()
