"""What Milvus is told of an item's metadata: plain numbers in columns that are the same for all.

    t0 … t19               facts: a key has texts, or this text or flag; 63 bits of a hash each
    k0 … k7, n0 … n7       numbers: a key's hash, and a number of it or a time
    upto                   what the columns had no place for: keys from this hash on

A fact or a number stands in one of three columns that its hash names, so that to look for it is to
compare three columns, however many keys a gallery has. Why no arrays and no JSON: ADR 0016.
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from nobackfill.server.stores.postgresql.database import Database, run

FACTS, NUMBERS = 20, 8
# Of what is in none of a row's columns.
_NONE = 0
_CHOICES = 3
# Characters of texts whose hashes are kept.
_SHORT = 128
# No hash of a key is as large: all of them are told.
_ALL = 2**63 - 1

Columns = Mapping[str, int | float]


class Mark(NamedTuple):
    """What is looked for: a hash, and a number where it is one of a key's numbers."""

    token: int
    number: float = 0.0


def token(*parts: str) -> int:
    """A hash of texts without NUL: 1 to 2**63 - 2."""
    # Long texts seldom come again, and as many as are kept would fill the memory.
    return _kept(*parts) if sum(map(len, parts)) <= _SHORT else _hashed(*parts)


def _hashed(*parts: str) -> int:
    digest = hashlib.blake2b("\0".join(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % (2**63 - 2) + 1


_kept = lru_cache(1 << 16)(_hashed)


def key_token(key: str) -> int:
    """That a key has texts; keys are told in the order of these."""
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
    """The columns, of `width`, where something of this hash may stand."""
    left = list(range(width))
    found = []
    for _ in range(_CHOICES):
        hashed, place = divmod(hashed, len(left))
        found.append(left.pop(place))
    return found


def columns_of(facets: Mapping[str, Mapping[str, Sequence[Any]]]) -> Columns:
    """The columns of an item. `facets`: as conditions.py has them."""
    facts, numbers = _Row(FACTS), _Row(NUMBERS)
    upto = _ALL
    for order, key in sorted((key_token(key), key) for key in facets):
        some, more = _marks(key, facets[key])
        if not (facts.take(some) and numbers.take(more)):
            # What is there of it does no harm: nobody looks for keys from here on.
            upto = order
            break
    return {
        "upto": upto,
        **{f"t{place}": mark.token for place, mark in enumerate(facts.marks)},
        **{f"k{place}": mark.token for place, mark in enumerate(numbers.marks)},
        **{f"n{place}": mark.number for place, mark in enumerate(numbers.marks)},
    }


def _marks(key: str, facet: Mapping[str, Sequence[Any]]) -> tuple[list[Mark], list[Mark]]:
    facts = [key_token(key)] if facet.get("s") else []
    facts += [text_token(key, text) for text in facet.get("s", ())]
    facts += [flag_token(key, flag) for flag in facet.get("b", ())]
    numbers = [Mark(number_token(key), float(number)) for number in facet.get("n", ())]
    numbers += [Mark(time_token(key), float(time)) for time in facet.get("t", ())]
    return [Mark(one) for one in facts], numbers


class _Row:
    """Columns of one kind, filled as a bipartite matching: what stands somewhere makes room where
    another column will do for it."""

    def __init__(self, width: int) -> None:
        self.marks = [Mark(_NONE)] * width

    def take(self, marks: Sequence[Mark]) -> bool:
        """Whether there is a place for all of them, each once."""
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


# Names of collections: a space's digest is never in an alias, a plan names its own collection.

_OURS = "nobackfill_"
# Of a collection's columns: one of an older layout has another name, so that it is dropped, and
# what it held is told to a new one.
_LAYOUT = 2


def database_id(database: Database) -> str:
    """What tells a database from all others, a copy that was restored on another server too."""
    query = (
        "SELECT system_identifier || '/' || (SELECT oid FROM pg_database WHERE datname ="
        " current_database()) FROM pg_control_system()"
    )
    told = database.read(lambda connection: run(connection, query).fetchone()[0])
    return hashlib.sha256(str(told).encode()).hexdigest()[:12]


def prefix_of(database: str) -> str:
    """Of every collection that belongs to a database."""
    return f"{_OURS}{database}_"


def name_of(database: str, schema: str, number: int) -> str:
    """Of the collection of one space. `schema` is nobackfill_<number>, numbers of spaces in it are
    never used twice."""
    return f"{prefix_of(database)}{schema.removeprefix(_OURS)}_{number:d}_{_LAYOUT}"
