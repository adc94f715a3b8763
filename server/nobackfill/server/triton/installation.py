"""Triton's own virtual environment: its wheel holds numpy below 2, so it cannot share ours."""

import subprocess
import sys
from pathlib import Path

from nobackfill.errors import CannotWriteError, UnavailableError
from nobackfill.server.triton.process import has_triton

# Every package at the version that was tried; make setup installs the same.
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def default_folder() -> Path:
    """Where the gateway looks for it, and where it is put: beside the environment we run in."""
    return Path(sys.prefix).parent / ".venv-triton"


def install(folder: Path) -> None:
    """Make the environment in `folder`, or complete one there; packages come from pip's index.

    Some 400 MB. Raises CannotWriteError (no environment can be made there), UnavailableError (pip
    cannot get the packages: no index, or none for this platform and Python).
    """
    made = _run(sys.executable, "-m", "venv", folder)
    if made is not None:
        raise CannotWriteError(
            f"{folder}: no virtual environment can be made there ({made}); name another folder, "
            "and on Debian install python3-venv"
        )
    python = folder / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--only-binary=:all:")
    missing = _run(python, *pip, "--requirement", REQUIREMENTS)
    if missing is not None or not has_triton(folder):
        raise UnavailableError(
            f"{folder}: Triton's packages cannot be installed ({missing or 'no tritonserver'}); "
            "that takes a package index and Python 3.12 or older; else serve with "
            "--triton=in-process"
        )


def _run(*command: str | Path) -> str | None:
    """The last line that a failed command said; None after one that did well."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
    return said.splitlines()[-1] if done.returncode else None
