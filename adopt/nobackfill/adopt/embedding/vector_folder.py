"""Read items, and write the folder of Parquet files of `nobackfill embed`.

An interrupted run leaves complete files of its finished batches; the next run embeds the other
items. Each vector is stored with a digest of the content that it was computed from.
"""

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import (
    MODEL,
    ROLE_KEY,
    SECONDS_KEY,
    ParquetSource,
    read_table,
    table_to_parquet,
    vectors_to_parquet,
)
from nobackfill.adopt.sources.source import Searchable, Source, repeated_ids
from nobackfill.durable import make_dir, remove_temporary_files, write_file
from nobackfill.errors import (
    IncompatibleSpaceError,
    InvalidInputError,
    NotFoundError,
    UnusableItemsError,
)
from nobackfill.extras import require_extra
from nobackfill.picture_files import is_hidden_or_system, is_picture
from nobackfill.text import read_text_lines
from nobackfill.vectors import InputKind, Vectors

with require_extra("adopt"):
    import pyarrow as pa


_WINDOW = 1000
# Column with the digest of each item's content; see content_digest.
CONTENT_DIGEST_COLUMN = "content"


@dataclass(frozen=True)
class ItemList:
    """Items to embed.

    Attributes:
        kind: "image" or "text".
        ids: Unique ids, at least one.
        contents: Texts, or paths of images, in the order of `ids`.
        skipped_file_count: Number of files in a folder of images that were left out: hidden, or not
            named as images.
    """

    kind: InputKind
    ids: list[str]
    contents: list[str] | list[Path]
    skipped_file_count: int = 0


def read_items(
    address: str,
    *,
    column: str,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
    only: Collection[str] | None = None,
    refusals: dict[str, str] | None = None,
) -> ItemList:
    """Read the items to embed: texts into memory, or the paths of images.

    The order is that of the source or file, and of sorted paths for images. Wanted texts that a
    source reads by id are sorted by it.

    Args:
        address: A folder with images at any depth, whose ids are their paths in it; FILE.jsonl with
            an object in each line; or a source, as `open_source` opens it. Hidden files, `@eaDir`
            and `__MACOSX` are left out. Images are chosen by their suffix, and not opened.
        column: Column of the source, or field of the file, with the texts; images ignore it.
        key: Column or field with the ids; None for the primary key or `id`. Images ignore it.
        vector: Column of the source's vectors; None for the only one.
        where: Condition of the rows in SQL, for stores that take one; None for all rows.
        only: Ids of the items to return; None: all. Unknown ids are ignored.
        refusals: Receives the reason of each line of FILE.jsonl that is left out: under FILE:LINE
            if it is malformed, under its id if an earlier line has this id or the text is no valid
            Unicode. None: the first such line raises its error.

    Returns:
        At least one item. Items of a source without a vector or a text are left out.

    Raises:
        NotFoundError: There is no such file or store, no item in it, or none of the ids of `only`.
        InvalidInputError: An id occurs twice, an id or a text is no valid Unicode, there is no such
            column, a line of FILE.jsonl is malformed (with `refusals`: all are), or the store
            takes no `where`.
        UnavailableError: The source's server does not answer.
        NotPermittedError: The server refuses the user.
        ConfigurationError: The address would send a password unencrypted, an extra is not
            installed, or a plug-in cannot be imported.
        BusyError: Others hold the store, or its server has too many requests.
        IncompatibleSpaceError: Files of one folder record different models.
        OSError: A path is too long, or this user may not search a folder.
    """
    path = Path(address)
    # Files take no condition: `open_source` refuses it.
    if where is None and path.suffix == ".jsonl":
        found = _line_texts(path, key or "id", column, refusals)
    elif where is None and path.is_dir() and any(_is_picture(p, path) for p in path.rglob("*")):
        every = [p for p in path.rglob("*") if p.is_file()]
        files = sorted(p for p in every if _is_picture(p, path))
        names = [p.relative_to(path).as_posix() for p in files]
        images = _wanted("image", names, files, only, address)
        return replace(images, skipped_file_count=len(every) - len(files))
    else:
        found = _column_texts(_source(address, key, vector, where), column, only)
    return _wanted("text", [name for name, _ in found], [text for _, text in found], only, address)


