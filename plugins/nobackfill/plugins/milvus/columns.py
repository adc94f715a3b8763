"""Columns of metadata in Milvus: numbers in a fixed set of columns, the same for all galleries.

    t0 … t19               facts: "key has texts", or a text or flag of a key; hashes of 63 bits
    k0 … k7, n0 … n7       numbers: the hash of a key, and a number or time of it
    upto                   the least key hash for which the columns had no room

The hash of a fact or number names three columns that may hold it. A condition therefore compares
three columns, however many keys a gallery has. ADR 0016 says why not arrays or JSON.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from nobackfill.server.stores.postgresql.database import Database, execute

FACTS, NUMBERS = 20, 8
# The value of empty columns.
_NONE = 0
_CHOICES = 3
# Longest texts whose hashes are cached, in characters.
_SHORT = 128
# Larger than every hash of a key: the columns hold all keys.
_ALL = 2**63 - 1

Columns = Mapping[str, int | float]


class ColumnMark(NamedTuple):
    """The content of a column.

    Attributes:
        hash_token: a hash; 0 in an empty column.
        number_value: the number, if the hash is that of a key's numbers or times; else 0.
    """

    hash_token: int
    number_value: float = 0.0


def hash_texts(*parts: str) -> int:
    """Hash texts to an integer from 1 to 2**63 - 2; the same texts always give the same hash.

    Args:
        parts: texts without NUL, because NUL separates them.

    Raises:
        UnicodeEncodeError: a text has half a surrogate pair.
    """
    # Long texts are rarely repeated, and their cache would fill the memory.
    return _cached_hash(*parts) if sum(map(len, parts)) <= _SHORT else _token_hash(*parts)


def _token_hash(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**63 - 2) + 1


_cached_hash = lru_cache(1 << 16)(_token_hash)


def key_token(key: str) -> int:
    """Return the hash of the fact that a key has texts; keys are stored in the order of it.

    Raises:
        UnicodeEncodeError: the key has half a surrogate pair.
    """
    return hash_texts("key", key)


def text_token(key: str, text: str) -> int:
    """Return the hash of the fact that a key has a text.

    Raises:
        UnicodeEncodeError: the key or the text has half a surrogate pair.
    """
    return hash_texts("text", key, text)


def flag_token(key: str, flag: bool) -> int:
    """Return the hash of the fact that a key has a flag.

    Raises:
        UnicodeEncodeError: the key has half a surrogate pair.
    """
    return hash_texts("flag", key, str(flag))


def number_token(key: str) -> int:
    """Return the hash that stands before each number of a key.

    Raises:
        UnicodeEncodeError: the key has half a surrogate pair.
    """
    return hash_texts("number", key)


def time_token(key: str) -> int:
    """Return the hash that stands before each time of a key, in microseconds since 1970.

    Raises:
        UnicodeEncodeError: the key has half a surrogate pair.
    """
    return hash_texts("time", key)


@lru_cache(1 << 16)
def possible_columns(hashed: int, width: int) -> Sequence[int]:
    """Return the three columns that may hold a hash.

    Args:
        hashed: the hash.
        width: the number of columns, FACTS or NUMBERS; at least 3.

    Returns:
        Three different numbers, each 0 to width - 1. The list is cached: do not change it.
    """
    free = list(range(width))
    columns = []
    for _ in range(_CHOICES):
        hashed, place = divmod(hashed, len(free))
        columns.append(free.pop(place))
    return columns


def columns_of(facets: Mapping[str, Mapping[str, Sequence[Any]]]) -> Columns:
    """Return the columns of an item's metadata.

    Keys are placed in the order of their hashes. The first one without room, and all later ones,
    are left to the database; `upto` is its hash.

    Args:
        facets: by key, lists of values by kind: "s" texts, "b" flags, "n" numbers, "t" times in
            microseconds since 1970.

    Returns:
        Every column by name; 0 where it is empty. Without facets, `upto` is 2**63 - 1 and all
        others are empty. Equal values take one column.

    Raises:
        UnicodeEncodeError: a key or text has half a surrogate pair.
    """
    facts, numbers = _Row(FACTS), _Row(NUMBERS)
    upto = _ALL
    for order, key in sorted((key_token(key), key) for key in facets):
        some, more = _marks_of(key, facets[key])
        if not (facts.take(some) and numbers.take(more)):
            # A part of the key may be stored; nothing reads keys from `upto` on.
            upto = order
            break
    return {
        "upto": upto,
        **{f"t{place}": mark.hash_token for place, mark in enumerate(facts.marks)},
        **{f"k{place}": mark.hash_token for place, mark in enumerate(numbers.marks)},
        **{f"n{place}": mark.number_value for place, mark in enumerate(numbers.marks)},
    }


def _marks_of(
    key: str, facet: Mapping[str, Sequence[Any]]
) -> tuple[list[ColumnMark], list[ColumnMark]]:
    facts = [key_token(key)] if facet.get("s") else []
    facts += [text_token(key, text) for text in facet.get("s", ())]
    facts += [flag_token(key, flag) for flag in facet.get("b", ())]
    numbers = [ColumnMark(number_token(key), float(number)) for number in facet.get("n", ())]
    numbers += [ColumnMark(time_token(key), float(time)) for time in facet.get("t", ())]
    return [ColumnMark(one) for one in facts], numbers


class _Row:
    """Columns of one kind, filled as a bipartite matching: a mark moves to another of its columns
    to make room."""

    def __init__(self, width: int) -> None:
        self.marks = [ColumnMark(_NONE)] * width

    def take(self, marks: Sequence[ColumnMark]) -> bool:
        """Place all marks, each once; return whether there was room."""
        return all(self._take(mark, set()) for mark in dict.fromkeys(marks))

    def _take(self, mark: ColumnMark, visited: set[int]) -> bool:
        for place in possible_columns(mark.hash_token, len(self.marks)):
            if place in visited:
                continue
            visited.add(place)
            present = self.marks[place]
            if present.hash_token == _NONE or self._take(present, visited):
                self.marks[place] = mark
                return True
        return False


# Names of collections contain the database, the gallery and the space's number.

_OURS = "nobackfill_"
# Version of the columns. Collections of an older layout have another name, so they are dropped and
# filled again.
_LAYOUT = 2


def database_id(database: Database) -> str:
    """Return an id of a database that a restored copy on another server does not share.

    Returns:
        12 hex digits.

    Raises:
        UnavailableError: the database does not answer.
        ConfigurationError: the role may not call pg_control_system().
        BusyError: a statement took too long, or no connection was free (OverloadedError).
        DeadlineError, CancelledError: the call's time is over, or its caller has gone.
    """
    query = (
        "SELECT system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname ="
        " current_database()) FROM pg_control_system()"
    )
    identity = database.read(lambda connection: execute(connection, query).fetchone()[0])
    return hashlib.sha256(str(identity).encode()).hexdigest()[:12]


def collection_prefix(database: str) -> str:
    """Return the prefix of the names of all collections of a database, from its id.

    Args:
        database: the id, from `database_id`.
    """
    return f"{_OURS}{database}_"


def collection_name(database: str, schema: str, space_number: int) -> str:
    """Return the name of the collection of a space.

    Args:
        database: the id of the database, from `database_id`.
        schema: the gallery's schema, nobackfill_<number>.
        space_number: the number of the space, which is never reused.
    """
    return f"{collection_prefix(database)}{schema.removeprefix(_OURS)}_{space_number:d}_{_LAYOUT}"
