"""Make native vectors of a store's rows: reuse those that exist, and embed the others.

A vector is reused only if the item has not changed since. `nobackfill embed` records a digest of
each item's content; the file of lazy re-embedding (natives.db) records a digest of the old vector.
"""

import hashlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder, open_embedder
from nobackfill.adopt.embedding.vector_folder import (
    CONTENT_DIGEST_COLUMN,
    EmbeddingRun,
    ItemList,
    content_digest,
    read_items,
)
from nobackfill.adopt.sources.parquet import ParquetSource
from nobackfill.adopt.sources.source import (
    QUERIES,
    Rows,
    Searchable,
    Source,
    Target,
    Window,
    check_same_model,
)
from nobackfill.errors import InvalidInputError, join_few
from nobackfill.serving.natives import NativeVectorFile, digest_old_vector
from nobackfill.vectors import InputKind, Vectors, normalise

# Rows of one step: a kill loses the model's work on so many at most.
WINDOW_ROWS = 512
# Most rows that a flip may write while it locks the store.
ROWS_UNDER_LOCK = 32
# Items of a window that are tried to learn the model's dimension.
_TRIED = 32
# If none of so many first items can be embedded, the model is the cause, not the items.
_HOPELESS = 100


class Originals(Protocol):
    """The originals of a store's items, which a model embeds.

    Attributes:
        kind: "text" or "image".
        column_or_path: Name of the column, or absolute path of the folder or file, that holds them.
        column: The column of the store; None if they are outside the store.
    """

    kind: InputKind
    column_or_path: str
    column: str | None

    def read_rows(self, rows: Rows, window: Window) -> dict[str, str | Path]:
        """Return the texts, or paths of images, of some rows by id.

        Args:
            rows: The rows.
            window: The range of the store that the rows are in.

        Returns:
            Rows without an original, or with an empty one, are left out.

        Raises:
            UnavailableError: The store's server does not answer.
            InvalidInputError: The store refuses the query, or a file of it is damaged.
            NotPermittedError: The server refuses the user.
            BusyError: Others hold the store, or its server has too many requests.
            NotFoundError: The table or the collection was deleted.
        """


class ColumnTexts:
    """The Originals in a column of the same store; each call of `read_rows` reads them.

    Args:
        source: The store.
        column: The column, which must exist.
    """

    kind: InputKind = "text"

    def __init__(self, source: Source, column: str) -> None:
        self._source, self._column = source, column
        self.column_or_path = column
        self.column: str | None = column

    def read_rows(self, rows: Rows, window: Window) -> dict[str, str | Path]:
        """Read the texts of rows from the column, by id; rows without a text are left out.

        The order is arbitrary. A store that cannot read by id reads the column of the whole window.

        Raises:
            InvalidInputError: There is no such column, or the store refuses the query.
            UnavailableError: The store's server does not answer.
            NotPermittedError: The server refuses the user.
            NotFoundError: The table or the collection was deleted.
            BusyError: Others hold the store, or its server has too many requests.
        """
        if isinstance(self._source, Searchable):
            return dict(self._source.texts(rows.ids, self._column))
        texts = self._source.read_column(window, self._column)
        wanted = set(rows.ids)
        pairs = zip(texts.ids, texts.values, strict=True)
        return {name: text for name, text in pairs if name in wanted}


class ListedOriginals:
    """The Originals in a file of texts or a folder of images, with the ids of the store.

    Args:
        items: The texts, or the paths of the images.
        path: The file or folder.

    Raises:
        RuntimeError: Links of the path form a loop.
    """

    column: str | None = None

    def __init__(self, items: ItemList, path: Path) -> None:
        self.kind, self.column_or_path = items.kind, originals_name(None, str(path))
        self._values: dict[str, str | Path] = dict(zip(items.ids, items.contents, strict=True))

    def read_rows(self, rows: Rows, window: Window) -> dict[str, str | Path]:
        """Return the texts, or paths, of rows by id; rows that the list lacks are left out.

        Files that were deleted since the list was made are not left out.
        """
        del window
        return {name: self._values[name] for name in rows.ids if name in self._values}


def originals_name(column: str | None, items_address: str | None) -> str:
    """Return the name of the originals for `native_vector_digest`.

    Args:
        column: Column of the store; ignored if `items_address` is given.
        items_address: Folder of images or FILE.jsonl; None for a column.

    Returns:
        The absolute path of `items_address` with links resolved, or else the column. The path need
        not exist. Without both, the text "None".

    Raises:
        RuntimeError: Links of the path form a loop.
    """
    return str(Path(items_address).resolve()) if items_address is not None else str(column)


