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

from nobackfill.server.stores.postgresql.database import Database, run

FACTS, NUMBERS = 20, 8
# The value of empty columns.
_NONE = 0
_CHOICES = 3
# Longest texts whose hashes are cached, in characters.
_SHORT = 128
# Larger than every hash of a key: the columns hold all keys.
_ALL = 2**63 - 1

Columns = Mapping[str, int | float]


class Mark(NamedTuple):
    """A hash, and a number if the hash is that of a key's number."""

    token: int
    number: float = 0.0


def token(*parts: str) -> int:
    """Hash texts without NUL to an integer from 1 to 2**63 - 2."""
    # Long texts are rarely repeated, and their cache would fill the memory.
    return _cached_hash(*parts) if sum(map(len, parts)) <= _SHORT else _hash(*parts)


def _hash(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**63 - 2) + 1


_cached_hash = lru_cache(1 << 16)(_hash)


def key_token(key: str) -> int:
    """Return the hash of "this key has texts"; keys are stored in the order of these hashes."""
    return token("key", key)


def text_token(key: str, text: str) -> int:
    return token("text", key, text)


def flag_token(key: str, flag: bool) -> int:
    return token("flag", key, str(flag))


def number_token(key: str) -> int:
    return token("number", key)


def time_token(key: str) -> int:
    return token("time", key)


@lru_cache(1 << 16)
def places(hashed: int, width: int) -> Sequence[int]:
    """Return the columns, of `width`, that may hold this hash."""
    free = list(range(width))
    columns = []
    for _ in range(_CHOICES):
        hashed, place = divmod(hashed, len(free))
        columns.append(free.pop(place))
    return columns


def columns_of(facets: Mapping[str, Mapping[str, Sequence[Any]]]) -> Columns:
    """Return the columns of an item; `facets` as in server.stores.postgresql.conditions."""
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
        **{f"t{place}": mark.token for place, mark in enumerate(facts.marks)},
        **{f"k{place}": mark.token for place, mark in enumerate(numbers.marks)},
        **{f"n{place}": mark.number for place, mark in enumerate(numbers.marks)},
    }


def _marks_of(key: str, facet: Mapping[str, Sequence[Any]]) -> tuple[list[Mark], list[Mark]]:
    facts = [key_token(key)] if facet.get("s") else []
    facts += [text_token(key, text) for text in facet.get("s", ())]
    facts += [flag_token(key, flag) for flag in facet.get("b", ())]
    numbers = [Mark(number_token(key), float(number)) for number in facet.get("n", ())]
    numbers += [Mark(time_token(key), float(time)) for time in facet.get("t", ())]
    return [Mark(one) for one in facts], numbers


class _Row:
    """Columns of one kind, filled as a bipartite matching: a mark moves to another of its columns
    to make room."""

    def __init__(self, width: int) -> None:
        self.marks = [Mark(_NONE)] * width

    def take(self, marks: Sequence[Mark]) -> bool:
        """Place all marks, each once; return whether there was room."""
        return all(self._take(mark, set()) for mark in dict.fromkeys(marks))

    def _take(self, mark: Mark, tried: set[int]) -> bool:
        for place in places(mark.token, len(self.marks)):
            if place in tried:
                continue
            tried.add(place)
            there = self.marks[place]
            if there.token == _NONE or self._take(there, tried):
                self.marks[place] = mark
                return True
        return False


# Names of collections contain the database, the gallery and the space's number.

_OURS = "nobackfill_"
# Version of the columns. Collections of an older layout have another name, so they are dropped and
# filled again.
_LAYOUT = 2


def database_id(database: Database) -> str:
    """Return an id of a database that even a restored copy on another server does not share."""
    query = (
        "SELECT system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname ="
        " current_database()) FROM pg_control_system()"
    )
    identity = database.read(lambda connection: run(connection, query).fetchone()[0])
    return hashlib.sha256(str(identity).encode()).hexdigest()[:12]


def prefix_of(database: str) -> str:
    """Return the prefix of every collection of a database."""
    return f"{_OURS}{database}_"


def name_of(database: str, schema: str, number: int) -> str:
    """Return the name of a space's collection. `schema` is nobackfill_<number>; numbers of spaces
    are never reused."""
    return f"{prefix_of(database)}{schema.removeprefix(_OURS)}_{number:d}_{_LAYOUT}"
