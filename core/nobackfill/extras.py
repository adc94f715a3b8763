"""Optional features: extras of the install, as in `pip install '.[server]'`, and plug-ins.

A plug-in is an entry point of a group `nobackfill.<group>`. It is imported when a configuration, an
address or a command asks for it by name (docs/adr/0038). A plug-in that needs an extra imports its
packages within `extra`, as every other module does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from nobackfill.errors import ConfigurationError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


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


def load_plugin(group: str, name: str) -> Any:
    """Import the plug-in `name` of the group `nobackfill.<group>`; what its entry point names.

    Raises ConfigurationError for a name that no installed distribution has, and where the plug-in
    needs an extra that is not installed.
    """
    found = _entry_points(group)
    if name not in found.names:
        known = ", ".join(sorted(found.names)) or "none"
        raise ConfigurationError(
            f"no plug-in {name!r} is installed in the group nobackfill.{group}, which has {known}; "
            "`pip install .` in the folder of nobackfill's source, or `make setup` in a checkout, "
            "registers its own"
        )
    return found[name].load()


def plugin_names(group: str) -> set[str]:
    """Return the names of the plug-ins that are installed in the group `nobackfill.<group>`."""
    return _entry_points(group).names


def _entry_points(group: str) -> "EntryPoints":
    # Takes 10 ms to import, and longer to read: commands that ask for no plug-in do without.
    from importlib.metadata import entry_points

    return entry_points(group=f"nobackfill.{group}")