def _line_texts(
    path: Path, key: str, column: str, refusals: dict[str, str] | None
) -> list[tuple[str, str]]:
    """Read ids and texts of a JSONL file; with `refusals`, without the lines that have no use."""
    lines = read_text_lines(path, refusals, id_key=key, text_key=column)
    if refusals is None:
        return [(one.id, one.text) for one in lines]
    texts: dict[str, str] = {}
    for one in lines:
        if one.id in texts:
            refusals[one.id] = (
                "an earlier line has the same id, and only its text is embedded; change the id of "
                "this line, or remove the line"
            )
        elif not _is_unicode(one.id + one.text):
            refusals[one.id] = (
                "expected an id and a text in valid Unicode, found half of a surrogate pair; "
                "correct this line"
            )
        else:
            texts[one.id] = one.text
    if refusals and not texts:
        # Such as a wrong `key`: the lines need not be named one by one.
        name, reason = next(iter(refusals.items()))
        refusals.clear()
        raise InvalidInputError(f"{name}: {reason}")
    return list(texts.items())


def _column_texts(
    source: Source, column: str, only: Collection[str] | None
) -> list[tuple[str, str]]:
    """Read ids and texts of a column; a few wanted ones by id where the source can."""
    if only is not None and isinstance(source, Searchable):
        # An error: an id is no key of this source, or there is no such column.
        with suppress(InvalidInputError):
            ids = sorted(only)
            parts = (ids[first : first + _WINDOW] for first in range(0, len(ids), _WINDOW))
            found = [pair for part in parts for pair in sorted(source.texts(part, column).items())]
            source.close()
            return found
    found = []
    for window in source.windows(_WINDOW):
        values = source.read_column(window, column)
        found += [
            pair
            for pair in zip(values.ids, values.values, strict=True)
            if only is None or pair[0] in only
        ]
    return found


def _is_picture(file: Path, folder: Path) -> bool:
    below = file.relative_to(folder).parts
    return is_picture(file.name) and not any(map(is_hidden_or_system, below)) and file.is_file()


def _source(address: str, key: str | None, vector: str | None, where: str | None) -> Source:
    try:
        return open_source(address, key=key, vector=vector, where=where)
    except NotFoundError as error:
        if not Path(address).is_dir():
            raise
        raise NotFoundError(
            f"{address}: expected a folder with Parquet files or image files (JPEG, PNG or WebP), "
            "found neither; name the folder of the items"
        ) from error


def _wanted(
    kind: InputKind,
    ids: list[str],
    values: list[str] | list[Path],
    only: Collection[str] | None,
    address: str,
) -> ItemList:
    if twice := repeated_ids(ids):
        raise InvalidInputError(
            f"{address}: expected each id once, found {twice[0]!r} at several items; change their "
            "ids, or remove all but one of them"
        )
    if only is not None:
        rows = [row for row, name in enumerate(ids) if name in only]
        ids, values = [ids[row] for row in rows], [values[row] for row in rows]  # type: ignore[assignment]
    for text in (*ids, *(map(str, values) if kind == "text" else ())):
        if not _is_unicode(text):
            raise InvalidInputError(
                f"{address}: expected ids and texts in valid Unicode, found half of a surrogate "
                f"pair in {text[:64]!r}; correct this id or text"
            )
    if not ids:
        raise NotFoundError(
            f"{address}: expected items to embed, found none"
            + (
                " with the ids of --only; correct the ids in the file of --only"
                if only is not None
                else "; name another folder or file"
            )
        )
    return ItemList(kind, ids, values)


