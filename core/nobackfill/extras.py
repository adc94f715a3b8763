"""Load optional features: extras of the installation, as in `pip install '.[server]'`, and
plug-ins.

A plug-in is an entry point of a group `nobackfill.<group>`. It is imported when a configuration, an
address or a command names it (docs/adr/0038). A plug-in that needs an extra imports the packages of
this extra within `require_extra`, as every other module does.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from nobackfill.errors import ConfigurationError, NobackfillError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints


@contextmanager
def require_extra(name: str) -> Iterator[None]:
    """Import optional packages in the block, and explain how to install them where one is missing.

    Any other ImportError passes through.

    Args:
        name: The extra of pyproject.toml that holds the packages. It is not checked; the message
            contains it.

    Raises:
        ConfigurationError: A package is not installed; the message has the pip command.
        ModuleNotFoundError: A module of nobackfill itself is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("nobackfill"):
            raise
        raise ConfigurationError(
            f"the Python package {error.name} is needed here and not installed: run pip install "
            f"'.[{name}]' in the folder of nobackfill's source"
        ) from error


def run_command(module: str, extra: str) -> None:
    """Run the command of a module.

    If a package of its extra is not installed, print a sentence on stderr and exit with code 78. A
    ConfigurationError of the command itself ends in the same way.

    Args:
        module: The module, whose object `app` runs the command with the words of this process.
        extra: The extra of pyproject.toml that holds its packages.

    Raises:
        ModuleNotFoundError: A module of nobackfill itself is missing.
        SystemExit: The command ends with an exit code.
        Exception: Any other error of the command.
    """
    try:
        with require_extra(extra):
            import_module(module).app()
    except ConfigurationError as error:
        print(f"{module}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def load_plugin(group: str, name: str) -> Any:
    """Import a plug-in by name and return the object that its entry point names.

    If several distributions have it, the first one that Python finds counts.

    Args:
        group: The group without its prefix: `stores` for `nobackfill.stores`.
        name: The name of the entry point.

    Raises:
        ConfigurationError: No installed distribution has this plug-in, it needs an extra that is
            not installed, its module cannot be imported, or the module lacks the object that the
            entry point names. The message names the distribution and the pip command.
        NobackfillError: The import itself raises it.
    """
    plugins = _entry_points(group)
    if name not in plugins.names:
        known = ", ".join(sorted(plugins.names)) or "none"
        raise ConfigurationError(
            f"no plug-in {name!r} is installed in the group nobackfill.{group}; installed are "
            f"{known}. Correct the name, or install the plug-ins of nobackfill by `pip install .` "
            "in the folder of its source (in a checkout: `make setup`)"
        )
    plugin = plugins[name]
    try:
        return plugin.load()
    except NobackfillError:
        raise
    except Exception as error:
        package = "unknown" if plugin.dist is None else plugin.dist.name
        remedy = (
            "run `pip install .` in the folder of nobackfill's source again"
            if package == "nobackfill"
            else f"run `pip install --upgrade {package}`, or `pip uninstall {package}`"
        )
        raise ConfigurationError(
            f"the plug-in {name!r} of the package {package} cannot be imported "
            f"({type(error).__name__}: {error}); {remedy}"
        ) from error


def plugin_names(group: str) -> set[str]:
    """Return the names of the installed plug-ins of a group, without importing them.

    Args:
        group: The group without its prefix; an unknown one has no plug-ins.
    """
    return _entry_points(group).names


def _entry_points(group: str) -> "EntryPoints":
    # Importing it takes 10 ms, and reading the entry points longer; commands without plug-ins skip
    # both.
    from importlib.metadata import entry_points

    return entry_points(group=f"nobackfill.{group}")
