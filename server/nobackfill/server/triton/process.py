"""One tritonserver as a child process: behind a socket of ours, gone when we are.

Whoever reaches Triton may load a model, which is code that runs as us. So it listens on no port,
but on a Unix socket in a folder that our user alone may enter (docs/adr/0007).
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from nobackfill import durable
from nobackfill.errors import CannotWriteError, UnavailableError

# Probes that Triton missed in a row: is it away, does it hang, or is it only busy?
#
# A model on a large batch, or a machine with too much to do, answers a probe late; ending it then
# costs more than waiting. What hangs uses no processor time, what is busy does.

# Missed probes in a row: from `_UNREADY` on, calls are refused at once and those under way are cut.
# One missed probe is no evidence: a machine under load starves a healthy child. At `_HANGS` a
# hanging child is killed.
_UNREADY = 2
_HANGS = 4
# Of one core: a child that works uses more even where a dozen others want the same core, an idle
# one less.
_BUSY = 0.02
# Busy for so long without any answer is a loop.
_LONGEST_S = 30.0
_MARK_EVERY_S = 1.0


class Misses:
    """Counted since the last answer. `processor_s` tells the seconds of processor time that the
    child has used, None where it is not ours to look at."""

    def __init__(self, processor_s: Callable[[], float] | None) -> None:
        self._processor_s = processor_s
        self._count = 0
        self._answered = self._marked = time.monotonic()
        self._used = 0.0

    @property
    def count(self) -> int:
        return self._count

    @property
    def unready(self) -> bool:
        return self._count >= _UNREADY

    @property
    def hangs(self) -> bool:
        return self._count >= _HANGS

    def clear(self) -> None:
        """It answered, or it starts anew."""
        self._count = 0
        self._answered = time.monotonic()
        if self._answered - self._marked >= _MARK_EVERY_S:
            self._mark()

    def add(self) -> None:
        """Count a missed probe, unless the child was busy since the last look."""
        share = self._mark()
        late = time.monotonic() - self._answered > _LONGEST_S
        if late or share < _BUSY:
            self._count += 1

    def _mark(self) -> float:
        """The share of a core that was used since the last mark."""
        if self._processor_s is None:
            return 0.0
        used, now = self._processor_s(), time.monotonic()
        share = (used - self._used) / max(now - self._marked, 1e-3)
        self._used, self._marked = used, now
        return share


def group_processor_s(group: int) -> float:
    """Seconds of processor time used by the living processes of a process group; 0 where there is
    no /proc."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which stands in parentheses and may hold anything.
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            # It ended since it was listed.
            continue
        if int(fields[2]) == group:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


_SHM = Path("/dev/shm")  # noqa: S108 - where Triton itself puts it
_SHM_PREFIX = "nobackfill-"
_EXIT_SECONDS = 5
# Triton puts address and port together with a colon; to a Unix socket that is a file name.
_SOCKET, _PORT = "grpc", 1


