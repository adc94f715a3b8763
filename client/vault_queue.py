"""What the vault holds of this gallery: one row an image, in the gallery's own SQLite file.

    sealed    encrypted and waiting in the outbox; the upload may have begun
    stored    acknowledged by the vault
    removing  the item is gone here and its blob must go there

A row is written before its upload begins and deleted after its blob is gone, so nothing that was
ever sent is forgotten. Digests of images stay here; the vault sees random ids only.
"""

from dataclasses import dataclass
from typing import Literal

from gallery.store import Store

State = Literal["sealed", "stored", "removing"]

_IS_THERE = "SELECT 1 FROM sqlite_master WHERE name = 'vault'"
_INDEX = "CREATE INDEX IF NOT EXISTS vault_items ON vault (item)"
_TABLE = """
CREATE TABLE IF NOT EXISTS vault (
    blob TEXT PRIMARY KEY,
    item TEXT NOT NULL,
    image_sha256 TEXT NOT NULL,
    blob_sha256 TEXT NOT NULL,
    size INTEGER NOT NULL,
    suffix TEXT NOT NULL,
    state TEXT NOT NULL CHECK (state IN ('sealed', 'stored', 'removing'))
) STRICT
"""


@dataclass(frozen=True)
class Entry:
    """One image in the vault. `size` and `blob_sha256` describe its ciphertext."""

    blob: str
    item: str
    image_sha256: str
    blob_sha256: str
    size: int
    # Of the file's name, to restore it under a name that programs know: ".jpg".
    suffix: str
    state: State


class VaultQueue:
    """The table `vault` of a gallery file, made by the first image that is sealed."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def entries(self, state: State | None = None, item: str | None = None) -> list[Entry]:
        """All rows, or those in one state or of one item, by item."""
        with self._store.reading() as connection:
            if not connection.execute(_IS_THERE).fetchone():
                return []
            rows = connection.execute(
                "SELECT blob, item, image_sha256, blob_sha256, size, suffix, state FROM vault "
                "WHERE state = ifnull(?, state) AND item = ifnull(?, item) ORDER BY item, blob",
                (state, item),
            )
            return [Entry(*row) for row in rows]

    def obsolete(self) -> list[Entry]:
        """What must leave the vault: rows that say so, and those whose item is gone."""
        with self._store.reading() as connection:
            items = {item for (item,) in connection.execute("SELECT id FROM items")}
        return [e for e in self.entries() if e.state == "removing" or e.item not in items]

    def of(self, item: str) -> Entry | None:
        """The row of an item, unless it is being removed."""
        return next((e for e in self.entries(item=item) if e.state != "removing"), None)

    def seal(self, entry: Entry) -> None:
        """Remember a blob before a byte of it is sent."""
        with self._store.writing() as connection:
            connection.execute(_TABLE)
            connection.execute(_INDEX)
            connection.execute(
                "INSERT INTO vault VALUES (?, ?, ?, ?, ?, ?, ?)",
                (
                    entry.blob, entry.item, entry.image_sha256, entry.blob_sha256,
                    entry.size, entry.suffix, entry.state,
                ),
            )  # fmt: skip

    def mark(self, blob: str, state: State) -> None:
        """Move a blob on to another state."""
        with self._store.writing() as connection:
            connection.execute("UPDATE vault SET state = ? WHERE blob = ?", (state, blob))

    def forget(self, blob: str) -> None:
        """Delete the row of a blob that is gone from the vault."""
        with self._store.writing() as connection:
            connection.execute("DELETE FROM vault WHERE blob = ?", (blob,))