def native_vector_digest(model: str, name_of_originals: str) -> str:
    """Return the digest that marks native vectors in a store, as 64 hexadecimal digits.

    Texts in any length; equal arguments give the same digest.

    Args:
        model: The model's fingerprint.
        name_of_originals: The name of the originals, as `originals_name` returns it.

    Raises:
        UnicodeEncodeError: `name_of_originals` has a lone surrogate, as a path has that is no
            UTF-8.
    """
    return hashlib.sha256(f"native\0{model}\0{name_of_originals}".encode()).hexdigest()


def open_originals(source: Source, column: str | None, items_address: str | None) -> Originals:
    """Open the originals of a store's items.

    Args:
        source: The store.
        column: Column of the store with texts; None if `items_address` is given.
        items_address: Folder of images, or FILE.jsonl with a field `text`; its items are read now.

    Raises:
        InvalidInputError: Both or neither of `column` and `items_address` are given, the store has
            no such column; or as `read_items`. An id of `items_address` occurs twice, or a line of
            FILE.jsonl is malformed.
        NotFoundError: There is no such path, or no item in it. The table or the collection was
            deleted.
        UnavailableError: The store's server does not answer.
        NotPermittedError: The server of the store refuses the user.
        ConfigurationError: `items_address` is the address of a store, which would send vectors or a
            password unencrypted, or needs an extra that is not installed.
        BusyError: Others hold the store, or its server has too many requests.
        IncompatibleSpaceError: As `read_items`.
    """
    if (column is None) == (items_address is None):
        raise InvalidInputError(
            "expected either --column NAME or --items PATH, which name the texts or images that "
            "the new model embeds, got both or neither; give exactly one"
        )
    if items_address is not None:
        return ListedOriginals(read_items(items_address, column="text"), Path(items_address))
    assert column is not None
    _check_column(source, column)
    return ColumnTexts(source, column)


def _check_column(source: Source, column: str) -> None:
    """Raise InvalidInputError where a store has no such column. Not all stores list them."""
    facts = source.facts()
    known, name = facts.columns, facts.name
    if column in known:
        return
    try:
        # sqlite-vec reads a column of another table as TABLE.COLUMN; Qdrant lists no fields.
        if known and "." not in column:
            raise InvalidInputError(f"{name}: no column {column!r}")
        source.read_column(next(iter(source.windows(1)), Window()), column)
    except InvalidInputError as error:
        raise InvalidInputError(
            f"{name}: expected --column to name a column of texts, got {column!r}; correct the "
            f"name. Besides the key and the vectors, the columns are {join_few(known) or 'none'}"
        ) from error


class VectorFolder:
    """A folder of vectors that `nobackfill embed` wrote, read by id.

    Later changes of the folder are not seen.

    Attributes:
        model: Fingerprint of the model that computed the vectors.
        dim: Their dimension; 0 if the first file has no vectors.

    Args:
        path: The folder. Opening reads its ids and digests, and its first file.

    Raises:
        NotFoundError: There is no Parquet file.
        InvalidInputError: The folder has vectors of queries, records no model or no digests of
            contents, or a file is damaged.
        IncompatibleSpaceError: Two files record different models.
    """

    def __init__(self, path: Path) -> None:
        self._source = ParquetSource(path)
        facts = self._source.facts()
        if self._source.text_role().startswith(QUERIES):
            raise InvalidInputError(
                f"{path}: expected vectors of the items, got vectors of queries; give a folder of "
                "`nobackfill embed` without --queries"
            )
        if facts.model is None or CONTENT_DIGEST_COLUMN not in facts.columns:
            raise InvalidInputError(
                f"{path}: expected a folder of `nobackfill embed` that records the model and the "
                f"content of each vector (column {CONTENT_DIGEST_COLUMN!r}); embed the items into "
                "a new folder"
            )
        self.model: str = facts.model
        self._places: dict[str, tuple[int, int]] = {}
        self._digests: dict[str, str] = {}
        self._windows = list(self._source.windows(0))
        for number, window in enumerate(self._windows):
            digests = self._source.read_column(window, CONTENT_DIGEST_COLUMN)
            self._places |= {name: (number, row) for row, name in enumerate(digests.ids)}
            self._digests |= dict(zip(digests.ids, digests.values, strict=True))
        self._loaded: dict[int, Vectors] = {}
        self.dim = self._part(0).shape[1]

    def get(self, digests: dict[str, str]) -> dict[str, Vectors]:
        """Return vectors of items whose content has not changed since they were embedded.

        An id that the folder lacks has no vector; if it has one twice, the last counts. Up to 16
        files stay in memory.

        Args:
            digests: Present digests of contents by id, as `content_digest` returns them.

        Returns:
            Vectors, float32 [dim], by id; items without a vector of this content are left out.

        Raises:
            InvalidInputError: A file of the folder is damaged or gone.
        """
        same = [name for name, one in digests.items() if self._digests.get(name) == one]
        vectors: dict[str, Vectors] = {}
        for name in same:
            number, row = self._places[name]
            vectors[name] = self._part(number)[row]
        return vectors

    def _part(self, number: int) -> Vectors:
        """Vectors of one file; some stay in memory, as rows of a window lie close together."""
        if number not in self._loaded:
            if len(self._loaded) >= 16:
                self._loaded.pop(next(iter(self._loaded)))
            self._loaded[number] = self._source.read(self._windows[number]).vectors
        return self._loaded[number]


