"""What gateways remember, in one row of the database, which any of them may change."""

import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

from nobackfill.server.state import MOST_DEEDS, Deed, GatewayState, Lead, State, read_state
from nobackfill.server.stores.postgresql import leading
from nobackfill.server.stores.postgresql.database import Connection, Database, run
from nobackfill.server.stores.postgresql.news import tell

Result = TypeVar("Result")


class StateRow(GatewayState):
    """What is said of each method: GatewayState. The row's epoch grows with each change."""

    shared = True

    def __init__(self, database: Database) -> None:
        """Raises VerificationError for a damaged row, UnavailableError."""
        self._database = database
        self._seeing = threading.Lock()
        self._epoch = -1
        query = "SELECT epoch, value FROM nobackfill.gateway"
        epoch, value = database.read(lambda connection: run(connection, query).fetchone())
        super().__init__(_state(value))
        self._epoch = epoch

    def look(self) -> Mapping[str, tuple[int, int]]:
        query = (
            "SELECT epoch, value, (SELECT coalesce(jsonb_object_agg(name, jsonb_build_array(number,"
            " epoch)), '{}') FROM nobackfill.galleries) FROM nobackfill.gateway"
        )
        epoch, value, marks = self._database.read(lambda c: run(c, query).fetchone())
        self._see(epoch, _state(value))
        return {name: (number, mark) for name, (number, mark) in marks.items()}

    def revise(self, values_of: Callable[[State], Mapping[str, object]]) -> State:
        def work(connection: Connection) -> tuple[int, State]:
            query = "SELECT epoch, value FROM nobackfill.gateway FOR UPDATE"
            epoch, value = run(connection, query).fetchone()
            now = _state(value)
            new = State.model_validate({**dict(now), **values_of(now)})
            run(
                connection,
                "UPDATE nobackfill.gateway SET value = %s, epoch = epoch + 1",
                [new.model_dump_json()],
            )
            tell(connection)
            return epoch + 1, new

        epoch, new = self._database.write(work)
        self._database.after_commit(lambda: self._see(epoch, new))
        return new

    def _see(self, epoch: int, now: State) -> None:
        """Nothing older is seen after something newer."""
        with self._seeing:
            if epoch > self._epoch:
                self._epoch, self._now = epoch, now

    def together(self, work: Callable[[], Result], lead: Lead | None = None) -> Result:
        def fenced() -> Result:
            result = work()
            if isinstance(lead, leading.DatabaseLead):
                leading.fence(self._database, lead.term)
            return result

        return self._database.together(fenced)

    def lead(self) -> Lead | None:
        return leading.take_lead(self._database)

    def depose(self) -> None:
        def work() -> None:
            leading.new_term(self._database)
            self.revise(lambda _now: {"activation": None})

        self._database.together(work)

    def held(self, seconds: float) -> AbstractContextManager[None]:
        return leading.releases_held(self._database, seconds)

    def job(self, gallery: str) -> str | None:
        query = "SELECT value FROM nobackfill.jobs WHERE gallery = %s"
        row = self._database.read(lambda connection: run(connection, query, [gallery]).fetchone())
        return None if row is None else str(row[0])

    def keep_job(self, gallery: str, job: str | None) -> None:
        statement = (
            "INSERT INTO nobackfill.jobs (gallery, value) VALUES (%s, %s)"
            " ON CONFLICT (gallery) DO UPDATE SET value = excluded.value"
        )
        if job is None:
            remove = "DELETE FROM nobackfill.jobs WHERE gallery = %s"
            self._database.write(lambda connection: run(connection, remove, [gallery]))
        else:
            self._database.write(lambda connection: run(connection, statement, [gallery, job]))

    def _keep_deed(self, deed: Deed) -> None:
        statement = (
            "INSERT INTO nobackfill.audit (at, who, what, of_what)"
            " VALUES (to_timestamp(%s), %s, %s, %s)"
        )
        self._database.write(lambda connection: run(connection, statement, list(deed)))

    def deeds(self) -> list[Deed]:
        query = (
            "SELECT extract(epoch FROM at)::double precision, who, what, of_what"
            " FROM nobackfill.audit ORDER BY number DESC LIMIT %s"
        )
        found = self._database.read(lambda c: run(c, query, [MOST_DEEDS]).fetchall())
        return [Deed(*row) for row in reversed(found)]


def _state(value: str) -> State:
    return read_state(value, "nobackfill.gateway of the database")
