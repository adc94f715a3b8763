"""Databases that cannot be served from: a sentence that says what to do, and no password."""

import socket
from pathlib import Path

import psycopg
import pytest

from nobackfill.errors import CannotWriteError, ConfigurationError, UnavailableError
from nobackfill.server.stores.postgresql import schema
from nobackfill.server.stores.postgresql.database import Connection, Database, check_url, execute
from tests.support.postgres import Server


def opened(url: str) -> None:
    database = Database(url, most_connections=2, wait_s=5.0)
    database.open(schema.prepare)
    try:
        database.read(lambda connection: execute(connection, "SELECT '[1,2]'::vector"))
    finally:
        database.close()


def test_pgvector_elsewhere_is_said_to_be_there(postgres: Server) -> None:
    with postgres.database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA elsewhere")
            connection.execute("CREATE EXTENSION vector SCHEMA elsewhere")
        with pytest.raises(ConfigurationError, match="found it in elsewhere; run ALTER"):
            opened(url)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("ALTER EXTENSION vector SET SCHEMA public")
        opened(url)


@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_a_database_that_cannot_hold_every_text_is_refused(postgres: Server, encoding: str) -> None:
    name = f"narrow_{encoding.lower()}"
    postgres.sql(f"CREATE DATABASE {name} ENCODING '{encoding}' LOCALE 'C' TEMPLATE template0")
    try:
        with pytest.raises(ConfigurationError, match=f"texts as UTF8, found {encoding}, which"):
            opened(postgres.url(name))
    finally:
        postgres.sql(f"DROP DATABASE {name} WITH (FORCE)")


def test_a_search_path_of_the_roles_own_is_no_matter(postgres: Server) -> None:
    with postgres.database() as url:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE SCHEMA mine")
            name = connection.info.dbname
            connection.execute(f'ALTER DATABASE "{name}" SET search_path = mine'.encode())
        opened(url)
        opened(url)


def test_an_extension_that_is_not_installed_is_named(postgres: Server) -> None:
    def prepare(connection: Connection) -> None:
        execute(connection, "CREATE EXTENSION not_there")

    with postgres.database() as url:
        database = Database(url, most_connections=2)
        with pytest.raises(ConfigurationError, match="not_there"):
            database.open(prepare)


def test_an_address_of_odd_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match="store: expected the address of a database, postgresql://"
    ):
        check_url(f"postgresql://{tmp_path.name}\udcff/d")


def test_a_read_only_database_is_said_to_be_one(postgres: Server) -> None:
    with postgres.database() as url:
        opened(url)
        with psycopg.connect(url, autocommit=True) as connection:
            name = connection.info.dbname
            connection.execute(
                f'ALTER DATABASE "{name}" SET default_transaction_read_only = on'.encode()
            )
        with pytest.raises(CannotWriteError, match=r"read-only.*target_session_attrs"):
            opened(url)


def test_a_database_that_cannot_be_reached_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=rf'"{tmp_path}/.*check that its server runs'):
        opened(f"postgresql:///x?host={tmp_path}")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(UnavailableError, match="timeout"):
            # The least that can be given.
            opened(f"postgresql://u:hush-hush@127.0.0.1:{port}/x?connect_timeout=2")
