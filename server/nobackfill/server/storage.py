"""Open the store of the settings: a folder, or a PostgreSQL database."""

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
from nobackfill.extras import load_plugin, require_extra
from nobackfill.gallery.sqlite_file import SuspendablePool
from nobackfill.server.galleries.hosted import GalleryStorage
from nobackfill.server.galleries.hosted_file import FileGalleryStorage
from nobackfill.server.grpc import context
from nobackfill.server.process_limits import max_open_galleries
from nobackfill.server.settings import DATABASES, SQLITE, Settings
from nobackfill.server.state import UNFINISHED_RESTORE, GatewayState, StateFile

if TYPE_CHECKING:
    # They need the extra `postgres`.
    from nobackfill.server.stores.postgresql.leading import CommitNotifications

# Connections of a gateway to its database, besides four that wait or hold locks.
_CONNECTIONS = 24
# Matches NAME+URL of an engine that searches instead of the database; NAME is a plug-in of
# `nobackfill.stores`.
_ENGINE = re.compile(r"[a-z]+\+")
# Name of the file, in a folder whose galleries were moved, that names the new store.
_MOVED = "moved.json"


def open_storage(settings: Settings) -> "Storage":
    """Open the store of a gateway that has locked its data folder; the caller closes it.

    A folder that does not exist is created, and so are the tables of a database. An older database
    is converted. Other gateways may share a database; a folder other than the data folder is
    locked.

    Raises:
        PreconditionError: `gateway data move` has moved the folder's galleries elsewhere.
        BusyError: another process uses the folder, or uses the database alone.
        ConfigurationError: the address has another form, leads to another machine without TLS,
            names an unknown engine, an extra is missing, or a plug-in cannot be imported.
        UnavailableError: the database does not answer.
        VerificationError: the state is damaged, a newer version wrote it, or a restore did not
            finish.
        CannotWriteError: the folder cannot be created, or the database cannot write.
        OSError, ValueError, KeyError: the mark of a move cannot be read, or is damaged.
    """
    store = settings.store.get_secret_value() if settings.store is not None else SQLITE
    folder = store_folder(store, settings.data)
    if folder is not None and (folder / _MOVED).exists():
        to = json.loads((folder / _MOVED).read_bytes())["to"]
        raise PreconditionError(
            f"{folder}: the galleries of this folder were moved to {to}, which may have changed "
            "since; serve that store with --store, or serve this old copy again with --force"
        )
    if store in (SQLITE, f"{SQLITE}{settings.data}"):
        return Storage(f"{SQLITE}{settings.data}", settings.data, lock=None)
    return Storage(store, settings.data, lock="shared")


def store_folder(store_address: str, data_folder: Path) -> Path | None:
    """Return the folder of a store; None for a database, and for any other address. The folder need
    not exist.

    Args:
        store_address: address of the store.
        data_folder: the gateway's data folder, for the store `sqlite:` without a folder.
    """
    if not store_address.startswith(SQLITE):
        return None
    return Path(store_address.removeprefix(SQLITE)) if store_address != SQLITE else data_folder


def mark_moved(folder: Path, new_address: str) -> None:
    """Mark a folder as moved, durably, so that no gateway serves it without --force.

    An earlier mark is replaced. The folder must exist.

    Args:
        folder: the folder.
        new_address: address of the new store; its user, password and options are not written.

    Raises:
        CannotWriteError: the folder cannot be written, or does not exist.
        ValueError: the address has unbalanced brackets.
    """
    url = urlsplit(new_address)
    # User and password are left out; they may be options, too.
    host = url.netloc.rpartition("@")[2]
    public_address = f"{url.scheme}://{host}{url.path}" if "://" in new_address else new_address
    durable.write_file(folder / _MOVED, json.dumps({"to": public_address}).encode(), 0o600)


def clear_moved_mark(settings: Settings) -> None:
    """Remove the mark of `mark_moved` from the folder of the settings' store.

    Without a mark, or with a database, it does nothing.

    Raises:
        CannotWriteError: the mark cannot be removed.
    """
    store = settings.store.get_secret_value() if settings.store is not None else SQLITE
    folder = store_folder(store, settings.data)
    if folder is not None:
        durable.remove_tree(folder / _MOVED)


def split_store_address(store_address: str) -> tuple[str, str | None]:
    """Split the address of a database from that of the engine that searches its vectors.

    The engine is the option ?vectors=… of the address. Percent-encode its password, or all of it if
    it has an `&`.

    Returns:
        The address of the database, and that of the engine, or None.

    Raises:
        ConfigurationError: there are several engines, or one has another form.
    """
    url, mark, options = store_address.partition("?")
    parts = [option for option in options.split("&") if option]
    values = [option[8:] for option in parts if option.startswith("vectors=")]
    # A password is decoded when the address is split: a `/` in it would end the host.
    engines = [value if _ENGINE.match(value) else unquote(value) for value in values]
    other_options = "&".join(option for option in parts if not option.startswith("vectors="))
    if len(engines) > 1 or not all(map(_ENGINE.match, engines)):
        # Not the option itself: it may have a password.
        found = f"{len(engines)} of them" if len(engines) > 1 else "one of another form"
        raise ConfigurationError(
            "store: expected one option ?vectors=milvus+http://HOST:PORT in the address, or none, "
            f"found {found}; correct the address"
        )
    return url + (mark + other_options if other_options else ""), engines[0] if engines else None


