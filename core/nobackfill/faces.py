"""Export names from a package and import their modules on first use.

So `import nobackfill.gallery` costs nothing, and a search of the edge client loads only what it
uses.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any


def export_lazily(package: str) -> Callable[[str], Any]:
    """Build the `__getattr__` of a package that imports its public names on first use.

    The public names are those that the package imports under `if TYPE_CHECKING`, where type
    checkers read them. These imports are compiled, but not run, so their names are found in the
    calling module's code. That works without source files, too.

    Args:
        package: The `__name__` of the package, which calls this function.

    Returns:
        A function that returns the attribute of a name, and imports its module. It stores nothing
        in the package, so each access calls it again. It raises AttributeError for an unknown name,
        and any error of the import.
    """
    code = sys._getframe(1).f_code

    @cache
    def homes() -> dict[str, str]:
        import dis

        modules, module = {}, ""
        for step in dis.get_instructions(code):
            if step.opname == "IMPORT_NAME":
                module = step.argval
            elif step.opname == "IMPORT_FROM":
                modules[step.argval] = module
        return modules

    def get(name: str) -> Any:
        # The first condition spares `dis` to the import of a submodule, which asks for its name.
        if name not in code.co_names or name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes()[name]), name)

    return get
