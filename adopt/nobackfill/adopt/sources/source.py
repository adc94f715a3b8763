"""The interface of a store that lives elsewhere: one Protocol to read it, one to write beside.

Below are the checks, marks and addresses that several sources share.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, runtime_checkable
from urllib.parse import SplitResult, urlsplit

import numpy as np

from nobackfill.digests import SPACE
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    IncompatibleSpaceError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    UnavailableError,
    few,
)
from nobackfill.loopback import is_loopback
from nobackfill.vectors import Vectors

# Metrics of stores; a larger "inner_product" is nearer.
SearchMetric = Literal["cosine", "squared_l2", "inner_product", "l1"]
# What a model reads where it reads queries otherwise than what they find.
DOCUMENTS, QUERIES = "documents", "queries"


@dataclass(frozen=True)
class Facts:
    """What a store says about its vectors. `metric` None: it does not say. `model`: the one that
    its metadata name, if any, by its fingerprint or a release's space. `columns`: what else an
    item holds there.
    `directions`: it keeps no norms, but brings every vector to 1."""

    name: str
    dim: int | None
    metric: SearchMetric | None = None
    model: str | None = None
    columns: tuple[str, ...] = ()
    directions: bool = False


@dataclass(frozen=True)
class Window:
    """A range of keys, above `after` up to and with `last`; None is open. Windows of one listing
    cover every key there is or may come, once."""

    after: object = None
    last: object = None


@dataclass(frozen=True)
class Rows:
    """Items of a window that have a vector: keys as text, float32 [n, dim], unchecked.

    `keys` and `seen` are the store's own: the key in its type, and what tells that the row is
    still as it was read.
    """

    ids: list[str]
    vectors: Vectors
    keys: Sequence[object] = ()
    seen: Sequence[object] = ()

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class Target:
    """Where carried vectors go: a name in the same store, their dimension, and `mark`, the digest
    of the map or model that made them: vectors of another one are never mixed in. `model`: the
    fingerprint of the model in whose space they are, if it is known. `content`: the column that
    they are made of, where that is not the old vector: a change of it makes a new vector stale.
    `native`: a model made them, so nothing here can tell a stale one later. `reversible`: after the
    flip, triggers empty an old vector whose new one changes, until the old ones are dropped."""

    name: str
    dim: int
    mark: str
    model: str | None = None
    content: str | None = None
    native: bool = False
    reversible: bool = False


@dataclass(frozen=True)
class ColumnValues:
    """Values of one other column of a window, by key."""

    ids: list[str]
    values: list[str] = field(default_factory=list)


class Beside(Protocol):
    """The place for new vectors in a store; made, or found again, by `Source.beside`. An item that
    goes from the source takes its new vector along."""

    @property
    def at_once(self) -> int:
        """Windows that may be carried at the same time, each by a thread."""

    def pending(self, window: Window) -> Rows:
        """Rows of a window that have no vector here, or one of an old vector that has changed."""

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Put vectors [n, dim] for rows that are still as they were read; others stay pending."""

    def read(self, window: Window) -> Rows:
        """The new vectors of a window."""

    def count(self) -> int:
        """How many items have a new vector."""

    def finish(self) -> list[str]:
        """Close the writing; the steps by which the owner flips to the new vectors."""


@runtime_checkable
class Flippable(Beside, Protocol):
    """A place to which its store can flip while others write."""

    @property
    def flipped(self) -> bool:
        """Whether that has been done. Items without a new vector are then pending, and the others
        are their writers'."""

    @property
    def put_by_writers(self) -> bool:
        """Whether writers put new vectors before the flip, too: then nothing is checked by it."""

    def prepare_flip(self) -> AbstractContextManager[None]:
        """Build the indexes that the new vectors lack, and keep other flips out for the block.
        Raises BusyError while another flip is under way, and InvalidInputError."""

    def left(self) -> list[str]:
        """Sentences that tell the owner what a flip does not do."""

    def flip(self) -> AbstractContextManager[None]:
        """Keep everybody else out, for the rest to be carried in the block; then flip. Raises
        BusyError, and InvalidInputError where an item would lose its vector."""


@runtime_checkable
class Multiplied(Beside, Protocol):
    """A place that tells its vectors from others without sending them."""

    def products(self, window: Window, probe: Vectors) -> tuple[list[str], Vectors]:
        """The inner product of each new vector of a window with `probe` [dim], as float32 [n], and
        whose it is, in the order of `pending`."""


