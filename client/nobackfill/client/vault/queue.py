"""The table of images in the vault: one row per image, in the gallery's own SQLite file.

    sealed    encrypted and waiting in the outbox; the upload may have begun
    stored    acknowledged by the vault
    removing  the item was removed here, so its blob must be deleted in the vault

A row is written before its upload begins and deleted after its blob is deleted, so every blob in
the vault is known. Digests of images stay here; the vault sees only random ids.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection
from typing import Literal, get_args

from nobackfill import durable
from nobackfill.errors import DamagedError
from nobackfill.gallery.store import Store

State = Literal["sealed", "stored", "removing"]

_COLUMNS = "SELECT name FROM pragma_table_info('vault')"
_INDEX = "CREATE INDEX IF NOT EXISTS vault_items ON vault (item)"
_ROWS = (
    "SELECT blob, item, image_sha256, blob_sha256, size, suffix, state, key FROM vault "
    "WHERE state = ifnull(?, state) AND item = ifnull(?, item) ORDER BY item, rowid"
)
_ROWS_WITHOUT_KEY = _ROWS.replace("state, key", "state, NULL")
_HEX = re.compile(r"[0-9a-f]{64}")
# Created when the first image is sealed.
TABLE = """
CREATE TABLE IF NOT EXISTS vault (
    blob TEXT PRIMARY KEY,
    item TEXT NOT NULL,
    image_sha256 TEXT NOT NULL,
    blob_sha256 TEXT NOT NULL,
    size INTEGER NOT NULL,
    suffix TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('sealed', 'stored', 'removing')),
    key TEXT
) STRICT
"""


@dataclass(frozen=True)
class VaultEntry:
    """One image in the vault.

    Attributes:
        blob_id: random id of its ciphertext, 64 hex digits.
        item_id: id of the item.
        image_sha256: digest of the image, 64 hex digits.
        blob_sha256: digest of the ciphertext, 64 hex digits.
        blob_bytes: bytes of the ciphertext.
        suffix: suffix of the file's name, such as ".jpg"; a restored file gets it.
        state: sealed, stored or removing.
        public_key: the device's public key that sealed it; None in rows of versions without this
            column.
    """

    blob_id: str
    item_id: str
    image_sha256: str
    blob_sha256: str
    blob_bytes: int
    suffix: str
    state: State
    public_key: str | None


class VaultQueue:
    """Access to the table `vault` of a gallery file; the first sealed image creates the table.

    Methods may raise VerificationError (a damaged gallery file) and BusyError; methods that write
    also raise CannotWriteError. `set_state`, `mark_stored` and `delete_entry` expect that the
    table exists.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def entries(self, state: State | None = None, item_id: str | None = None) -> list[VaultEntry]:
        """Return rows ordered by item, the latest of an item last.

        Nothing is written.

        Args:
            state: only rows in this state; None: any state.
            item_id: only rows of the item with this id; None: any item.

        Returns:
            Empty if nothing was ever pushed.

        Raises:
            DamagedError: a row holds a value that this program never writes.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        with self._store.read_snapshot() as connection:
            columns = {name for (name,) in connection.execute(_COLUMNS)}
            if not columns:
                return []
            rows = connection.execute(
                _ROWS if "key" in columns else _ROWS_WITHOUT_KEY, (state, item_id)
            )
            entries = [VaultEntry(*row) for row in rows]
        if not all(map(_is_sound, entries)):
            raise DamagedError(
                self._store.path, "its table of pushed images has a row with unusable values"
            )
        return entries

    def obsolete_entries(self) -> list[VaultEntry]:
        """Return the rows whose blobs are to delete in the vault: removing, or without an item.

        Returns:
            The rows, ordered by item; empty if nothing was ever pushed.

        Raises:
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        with self._store.read_snapshot() as connection:
            items = {item for (item,) in connection.execute("SELECT id FROM items")}
        return [e for e in self.entries() if e.state == "removing" or e.item_id not in items]

    def latest_entry(self, item_id: str) -> VaultEntry | None:
        """Return the latest row of an item that is not being removed; None if there is none.

        Args:
            item_id: id of the item.

        Raises:
            DamagedError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the file cannot be opened, or the disk fails.
            NotFoundError: the gallery was closed.
        """
        rows = [entry for entry in self.entries(item_id=item_id) if entry.state != "removing"]
        return rows[-1] if rows else None

    def insert_sealed(self, entry: VaultEntry) -> None:
        """Insert the row of a blob; call this before any byte of it is sent.

        Creates the table, or adds the columns that an older version lacks.

        Args:
            entry: the row to insert, with any state.

        Raises:
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            DamagedError: the gallery file is damaged, or the blob has a row already.
            NotFoundError: the gallery was closed.
        """
        with self._store.transaction() as connection:
            _prepare(connection)
            connection.execute(
                "INSERT INTO vault VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    entry.blob_id, entry.item_id, entry.image_sha256, entry.blob_sha256,
                    entry.blob_bytes, entry.suffix, entry.state, entry.public_key,
                ),
            )  # fmt: skip

    def set_state(self, blob_id: str, state: State) -> None:
        """Set the state of a blob's row.

        Args:
            blob_id: the id of the blob; an unknown one is ignored.
            state: sealed, stored or removing.

        Raises:
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            DamagedError: the gallery file is damaged, or has no such table; or `state` is another
                text.
            NotFoundError: the gallery was closed.
        """
        with self._store.transaction() as connection:
            connection.execute("UPDATE vault SET state = ? WHERE blob = ?", (state, blob_id))

    def mark_stored(self, entry: VaultEntry) -> None:
        """Mark a blob's row as stored, and the rows of all other blobs of its item as removing.

        An unknown blob is not inserted, but the others are marked all the same. Both happen in one
        transaction.

        Raises:
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            DamagedError: the gallery file is damaged, or has no such table.
            NotFoundError: the gallery was closed.
        """
        with self._store.transaction() as connection:
            connection.execute("UPDATE vault SET state = 'stored' WHERE blob = ?", (entry.blob_id,))
            connection.execute(
                "UPDATE vault SET state = 'removing' WHERE item = ? AND blob <> ?",
                (entry.item_id, entry.blob_id),
            )

    def set_missing_keys(self, key: str) -> None:
        """Set the public key of all rows that have none.

        A missing table is created, and an old one migrated, first.

        Raises:
            VerificationError: the gallery file is damaged.
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            NotFoundError: the gallery was closed.
        """
        with self._store.transaction() as connection:
            _prepare(connection)
            connection.execute("UPDATE vault SET key = ? WHERE key IS NULL", (key,))

    def delete_entry(self, blob_id: str) -> None:
        """Delete the row of a blob; call this after the vault has deleted the blob.

        An unknown blob is ignored.

        Raises:
            BusyError: another process holds the gallery file for 5 seconds.
            CannotWriteError: the disk is full or read-only.
            DamagedError: the gallery file is damaged, or has no such table.
            NotFoundError: the gallery was closed.
        """
        with self._store.transaction() as connection:
            connection.execute("DELETE FROM vault WHERE blob = ?", (blob_id,))

    def sweep(self, folder: Path) -> None:
        """Delete the files of a folder that are no sealed blob, such as ciphertext of a killed
        push.

        Raises:
            DamagedError: the gallery file is damaged.
            CannotWriteError: a file cannot be deleted, or the disk fails.
            BusyError: another process holds the gallery file for 5 seconds.
            NotFoundError: the gallery was closed.
            OSError: the folder cannot be read.
        """
        sealed_blobs = {entry.blob_id for entry in self.entries("sealed")}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.name not in sealed_blobs:
                durable.remove_tree(path)


def _is_sound(entry: VaultEntry) -> bool:
    """Check the values of a row: its blob names a file, and its size goes into a message."""
    digests = (entry.blob_id, entry.image_sha256, entry.blob_sha256)
    return (
        all(isinstance(digest, str) and _HEX.fullmatch(digest) for digest in digests)
        and all(isinstance(text, str) for text in (entry.item_id, entry.suffix))
        and isinstance(entry.public_key, str | None)
        and entry.state in get_args(State)
        and isinstance(entry.blob_bytes, int)
        and entry.blob_bytes > 0
    )


def _prepare(connection: Connection) -> None:
    """Create the table, or migrate that of an older version."""
    connection.execute(TABLE)
    connection.execute(_INDEX)
    if "key" not in {name for (name,) in connection.execute(_COLUMNS)}:
        connection.execute("ALTER TABLE vault ADD COLUMN key TEXT")
