"""What a gateway remembers, in one row of the database."""

from pydantic import ValidationError

from nobackfill.errors import VerificationError
from nobackfill.server.state import GatewayState, State
from nobackfill.server.stores.postgresql.database import Database, run


class StateRow(GatewayState):
    """Written whole at each change."""

    def __init__(self, database: Database) -> None:
        """Raises VerificationError for a damaged row, UnavailableError."""
        self._database = database
        row = database.read(lambda c: run(c, "SELECT value FROM nobackfill.gateway").fetchone())
        try:
            now = State() if row is None else State.model_validate_json(row[0])
        except ValidationError as error:
            raise VerificationError(
                f"nobackfill.gateway is damaged ({error}); restore the database from a backup"
            ) from error
        super().__init__(now)

    def _keep(self, new: State) -> None:
        statement = (
            "INSERT INTO nobackfill.gateway (value) VALUES (%s)"
            " ON CONFLICT (one) DO UPDATE SET value = excluded.value"
        )
        self._database.write(lambda c: run(c, statement, [new.model_dump_json()]))