class Source(Protocol):
    """A store of vectors; a sixth kind is a file with this class and an address in opening.py."""

    def facts(self) -> Facts:
        """What the store says about itself."""

    def count(self) -> int:
        """How many items have a vector."""

    def windows(self, rows: int) -> Iterator[Window]:
        """Ranges of about `rows` items that cover all keys."""

    def read(self, window: Window) -> Rows:
        """Items of a window with their vectors. Raises InvalidInputError where dims differ."""

    def column(self, window: Window, name: str) -> ColumnValues:
        """Another column's values as text, of items where it is not empty."""

    def beside(self, target: Target) -> Beside:
        """Make the place for new vectors, or go on with it. Raises AlreadyExistsError where what
        has that name was not made by this map."""

    def rollback(self, name: str) -> bool:
        """Remove what `beside` made under this name; whether there was anything."""


@runtime_checkable
class WarningSource(Source, Protocol):
    """A source that knows what else happens in its store when new vectors are written."""

    def warnings(self, to: str) -> list[str]:
        """Sentences that warn of side effects of writing vectors under this name."""

    def obstacles(self, target: Target) -> list[str]:
        """Sentences that name what keeps the store from flipping to vectors that are to be carried
        to `target`; none if it can. Writes nothing."""


@runtime_checkable
class Reversible(Source, Protocol):
    """A source whose store keeps the old vectors after a flip and can give them their name back.

    `vector`: the column of its vectors.
    """

    vector: str

    def filled(self, column: str) -> int:
        """Count the rows that have a vector in a column; 0 where there is no such column."""

    def name_model(self, model: str) -> None:
        """Note the fingerprint of the model in whose space the vectors are."""

    def mark_of(self, column: str) -> str | None:
        """Return the digest of what wrote new vectors into a column; None for another column."""

    def flip_state(self, mark: str) -> Literal["old", "flipped", "finished", "unknown"]:
        """Tell whose vectors have the source's name: the old ones; those with the digest `mark`,
        while the old ones are there (flipped) or after they were dropped (finished); unknown where
        the old vectors of a flip are there, and the others have another digest or none."""

    def flip_back(self, to: str, *, lose: bool = False) -> int:
        """Give the old vectors their name back and drop the new ones.

        Args:
            to: The name that the new vectors had before the flip.
            lose: Go on where rows have only a new vector: they lose it.

        Returns:
            How many rows have no vector any more.

        Raises:
            InvalidInputError: Rows have only a new vector, an object keeps the new ones, or the
                flip did not watch the old ones (see Target.reversible).
            NotFoundError: There are no old vectors.
        """

    def drop_old(self) -> None:
        """Drop the old vectors after a flip. Raises NotFoundError, and InvalidInputError where an
        object of the database still depends on them."""


@runtime_checkable
class EmbeddedSource(Source, Protocol):
    """A source that `nobackfill embed` may have written."""

    def seconds_per_item(self) -> float | None:
        """What embedding an item took, where that was measured."""

    def reads(self) -> str:
        """Which texts a model that reads queries otherwise was given (see Embedder); empty for one
        that reads all alike."""


@runtime_checkable
class Dimensioned(Source, Protocol):
    """A source that may hold vectors of several dimensions, and counts them by itself."""

    def dims(self) -> dict[int, int]:
        """How many items have a vector of each dimension."""


@runtime_checkable
class Searchable(Source, Protocol):
    """A source that answers searches: what nobackfill.serve needs of a store."""

    def nearest(self, vector: Vectors, count: int, beside: str | None = None) -> list[str]:
        """Ids of the items nearest to a vector [dim], nearest first; `beside`: among new vectors
        of that name in place of the old ones."""

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Those of `ids` that are there, in any order, each once, with their old vectors."""

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Another column's values by id, where they are not empty."""

    def close(self) -> None:
        """Let go of what searches keep open."""


def fingerprint_of(*models: str | None) -> str | None:
    """The first that is a model's fingerprint, and no release's space."""
    return next((one for one in models if one is not None and not one.startswith(SPACE)), None)


def same_model(first: str | None, second: str | None, what: str) -> None:
    """Equal dimensions are not equal spaces. Raises IncompatibleSpaceError where two models are
    known to be two: the space of a release and the fingerprint of the files that it was made of
    name one model in two ways, so that neither contradicts the other."""
    if first is None or second is None or first.startswith(SPACE) != second.startswith(SPACE):
        return
    if first != second:
        raise IncompatibleSpaceError(
            f"{what}: expected vectors of one model, got {first[:12]}… and {second[:12]}…; the "
            "same dimension is not the same space (or this model was declared otherwise)"
        )