def content_digest(value: str | Path) -> str:
    """Return the BLAKE2b digest of a text in UTF-8, or of a file's bytes, as 32 hex digits.

    Args:
        value: A text, or the path of a file, which is read whole.

    Raises:
        InvalidInputError: The file cannot be read.
        UnicodeEncodeError: A text has a lone surrogate.
    """
    try:
        data = value.encode() if isinstance(value, str) else value.read_bytes()
    except OSError as error:
        raise InvalidInputError(
            f"{value}: cannot read this file ({error.strerror}); check that it exists and its "
            "permissions"
        ) from error
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _is_unicode(text: str) -> bool:
    """Return whether a text has no lone surrogate, which JSON's escapes and file names allow."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


# Items of a Parquet file.
PART_ITEMS = 500
# If none of so many items can be embedded, the model is the cause, not the items.
_HOPELESS = 1000


def embed_into(
    folder: Path,
    items: ItemList,
    embedder: Embedder,
    *,
    batch_size: int = 32,
    progress: Callable[[int], None] | None = None,
    on_failure: Callable[[str, str], None] | None = None,
) -> int:
    """Embed the items that are not yet in a folder, and write their vectors into it.

    Vectors of items whose content has changed since are removed first and computed again. Vectors
    of items that are not in `items` stay. Finished batches stay after any error or interrupt; call
    it again to continue.

    An item that failed in an earlier run is tried again. Two runs must not write to one folder at
    the same time.

    Args:
        folder: The folder of Parquet files; it is created if it does not exist. Temporary files of
            a killed run are deleted. Files have mode 0600 and up to 500 items.
        items: The items.
        embedder: The model.
        batch_size: Number of items that the model gets at a time. A batch that fails is halved. At
            least 1.
        progress: Called with the number of items tried so far. Its errors end the run; what was
            embedded before is stored.
        on_failure: Called with the id and the reason of each item that the model cannot embed;
            such an item is left out. None leaves it out silently. Its errors end the run, too.

    Returns:
        The number of items embedded by this run.

    Raises:
        IncompatibleSpaceError: The folder holds vectors of another model, or of another role of
            texts (documents, queries).
        InvalidInputError: The model reads another kind of item, returns vectors of several
            dimensions, or embeds none of the first 1,000 items; or a file of the folder is damaged.
            The model's output cannot be used, whatever the items are.
        CannotWriteError: The folder cannot be written.
        UnavailableError: An endpoint does not answer.
        BusyError: An endpoint is still busy after its patience, or `progress` raises it.
        NotPermittedError: An endpoint refuses the key.
        UnicodeEncodeError: A text has a lone surrogate; `read_items` refuses such texts.
        ValueError: The last file part-….parquet of the folder has no number in its name.
        Exception: Any error of `progress` and `on_failure`.
    """
    if embedder.input_kind not in (None, items.kind):
        raise InvalidInputError(
            f"the model of --with reads {embedder.input_kind}s, but the items are {items.kind}s; "
            "give other items or another model"
        )
    make_dir(folder)
    remove_temporary_files(folder)
    done, files = _done(folder, items, embedder)
    rest = [row for row, name in enumerate(items.ids) if name not in done]
    run = EmbeddingRun(items, embedder, batch_size, on_failure)
    for first in range(0, len(rest), PART_ITEMS):
        ids: list[str] = []
        digests: list[str] = []
        vectors: list[Vectors] = []
        part = rest[first : first + PART_ITEMS]
        # Before the model reads a file: one that is replaced meanwhile has another digest.
        contents = {row: _digest_or_empty(items.contents[row]) for row in part}
        started = time.perf_counter()
        try:
            for rows, made in run.embed(part):
                ids += [items.ids[row] for row in rows]
                digests += [contents[row] for row in rows]
                vectors.append(made)
                if progress is not None:
                    progress(run.attempted_count)
        finally:
            # Also after an interrupt: the batches may have cost money.
            if ids:
                seconds = (time.perf_counter() - started) / len(ids)
                file = folder / f"part-{files:05d}.parquet"
                _write(file, ids, digests, vectors, embedder, seconds)
                files += 1
    return run.embedded_count


def _digest_or_empty(value: str | Path) -> str:
    """Return the content's digest; "" for a file that cannot be read, which the model refuses."""
    try:
        return content_digest(value)
    except InvalidInputError:
        return ""


