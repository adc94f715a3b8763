"""Faces of rooms: names that a package offers, and imports when they are first asked for.

So `import nobackfill.gallery` costs nothing, and a search of the edge client loads what it uses.
"""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def offer(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The `__getattr__` of `package`; `modules`: the names it offers of each, as words.

    Type checkers read the same names under `if TYPE_CHECKING`; a test holds the two to each other.
    """
    homes = {name: module for module, names in modules.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{homes[name]}"), name)

    return get
