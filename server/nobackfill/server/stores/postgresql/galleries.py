"""The galleries of a database, by name: made and deleted in one transaction each."""

from collections.abc import Mapping, Sequence
from typing import Any

from nobackfill.errors import AlreadyExistsError, NotFoundError
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.server.stores.postgresql import rows, schema, spaces
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.gallery import PostgresqlGallery
from nobackfill.server.stores.postgresql.news import tell


class PostgresqlGalleries:
    """What is said of each method: Stores."""

    def __init__(self, database: Database) -> None:
        self.database = database

    def names(self) -> list[str]:
        query = "SELECT name FROM nobackfill.galleries ORDER BY name"
        return self.database.read(lambda connection: [name for (name,) in run(connection, query)])

    def open(self, name: str) -> PostgresqlGallery:
        number = self.database.read(lambda connection: _number(connection, name))
        if number is None:
            raise NotFoundError(f"the database has no gallery {name!r}; create it first")
        return PostgresqlGallery(self.database, number)

    def create(
        self, name: str, specs: Sequence[SpaceSpec], state: Mapping[str, Any]
    ) -> PostgresqlGallery:
        def work(connection: Connection) -> int:
            if _number(connection, name) is not None:
                raise AlreadyExistsError(f"gallery {name!r} exists already")
            number = run(
                connection,
                "INSERT INTO nobackfill.galleries (name) VALUES (%s) RETURNING number",
                [name],
            ).fetchone()[0]
            made = schema.schema_of(number)
            schema.create_gallery(connection, number, specs[0])
            for spec in specs[1:]:
                spaces.begin(connection, made, spec)
                spaces.flip(connection, made, spec.space, leave_behind=False)
            for info in rows.read_spaces(connection, made):
                for statement in schema.index_statements(made, info.number, info.spec):
                    run(connection, statement)
            rows.set_state(connection, made, state)
            tell(connection)
            return int(number)

        return PostgresqlGallery(self.database, self.database.write(work))

    def delete(self, name: str) -> None:
        def work(connection: Connection) -> None:
            gone = run(
                connection,
                "DELETE FROM nobackfill.galleries WHERE name = %s RETURNING number",
                [name],
            ).fetchone()
            if gone is not None:
                schema.drop_gallery(connection, gone[0])
                tell(connection)

        self.database.write(work)


def _number(connection: Connection, name: str) -> int | None:
    row = run(
        connection, "SELECT number FROM nobackfill.galleries WHERE name = %s", [name]
    ).fetchone()
    return None if row is None else int(row[0])
