"""Where the settings say that galleries and state are kept: a folder, or a PostgreSQL database."""

from contextlib import ExitStack
from pathlib import Path

from nobackfill import durable
from nobackfill.errors import ConfigurationError, NotFoundError
from nobackfill.extras import extra
from nobackfill.gallery.residents import Residents
from nobackfill.server.descriptors import open_galleries
from nobackfill.server.galleries.in_files import Home, InFiles
from nobackfill.server.settings import DATABASES, SQLITE, Settings
from nobackfill.server.state import GatewayState, StateFile

# Connections of a gateway to its database.
_CONNECTIONS = 32


def storage_of(settings: Settings) -> "Storage":
    """That of a gateway which has locked its data folder. Raises as `Storage`."""
    store = settings.store.get_secret_value() if settings.store is not None else SQLITE
    if store in (SQLITE, f"{SQLITE}{settings.data}"):
        return Storage(f"{SQLITE}{settings.data}", settings.data, locked=False)
    return Storage(store, settings.data)


def need_store(store: str) -> None:
    """Raises NotFoundError for a folder that no gateway has served: to open one would make it, and
    ConfigurationError for what is no store's address."""
    if store.startswith(SQLITE):
        folder = Path(store.removeprefix(SQLITE))
        if not (folder / "state.json").is_file():
            raise NotFoundError(f"{folder}: no gateway has served from it; look at its name")
    elif not store.startswith(DATABASES):
        raise ConfigurationError("expected sqlite:FOLDER or postgresql://USER@HOST/DATABASE")


class Storage:
    """`home` of the galleries and `state` of the gateway; `close` it."""

    def __init__(self, store: str, data: Path, *, locked: bool = True) -> None:
        """`store` as in the settings; `data`: the gateway's folder. Not `locked`: beside whoever
        has it.

        Raises BusyError where another gateway has it, ConfigurationError, UnavailableError,
        VerificationError for a damaged state, CannotWriteError.
        """
        self.home: Home
        self.state: GatewayState
        with ExitStack() as closing:
            if store.startswith(SQLITE):
                folder = Path(store.removeprefix(SQLITE))
                durable.make_dir(folder, 0o700)
                if locked:
                    closing.enter_context(durable.lock(folder / "lock"))
                self.home = InFiles(folder / "galleries", Residents(open_galleries()))
                self.state = StateFile(folder / "state.json")
            else:
                self._open_database(store, data, closing, locked)
            self._closing = closing.pop_all()

    def _open_database(self, url: str, data: Path, closing: ExitStack, locked: bool) -> None:
        with extra("postgres"):
            from nobackfill.server.galleries.in_database import InDatabase
            from nobackfill.server.stores.postgresql import schema
            from nobackfill.server.stores.postgresql.database import Database
            from nobackfill.server.stores.postgresql.state import StateRow
            from nobackfill.server.stores.postgresql.tenure import Tenure
        database = Database(url, _CONNECTIONS)
        closing.callback(database.close)
        database.open(schema.prepare)
        if locked:
            closing.callback(Tenure(database).close)
        self.home = InDatabase(database, data / "galleries")
        self.state = StateRow(database)

    def close(self) -> None:
        """Let go of it; twice is harmless."""
        self._closing.close()
