"""A Milvus for tests: the standalone server of PyPI's `milvus`, ended with the block."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from nobackfill.errors import UnavailableError
from tests.support.ports import free_port, listening

# It unpacks itself, and starts in 10 to 25 s.
_START_S = 120.0
# Of the etcd inside it, whatever else is configured: there is one Milvus a machine.
_ETCD = 2379
# Milliseconds, in place of 200, 1000 and 500: a Strong read waits until its clock ticks, and who
# loads a collection until its coordinator looks again. What is read otherwise still comes late.
QUICKER = (
    "proxy.timeTickInterval=50", "queryCoord.checkInterval=100", "queryCoord.distPullInterval=50",
)  # fmt: skip


@contextmanager
def running(*settings: str) -> Iterator[str]:
    """The address of a server, as a store's `vectors=` has it; `settings`, NAME=VALUE, in place of
    those that it comes with. Raises UnavailableError, saying why, where it cannot start here."""
    if find_spec("milvus") is None:
        raise UnavailableError(
            "Milvus cannot start here: the package milvus==2.3.5 is not installed"
        )
    if listening(_ETCD):
        raise UnavailableError(
            f"Milvus cannot start here: something listens at 127.0.0.1:{_ETCD}, where its etcd "
            "does; is another one left?"
        )
    with tempfile.TemporaryDirectory(prefix="milvus-", ignore_cleanup_errors=True) as folder:
        port = free_port()
        with (Path(folder) / "log").open("wb") as log:
            process = subprocess.Popen(
                [
                    str(Path(sys.executable).with_name("milvus-server")),
                    f"--data={folder}/data", f"--proxy-port={port}",
                    *(f"--extra-config={setting}" for setting in settings),
                ],
                stdout=log, stderr=log, cwd=folder, start_new_session=True,
            )  # fmt: skip
        try:
            _wait(process, port)
            yield f"milvus+http://127.0.0.1:{port}"
        finally:
            # Its child outlives it unless it ends the child itself.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)


def _wait(process: "subprocess.Popen[bytes]", port: int) -> None:
    from nobackfill.plugins.milvus.collections import Collections

    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        if process.poll() is not None:
            raise UnavailableError(f"Milvus cannot start here: it ended ({process.returncode})")
        with suppress(UnavailableError):
            collections = Collections(f"milvus+http://127.0.0.1:{port}")
            collections.names()
            collections.close()
            return
        time.sleep(0.5)
    raise UnavailableError(f"Milvus cannot start here: no answer within {_START_S:.0f} s")
