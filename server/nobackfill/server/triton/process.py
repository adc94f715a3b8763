"""Run a tritonserver as a child process, behind a private socket, and install its wheel.

Anybody who reaches Triton may load a model, which is code that runs as our user. So it listens on
no port, but on a Unix socket in a folder that only our user may enter (docs/adr/0007).
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

# Missed probes tell whether Triton is away, hangs or is only busy. A model with a large batch, or a
# busy machine, answers a probe late, and a restart then costs more than waiting. A hanging process
# neither uses processor time nor waits for it; a busy one does.

# From _UNREADY missed probes in a row on, calls are refused at once and running ones are cut. A
# single one is no evidence: a busy machine starves a healthy child. At _HANGS a hanging child is
# killed.
_UNREADY = 2
_HANGS = 4
# Share of a core: a working child uses more even if a dozen others want the same core; an idle one
# uses less.
_BUSY = 0.02
# A child that is busy for so long (seconds) without an answer is in a loop.
_LOOP_SECONDS = 30.0
_MARK_SECONDS = 1.0


class MissedProbes:
    """Count missed probes since the last answer, except while the child is busy."""

    def __init__(self, processor_s: Callable[[], float] | None) -> None:
        """Start at 0, as if the last answer came now.

        Args:
            processor_s: returns the seconds that the child has used a processor or waited for one;
                None for a child of somebody else, which is never busy.
        """
        self._processor_s = processor_s
        self._count = 0
        self._last_answer = self._last_mark = time.monotonic()
        self._processor_time = 0.0

    @property
    def count(self) -> int:
        """The number of missed probes since the last answer, less those that are forgiven."""
        return self._count

    @property
    def is_unready(self) -> bool:
        """Whether calls must be refused: two probes or more were missed."""
        return self._count >= _UNREADY

    @property
    def is_hung(self) -> bool:
        """Whether the child must be killed: four probes or more were missed."""
        return self._count >= _HANGS

    def clear(self) -> None:
        """Start again at 0, after an answer or a restart; the 30 s of `add` start again, too."""
        self._count = 0
        self._last_answer = time.monotonic()
        if self._last_answer - self._last_mark >= _MARK_SECONDS:
            self._mark()

    def add(self, *, is_late: bool = False) -> None:
        """Count a missed probe, unless the child was busy since the last one.

        A thread that has ended takes its waiting time along; ending is work, too. 30 s after the
        last answer every miss counts, because a child that is busy for so long is in a loop. A
        child of somebody else is never busy.

        It takes no lock, so one thread calls it and `clear`.

        Args:
            is_late: whether this process noticed the miss late, so that it waited for a processor
                itself; such a miss counts like one of a busy child.
        """
        share = abs(self._mark())
        is_loop = time.monotonic() - self._last_answer > _LOOP_SECONDS
        if is_loop or (share < _BUSY and not is_late):
            self._count += 1

    def _mark(self) -> float:
        """Return the share of a core that was used since the last mark."""
        if self._processor_s is None:
            return 0.0
        total, time_now = self._processor_s(), time.monotonic()
        share = (total - self._processor_time) / max(time_now - self._last_mark, 1e-3)
        self._processor_time, self._last_mark = total, time_now
        return share


def group_processor_s(process_group: int) -> float:
    """Return for how long (seconds) the living processes of a group wanted a processor.

    That is the time they ran, and the time their threads waited in a run queue where the kernel
    counts it: on a loaded machine a process runs little and waits long. A process that ends takes
    its time along, so the sum may fall. It reads the entry of every process. Returns 0 for an
    unknown group, and on a system without /proc.
    """
    total = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # After the name, which is in parentheses and may have any characters.
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[2]) != process_group:
                continue
            total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
            for schedule in stat.parent.glob("task/*/schedstat"):
                total += int(schedule.read_text().split()[1]) / 1e9
        except OSError:
            # It ended after it was listed.
            continue
    return total


_SHM = Path("/dev/shm")  # noqa: S108 - Triton's own place
_SHM_PREFIX = "nobackfill-"
_EXIT_SECONDS = 5
# Triton joins address and port with a colon; for a Unix socket the result is a file name.
_SOCKET, _PORT = "grpc", 1


class TritonProcess:
    """Start and stop the tritonserver of the wheel nvidia-pytriton.

    The address stays the same over restarts, so that channels reconnect. The child and its
    processes end with this process; see launch.py.
    """

    def __init__(self, venv: Path, model_repo: Path, folder: Path) -> None:
        """Find the wheel, and prepare the folder; nothing is started. `stop` closes the descriptor
        of the folder.

        Args:
            venv: virtual environment with the wheel.
            model_repo: publication folder.
            folder: private folder (made with mode 0700) for backends, socket and Triton's log.

        Raises:
            UnavailableError: the wheel is not installed.
            CannotWriteError: the folder cannot be created, or not be made private.
        """
        site = _site_packages(venv)
        self._triton = site / "pytriton" / "tritonserver"
        self._python = (venv / "bin" / "python").absolute()
        if not (self._triton / "bin" / "tritonserver").is_file():
            raise UnavailableError(
                f"nvidia-pytriton is not installed in {venv}; run `gateway install-triton {venv}`, "
                "or set --triton-venv"
            )
        self._libraries = site / "nvidia_pytriton.libs"
        self._model_repo = model_repo.absolute()
        self._folder = folder.absolute()
        self.log_path = folder / "triton.log"
        # Prefix of its shared memory; one process may run several children.
        self._prefix = f"{_SHM_PREFIX}{os.getpid()}-{os.urandom(4).hex()}-"
        durable.make_dir(self._folder, 0o700)
        self._descriptor = _enter(self._folder)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """The address, through a descriptor of the folder: a socket's path has at most 107 bytes.
        It is not valid after `stop`.
        """
        return f"unix:/proc/{os.getpid()}/fd/{self._descriptor}/{_SOCKET}:{_PORT}"

    def start(self) -> None:
        """Start the child, which answers later; a child that runs is killed first.

        Copies the backends into the folder again, empties Triton's log, and removes shared memory
        that former children and killed gateways have left. Models are loaded only on request. Do
        not call it after `stop`, which ends the address. After an error no child runs.

        Raises:
            UnavailableError: it cannot be started, the environment's Python does not run, the wheel
                has no backend for that Python, or the log cannot be written.
            OSError: the backends cannot be copied into the folder.
        """
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
            # Our configurations are complete; completing one would start another process for
            # nothing.
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
            raise UnavailableError(
                f"tritonserver cannot be started ({error.strerror}); run `gateway install-triton`"
            ) from error

    def alive(self) -> bool:
        """Tell whether the child runs; False before `start`. A child that hangs is alive."""
        return self._process is not None and self._process.poll() is None

    def stop(self) -> None:
        """Ask the child to end, wait for it at most 7 s, then kill it; the address ends with it.

        Removes its shared memory. A second call does nothing more, and without a child only the
        folder's descriptor is closed.
        """
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
        """Kill the child and its model processes, and wait for its end; without a child it does
        nothing.

        Its shared memory stays until `start` or `stop`. If the child has ended already, its model
        processes are not killed here.
        """
        if self._process is not None:
            if self.alive():
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            assert self._process.stdin is not None, "stdin is a pipe"
            self._process.stdin.close()

    def processor_s(self) -> float:
        """Return for how long (seconds) the child and its model processes wanted a processor; 0 if
        it was never started or has ended. See group_processor_s.
        """
        return group_processor_s(self._process.pid) if self._process is not None else 0.0

    def log_tail(self) -> str:
        """Return the last three error lines of Triton's log, joined by " | ", for messages.

        Without error lines they are its last three lines of any kind; empty without a log. Blank
        lines and lines of tables are left out. It reads the whole log.
        """
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        lines = [line for line in lines if line.strip() and line[0] not in "+|"]
        relevant = [line for line in lines if line[0] in "EF" or "rror" in line] or lines
        return " | ".join(relevant[-3:])

    def _remove_shared_memory(self) -> None:
        for path in _SHM.glob(f"{self._prefix}*"):
            path.unlink(missing_ok=True)

    def _environment(self) -> dict[str, str]:
        inherited = {
            name: os.environ[name] for name in ("HOME", "LANG", "TMPDIR") if name in os.environ
        }
        return {
            **inherited,
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
            raise UnavailableError(
                f"nvidia-pytriton has no Triton backend for Python {version}; run `gateway "
                "install-triton` with Python 3.12 or older"
            )
        shutil.copy(stub, backends / "python")
        shutil.copytree(
            Path(__file__).with_name("backends") / "onnxruntime", backends / "onnxruntime",
            ignore=shutil.ignore_patterns("__pycache__"),
        )  # fmt: skip


def has_triton(venv: Path) -> bool:
    """Tell whether the wheel is installed in a virtual environment; False if there is no such
    folder. Its version is not checked.
    """
    return (_site_packages(venv) / "pytriton" / "tritonserver").is_dir()


_LIBDIR = "import sysconfig; print(sysconfig.get_config_var('LIBDIR'))"
_VERSION = "import sys; print('%d.%d' % sys.version_info[:2])"


def _ask(python: Path, program: str) -> str:
    try:
        answer = subprocess.run([python, "-I", "-c", program], capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UnavailableError(
            f"{python}: this Python of Triton's virtual environment does not start; run `gateway "
            "install-triton` again"
        ) from error
    return answer.stdout.decode().strip()


def _site_packages(venv: Path) -> Path:
    return next(iter(sorted(venv.absolute().glob("lib/python3*/site-packages"))), venv)


def _enter(folder: Path) -> int:
    """Make a folder private, and return a descriptor of it."""
    try:
        folder.chmod(0o700)
        return os.open(folder, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise CannotWriteError(
            f"{folder}: the rights of this folder cannot be set for Triton ({error.strerror}); run "
            "the gateway as the folder's owner"
        ) from error


def _remove_orphaned_shared_memory() -> None:
    """Remove shared memory that killed gateways have left; folders are of other programs."""
    for path in _SHM.glob(f"{_SHM_PREFIX}*"):
        pid = path.name.removeprefix(_SHM_PREFIX).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists() and not path.is_dir():
            path.unlink(missing_ok=True)


# Triton has a virtual environment of its own: its wheel needs numpy below 2.

# Every package, at the tested version; make setup installs the same.
REQUIREMENTS = Path(__file__).with_name("requirements.txt")


def default_folder() -> Path:
    """Return the default folder of Triton's environment: .venv-triton beside the one we run in."""
    return Path(sys.prefix).parent / ".venv-triton"