class NativeVectorComputer:
    """The VectorComputer that gives rows the new model's own vectors.

    A vector is taken from `folder`, else from `natives`, else `embedder` computes it. It closes
    nothing that it is given.

    If `folder` and `natives` both have a vector, that of the folder counts.

    Attributes:
        model: Fingerprint of the new model.
        missing_reasons: For each item without a new vector, its id and the reason.
    """

    window_rows = WINDOW_ROWS

    def __init__(
        self,
        contents: Originals,
        dim: int,
        *,
        embedder: Embedder | None = None,
        folder: VectorFolder | None = None,
        natives: NativeVectorFile | None = None,
        ignores_norms: bool = False,
        batch_size: int = 32,
        pause: Callable[[], None] | None = None,
    ) -> None:
        """Combine the origins of native vectors. At least one of `embedder` and `folder` is needed.

        Args:
            contents: The originals.
            dim: Dimension of the vectors.
            embedder: The new model; None to use stored vectors alone.
            folder: Vectors that `nobackfill embed` wrote; None: none.
            natives: Vectors of lazy re-embedding, and the items that searches returned; None: none.
            ignores_norms: Whether to normalise every vector, as the store does.
            batch_size: Number of items that the model gets at a time.
            pause: Called before each window; an error that it raises ends the run. None: no call.

        Raises:
            InvalidInputError: The model reads another kind of item than `contents`, or there is
                neither a model nor a folder.
            IncompatibleSpaceError: The folder holds another model's vectors.
        """
        models = [
            one for one in (embedder and embedder.fingerprint, folder and folder.model) if one
        ]
        if not models:
            raise InvalidInputError(
                "expected --with MODEL or --vectors FOLDER, from which the new vectors come, got "
                "neither; give one of them"
            )
        check_same_model(models[0], models[-1], "--with and --vectors")
        if embedder is not None and embedder.input_kind not in (None, contents.kind):
            raise InvalidInputError(
                f"the model of --with reads {embedder.input_kind}s, but the items are "
                f"{contents.kind}s; give other items (--column, --items) or another model"
            )
        self.model: str = models[0]
        self.missing_reasons: dict[str, str] = {}
        self._contents, self._dim, self._embedder, self._batch = contents, dim, embedder, batch_size
        self._folder, self._natives, self._directions = folder, natives, ignores_norms
        self._pause = pause
        # Ids that `first_ids` returned because searches wanted them, and the last id that it
        # returned because the file has its vector; None after the last one.
        self._wanted = set[str]()
        self._after: str | None = ""
        self._any = False
        self._seconds_per_item = 0.0

    @property
    def rows_under_lock(self) -> int:
        """Return the number of rows that the model embeds in about a second, 1 to 32; 32 before the
        first one was embedded.

        It changes as the model is measured.
        """
        if not self._seconds_per_item:
            return ROWS_UNDER_LOCK
        return min(ROWS_UNDER_LOCK, max(1, int(1 / self._seconds_per_item)))

    def target(self, name: str, *, must_be_reversible: bool = False) -> Target:
        """Describe the place of these vectors in the store; nothing is written.

        Args:
            name: Name of the new vectors.
            must_be_reversible: As in `Target`.

        Returns:
            A target whose digest is that of the model and of the name of the originals. Its
            `content_column` is the column of the originals, or None where they are outside of the
            store.

        Raises:
            UnicodeEncodeError: The path of the originals is no UTF-8.
        """
        return Target(
            name,
            self._dim,
            native_vector_digest(self.model, self._contents.column_or_path),
            self.model,
            self._contents.column,
            is_native=True,
            must_be_reversible=must_be_reversible,
        )

    def priority_ids(self) -> list[str]:
        """Return ids whose vectors to write next, before all others.

        First come the items of which lazy re-embedding stored vectors, then the items that searches
        want, most wanted first. Each id is returned once.

        Returns:
            At most 512 ids; none without a file of lazy re-embedding.

        Raises:
            VerificationError: The file of lazy re-embedding is damaged.
            BusyError: Another process holds the file.
            CannotWriteError: The file cannot be read or written.
        """
        if self._natives is None:
            return []
        if self._after is not None:
            ids = [name for name, _ in self._natives.list_ids(self._after, WINDOW_ROWS)]
            self._after = ids[-1] if ids else None
            if ids:
                return ids
        wanted = self._natives.requested_ids(WINDOW_ROWS + len(self._wanted))
        ids = [name for name in wanted if name not in self._wanted][:WINDOW_ROWS]
        self._wanted.update(ids)
        return ids

    def compute(self, rows: Rows, window: Window) -> tuple[Rows, Vectors]:
        """Make the native vectors of pending rows.

        New vectors of items that `priority_ids` returned because searches want them are also
        stored in the file of lazy re-embedding. Searches then use them at once.

        `missing_reasons` grows; the caller clears it.

        Args:
            rows: Rows of the store, with their old vectors.
            window: The range of the store that the rows are in.

        Returns:
            The m rows that have a new vector, and the vectors, float32 [m, dim]. The others are in
            `missing_reasons`, with the reason.

        Raises:
            InvalidInputError: Vectors have several dimensions, or none of the first 100 items or
                more can be embedded. A file of the folder, or of an original, cannot be read.
            CannotWriteError: The file of lazy re-embedding cannot be read or written.
            UnavailableError: The store or an endpoint does not answer.
            BusyError: An endpoint is still busy after its patience, or `pause` raises it. Others
                hold the store or the file of lazy re-embedding, or its server has too many
                requests.
            NotPermittedError: The store or an endpoint refuses the user or the key.
            NotFoundError: The table or the collection was deleted.
            VerificationError: The file of lazy re-embedding is damaged.
            UnicodeEncodeError: A text of the store has a lone surrogate, and vectors of a folder
                are reused.
            Exception: Any other error of `pause`.
        """
        if self._pause is not None:
            self._pause()
        values = self._contents.read_rows(rows, window)
        self.missing_reasons |= {
            name: "it has no text or image" for name in rows.ids if name not in values
        }
        vectors = self._reused(rows, values)
        rest = [name for name in rows.ids if name in values and name not in vectors]
        if rest and self._embedder is None:
            self.missing_reasons |= dict.fromkeys(
                rest, "the folder of --vectors has no vector of its present content"
            )
        elif rest:
            vectors |= self._embedded(rest, values)
        self._store_wanted(rows, vectors)
        places = [row for row, name in enumerate(rows.ids) if name in vectors]
        if not places:
            return Rows([], np.empty((0, 0), np.float32)), np.empty((0, 0), np.float32)
        dims = {len(vector) for vector in vectors.values()}
        if len(dims) > 1:
            raise InvalidInputError(
                f"expected new vectors of one dimension, got {join_few(sorted(dims))}: the model "
                "has changed since the vectors of --vectors or --natives were computed. Leave that "
                "option out"
            )
        made = np.stack([vectors[rows.ids[row]] for row in places]).astype(np.float32)
        some = rows if len(places) == len(rows) else rows.select(places)
        return some, normalise(made) if self._directions else made

    def recompute(self, rows: Rows) -> None:
        """Return None, because to embed items again costs as much as the first time.

        So `carry` compares only the vectors of its own run.
        """
        del rows

    def _store_wanted(self, rows: Rows, vectors: dict[str, Vectors]) -> None:
        """Store the vectors that searches want in the file of lazy re-embedding."""
        wanted = self._wanted & vectors.keys()
        places = [row for row, name in enumerate(rows.ids) if name in wanted]
        if self._natives is not None and places:
            self._natives.store_vectors(
                [rows.ids[row] for row in places],
                [digest_old_vector(rows.vectors[row]) for row in places],
                np.stack([vectors[rows.ids[row]] for row in places]).astype(np.float32),
            )

    def _reused(self, rows: Rows, values: dict[str, str | Path]) -> dict[str, Vectors]:
        vectors: dict[str, Vectors] = {}
        if self._natives is not None:
            known = self._natives.read_vectors(rows.ids)
            for row, name in enumerate(rows.ids):
                if name in known and known[name].old_digest == digest_old_vector(rows.vectors[row]):
                    vectors[name] = known[name].vector
        if self._folder is not None:
            digests = {name: content_digest(value) for name, value in values.items()}
            vectors |= self._folder.get(digests)
        return vectors

    def _embedded(self, ids: list[str], values: dict[str, str | Path]) -> dict[str, Vectors]:
        assert self._embedder is not None
        contents = [values[name] for name in ids]
        items = ItemList(self._contents.kind, ids, contents)  # type: ignore[arg-type]
        run = EmbeddingRun(items, self._embedder, self._batch, self.missing_reasons.__setitem__)
        by_id: dict[str, Vectors] = {}
        started = time.perf_counter()
        for some, vectors in run.embed(range(len(ids))):
            by_id |= {ids[row]: vector for row, vector in zip(some, vectors, strict=True)}
        self._seconds_per_item = (time.perf_counter() - started) / len(ids)
        self._any = self._any or bool(by_id)
        if not self._any and len(ids) >= _HOPELESS:
            name = ids[-1]
            raise InvalidInputError(
                f"none of the first {len(ids)} items could be embedded; the reason for {name!r} "
                f"is: {self.missing_reasons[name]}. Correct --with, or --column or --items"
            )
        return by_id