def check_store_folder(store_address: str) -> None:
    """Check that the folder of a store exists, before opening it would create it.

    If it is a database, only the form of the address is checked. Nothing is written or locked.

    Args:
        store_address: address of the store, as in the settings. `sqlite:` without a folder means
            the working folder here.

    Raises:
        NotFoundError: no gateway has served from the folder: it has no state.json.
        ConfigurationError: the address has another form.
        OSError: this user may not search the folder, or one above it.
    """
    if store_address.startswith(SQLITE):
        folder = Path(store_address.removeprefix(SQLITE))
        if not (folder / "state.json").is_file():
            raise NotFoundError(
                f"{folder}: expected the data folder of a gateway, found no state.json; check its "
                "name"
            )
    elif not store_address.startswith(DATABASES):
        raise _unknown_store()


def _unknown_store() -> ConfigurationError:
    return ConfigurationError(
        "store: expected sqlite:FOLDER or postgresql://USER@HOST/DATABASE, got another form; "
        "correct --store"
    )


def migrate_database(url: str, to_format: int | None) -> tuple[int, int]:
    """Convert the tables of a database to a format, in one transaction.

    Going back deletes what older formats lack, such as the audit and the records of upgrades.

    Args:
        url: address of the database.
        to_format: number of the format; None means this version's. If the database has that format
            already, nothing changes.

    Returns:
        The numbers of the format before and after.

    Raises:
        NotFoundError: no gateway has served from the database.
        BusyError: a gateway serves from it.
        ConfigurationError: the format is unknown, also because a newer version wrote the database;
            or the extra `postgres` is missing.
        UnavailableError: the database does not answer, or refuses the connection.
        CannotWriteError: the database cannot write.
    """
    with require_extra("postgres"):
        from nobackfill.server.stores.postgresql.database import Connection, Database, execute
        from nobackfill.server.stores.postgresql.schema import FORMAT, migrate
    formats: list[int] = []
    target = FORMAT if to_format is None else to_format

    def work(connection: Connection) -> None:
        with connection.transaction():
            has_format = execute(connection, "SELECT to_regclass('nobackfill.format') IS NOT NULL")
            if not has_format.fetchone()[0]:
                raise NotFoundError(
                    "--store: expected a database that a gateway has served from, found no schema "
                    "nobackfill in it; check the database's name"
                )
            formats.append(migrate(connection, target))

    with closing(Database(url, 1)) as database:
        database.open(work)
    return formats[0], target


class Storage:
    """Hold an open store: `galleries` and `state` of the gateway."""

    def __init__(
        self,
        store_address: str,
        data_folder: Path,
        *,
        lock: Literal["alone", "shared"] | None = "alone",
    ) -> None:
        """Open a store.

        A missing folder is created, and so are the tables of a database; those of an older version
        are converted. The caller closes the store. After an error nothing stays open or locked.

        Args:
            store_address: address of the store, as in the settings.
            data_folder: the gateway's data folder.
            lock: alone keeps every other process out; shared admits other gateways of a database;
                None takes no lock, so that a gateway may serve the store at the same time.

        Raises:
            BusyError: another process has a lock that excludes this one.
            ConfigurationError: the address has another form, leads to another machine without TLS,
                names an unknown engine, an extra is missing, or a plug-in cannot be imported.
            UnavailableError: the database does not answer.
            VerificationError: the state is damaged, a newer version wrote it, or a restore did not
                finish.
            CannotWriteError: the folder cannot be created, or the database cannot write.
        """
        self.galleries: GalleryStorage
        self.state: GatewayState
        # Reports changes by other gateways; None if the store is not shared.
        self.commits: CommitNotifications | None = None
        with ExitStack() as closing:
            if store_address.startswith(SQLITE):
                folder = Path(store_address.removeprefix(SQLITE))
                durable.make_dir(folder, 0o700)
                if lock is not None:
                    closing.enter_context(durable.lock_file(folder / "lock"))
                if (folder / UNFINISHED_RESTORE).exists() and not (folder / "state.json").exists():
                    raise VerificationError(
                        f"{folder}: a restore into this folder did not finish, so it has no "
                        f"complete data; run `gateway data restore BACKUP --data {folder}` again"
                    )
                self.galleries = FileGalleryStorage(
                    folder / "galleries", SuspendablePool(max_open_galleries())
                )
                self.state = StateFile(folder / "state.json")
            elif store_address.startswith(DATABASES):
                self._open_database(store_address, data_folder, closing, lock)
            else:
                raise _unknown_store()
            self._closing = closing.pop_all()

    def _open_database(
        self, store: str, data: Path, closing: ExitStack, lock: Literal["alone", "shared"] | None
    ) -> None:
        with require_extra("postgres"):
            from nobackfill.server.galleries.hosted_database import DatabaseGalleryStorage
            from nobackfill.server.stores.postgresql import schema
            from nobackfill.server.stores.postgresql.database import Database
            from nobackfill.server.stores.postgresql.leading import (
                CommitNotifications,
                DatabaseState,
                GatewayDatabaseLock,
            )
        url, engine = split_store_address(store)
        database = Database(url, _CONNECTIONS, reader=context.reading_call)
        closing.callback(database.close)
        database.open(schema.prepare)
        if lock is not None:
            closing.callback(GatewayDatabaseLock(database, exclusive=lock == "alone").close)
        if engine is None:
            self.galleries = DatabaseGalleryStorage(database, data / "galleries")
        else:
            open_home = load_plugin("stores", engine.partition("+")[0])
            self.galleries = closing.enter_context(
                open_home(engine, database, data / "galleries", feeds=lock is not None)
            )
        self.state = DatabaseState(database)
        self.commits = CommitNotifications(database)
        closing.callback(self.commits.close)

    def close(self) -> None:
        """Close the store, its connections and its locks; a second call does nothing. Galleries
        that were opened from it are closed by their own.
        """
        self._closing.close()
