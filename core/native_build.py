"""Compiles nobackfill.gallery.search._native, if there is a compiler; hatchling calls it.

Without it the package hnswlib has the graphs, and everything is searched in Python. One build
serves every processor of its architecture: it chooses its distances when it is loaded.
"""

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

FOLDER = Path(__file__).parent / "nobackfill" / "gallery" / "search"
SOURCES = FOLDER / "native"
FLAGS = (
    # Distances are rounded where Python rounds them.
    "-std=c++17", "-O3", "-DNDEBUG", "-ffp-contract=off", "-fvisibility=hidden", "-shared", "-fPIC",
    "-pthread",
    # The same sources make the same file, wherever they lie.
    "-frandom-seed=native", f"-ffile-prefix-map={FOLDER}=.",
)  # fmt: skip


def compiled_module_path() -> Path:
    """Return the path of the compiled module for this Python."""
    return FOLDER / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_to(path: Path, *flags: str) -> None:
    """Compile the module.

    Args:
        path: The file to write; it is replaced once the compiler has finished, and stays as it was
            after an error.
        flags: Further flags of the compiler, which $CXX names (by default c++).

    Raises:
        OSError: There is no compiler.
        ImportError: pybind11 is not installed.
        subprocess.CalledProcessError: The compiler refuses the sources.
    """
    # Only here: whoever has no compiler needs no pybind11.
    import pybind11

    includes = [f"-I{sysconfig.get_path('include')}", f"-I{pybind11.get_include()}"]
    made = path.with_name(f".{path.name}.{os.getpid()}")
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    command = [*compiler, *FLAGS, *flags, *includes, str(SOURCES / "module.cpp"), "-o", str(made)]
    try:
        subprocess.run(command, check=True)
        made.replace(path)
    finally:
        made.unlink(missing_ok=True)


def _is_fresh(path: Path) -> bool:
    made = path.stat().st_mtime if path.exists() else 0.0
    sources = [Path(__file__), *SOURCES.rglob("*.*pp"), *SOURCES.rglob("*.h")]
    return made > max(source.stat().st_mtime for source in sources)


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """Build the module for editable installs, which load it from the checkout, and for wheels."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the module unless it is newer than its sources, and add it to a wheel.

        Without a compiler the wheel has no module, and a line on stderr says so. An outdated module
        is removed then.

        Args:
            version: Kind of the build: editable or standard.
            build_data: Changed in place: the files and the tag of the wheel.
        """
        path = compiled_module_path()
        if not _is_fresh(path):
            try:
                compile_to(path)
            except (OSError, ImportError, subprocess.CalledProcessError) as error:
                path.unlink(missing_ok=True)
                print(
                    "nobackfill's search was not compiled, so searches run in Python and take "
                    f"several times longer ({error}); install a C++ compiler, then install "
                    "nobackfill again",
                    file=sys.stderr,
                )
        if path.exists():
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            if version != "editable":
                inside = f"nobackfill/gallery/search/{path.name}"
                build_data["force_include"][str(path)] = inside
