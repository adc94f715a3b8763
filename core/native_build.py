"""Compiles nobackfill.gallery.search._native, if there is a compiler; hatchling calls it.

An extra: without it everything is searched in Python. HNSWLIB_NO_NATIVE=1: for any processor, as
hnswlib is compiled then.
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
    "-std=c++17", "-O3", "-ffp-contract=off", "-fvisibility=hidden", "-shared", "-fPIC",
    # The same sources make the same file, wherever they lie.
    "-frandom-seed=native", f"-ffile-prefix-map={FOLDER}=.",
)  # fmt: skip


def target() -> Path:
    """Where the module of this Python lies."""
    return FOLDER / f"_native{sysconfig.get_config_var('EXT_SUFFIX')}"


def compile_to(path: Path, *flags: str) -> None:
    """Raises OSError without a compiler, CalledProcessError when it refuses."""
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


class NativeBuild(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels and editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        path, anywhere = target(), bool(os.environ.get("HNSWLIB_NO_NATIVE"))
        made = path.stat().st_mtime if path.exists() else 0.0
        fresh = made > max(source.stat().st_mtime for source in SOURCES.iterdir())
        if version == "editable" or anywhere or not fresh:
            try:
                compile_to(path, *(() if anywhere else ("-march=native",)))
            except (OSError, ImportError, subprocess.CalledProcessError) as error:
                path.unlink(missing_ok=True)
                print(f"searching in Python: nothing compiled ({error})", file=sys.stderr)
        if path.exists():
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
            build_data["artifacts"].append(f"/core/nobackfill/gallery/search/{path.name}")
