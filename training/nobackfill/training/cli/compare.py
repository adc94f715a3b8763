"""The command compare.py of an installation without nobackfill.research."""

import sys
from typing import NoReturn

from nobackfill.errors import ConfigurationError


def refuse() -> NoReturn:
    """Print on stderr why there is no comparison and how to run one, and exit with 78.

    It looks at nothing: callers check that nobackfill.research is missing.

    Raises:
        SystemExit: always.
    """
    error = ConfigurationError(
        "nobackfill.research is not installed: the wheel does not contain the comparison of "
        "methods. In a checkout of nobackfill run `make setup`, then "
        "`.venv/bin/python training/compare.py`"
    )
    print(f"compare.py: {error}", file=sys.stderr)
    sys.exit(error.exit_code)


if __name__ == "__main__":
    refuse()
