"""What marks a gallery file as ours, and of which format."""

import sqlite3
from pathlib import Path

from nobackfill.errors import VerificationError

# Of the file: "nobf".
APPLICATION = 0x6E6F6266
# Of the tables; PRAGMA user_version of every gallery file. schema.py leads there.
FORMAT = 1


def format_of(connection: sqlite3.Connection, path: Path) -> int:
    """The format of the tables. Raises VerificationError for another program's, or a newer one."""
    if connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        raise not_a_gallery(path, "a database of another program")
    found: int = connection.execute("PRAGMA user_version").fetchone()[0]
    if found > FORMAT:
        raise VerificationError(
            f"{path}: expected a gallery of format {FORMAT} or older, got format {found}; use a "
            "newer nobackfill"
        )
    return found


def not_a_gallery(path: Path, kind: str) -> VerificationError:
    return VerificationError(f"{path}: expected a gallery, got {kind}; name the gallery's file")