def install(folder: Path) -> None:
    """Create or complete Triton's environment; pip downloads about 400 MB from its index, and this
    waits for it.

    There is no time limit.

    Args:
        folder: the folder; it may exist.

    Raises:
        CannotWriteError: no virtual environment can be created there.
        UnavailableError: pip cannot install the packages; the environment is left incomplete, and
            another call completes it.
    """
    failure = _run(sys.executable, "-m", "venv", folder)
    if failure is not None:
        raise CannotWriteError(
            f"{folder}: cannot create a virtual environment ({failure}); name another folder, or "
            "install python3-venv (Debian)"
        )
    python = folder / "bin" / "python"
    pip = ("-m", "pip", "install", "--quiet", "--only-binary=:all:")
    pip_failure = _run(python, *pip, "--requirement", REQUIREMENTS)
    if pip_failure is not None or not has_triton(folder):
        raise UnavailableError(
            f"{folder}: cannot install Triton's packages "
            f"({pip_failure or 'tritonserver is missing'}); they need a package index and Python "
            "3.12 or older; without them, serve with --triton=in-process"
        )


def _run(*command: str | Path) -> str | None:
    """Run a command; returns the last line of a failure, None after a success."""
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    output = (process.stderr or process.stdout).strip() or f"exit status {process.returncode}"
    return output.splitlines()[-1] if process.returncode else None
