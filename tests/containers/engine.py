"""podman or docker, as deploy/containers/build found it, and the containers that tests start."""

import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOUND = ROOT / "build" / "container" / "engine"
# Whatever of ours is left of a run that was killed is known by it.
_LABEL = f"nobackfill.tests={ROOT}"
# As compose.yaml and the chart run them.
CONFINED = (
    "--read-only", "--tmpfs", "/tmp", "--cap-drop", "all",
    "--security-opt", "no-new-privileges",
)  # fmt: skip
_ENDS_S = 200


class Engine:
    """Starts containers of the images that were built."""

    def __init__(self) -> None:
        """Raises FileNotFoundError where no image was built here."""
        lines = shlex.split(FOUND.read_text(encoding="utf-8"))
        found = dict(line.split("=", 1) for line in lines)
        self.name, self._version, self._base = found["ENGINE"], found["VERSION"], found["BASE"]
        # With which containers start on this machine.
        self.words, self._build = found["RUN"].split(), found["BUILD"].split()
        self._built = found["BUILT"].split()
        self._network, self._hosts = "", FOUND.with_name("hosts")
        self.sweep()

    def image(self, target: str) -> str:
        """Name of the image of a target of Containerfile."""
        return f"nobackfill/{target}:{self._version}"

    @property
    def offline(self) -> bool:
        """Whether the images' base was made here, as no registry answers."""
        return self._base.startswith("localhost/")

    def build(self, context: Path, name: str) -> None:
        """An image of a folder with a Containerfile, on the base of the others."""
        given = ["--build-arg", f"BASE={self._base}", "--tag", name, "--file"]
        self.ask("build", *self._build, *given, str(context / "Containerfile"), str(context))

    def ask(self, *words: str, check: bool = True) -> str:
        """What the engine says to a command; raises AssertionError where it refuses."""
        done = self._do(*words)
        assert not check or done.returncode == 0, f"{shlex.join(words)}: {done.stderr}"
        return done.stdout

    def status(self, *words: str) -> int:
        """The exit status of a command of the engine's."""
        return self._do(*words).returncode

    def log(self, container: str) -> str:
        """All that a container has said."""
        done = self._do("logs", container)
        return done.stdout + done.stderr

    def _do(self, *words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [self.name, *words], check=False, capture_output=True, text=True, timeout=_ENDS_S
        )

    def isolate(self, hosts: Mapping[str, str]) -> None:
        """A network of the containers that are started from now on: a loopback device of their own,
        which nothing leads out of, and names for addresses there."""
        known = {"localhost": "127.0.0.1", **hosts}
        self._hosts.write_text("".join(f"{address} {name}\n" for name, address in known.items()))
        words = ("--network", "none", "--entrypoint", "sleep")
        held = self._create(self._built[0], ("infinity",), words)
        self._network = held.name

    def start(
        self, target: str, *command: str, volumes: Mapping[Any, str] = MappingProxyType({}),
        env: Mapping[str, str] = MappingProxyType({}), words: Sequence[str] = (),
        confined: Sequence[str] = CONFINED,
    ) -> "Container":  # fmt: skip
        """A container in the background. `volumes`: what is mounted where (`/there:ro`)."""
        given = [*confined, *words, "--network", f"container:{self._network}"]
        for here, there in {**volumes, self._hosts: "/etc/hosts:ro"}.items():
            given += ["--volume", f"{here}:{there}"]
        for name, value in env.items():
            given += ["--env", f"{name}={value}"]
        return self._create(target, command, given)

    def _create(self, target: str, command: Sequence[str], words: Sequence[str]) -> "Container":
        if target not in self._built:
            pytest.skip(f"the image {target} was not built here")
        given = ["run", "--detach", "--label", _LABEL, *self.words, *words]
        return Container(self, self.ask(*given, self.image(target), *command).strip())

    def sweep(self) -> None:
        """Remove every container of ours."""
        left = self.ask("ps", "--all", "--quiet", "--filter", f"label={_LABEL}").split()
        for container in left:
            self.remove(container)

    def remove(self, container: str) -> None:
        """At once, with its folders that have no name."""
        self.ask("kill", container, check=False)
        self.ask("rm", "--force", "--volumes", container, check=False)


class Container:
    """One of an engine's."""

    def __init__(self, engine: Engine, name: str) -> None:
        self._engine, self.name = engine, name

    def __enter__(self) -> "Container":
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.remove(self.name)

    def ask(self, *command: str, check: bool = True) -> str:
        """What a command says inside."""
        return self._engine.ask("exec", self.name, *command, check=check)

    def status(self, *command: str) -> int:
        """The exit status of a command inside."""
        return self._engine.status("exec", self.name, *command)

    def signal(self, name: str) -> None:
        """Send a signal to what it runs."""
        self._engine.ask("kill", "--signal", name, self.name)

    def wait(self) -> int:
        """Its exit status, once it has ended."""
        return int(self._engine.ask("wait", self.name))

    def restart(self) -> None:
        """Once more, with the same folders, after it has ended."""
        self._engine.ask("start", self.name)

    @property
    def log(self) -> str:
        """What it has said."""
        return self._engine.log(self.name)