class EmbeddingRun:
    """Embeds items in batches, and halves a batch that fails until it finds the failing items.

    Attributes:
        embedded_count: Number of items embedded so far.
        attempted_count: Number of items tried so far, with failing ones.

    Args:
        items: The items.
        embedder: The model.
        batch_size: Number of items that the model gets at a time, at least 1. It falls for later
            batches if the model takes each item but not so many at a time.
        on_failure: Called with the id and the reason of each failing item; None: no call.
    """

    def __init__(
        self, items: ItemList, embedder: Embedder, batch_size: int,
        on_failure: Callable[[str, str], None] | None,
    ) -> None:  # fmt: skip
        self._items, self._embedder, self._refuse = items, embedder, on_failure
        self._batch = batch_size
        self._dim: int | None = None
        self.embedded_count = self.attempted_count = 0

    def embed(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], Vectors]]:
        """Embed some of the items, and yield them batch by batch, without failing ones.

        The model runs when the next batch is requested. A second call continues the counts, and
        expects the same dimension.

        Args:
            rows: Their numbers in the list of items.

        Yields:
            Numbers of embedded items, and their vectors, float32 [m, dim].

        Raises:
            InvalidInputError: Vectors of this run have several dimensions, or none of the first
                1,000 items can be embedded. The model's output cannot be used, whatever the items
                are.
            UnavailableError: An endpoint does not answer.
            BusyError: An endpoint is still busy after its patience.
            NotPermittedError: An endpoint refuses the key.
            IndexError: There is no item of such a number.
            Exception: Any error of `on_failure`.
        """
        start = 0
        while start < len(rows):
            some = rows[start : start + self._batch]
            start += len(some)
            refused = self.attempted_count - self.embedded_count
            sizes = []
            for taken, vectors in self._halved(some):
                sizes.append(len(taken))
                yield taken, vectors
            if len(sizes) > 1 and self.attempted_count - self.embedded_count == refused:
                # Each item is taken, only not so many at a time.
                self._batch = max(sizes)

    def _halved(self, rows: Sequence[int]) -> Iterator[tuple[Sequence[int], Vectors]]:
        values = [self._items.contents[row] for row in rows]
        try:
            vectors = self._embedder.embed(values)  # type: ignore[arg-type]
        except UnusableItemsError as error:
            if len(rows) == 1:
                self._refused(rows[0], error)
                return
        else:
            if self._dim not in (None, vectors.shape[1]):
                raise InvalidInputError(
                    f"the model of --with: expected vectors of one dimension, got {self._dim} for "
                    f"the first items and {vectors.shape[1]} for later ones; check that --with "
                    "names one model"
                )
            self._dim = vectors.shape[1]
            self.embedded_count += len(rows)
            self.attempted_count += len(rows)
            yield rows, vectors
            return
        half = len(rows) // 2
        yield from self._halved(rows[:half])
        yield from self._halved(rows[half:])

    def _refused(self, row: int, error: UnusableItemsError) -> None:
        self.attempted_count += 1
        if self._refuse is not None:
            why = str(error).removeprefix(f"{self._items.contents[row]}: ")
            self._refuse(self._items.ids[row], why)
        if self.embedded_count == 0 and self.attempted_count >= _HOPELESS:
            raise InvalidInputError(
                f"none of the first {_HOPELESS} items could be embedded. The last one: {error}. "
                "Check the model of --with"
            ) from error


def _write(
    path: Path,
    ids: list[str],
    digests: list[str],
    vectors: list[Vectors],
    embedder: Embedder,
    seconds: float,
) -> None:
    metadata = {MODEL: embedder.fingerprint.encode(), SECONDS_KEY: f"{seconds:.6g}".encode()}
    if embedder.text_role:
        metadata[ROLE_KEY] = embedder.text_role.encode()
    joined = np.concatenate(vectors)
    others = {CONTENT_DIGEST_COLUMN: pa.array(digests)}
    write_file(
        path, vectors_to_parquet("id", pa.array(ids), "vector", joined, metadata, others), 0o600
    )


def _done(folder: Path, items: ItemList, embedder: Embedder) -> tuple[set[str], int]:
    """Return the ids in the folder and the number of its next file.

    Vectors of items whose content has changed since are removed from their file.

    Raises:
        IncompatibleSpaceError: The folder holds another model's vectors, or texts of another role.
    """
    files = sorted(folder.glob("part-*.parquet"))
    if not files:
        return set(), 0
    source = ParquetSource(folder)
    if source.facts().model != embedder.fingerprint:
        raise IncompatibleSpaceError(
            f"{folder}: expected vectors of the model of --with, found those of another model, or "
            "of this model with other settings; name another folder with --out"
        )
    if source.text_role() != embedder.text_role:
        raise IncompatibleSpaceError(
            f"{folder}: expected vectors of {embedder.text_role[:30] or 'texts of any role'}, "
            f"found vectors of {source.text_role()[:30] or 'texts of any role'}; name another "
            "folder with --out"
        )
    values: dict[str, str | Path] = dict(zip(items.ids, items.contents, strict=True))
    present: set[str] = set()
    for file in files:
        present |= _unchanged(file, values)
    return present, int(files[-1].stem.removeprefix("part-")) + 1


def _unchanged(file: Path, values: dict[str, str | Path]) -> set[str]:
    """Return the ids of a file, and remove the rows of items whose content is another one now.

    `values`: the present contents by id. A file of before November 2026 has no digests: its rows
    stay.
    """
    table = read_table(file)
    ids: list[str] = table["id"].to_pylist()
    if CONTENT_DIGEST_COLUMN not in table.column_names:
        return set(ids)
    digests = table[CONTENT_DIGEST_COLUMN].to_pylist()
    kept = [
        name not in values or digest == _digest_or_empty(values[name])
        for name, digest in zip(ids, digests, strict=True)
    ]
    if not all(kept):
        write_file(file, table_to_parquet(table.filter(pa.array(kept))), 0o600)
    return {name for name, same in zip(ids, kept, strict=True) if same}
