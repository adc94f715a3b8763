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
from pathlib import Path

from nobackfill import durable
from nobackfill.errors import CannotWriteError, UnavailableError
from nobackfill.server.triton.misses import group_processor_s

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
