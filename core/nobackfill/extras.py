"""What an extra of the install brings, as in `pip install '.[server]'`."""

from collections.abc import Iterator
from contextlib import contextmanager

from nobackfill.errors import ConfigurationError


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Imports in the block need the extra `name`.

    Raises ConfigurationError, which says how to get it, where one of its packages is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nobackfill"):
            raise
        raise ConfigurationError(
            f"this needs {error.name}, which is not installed: pip install '.[{name}]' in the "
            "folder of nobackfill's source"
        ) from error