def metric_of(said: str, known: Mapping[str, SearchMetric], where: str) -> SearchMetric | None:
    """The metric that a store names, None where it names none. Raises InvalidInputError for one
    that is neither judged nor served."""
    if said and said not in known:
        raise InvalidInputError(
            f"{where}: its vectors are searched by {said}; expected {few(known)}, which are what "
            "nobackfill judges and serves"
        )
    return known.get(said)


def checked(rows: Rows, dim: int | None, where: str) -> Rows:
    """`rows` if every vector can be used. Raises InvalidInputError that names the first bad id."""
    if dim is not None and len(rows) and rows.vectors.shape[1] != dim:
        raise InvalidInputError(
            f"{where}: expected vectors of dimension {dim}, got {rows.vectors.shape[1]}; "
            "one column holds the vectors of one model"
        )
    bad = np.flatnonzero(~np.isfinite(rows.vectors).all(1))
    if len(bad):
        raise InvalidInputError(
            f"{where}: expected finite vectors, got NaN or infinity in "
            f"{few(repr(rows.ids[row]) for row in bad.tolist())}; mend or delete these items first"
        )
    return rows


def text_of(value: object) -> str:
    """A key or another value as text: bytes as the text that they are in UTF-8."""
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return repr(value)
    return str(value)


def file_name(name: str) -> str:
    """`name`, if a file beside the source may have it. Raises InvalidInputError."""
    if not name or "/" in name or name.startswith("."):
        raise InvalidInputError(
            f"--to: expected a name without '/' that begins with no dot, got {name!r}; new vectors "
            "go beside the old ones"
        )
    return name


def mode_of(path: Path) -> int:
    """The mode of a file: new vectors are readable by the readers of the old ones."""
    return path.stat().st_mode & 0o666


def read_mark(path: Path) -> object:
    """What a file of ours says of the map, None where there is none. Raises InvalidInputError."""
    try:
        return json.loads(path.read_bytes()) if path.is_file() else None
    except (ValueError, RecursionError, OSError) as error:
        raise InvalidInputError(f"{path}: cannot be read ({error}); remove it by hand") from error


def repeated(ids: Iterable[str]) -> list[str]:
    """The ids that stand there a second time."""
    seen: set[str] = set()
    return [name for name in ids if name in seen or seen.add(name)]  # type: ignore[func-returns-value]


def even(vectors: Sequence[Sequence[float] | Vectors], ids: Sequence[str], where: str) -> Vectors:
    """Vectors of one length as an array [n, dim]. Raises InvalidInputError where dims differ."""
    lengths = [len(vector) for vector in vectors]
    if 0 in lengths:
        raise InvalidInputError(f"{where}: expected vectors of 1 number or more, got one of none")
    other = next((row for row, n in enumerate(lengths) if n != lengths[0]), None)
    if other is not None:
        raise InvalidInputError(
            f"{where}: expected one dimension in all rows, got {lengths[0]} in {ids[0]!r} and "
            f"{lengths[other]} in {ids[other]!r}; are these two models' vectors?"
        )
    return np.asarray(vectors, np.float32).reshape(len(vectors), lengths[0] if lengths else 0)


# What a status of HTTP means; all others say that the request is unfit.
STATUSES: dict[int, type[NobackfillError]] = {
    401: NotPermittedError, 403: NotPermittedError, 404: NotFoundError, 429: BusyError,
    500: UnavailableError, 502: UnavailableError, 503: UnavailableError, 504: UnavailableError,
}  # fmt: skip


def server_address(place: str, kind: str, key: str) -> SplitResult:
    """The parts of https://HOST:PORT, or of http:// on this machine: vectors are private.

    `key`: the variable that a server's key belongs into. Raises ConfigurationError.
    """
    try:
        parts = urlsplit(place)
        host, _ = parts.hostname, parts.port
    except ValueError as error:
        raise ConfigurationError(f"{kind}: expected https://HOST:PORT as its address") from error
    if "@" in parts.netloc:
        raise ConfigurationError(f"{kind}: expected no password in the address, but a key in {key}")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigurationError(f"{kind}: expected https://HOST:PORT as its address")
    if parts.scheme == "http" and not is_loopback(host):
        raise ConfigurationError(f"{kind}: expected https://{host}; vectors are private")
    return parts
