"""Read and migrate vectors in a folder of numpy files, and search files in memory.

The folder has `ids.npy` and a `NAME.npy` [n, dim]. New vectors are written in parts, which become
`NEW.npy` in the same folder when all are complete. Files have no search of their own, so they are
read into memory for searches.
"""

import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol, runtime_checkable

import numpy as np

from nobackfill.adopt.pairs import WINDOW_ITEMS, read_all
from nobackfill.adopt.sources.source import (
    ColumnValues,
    Facts,
    MigrationCosts,
    MigrationTrial,
    Rows,
    Source,
    Target,
    TargetVectors,
    Window,
    check_file_name,
    file_permissions,
    read_vector_record,
    time_reading,
    value_as_text,
)
from nobackfill.durable import (
    append_bytes,
    make_dir,
    remove_temporary_files,
    remove_tree,
    replace_file,
    write_file,
)
from nobackfill.errors import (
    AlreadyExistsError,
    InvalidInputError,
    NotFoundError,
    VerificationError,
    join_few,
)
from nobackfill.vectors import Vectors, normalise

_IDS = "ids.npy"


class ArraySource:
    """The Source of a folder of numpy arrays with one row for each item.

    A window is a range of rows. The files must not change while they are open.

    Only the windows that are read are held in memory. Every array of the folder is opened once.

    Args:
        folder: The folder, with `ids.npy`.
        vector: Name of the old vectors' file without its suffix; None for the only two-dimensional
            array, apart from migrated ones.

    Raises:
        NotFoundError: There is no `ids.npy`.
        InvalidInputError: There is no such array or there are several, it has no numbers, or
            another number of rows than `ids.npy`. A file cannot be read as a numpy array, or there
            are several arrays of vectors and `vector` is None.
        OSError: A path is too long, or this user may not search its folder.
    """

    def __init__(self, folder: Path, vector: str | None = None) -> None:
        self._folder = folder
        if not (folder / _IDS).is_file():
            raise NotFoundError(
                f"{folder}: expected a file {_IDS} with a key for each row, found none; write it "
                "with numpy.save"
            )
        self._ids = _array(folder / _IDS)
        files = sorted(path for path in folder.glob("*.npy") if path.name != _IDS)
        names = [path.stem for path in files if _array(path).ndim == 2]
        if vector is None:
            # Migrated vectors are chosen only by their name.
            names = [name for name in names if _mark(folder, name) is None]
        if (vector is None and len(names) != 1) or (vector is not None and vector not in names):
            raise InvalidInputError(
                f"{folder}: expected {'one array' if vector is None else repr(vector)} of vectors "
                f"[n, dim], found {join_few(names) or 'none'}; name one with --vector"
            )
        self._name = vector or names[0]
        self.path = folder / f"{self._name}.npy"
        self._vectors = _array(self.path)
        if self._ids.ndim != 1 or len(self._ids) != len(self._vectors):
            raise InvalidInputError(
                f"{folder}: expected a key for each of {len(self._vectors)} rows, got the shape "
                f"{list(self._ids.shape)} in {_IDS}; write it again with numpy.save"
            )
        if self._vectors.dtype.kind not in "fiu" or not self._vectors.shape[1]:
            raise InvalidInputError(
                f"{folder}: expected numbers in {self._name!r}, got {self._vectors.dtype} of "
                f"dimension {self._vectors.shape[1]}; name another array with --vector"
            )
        self._others = tuple(p.stem for p in files if _array(p).ndim == 1)

    def facts(self) -> Facts:
        """Return name, dimension, the recorded model and the names of one-dimensional arrays.

        The model is None without a record. There is no metric.

        Raises:
            InvalidInputError: The record of the vectors cannot be read.
        """
        name = f"{self._folder}#{self._name}"
        mark = _mark(self._folder, self._name) or {}
        return Facts(name, self._vectors.shape[1], None, mark.get("model"), self._others)

    def count(self) -> int:
        """Count the rows of `ids.npy`, which all have a vector."""
        return len(self._ids)

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide the rows into windows of exactly `rows_per_window` rows, the last one shorter.

        A folder without rows gives none.

        Args:
            rows_per_window: Rows of a window, at least 1.

        Raises:
            ValueError: `rows_per_window` is 0.
        """
        for first in range(0, len(self._ids), rows_per_window):
            yield Window(first, min(first + rows_per_window, len(self._ids)))

    def read(self, window: Window) -> Rows:
        """Read the vectors of a window as float32; every row has one.

        Keys become text. The rows have no keys or versions. NaN passes, and a repeated key is not
        detected.

        Raises:
            InvalidInputError: A file is gone or cannot be read.
        """
        rows = slice(window.lower, window.upper)
        # A map of its own for each window: one for all would hold every page that was read.
        ids = list(map(value_as_text, _array(self._folder / _IDS)[rows].tolist()))
        return Rows(ids, np.array(_array(self.path)[rows], np.float32))

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read a one-dimensional array of the folder as text, for the rows of a window.

        A missing number is "nan", and a missing date "None".

        Values become text by `str`, bytes as UTF-8.

        Raises:
            InvalidInputError: There is no such array, it has another number of values than
                `ids.npy`, or its file cannot be read.
        """
        path = self._folder / f"{name}.npy"
        if name not in self._others:
            raise InvalidInputError(
                f"{self._folder}: expected an array {name!r} with one value for each row, found "
                f"{join_few(self._others) or 'none'}; correct the name"
            )
        array = _array(path)
        if len(array) != len(self._ids):
            raise InvalidInputError(
                f"{path}: expected {len(self._ids)} values, one for each key of {_IDS}, got "
                f"{len(array)}; write the array again with a value for each row"
            )
        values = array[window.lower : window.upper]
        return ColumnValues(self.read(window).ids, list(map(value_as_text, values.tolist())))

    def open_target(self, target: Target) -> "ArrayTarget":
        """Create the folder of parts for new vectors, or open that of an earlier run of this map.

        An unfinished file of a killed run is deleted. After a complete run nothing is pending.
        There is no lock: only one process may write a name.

        Raises:
            AlreadyExistsError: The name has other vectors, or those of another number of rows.
            InvalidInputError: The name is no plain file name. The record of an earlier run cannot
                be read.
            CannotWriteError: The folder cannot be written.
        """
        parts, final = self._parts(target.name), self._folder / f"{target.name}.npy"
        mark = {"map": target.computer_digest, "dim": target.dim, "rows": len(self._ids)}
        earlier = _mark(self._folder, target.name)
        # An early version wrote no model.
        found = None if earlier is None else {key: earlier.get(key) for key in mark}
        if (final.exists() and found != mark) or (parts.exists() and found not in (None, mark)):
            raise AlreadyExistsError(
                f"{final}: exists already, and was not made by this map from these rows; choose "
                "another --to, or remove it with `nobackfill carry --rollback`"
            )
        make_dir(parts)
        remove_temporary_files(parts)
        named = {"model": target.model} if target.model else {}
        write_file(_mark_path(self._folder, target.name), json.dumps(mark | named).encode())
        return ArrayTarget(self, self._folder, parts, final, target)

    def open_migrated(self, name: str) -> "ArraySource":
        """Open the new vectors of a name, as a source of their own.

        Raises:
            InvalidInputError: There are none, or they are not complete. The name is no plain file
                name, or its file cannot be read.
            NotFoundError: `ids.npy` is gone.
        """
        return ArraySource(self._folder, check_file_name(name))

    def drop_new_vectors(self, name: str) -> bool:
        """Delete the array, the parts and the record of new vectors.

        After a kill, a second call completes it.

        Returns:
            False, and nothing changes, if nobackfill wrote no vectors of this name.

        Raises:
            InvalidInputError: The name is no plain file name, or the record cannot be read.
            CannotWriteError: A file cannot be deleted.
        """
        parts = self._parts(name)
        if _mark(self._folder, name) is None:
            return False
        remove_tree(self._folder / f"{name}.npy")
        remove_tree(parts)
        remove_tree(_mark_path(self._folder, name))
        return True

    def estimate_costs(self, trial: MigrationTrial) -> MigrationCosts:
        """Estimate the seconds of a migration, by one of 10,000 items in a temporary folder.

        Raises:
            InvalidInputError: A file cannot be read, or its vectors have several dimensions.
            OSError: The temporary folder cannot be written.
            CannotWriteError: The temporary folder is full.
        """
        return estimate_file_costs(self, trial)

    def _parts(self, name: str) -> Path:
        return self._folder / f".{check_file_name(name)}.parts"


