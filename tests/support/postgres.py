"""A PostgreSQL with pgvector for tests: one for each worker, on a socket, ended with it."""

import signal
import subprocess
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psycopg

from demo.database import make_database, user_command
from tests.support.waiting import wait_until

# Nothing survives a power cut here, and nothing has to; a killed server loses nothing.
_SETTINGS = {
    "listen_addresses": "", "fsync": "off", "full_page_writes": "off", "max_connections": "80",
    "shared_buffers": "64MB", "max_prepared_transactions": "0", "log_min_messages": "fatal",
    "max_parallel_maintenance_workers": "0",
}  # fmt: skip


class Server:
    """One server, with a database for each who asks."""

    def __init__(self, folder: Path, settings: Mapping[str, str] = MappingProxyType({})) -> None:
        """Raises UnavailableError, saying why, where PostgreSQL cannot start on this machine."""
        self._folder = folder
        self._settings = {**_SETTINGS, **settings}
        self._bin = make_database(folder)
        self._data = folder / "data"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Once more, after `stop` or `kill`."""
        settings = self._settings.items()
        options = [word for name, value in settings for word in ("-c", f"{name}={value}")]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*user_command(), str(self._bin / "postgres"), "-D", str(self._data),
                 "-k", str(self._folder), *options],
                stdout=log, stderr=log, cwd=self._folder,
                env={"PATH": "/usr/bin:/bin", "TZ": "UTC"},
            )  # fmt: skip
        wait_until(self._answers, seconds=60, what="PostgreSQL answers")

    def alone(self, *statements: str) -> None:
        """Run statements on what is stopped, each as a transaction, before anyone can connect."""
        subprocess.run(
            [*user_command(), str(self._bin / "postgres"), "--single", "-D", str(self._data),
             "postgres"],
            input="".join(f"{statement}\n" for statement in statements).encode(),
            cwd=self._folder, capture_output=True, check=True,
            env={"PATH": "/usr/bin:/bin", "TZ": "UTC"},
        )  # fmt: skip

    def _answers(self) -> bool:
        assert self._process is not None and self._process.poll() is None, "PostgreSQL ended"
        try:
            psycopg.connect(self.url("postgres")).close()
        except psycopg.OperationalError:
            return False
        return True

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT ends every connection; SIGQUIT ends as a crash does."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    @property
    def socket(self) -> Path:
        """Where it listens."""
        return self._folder / ".s.PGSQL.5432"

    def url(self, database: str) -> str:
        """Address of a database."""
        return f"postgresql://postgres@/{database}?host={self._folder}"

    @property
    def programs(self) -> Path:
        """The folder of psql, pg_dump and the like."""
        return self._bin

    def sql(self, statement: str, database: str = "postgres") -> list[tuple[object, ...]]:
        """Run a statement as the administrator."""
        with psycopg.connect(self.url(database), autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return cursor.fetchall() if cursor.description else []

    @contextmanager
    def database(self) -> Iterator[str]:
        """Address of an empty database that is dropped in the end."""
        name = f"t{uuid.uuid4().hex[:12]}"
        self.sql(f"CREATE DATABASE {name}")
        try:
            yield self.url(name)
        finally:
            self.sql(f"DROP DATABASE {name} WITH (FORCE)")

    @contextmanager
    def connected(self) -> Iterator[tuple[str, psycopg.Connection[tuple[Any, ...]]]]:
        """The address of such a database, and a connection that commits each statement."""
        with self.database() as url, psycopg.connect(url, autocommit=True) as connection:
            yield url, connection


@contextmanager
def running(settings: Mapping[str, str] = MappingProxyType({})) -> Iterator[Server]:
    """A server, to the end of the block; `settings`: beside those of every test."""
    # A short path: a socket's may have 107 bytes.
    with tempfile.TemporaryDirectory(prefix="pg-", ignore_cleanup_errors=True) as folder:
        server = Server(Path(folder), settings)
        try:
            yield server
        finally:
            server.stop()