def open_native_vectors(
    source: Source,
    contents: Originals,
    *,
    model: str | None = None,
    model_name: str | None = None,
    folder: Path | None = None,
    natives_file: Path | None = None,
    pause: Callable[[], None] | None = None,
) -> NativeVectorComputer:
    """Open the model, the folder and the file from which native vectors of a store come.

    Without a folder, one item is embedded to learn the dimension.

    The caller does not close anything: the file of lazy re-embedding closes with the maker.

    Args:
        source: The store.
        contents: The originals of its items.
        model: The new model, as `open_embedder` takes it; None to use stored vectors alone.
        model_name: Its name at an endpoint.
        folder: Folder of vectors that `nobackfill embed` wrote; None: none.
        natives_file: File of lazy re-embedding, which is created if it is missing; None: none. It
            is not used where neither the model nor the folder tells a fingerprint.
        pause: Called before each window; an error that it raises ends the run. None: no call.

    Raises:
        InvalidInputError: There is neither a model nor a folder, the folder has vectors of queries
            or no digests, or the model can embed no item of the store. The model reads another kind
            of item than the originals.
        IncompatibleSpaceError: Folder, file and model are not of one model.
        NotFoundError: There is no such folder, model file or module. The table or the collection
            was deleted.
        UnavailableError: The store or an endpoint does not answer.
        BusyError: An endpoint is still busy after its patience, or another process holds the file.
            Others hold the store, or its server has too many requests. Another process exports the
            model's folder for longer than an hour.
        NotPermittedError: The store or an endpoint refuses the user or the key.
        ConfigurationError: The address of an endpoint is not allowed, or an extra is not installed.
        VerificationError: The file of lazy re-embedding is damaged.
        CannotWriteError: The file of lazy re-embedding cannot be created, or the cache of exported
            models cannot be written.
        OSError: A file of the model cannot be read.
        Exception: Any other error of the code of a model `module:function`, when it is imported.
    """
    embedder = None if model is None else open_embedder(model, name=model_name)
    stored = None if folder is None else VectorFolder(folder)
    facts = source.facts()
    fingerprint = embedder.fingerprint if embedder else stored.model if stored else None
    dim = 0
    if stored is not None:
        dim = stored.dim
    elif embedder is not None:
        dim = _dimension(source, contents, embedder)
    known = None
    if natives_file is not None and fingerprint is not None:
        known = NativeVectorFile(natives_file, fingerprint, dim)
    return NativeVectorComputer(
        contents,
        dim,
        embedder=embedder,
        folder=stored,
        natives=known,
        ignores_norms=facts.normalises,
        pause=pause,
    )


def _dimension(source: Source, contents: Originals, embedder: Embedder) -> int:
    """Embed items one by one until one succeeds, and return the dimension of its vector."""
    for window in source.windows(WINDOW_ROWS):
        rows = source.read(window)
        values = list(contents.read_rows(rows, window).items())
        for name, value in values[:_TRIED]:
            items = ItemList(contents.kind, [name], [value])  # type: ignore[arg-type]
            for _, vectors in EmbeddingRun(items, embedder, 1, None).embed([0]):
                return int(vectors.shape[1])
    raise InvalidInputError(
        f"{source.facts().name}: the new model could embed none of the items that were tried "
        f"({_TRIED} of every {WINDOW_ROWS} in the store); check --with, and --column or --items"
    )