def estimate_file_costs(source: Source, trial: MigrationTrial) -> MigrationCosts:
    """Estimate the seconds of a migration in files, by one of 10,000 items in a temporary folder.

    Reading is measured on the source itself.

    The temporary folder is deleted at the end.

    Args:
        source: The files with the old vectors.
        trial: The pairs, whose old vectors are repeated.

    Returns:
        Seconds of an item, and none of an index.

    Raises:
        InvalidInputError: A file cannot be read, or its vectors have several dimensions.
        IncompatibleSpaceError: Files of one folder record different models.
        OSError: The temporary folder cannot be written.
        CannotWriteError: The temporary folder is full.
        Exception: Any error of `trial.carry_seconds`.
    """
    with TemporaryDirectory(prefix="nobackfill-fit-") as folder:
        np.save(Path(folder, _IDS), np.arange(WINDOW_ITEMS))
        np.save(Path(folder, "old.npy"), np.resize(trial.old, (WINDOW_ITEMS, trial.old.shape[1])))
        writing = trial.carry_seconds(ArraySource(Path(folder)))
    # Every item is read twice: to migrate it, and to check it.
    return MigrationCosts(2 * time_reading(source) + writing, 0.0)


class ArrayTarget:
    """The TargetVectors of an ArraySource: a file for each window, which `finish` joins.

    Args:
        source: The source.
        folder: Its folder.
        parts_folder: Folder of the files for the windows.
        final_file: The file that `finish` writes; if it exists, nothing is pending.
        target: The name and the dimension of the new vectors.
    """

    concurrent_windows = 1

    def __init__(
        self,
        source: ArraySource,
        folder: Path,
        parts_folder: Path,
        final_file: Path,
        target: Target,
    ) -> None:
        self._source, self._folder, self._parts = source, folder, parts_folder
        self._final, self._target = final_file, target

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of a window that have no new one; none if the array is complete.

        The key of each row is the window, and its version the number in it. All runs for one name
        must divide the rows into the same windows.

        Raises:
            InvalidInputError: A file of the source, or of the new vectors, cannot be read.
        """
        if self._final.exists() or self._part(window).is_file():
            return Rows([], np.empty((0, 0), np.float32))
        rows = self._source.read(window)
        partial = self._partial(window)
        places = np.arange(len(rows))
        if partial.is_file():
            places = np.flatnonzero(np.isnan(_array(partial)).any(1))
        ids = [rows.ids[row] for row in places]
        return Rows(ids, rows.vectors[places], [window] * len(ids), places.tolist())

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write the new vectors of one window durably, with the permissions of the old array.
        Vectors that the file has of other rows stay.

        A row whose new vector holds NaN stays pending. Only one thread may write.

        Args:
            rows: Some of the rows that `pending` returned for one window, at least one.
            vectors: Their new vectors, float32 [n, dim]; a single one is written to every row.

        Raises:
            CannotWriteError: The disk is full, or the folder cannot be written.
            ValueError: The rows are of several windows, or there are none. The vectors have another
                dimension than the target.
            InvalidInputError: The old array is gone, or the earlier file of the window cannot be
                read.
        """
        (window,) = set(rows.keys)
        assert isinstance(window, Window)
        partial = self._partial(window)
        if partial.is_file():
            vectors_of_window = np.array(_array(partial))
        else:
            shape = len(self._source.read(window)), self._target.dim
            vectors_of_window = np.full(shape, np.nan, np.float32)
        vectors_of_window[np.asarray(rows.versions, np.int64)] = vectors
        complete = not np.isnan(vectors_of_window).any()
        buffer = io.BytesIO()
        np.save(buffer, vectors_of_window, allow_pickle=False)
        file = self._part(window) if complete else partial
        write_file(file, buffer.getvalue(), file_permissions(self._source.path))
        if complete:
            remove_tree(partial)

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a window; rows without one are left out. They may be a read-only
        view of the file.

        Raises:
            InvalidInputError: The file cannot be read.
        """
        ids = self._source.read(window).ids
        if self._final.exists():
            return Rows(ids, np.asarray(_array(self._final)[window.lower : window.upper]))
        if self._part(window).is_file():
            return Rows(ids, np.asarray(_array(self._part(window))))
        if not (partial := self._partial(window)).is_file():
            return Rows([], np.empty((0, self._target.dim), np.float32))
        vectors = np.asarray(_array(partial))
        places = np.flatnonzero(~np.isnan(vectors).any(1))
        return Rows([ids[row] for row in places], vectors[places])

    def count(self) -> int:
        """Count the rows of the complete array, or those with a new vector.

        Raises:
            InvalidInputError: A file cannot be read.
        """
        if self._final.exists():
            return len(_array(self._final))
        complete = sum(len(_array(part)) for part in self._parts.glob("*.npy"))
        partial = (~np.isnan(_array(one)).any(1) for one in self._parts.glob("*.partial"))
        return complete + sum(int(one.sum()) for one in partial)

    def finish(self) -> list[str]:
        """Join the files of all windows into one array, check it, and delete them. A second call
        only returns the sentence.

        The caller has written all rows. The record of the map stays, for `drop_new_vectors`.
        A folder without rows gives an array [0, dim].

        Returns:
            One sentence that names the file to read.

        Raises:
            VerificationError: The joined file differs from its parts, which stay. Or vectors are
                missing.
            CannotWriteError: The disk is full. The parts stay, and a later call continues.
            InvalidInputError: A part cannot be read, or the old array is gone.
        """
        if not self._final.exists():
            if (count := self.count()) != self._source.count():
                raise VerificationError(
                    f"{self._final}: expected {self._source.count()} new vectors, found {count}; "
                    "remove the new vectors with `nobackfill carry --rollback`, and run "
                    "`nobackfill carry` again"
                )
            merged = self._parts / ".tmp-whole"
            remove_tree(merged)
            shape = (self._source.count(), self._target.dim)
            form = {"descr": "<f4", "fortran_order": False, "shape": shape}
            header = io.BytesIO()
            np.lib.format.write_array_header_1_0(header, form)
            append_bytes(merged, header.getvalue(), file_permissions(self._source.path))
            # Not mapped: on a full disk, a write to a mapped file kills the process.
            for part in sorted(self._parts.glob("*.npy"), key=lambda p: int(p.stem.split("-")[0])):
                append_bytes(merged, _array(part).astype("<f4").tobytes())
            self._check(merged)
            replace_file(merged, self._final)
        remove_tree(self._parts)
        return [f"read {self._final} in place of the old vectors; rows have the same order"]

    def _check(self, merged: Path) -> None:
        """Compare the joined file with its parts; raise VerificationError if they differ."""
        for part in self._parts.glob("*.npy"):
            first, last = map(int, part.stem.split("-"))
            if not np.array_equal(_array(merged)[first:last], _array(part)):
                raise VerificationError(
                    f"{self._final}: rows {first} to {last - 1} differ from the vectors that were "
                    "written; check the disk, and run `nobackfill carry` again"
                )

    def _part(self, window: Window) -> Path:
        return self._parts / f"{window.lower}-{window.upper}.npy"

    def _partial(self, window: Window) -> Path:
        """Return the file of a window that lacks some vectors; their rows are NaN."""
        return self._part(window).with_suffix(".partial")


def _array(path: Path) -> Any:
    try:
        return np.lib.format.open_memmap(path, mode="r")
    except Exception as error:
        # Errors of numpy at the header of another file have no common base class.
        raise InvalidInputError(
            f"{path}: cannot be read as a numpy array ({error}); write it again with numpy.save"
        ) from error


def _mark_path(folder: Path, name: str) -> Path:
    return folder / f".{name}.json"


def _mark(folder: Path, name: str) -> dict[str, Any] | None:
    said = read_vector_record(_mark_path(folder, name))
    return said if isinstance(said, dict) else None


@runtime_checkable
class FileSource(Source, Protocol):
    """A source of files whose new vectors are files as well."""

    def open_migrated(self, name: str) -> Source:
        """Open the new vectors of a name, as a source of their own.

        Raises:
            NotFoundError: There are none, in a source of Parquet files.
            InvalidInputError: There are none, in a folder of arrays; or they cannot be read. The
                name is no plain file name.
            OSError: The name is too long for a folder, in a source of Parquet files.
        """


class MemorySource:
    """A Searchable that holds all vectors of a source of files in memory.

    Searches are exact, by cosine; a zero vector has the product 0 with each query. New vectors are
    read at their first search; vectors that are written later are not found.

    Args:
        source: The source; it is read now.

    Raises:
        InvalidInputError: Vectors hold NaN or several dimensions, or an id occurs twice.
        NobackfillError: The source cannot be read, as `Source.read` says.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        rows = read_all(source)
        self._ids, self._old = rows.ids, rows.vectors
        self._places = {name: row for row, name in enumerate(rows.ids)}
        # Ids and unit vectors by the name of the new vectors; None: the old ones.
        self._searched: dict[str | None, tuple[list[str], Vectors]] = {
            None: (rows.ids, normalise(rows.vectors))
        }

    def facts(self) -> Facts:
        """Return the facts of the source.

        Raises:
            InvalidInputError: The column of vectors cannot be chosen, or a record cannot be read.
        """
        return self._source.facts()

    def count(self) -> int:
        """Count the vectors in memory.

        Items that were added to the files later do not count.
        """
        return len(self._ids)

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Divide the source itself into windows, not the vectors in memory.

        The errors come when a window is requested.

        Raises:
            InvalidInputError: A file cannot be read.
            IncompatibleSpaceError: Files of one folder record different models.
            ValueError: `rows_per_window` is 0, in a folder of arrays.
        """
        return self._source.windows(rows_per_window)

    def read(self, window: Window) -> Rows:
        """Read a window of the source itself, not of the vectors in memory.

        Raises:
            InvalidInputError: A file cannot be read, or its vectors have several dimensions.
        """
        return self._source.read(window)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read another column of the source itself.

        Raises:
            InvalidInputError: There is no such column, or its file cannot be read.
        """
        return self._source.read_column(window, name)

    def open_target(self, target: Target) -> TargetVectors:
        """Create or open new vectors in the source itself.

        Raises:
            AlreadyExistsError: The name belongs to other data, or to vectors with another mark.
            InvalidInputError: The name is no plain file name, or the record of an earlier run
                cannot be read.
            CannotWriteError: The folder cannot be written.
            OSError: The name is too long for a folder, in a source of Parquet files.
        """
        return self._source.open_target(target)

    def drop_new_vectors(self, name: str) -> bool:
        """Remove new vectors from the source itself; those in memory stay searchable.

        Returns:
            False if the source has no new vectors of this name.

        Raises:
            InvalidInputError: The name is no plain file name, or the record of an earlier run
                cannot be read.
            CannotWriteError: A file cannot be deleted.
            OSError: A folder of new vectors cannot be listed, or the name is too long for one.
        """
        return self._source.drop_new_vectors(name)

    def nearest(self, vector: Vectors, count: int, new_name: str | None = None) -> list[str]:
        """Search for the items nearest to a vector by cosine, exactly.

        New vectors are read into memory at their first search; later writes are not found.

        Args:
            vector: The query, float32 [dim], of the dimension of the searched vectors.
            count: Largest number of hits, at least 1. All items are hits if there are fewer.
            new_name: Name of the new vectors to search; None for the old ones.

        Returns:
            Ids, nearest first, equally near ones in any order; none for an empty source. A query
            with NaN gives an arbitrary order.

        Raises:
            NotFoundError: There are no new vectors of this name, in a source of Parquet files.
            InvalidInputError: There are none, in a folder of arrays; or they cannot be read, hold
                NaN or repeat an id. The name is no plain file name.
            IncompatibleSpaceError: Files of the new vectors record different models.
            ValueError: The query has another dimension.
            OSError: The name is too long for a folder, in a source of Parquet files.
        """
        if new_name is not None and new_name not in self._searched:
            assert isinstance(self._source, FileSource)
            rows = read_all(self._source.open_migrated(new_name))
            self._searched[new_name] = rows.ids, normalise(rows.vectors)
        ids, unit = self._searched[new_name]
        if not ids:
            return []
        products = unit @ vector
        most = min(count, len(ids))
        best = np.argpartition(-products, most - 1)[:most]
        ordered = best[np.argsort(-products[best], kind="stable")]
        return [ids[row] for row in ordered.tolist()]

    def lookup(self, ids: Sequence[str]) -> Rows:
        """Return old vectors from memory by id, in the order of `ids`; unknown ids are left out,
        and a repeated one comes once. They are as they were when this object was made.
        """
        here = [name for name in dict.fromkeys(ids) if name in self._places]
        rows = np.array([self._places[name] for name in here], np.int64)
        return Rows(here, self._old[rows])

    def texts(self, ids: Sequence[str], column: str) -> dict[str, str]:
        """Read another column by id from the source itself; the whole column is read.

        Values become text by `str`. In a folder of arrays, a missing number is "nan" and a missing
        date "None". An empty text stays.

        Returns:
            Values by id. Unknown ids and items without a value are left out.

        Raises:
            InvalidInputError: There is no such column, or its file cannot be read. A source without
                windows (no rows) gives no values instead, also for an unknown column.
            IncompatibleSpaceError: Files of one folder record different models.
        """
        wanted, found = set(ids), dict[str, str]()
        for window in self._source.windows(WINDOW_ITEMS):
            one = self._source.read_column(window, column)
            found |= {n: v for n, v in zip(one.ids, one.values, strict=True) if n in wanted}
        return found

    def close(self) -> None:
        """Do nothing: the vectors stay in memory."""
