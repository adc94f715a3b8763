"""Virtual environments with what nobackfill asks for and nothing else, made without a network."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

NAME = "nobackfill"
UV = Path(sys.executable).with_name("uv")


class Environment:
    """A virtual environment with `nobackfill[extras]` from `wheel`, below `folder`.

    Its other packages are links to those of the test environment: what is declared, and what that
    asks for, is there; everything else is not. uv installs the wheel, and refuses one whose
    requirements these do not meet.
    """

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self.bin = folder / "bin"
        _run(UV, "venv", "--quiet", "--offline", "--python", sys.executable, folder)
        (self.site_packages,) = folder.glob("lib/python3*/site-packages")
        _link(_closure(extras), self.site_packages)
        before = self._names()
        extra = f"[{','.join(extras)}]" if extras else ""
        _run(
            UV, "pip", "install", "--quiet", "--offline", "--no-index", "--python",
            self.bin / "python", f"{NAME}{extra} @ {wheel.as_uri()}",
        )  # fmt: skip
        # What the install put there.
        self.added = self._names() - before

    def run(
        self, *command: str | Path, cwd: Path, code: int = 0, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of this environment, or `python`, run in `cwd`; it ends with `code`."""
        done = subprocess.run(
            [self.bin / command[0], *command[1:]],
            cwd=cwd, env={**self.variables(), **variables}, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr, done.stderr
        return done

    def variables(self) -> dict[str, str]:
        """Those of this process but for what leads Python elsewhere."""
        kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        return {**kept, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}

    def _names(self) -> set[str]:
        return {path.name for path in self.site_packages.iterdir()}


def _closure(extras: Iterable[str]) -> list[metadata.Distribution]:
    """The distributions that nobackfill with `extras` asks for, and those that they ask for."""
    found: dict[str, metadata.Distribution] = {}
    seen: set[tuple[str, str]] = set()
    wanted = [(NAME, extra) for extra in ("", *extras)]
    while wanted:
        name, extra = wanted.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        found[name] = metadata.distribution(name)
        wanted += _asked_for(found[name], extra)
    del found[NAME]
    return list(found.values())


def _asked_for(distribution: metadata.Distribution, extra: str) -> Iterator[tuple[str, str]]:
    for line in distribution.requires or ():
        asked = Requirement(line)
        if asked.marker is None or asked.marker.evaluate({"extra": extra}):
            name = canonicalize_name(asked.name)
            yield from ((name, wanted) for wanted in ("", *asked.extras))


def _link(distributions: Iterable[metadata.Distribution], site_packages: Path) -> None:
    for distribution in distributions:
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            source, link = Path(str(distribution.locate_file(top))), site_packages / top
            if top.endswith(".dist-info"):
                # uv does not follow links to them.
                shutil.copytree(source, link)
            elif not link.exists():
                link.symlink_to(source.resolve())


def _run(*command: str | Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
