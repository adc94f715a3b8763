"""Run a command of ours in this process: a python that starts and imports costs half a second."""

import io
import os
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Ended:
    """Exit code and output of a command that ended."""

    returncode: int
    stdout: str
    stderr: str


def run_here(
    main: Callable[[], object],
    *words: str | bytes | Path,
    stdin: str = "",
    cwd: Path | None = None,
) -> Ended:
    """Run `main` with the command line `words`, of which the first is the program's name.

    Output has the encoding and the error handlers of a process under UTF-8. An exception that the
    command does not handle is raised to the caller.
    """
    out = io.TextIOWrapper(io.BytesIO(), "utf-8", "strict", write_through=True)
    err = io.TextIOWrapper(io.BytesIO(), "utf-8", "backslashreplace", write_through=True)
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setattr(sys, "argv", [os.fsdecode(word) for word in words])
        patch.setattr(sys, "stdin", io.StringIO(stdin))
        if cwd is not None:
            patch.chdir(cwd)
        with pytest.raises(SystemExit) as ended:
            main()
            raise SystemExit(0)
    code = ended.value.code or 0
    assert isinstance(code, int), code
    out.seek(0)
    err.seek(0)
    return Ended(code, out.read(), err.read())
