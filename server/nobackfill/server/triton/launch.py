"""Run a program and end all of it: `python launch.py PROGRAM ARGUMENT...`, in a session of its own.

Standard input is a leash: when whoever holds the other end is gone, however it ended, or when the
program has, everything in our process group is killed. Triton needs it: the processes that run its
models may wait for it for ever, when it is killed while it loads them. SIGTERM is passed on.
A separate program, because running Python between fork and exec is unsafe in a threaded process.

Nothing that the program makes can be read by other users: pixels of queries lie in its shared
memory. A umask alone does not do, as Boost gives that memory mode 0644 by fchmod once it is there;
a seccomp filter refuses fchmod to group and others.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
import threading

PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
SECCOMP_MODE_FILTER, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO = 2, 0x7FFF0000, 0x00050000
# AUDIT_ARCH_* and the number of fchmod, where Triton's wheel runs.
FCHMOD = {"x86_64": (0xC000003E, 91), "aarch64": (0xC00000B7, 52)}
# Classic BPF over struct seccomp_data: number at 0, architecture at 4, second argument at 24.
LOAD, AND, EQUAL, RETURN = 0x20, 0x54, 0x15, 0x06


def main() -> None:
    """Run the program of the arguments, and wait for its end; then kill the process group.

    This process is killed too, so the program's exit status is lost. SIGTERM is passed on to the
    program. Without arguments, or if the program cannot be started, the group ends at once.
    """
    launcher = os.getpid()
    program = os.fork()
    if not program:
        _become(sys.argv[1:], launcher)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(program, signal.SIGTERM))
    threading.Thread(target=_hold, daemon=True).start()
    os.waitpid(program, 0)
    _end_all()


def _become(command: list[str], launcher: int) -> None:
    """Exec; should the launcher be killed, the kernel kills the program."""
    os.umask(0o077)
    _refuse_opening_to_others()
    if ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL) == 0 == os.getppid() - launcher:
        os.execv(command[0], command)  # noqa: S606 - the program is ours to choose
    os._exit(1)


def _refuse_opening_to_others() -> None:
    """From here on, fchmod fails with EPERM where its mode lets group or others in."""
    architecture, number = FCHMOD[platform.machine()]
    steps = (
        (LOAD, 0, 0, 4), (EQUAL, 0, 5, architecture),
        (LOAD, 0, 0, 0), (EQUAL, 0, 3, number),
        (LOAD, 0, 0, 24), (AND, 0, 0, 0o077), (EQUAL, 0, 1, 0),
        (RETURN, 0, 0, SECCOMP_RET_ALLOW), (RETURN, 0, 0, SECCOMP_RET_ERRNO | errno.EPERM),
    )  # fmt: skip
    # A jump skips so many steps when true, so many when false; the last but one allows.
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    done = prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) or prctl(
        PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.c_char_p(program)
    )
    if done:
        sys.exit(
            "launch.py: the system refuses the seccomp filter that confines Triton "
            f"({os.strerror(ctypes.get_errno())}); serve with --triton=in-process"
        )


def _hold() -> None:
    os.read(0, 1)
    _end_all()


def _end_all() -> None:
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()