class TritonProcess:
    """Starts and stops the tritonserver of the wheel nvidia-pytriton, found in `venv`.

    `folder`, which becomes ours alone (0700), receives the backends, the socket and Triton's log.
    The address stays the same over restarts, so that channels reconnect. The child and all below it
    end with this process, see launch.py. Raises UnavailableError where the wheel is not to be
    found, CannotWriteError.
    """

    def __init__(self, venv: Path, model_repo: Path, folder: Path) -> None:
        site = _site_packages(venv)
        self._triton = site / "pytriton" / "tritonserver"
        self._python = (venv / "bin" / "python").absolute()
        if not (self._triton / "bin" / "tritonserver").is_file():
            raise UnavailableError(
                f"expected nvidia-pytriton in {venv}, found none; run `gateway install-triton "
                f"{venv}`, or give --triton-venv"
            )
        self._libraries = site / "nvidia_pytriton.libs"
        self._model_repo = model_repo.absolute()
        self._folder = folder.absolute()
        self.log_path = folder / "triton.log"
        # Of its shared memory; several may run below one process.
        self._prefix = f"{_SHM_PREFIX}{os.getpid()}-{os.urandom(4).hex()}-"
        durable.make_dir(self._folder, 0o700)
        self._descriptor = _enter(self._folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """By way of our descriptor of the folder: a socket's path may have 107 bytes only."""
        return f"unix:/proc/{os.getpid()}/fd/{self._descriptor}/{_SOCKET}:{_PORT}"

    def start(self) -> None:
        """Start the child; it answers later. Raises UnavailableError, CannotWriteError."""
        self.kill()
        self._remove_shared_memory()
        _remove_orphaned_shared_memory()
        self._lay_out_backends()
        program = [
            str(self._triton / "bin" / "tritonserver"),
            f"--model-repository={self._model_repo}",
            "--model-control-mode=explicit",
            f"--backend-directory={self._folder / 'backends'}",
            "--allow-http=false",
            "--allow-metrics=false",
            f"--grpc-address=unix:{_SOCKET}",
            f"--grpc-port={_PORT}",
            "--strict-readiness=false",
            # Ours are complete; completing one starts a model process more, for nothing.
            "--disable-auto-complete-config",
            f"--exit-timeout-secs={_EXIT_SECONDS}",
            f"--backend-config=python,shm-region-prefix-name={self._prefix}",
        ]
        launch = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py"))]
        try:
            with self.log_path.open("wb") as log:
                self._process = subprocess.Popen(
                    [*launch, *program],
                    stdin=subprocess.PIPE, stdout=log, stderr=log,
                    env=self._environment(), cwd=self._folder, start_new_session=True,
                )  # fmt: skip
        except OSError as error:
            raise UnavailableError(f"tritonserver cannot be started: {error.strerror}") from error

    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask it to end, wait for its exit timeout, then kill it. The address ends with it."""
        if self._process is not None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_EXIT_SECONDS + 2)
            self.kill()
        self._remove_shared_memory()
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def kill(self) -> None:
        """End it at once, with its model processes."""
        if self._process is not None:
            if self.alive():
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None, "a pipe"
            self._process.stdin.close()

    def processor_s(self) -> float:
        """Seconds of processor time that it and its model processes have used; 0 if none runs."""
        return group_processor_s(self._process.pid) if self._process is not None else 0.0

    def log_tail(self) -> str:
        """The last error lines that Triton wrote, for messages."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        lines = [line for line in lines if line.strip() and line[0] not in "+|"]
        relevant = [line for line in lines if line[0] in "EF" or "rror" in line] or lines
        return " | ".join(relevant[-3:])

    def _remove_shared_memory(self) -> None:
        for left in _SHM.glob(f"{self._prefix}*"):
            left.unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ}
        return {
            **kept,
            "PATH": f"{self._python.parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}",
            "LD_LIBRARY_PATH": f"{self._libraries}{os.pathsep}{_ask(self._python, _LIBDIR)}",
            "OMP_NUM_THREADS": "1",
        }

    def _lay_out_backends(self) -> None:
        backends = self._folder / "backends"
        if backends.exists():
            shutil.rmtree(backends)
        shutil.copytree(self._triton / "backends", backends)
        version = _ask(self._python, _VERSION)
        stub = self._triton / "python_backend_stubs" / version / "triton_python_backend_stub"
        if not stub.is_file():
            raise UnavailableError(f"the wheel has no python backend for Python {version}")
        shutil.copy(stub, backends / "python")
        shutil.copytree(
            Path(__file__).with_name("backends") / "onnxruntime", backends / "onnxruntime",
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip


def has_triton(venv: Path) -> bool:
    """Whether the wheel is installed in `venv`."""
    return (_site_packages(venv) / "pytriton" / "tritonserver").is_dir()


_LIBDIR = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def _ask(python: Path, program: str) -> str:
    try:
        answer = subprocess.run([python, "-I", "-c", program], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(f"{python} does not run; run `gateway install-triton`") from error
    return answer.stdout.decode().strip()


def _site_packages(venv: Path) -> Path:
    return next(iter(sorted(venv.absolute().glob("lib/python3*/site-packages"))), venv)


def _enter(folder: Path) -> int:
    """A descriptor of `folder`, which nobody else may enter from now on."""
    try:
        folder.chmod(0o700)
        return os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise CannotWriteError(
            f"{folder}: expected a folder of our own for Triton ({error.strerror})"
        ) from error


def _remove_orphaned_shared_memory() -> None:
    """Remove what gateways that were killed left in shared memory."""
    for left in _SHM.glob(f"{_SHM_PREFIX}*"):
        pid = left.name.removeprefix(_SHM_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            left.unlink(missing_ok=True)


# Triton's own virtual environment: its wheel holds numpy below 2, so it cannot share ours.

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
