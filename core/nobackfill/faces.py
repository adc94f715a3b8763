"""Export names from a package and import their modules on first use.

So `import nobackfill.gallery` costs nothing, and a search of the edge client loads only what it
uses.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def export_lazily(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """Build the `__getattr__` of a package that imports its public names on first use.

    Type checkers read the same names under `if TYPE_CHECKING`; a test compares the two lists.

    Args:
        package: The `__name__` of the package.
        modules: For each module of the package, its public names, separated by spaces.

    Returns:
        A function that returns the attribute of a name, and imports its module. It stores nothing
        in the package, so each access calls it again. It raises AttributeError for an unknown name,
        and any error of the import.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get
