"""A PgBouncer before a PostgreSQL of tests: each transaction has whatever session is free."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

from demo.database import USER, user_command
from tests.support.ports import free_port
from tests.support.postgres import Server
from tests.support.waiting import wait_until

# Debian's place is not on every PATH.
PROGRAM = shutil.which("pgbouncer", path="/usr/sbin:/usr/bin:/usr/local/bin")


@contextmanager
def pooled(server: Server) -> Iterator[str]:
    """The address of all databases of a server, without a database, to be continued by `/NAME`."""
    if PROGRAM is None:
        pytest.skip("PgBouncer is not tested: it is not installed")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as name:
        folder = Path(name)
        config = folder / "pgbouncer.ini"
        config.write_text(
            f"[databases]\n* = host={server.socket.parent} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n"
            "auth_type = any\npool_mode = transaction\ndefault_pool_size = 3\n"
            # Sessions in turn, so that the next transaction has another one.
            "server_round_robin = 1\nserver_reset_query =\n"
        )
        config.chmod(0o644)
        if USER:
            shutil.chown(folder, USER)
        process = subprocess.Popen(
            [*user_command(), PROGRAM, "-q", str(config)],
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=folder,
        )  # fmt: skip
        address = f"postgresql://postgres@127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, "PgBouncer ended"
            try:
                psycopg.connect(f"{address}/postgres").close()
            except psycopg.OperationalError:
                return False
            return True

        try:
            wait_until(answers, seconds=30, what="PgBouncer answers")
            yield address
        finally:
            process.terminate()
            process.wait(30)
