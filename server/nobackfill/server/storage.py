"""Where the settings say that galleries and state are kept: a folder, or a PostgreSQL database."""

import json
import re
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import unquote, urlsplit

from nobackfill import durable
from nobackfill.errors import (
    ConfigurationError,
    NotFoundError,
    PreconditionError,
    VerificationError,
)
from nobackfill.extras import extra, load_plugin
from nobackfill.gallery.connections import Residents
from nobackfill.server.galleries.hosted_file import FileHome, Home
from nobackfill.server.grpc import context
from nobackfill.server.process_limits import open_galleries
from nobackfill.server.settings import DATABASES, SQLITE, Settings
from nobackfill.server.state import UNFINISHED_RESTORE, GatewayState, StateFile

if TYPE_CHECKING:
    # They need the extra `postgres`.
    from nobackfill.server.stores.postgresql.leading import News

# Connections of a gateway to its database, beside four that wait or hold locks.
_CONNECTIONS = 24
# NAME+URL of an engine that searches for a database: NAME is a plug-in of `nobackfill.stores`.
_ENGINE = re.compile(r"[a-z]+\+")
# In a folder whose galleries were moved: where to.
_MOVED = "moved.json"


def storage_of(settings: Settings) -> "Storage":
    """That of a gateway which has locked its data folder. Raises as `Storage`, and
    PreconditionError for a folder whose galleries were moved."""
    store = settings.store.get_secret_value() if settings.store is not None else SQLITE
    folder = folder_of(store, settings.data)
    if folder is not None and (folder / _MOVED).exists():
        to = json.loads((folder / _MOVED).read_bytes())["to"]
        raise PreconditionError(
            f"{folder} was moved to {to}, which may have changed since; serve that, or give "
            "--force to serve this copy again"
        )
    if store in (SQLITE, f"{SQLITE}{settings.data}"):
        return Storage(f"{SQLITE}{settings.data}", settings.data, lock=None)
    return Storage(store, settings.data, lock="shared")


def folder_of(store: str, data: Path) -> Path | None:
    """The folder that a store is, None for a database; `data`: the gateway's folder."""
    if not store.startswith(SQLITE):
        return None
    return Path(store.removeprefix(SQLITE)) if store != SQLITE else data


def mark_moved(folder: Path, to: str) -> None:
    """Refuse to serve a folder from now on: its galleries were moved `to` another store."""
    url = urlsplit(to)
    # Without the name and password of whoever may read it.
    shown = to if not url.netloc else f"{url.scheme}://{url.hostname}{url.path}"
    durable.write_file(folder / _MOVED, json.dumps({"to": shown}).encode(), 0o600)


def forget_move(settings: Settings) -> None:
    """Let a folder be served again that was moved."""
    store = settings.store.get_secret_value() if settings.store is not None else SQLITE
    folder = folder_of(store, settings.data)
    if folder is not None:
        durable.remove_tree(folder / _MOVED)


def split_store(store: str) -> tuple[str, str | None]:
    """The address of a database, and that of the engine that searches its vectors, which is given
    as ?vectors=… and percent-encoded where it has a `&`: its password alone, or all of it."""
    url, mark, options = store.partition("?")
    given = [option for option in options.split("&") if option]
    said = [one[8:] for one in given if one.startswith("vectors=")]
    # A password is decoded when the address is split: a `/` in it would end the host.
    engines = [one if _ENGINE.match(one) else unquote(one) for one in said]
    rest = "&".join(one for one in given if not one.startswith("vectors="))
    if len(engines) > 1 or not all(map(_ENGINE.match, engines)):
        raise ConfigurationError("store: expected one vectors=milvus+http://HOST:PORT")
    return url + (mark + rest if rest else ""), engines[0] if engines else None


def need_store(store: str) -> None:
    """Raises NotFoundError for a folder that no gateway has served: to open one would make it, and
    ConfigurationError for what is no store's address."""
    if store.startswith(SQLITE):
        folder = Path(store.removeprefix(SQLITE))
        if not (folder / "state.json").is_file():
            raise NotFoundError(f"{folder}: no gateway has served from it; look at its name")
    elif not store.startswith(DATABASES):
        raise _no_store()


def _no_store() -> ConfigurationError:
    return ConfigurationError("store: expected sqlite:FOLDER or postgresql://USER@HOST/DATABASE")


def migrate_database(url: str, to: int | None) -> tuple[int, int]:
    """Bring a database to a format (None: this version's); that before and after. Raises
    NotFoundError where no gateway has served from it, BusyError where one does, ConfigurationError,
    UnavailableError."""
    with extra("postgres"):
        from nobackfill.server.stores.postgresql.database import Connection, Database, run
        from nobackfill.server.stores.postgresql.schema import FORMAT, migrate
    found: list[int] = []
    wanted = FORMAT if to is None else to

    def work(connection: Connection) -> None:
        with connection.transaction():
            there = run(connection, "SELECT to_regclass('nobackfill.format') IS NOT NULL")
            if not there.fetchone()[0]:
                raise NotFoundError("no gateway has served from this database; look at its name")
            found.append(migrate(connection, wanted))

    with closing(Database(url, 1)) as database:
        database.open(work)
    return found[0], wanted


class Storage:
    """`home` of the galleries and `state` of the gateway; `close` it."""

    def __init__(
        self, store: str, data: Path, *, lock: Literal["alone", "shared"] | None = "alone"
    ) -> None:
        """`store` as in the settings; `data`: the gateway's folder. `lock`: a database may be
        shared with other gateways; None: beside whoever has it.

        Raises BusyError where another gateway has it, ConfigurationError, UnavailableError,
        VerificationError for a damaged state, CannotWriteError.
        """
        self.home: Home
        self.state: GatewayState
        # Where other gateways change it, too.
        self.news: News | None = None
        with ExitStack() as ending:
            if store.startswith(SQLITE):
                folder = Path(store.removeprefix(SQLITE))
                durable.make_dir(folder, 0o700)
                if lock is not None:
                    ending.enter_context(durable.lock(folder / "lock"))
                if (folder / UNFINISHED_RESTORE).exists() and not (folder / "state.json").exists():
                    raise VerificationError(
                        f"{folder}: a restore into it did not end; run `gateway data restore` again"
                    )
                self.home = FileHome(folder / "galleries", Residents(open_galleries()))
                self.state = StateFile(folder / "state.json")
            elif store.startswith(DATABASES):
                self._open_database(store, data, ending, lock)
            else:
                raise _no_store()
            self._closing = ending.pop_all()

    def _open_database(
        self, store: str, data: Path, ending: ExitStack, lock: Literal["alone", "shared"] | None
    ) -> None:
        with extra("postgres"):
            from nobackfill.server.galleries.hosted_database import DatabaseHome
            from nobackfill.server.stores.postgresql import schema
            from nobackfill.server.stores.postgresql.database import Database
            from nobackfill.server.stores.postgresql.leading import News, StateRow, Tenure
        url, engine = split_store(store)
        database = Database(url, _CONNECTIONS, reader=context.reader)
        ending.callback(database.close)
        database.open(schema.prepare)
        if lock is not None:
            ending.callback(Tenure(database, exclusive=lock == "alone").close)
        if engine is None:
            self.home = DatabaseHome(database, data / "galleries")
        else:
            opened = load_plugin("stores", engine.partition("+")[0])
            self.home = ending.enter_context(
                opened(engine, database, data / "galleries", feeds=lock is not None)
            )
        self.state = StateRow(database)
        self.news = News(database)
        ending.callback(self.news.close)

    def close(self) -> None:
        """Let go of it; twice is harmless."""
        self._closing.close()
