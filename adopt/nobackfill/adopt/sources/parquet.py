"""Read and migrate vectors in a Parquet file or a folder of them.

New vectors go into a folder `_NAME`, one file for each row group; no file of the source changes.
Each new file has the source's keys in their type. It records the identity of its source file, so
that vectors of a file that was replaced are computed again.
"""

import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from nobackfill.adopt.sources.arrays import estimate_file_costs
from nobackfill.adopt.sources.source import (
    ColumnValues,
    Facts,
    MigrationCosts,
    MigrationTrial,
    Rows,
    Target,
    Window,
    check_file_name,
    check_same_model,
    file_permissions,
    read_vector_record,
    value_as_text,
)
from nobackfill.durable import make_dir, remove_temporary_files, remove_tree, write_file
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError, join_few
from nobackfill.extras import require_extra
from nobackfill.vectors import Vectors

with require_extra("adopt"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

# The model of the vectors: its fingerprint, or, in an export of a gateway, a release's space.
MODEL, SPACE = b"nobackfill.model", b"nobackfill.space"
SECONDS_KEY = b"nobackfill.seconds_per_item"
# Files whose times estimate the time of all.
_TIMED_FILES = 16
ROLE_KEY = b"nobackfill.reads"
# In a file of new vectors: the identity of its source file.
SOURCE_FILE_KEY = b"nobackfill.of"
# In a file of new vectors that lacks some of its row group's items.
PARTIAL = b"nobackfill.partial"
_MARK = "carried.json"
_SUFFIX = ".parquet"
# At a Parquet file's end: the footer's length in 4 bytes, and a magic of 4.
_TAIL = 8


class ParquetSource:
    """The Source of a Parquet file, or of the *.parquet files of a folder, ordered by name.

    A folder without such files is searched for partitions (`lang=de/`). Files are listed once:
    later ones are not read. A window is one row group. The column of vectors is chosen when it is
    first needed.

    Args:
        path: The file or the folder.
        key: Column of unique keys.
        vector: Column of vectors, lists of floats; None for the only one. If there is no such
            column, or there are several, `facts` and `read` raise InvalidInputError.

    Raises:
        NotFoundError: There is no Parquet file.
        InvalidInputError: The first file cannot be read, has a column twice, or has no such key.
        ConfigurationError: The extra `adopt` is not installed.
        OSError: A path is too long, or this user may not search its folder.
    """

    def __init__(self, path: Path, key: str = "id", vector: str | None = None) -> None:
        self._path = path
        self._inside = path if path.is_dir() else path.parent
        self._files = _files(path) if path.is_dir() else [path]
        if not self._files or not all(file.is_file() for file in self._files):
            raise NotFoundError(
                f"{path}: expected a Parquet file or a folder with files *{_SUFFIX}, found none; "
                "correct the path"
            )
        self._schema = _opened(self._files[0]).schema_arrow
        self._wanted = vector
        names = self._schema.names
        if len(set(names)) != len(names):
            raise InvalidInputError(
                f"{path}: expected each column to have a name of its own, got {join_few(names)}; "
                "rename the duplicates"
            )
        if key not in names:
            raise InvalidInputError(
                f"{path}: expected a column {key!r} of unique keys, got "
                f"{join_few(self._schema.names)}; name it with --key"
            )
        self._key = key

    @cached_property
    def _vector(self) -> str:
        wanted = self._wanted
        lists = [field.name for field in self._schema if _is_vector(field.type)]
        if wanted is None and len(lists) == 1:
            return str(lists[0])
        if wanted in lists:
            return str(wanted)
        raise InvalidInputError(
            f"{self._path}: expected {'a' if wanted is None else f'{wanted!r} as'} column of "
            f"vectors (lists of floats), found {join_few(lists) or 'none'}; name one with --vector"
        )

    def facts(self) -> Facts:
        """Return name, dimension, recorded model and other columns, from the first file's schema.

        The dimension is None for lists of variable length. The model of an export of a gateway is
        its release's space.

        Raises:
            InvalidInputError: The column of vectors cannot be chosen.
        """
        others = tuple(name for name in self._schema.names if name not in (self._key, self._vector))
        kind = self._schema.field(self._vector).type
        dim = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        name = f"{self._path}#{self._vector}"
        return Facts(name, dim, None, _model(self._schema), others)

    def seconds_per_item(self) -> float | None:
        """Return the seconds per item that `nobackfill embed` recorded; None for other files.

        `embed` records them for each file. It is the mean over the items of the first 16 files, so
        it assumes that the model, its machine and its endpoint stay as fast and as busy as then.
        The first file counts only if it is the only one, because its time includes the model's
        start. Files below half of the largest one are left out.

        Values that are no finite number are ignored.

        Raises:
            InvalidInputError: One of these files cannot be read.
        """
        times = []
        for file in self._files[:_TIMED_FILES]:
            opened = _opened(file)
            try:
                found = float((opened.schema_arrow.metadata or {})[SECONDS_KEY])
            except (KeyError, ValueError):
                continue
            if math.isfinite(found):
                times.append((opened.metadata.num_rows, found))
        least = max((rows for rows, _ in times), default=0) / 2
        counted = [one for one in times[1:] if one[0] >= least] or times[:1]
        items = sum(rows for rows, _ in counted)
        return sum(rows * seconds for rows, seconds in counted) / items if items else None

    def text_role(self) -> str:
        """Return the role of the texts that `nobackfill embed` recorded (see `Embedder.text_role`),
        from the first file; empty without one.
        """
        return str((self._schema.metadata or {}).get(ROLE_KEY, b"").decode(errors="replace"))

    def count(self) -> int:
        """Count the rows that have a vector; reads every vector.

        Raises:
            InvalidInputError: A file cannot be read, or a group has several dimensions. A row with
                a vector has no key, or the column of vectors cannot be chosen.
            IncompatibleSpaceError: Two files record different models.
        """
        return sum(len(self.read(window)) for window in self.windows(0))

    def windows(self, rows_per_window: int) -> Iterator[Window]:
        """Yield one window for each row group, none without row groups; `rows_per_window` is
        ignored.

        A file is opened when its first window is requested.

        Raises:
            IncompatibleSpaceError: Two files record different models.
            InvalidInputError: A file cannot be read.
        """
        del rows_per_window  # A row group is what can be read alone.
        for file in self._files:
            opened = _opened(file)
            first = self._files[0].name
            check_same_model(
                _model(self._schema), _model(opened.schema_arrow), f"{first} and {file}"
            )
            for group in range(opened.num_row_groups):
                yield Window(self._name(file), group)

    def read(self, window: Window) -> Rows:
        """Read the vectors of a row group as float32; rows without one are left out.

        `Rows.keys` has the keys in their own type. NaN passes, and a repeated key is not detected.
        A row group without vectors gives no rows, of dimension 0.

        Raises:
            InvalidInputError: A row with a vector has no key, dimensions differ, the column of
                vectors cannot be chosen, the file is damaged, it lacks a column of the first file,
                or the window is none of `windows`, such as `Window()`.
        """
        return _rows(self._table(window, self._vector), self._key, self._vector, self._path)

    def read_column(self, window: Window, name: str) -> ColumnValues:
        """Read another column of a row group as text; rows without a value or a key are left out.

        Rows without a vector are there, so match with `read` by the key.

        Raises:
            InvalidInputError: There is no such column, the file is damaged or lacks it, or the
                window is none of `windows`.
        """
        if name not in self._schema.names:
            raise InvalidInputError(
                f"{self._path}: expected a column {name!r}, found only "
                f"{join_few(self._schema.names)}; correct the name"
            )
        table = self._table(window, name).drop_null()
        return ColumnValues(
            _ids(table, self._key), list(map(value_as_text, table[name].to_pylist()))
        )

    def _table(self, window: Window, column: str) -> Any:
        file = self.window_file(window)
        columns = [self._key] if column == self._key else [self._key, column]
        opened = _opened(file)
        kinds = {field.name: field.type for field in opened.schema_arrow}
        if not set(columns) <= set(kinds) or (
            _is_vector(self._schema.field(column).type) and not _is_vector(kinds[column])
        ):
            raise InvalidInputError(
                f"{file}: expected columns {join_few(columns)} as in {self._files[0].name}, found "
                f"{join_few(f'{name} ({kind})' for name, kind in kinds.items()) or 'none'}; write "
                "this file again with the same columns"
            )
        try:
            return _without_views(opened.read_row_group(window.upper, columns=columns))
        except (pa.ArrowException, OSError) as error:
            raise InvalidInputError(
                f"{file}: cannot be read as Parquet ({error}); write this file again"
            ) from error

    def window_file(self, window: Window) -> Path:
        """Return the path of the file that holds a window.

        The file need not exist.
        """
        return self._inside / str(window.lower)

    def file_identity(self, window: Window) -> bytes:
        """Return the identity of a window's file: another one later means that it was replaced.

        A file that is shorter than a footer gets an identity, too. A file with another time of
        change counts as replaced, even with the same content.

        Returns:
            JSON with the file's size, its time of change and the digest of its footer.

        Raises:
            InvalidInputError: The file cannot be read.
        """
        file = self.window_file(window)
        try:
            with file.open("rb") as opened:
                size = opened.seek(0, io.SEEK_END)
                opened.seek(max(0, size - _TAIL))
                footer = int.from_bytes(opened.read(_TAIL)[:4], "little")
                opened.seek(max(0, size - _TAIL - footer))
                digest = hashlib.sha256(opened.read()).hexdigest()
                changed = os.fstat(opened.fileno()).st_mtime_ns
        except OSError as error:
            raise InvalidInputError(
                f"{file}: cannot be read ({error.strerror}); check the disk and the permissions"
            ) from error
        return json.dumps({"size": size, "mtime_ns": changed, "footer": digest}).encode()

    def open_target(self, target: Target) -> "ParquetTarget":
        """Create the folder of new vectors, or open that of an earlier run of this map.

        Unfinished files of a killed run are deleted. A folder that an earlier version made, without
        a record of its source, is accepted. No lock is taken. A run that was killed between the
        folder and its record leaves a folder that is refused: delete it.

        Raises:
            AlreadyExistsError: The folder has other files, or vectors of another map or source.
            InvalidInputError: The name is no plain file name. The record of an earlier run cannot
                be read.
            CannotWriteError: The folder cannot be written.
            OSError: The name is too long for a folder.
        """
        folder = self._folder(target.name)
        mark = {"map": target.computer_digest, "dim": target.dim, "of": self._of}
        if folder.exists():
            found = read_vector_record(folder / _MARK)
            # Before November 2026, a folder did not record its source file.
            if not isinstance(found, dict) or {"of": self._of} | found != mark:
                raise AlreadyExistsError(
                    f"{folder}: exists already, and was not made by this map from "
                    f"{self._path.name}; choose another --to, or remove it with `nobackfill carry "
                    "--rollback`"
                )
            for inside in (folder, *filter(Path.is_dir, folder.rglob("*"))):
                remove_temporary_files(inside)
        else:
            make_dir(folder)
            write_file(folder / _MARK, json.dumps(mark).encode())
        return ParquetTarget(self, folder, target, self._key)

    def open_migrated(self, name: str) -> "ParquetSource":
        """Open the new vectors of a name, as a source of their own.

        Raises:
            NotFoundError: There are none.
            InvalidInputError: A file cannot be read. The name is no plain file name.
            OSError: The name is too long for a folder.
        """
        return ParquetSource(self._folder(name), self._key, name)

    def drop_new_vectors(self, name: str) -> bool:
        """Delete the folder of new vectors.

        After a kill, a second call completes it. It deletes all files of the folder.

        Returns:
            False, and nothing changes, if nobackfill wrote no vectors of this name.

        Raises:
            InvalidInputError: The name is no plain file name, or the record of an earlier run
                cannot be read.
            CannotWriteError: A file cannot be deleted.
            OSError: The folder cannot be listed, or the name is too long for one.
        """
        folder = self._folder(name)
        if not (folder / _MARK).is_file():
            return False
        # The mark goes last: after a kill, a second call still recognises the folder.
        for path in sorted(folder.iterdir()):
            if path.name != _MARK:
                remove_tree(path)
        remove_tree(folder)
        return True

    def estimate_costs(self, trial: MigrationTrial) -> MigrationCosts:
        """Estimate the seconds of a migration, by one of 10,000 items in a temporary folder.

        Raises:
            InvalidInputError: A file cannot be read, or its vectors have several dimensions.
            OSError: The temporary folder cannot be written.
            CannotWriteError: The temporary folder is full.
            IncompatibleSpaceError: Files of one folder record different models.
        """
        return estimate_file_costs(self, trial)

    def _folder(self, name: str) -> Path:
        # Readers of a folder of Parquet files skip names with an underscore.
        if self._path.is_dir():
            return self._path / f"_{check_file_name(name)}"
        short = self._inside / f"_{self._path.stem}.{check_file_name(name)}"
        if self._path.suffix == _SUFFIX:
            return short
        # Before November 2026 all files of one stem shared this folder.
        found = read_vector_record(short / _MARK)
        alone = not self._path.with_suffix(_SUFFIX).exists()
        if alone and isinstance(found, dict) and "of" not in found:
            return short
        return self._inside / f"_{self._path.name}.{name}"

    @property
    def _of(self) -> str:
        """Return the source that new vectors record: the file's name, or "." for a folder."""
        return "." if self._path.is_dir() else self._path.name

    def _name(self, file: Path) -> str:
        return file.relative_to(self._inside).as_posix()


class ReadVersion(NamedTuple):
    """The version of rows that were read from a Parquet file.

    Attributes:
        window: Their window.
        file_identity: The identity of its file when they were read.
        vector_count: Number of the window's rows with an old vector.
    """

    window: Window
    file_identity: bytes
    vector_count: int


class ParquetTarget:
    """The TargetVectors of a ParquetSource: files `_NAME/FILE.GROUP.parquet` with its keys.

    Args:
        source: The source.
        folder: The folder of the new files.
        target: The place; its name becomes the column of vectors.
        key: Name of the column of keys.
    """

    concurrent_windows = 1

    def __init__(self, source: ParquetSource, folder: Path, target: Target, key: str) -> None:
        self._source, self._folder, self._target, self._key = source, folder, target, key

    def pending(self, window: Window) -> Rows:
        """Read the old vectors of a row group whose new file is missing, of a replaced file or
        lacks them.

        Without any, the rows are empty and of dimension 0. Rows are known by the text of their
        keys.

        Raises:
            InvalidInputError: The source file or the new file cannot be read, or its vectors have
                several dimensions.
        """
        # Before its rows are read: a file that is replaced meanwhile is pending again.
        now = self._source.file_identity(window)
        metadata = self._metadata(window)
        if metadata.get(SOURCE_FILE_KEY) == now and PARTIAL not in metadata:
            return Rows([], np.empty((0, 0), np.float32))
        rows = self._source.read(window)
        read = ReadVersion(window, now, len(rows))
        if metadata.get(SOURCE_FILE_KEY) == now:
            done = set(self.read(window).ids)
            rows = _take(rows, [row for row, name in enumerate(rows.ids) if name not in done])
        return replace(rows, versions=[read] * len(rows))

    def write(self, rows: Rows, vectors: Vectors) -> None:
        """Write the new vectors of one row group durably, with the source file's permissions.
        Vectors that the file has of other rows stay.

        Args:
            rows: Some of the rows that `pending` returned for one window, at least one.
            vectors: Their new vectors, float32 [n, dim].

        Raises:
            CannotWriteError: The disk is full, or the folder cannot be written.
            ValueError: The rows are of several windows, or there are none, or `vectors` has another
                number of rows.
            InvalidInputError: The source file is gone, or it or the earlier file cannot be read.
        """
        (read,) = set(rows.versions)
        assert isinstance(read, ReadVersion)
        metadata = {SOURCE_FILE_KEY: read.file_identity}
        if self._target.model:
            metadata[MODEL] = self._target.model.encode()
        if len(rows) < read.vector_count:
            rows, vectors = self._with_earlier(read, rows, vectors)
        if len(rows) < read.vector_count:
            metadata[PARTIAL] = b"1"
        data = vectors_to_parquet(self._key, rows.keys, self._target.name, vectors, metadata)
        file = self._file(read.window)
        make_dir(file.parent)
        write_file(file, data, file_permissions(self._source.window_file(read.window)))

    def _with_earlier(
        self, read: ReadVersion, rows: Rows, vectors: Vectors
    ) -> tuple[Rows, Vectors]:
        """Add the new vectors that the file of a row group has, in the order of the source."""
        by_id = dict(zip(rows.ids, vectors, strict=True))
        if self._metadata(read.window).get(SOURCE_FILE_KEY) == read.file_identity:
            earlier = self.read(read.window)
            by_id = dict(zip(earlier.ids, earlier.vectors, strict=True)) | by_id
        every = self._source.read(read.window)
        places = [row for row, name in enumerate(every.ids) if name in by_id]
        return _take(every, places), np.stack([by_id[every.ids[row]] for row in places])

    def _metadata(self, window: Window) -> Mapping[bytes, bytes]:
        file = self._file(window)
        metadata: Mapping[bytes, bytes] | None = (
            _opened(file).schema_arrow.metadata if file.is_file() else None
        )
        return metadata or {}

    def read(self, window: Window) -> Rows:
        """Read the new vectors of a row group; none if its file is missing.

        They may be of a source file that was replaced since: `pending` tells.

        Raises:
            InvalidInputError: The file cannot be read.
        """
        file = self._file(window)
        if not file.is_file():
            return Rows([], np.empty((0, self._target.dim), np.float32))
        return _rows(read_table(file), self._key, self._target.name, file)

    def count(self) -> int:
        """Count the rows of all new files, also of source files that were replaced since.

        Raises:
            InvalidInputError: A file cannot be read.
        """
        return sum(_opened(file).metadata.num_rows for file in self._written())

    def finish(self) -> list[str]:
        """Delete new files whose source file or row group is gone, and return the step of the flip.

        It does not check that all rows are written. May be repeated.

        Raises:
            InvalidInputError: A source file cannot be read.
            IncompatibleSpaceError: Two source files record different models.
            CannotWriteError: A file cannot be deleted.
        """
        there = {self._file(window) for window in self._source.windows(0)}
        for file in self._written():
            if file not in there:
                remove_tree(file)
        return [
            f"read column {self._target.name!r} of {self._folder}/*.parquet in place of the old "
            f"vectors; rows have the same {self._key!r}"
        ]

    def _written(self) -> list[Path]:
        return list(self._folder.rglob(f"*{_SUFFIX}"))

    def _file(self, window: Window) -> Path:
        of = Path(str(window.lower))
        return self._folder / of.parent / f"{of.stem}.{window.upper}{_SUFFIX}"


def _files(folder: Path) -> list[Path]:
    """List the Parquet files of a folder, or else of its folders of partitions."""
    found = sorted(folder.glob(f"*{_SUFFIX}"))
    if found:
        return found
    inside = [path for path in sorted(folder.glob("*=*")) if path.is_dir()]
    return [file for path in inside for file in _files(path)]


def vectors_to_parquet(
    key_column: str,
    keys: Any,
    vector_column: str,
    vectors: Vectors,
    metadata: dict[bytes, bytes],
    others: Mapping[str, Any] = MappingProxyType({}),
) -> bytes:
    """Encode keys, vectors and other columns as the bytes of a Parquet file.

    Args:
        key_column: Name of the column of keys.
        keys: n keys, as an array of pyarrow.
        vector_column: Name of the column of vectors.
        vectors: [n, dim] with dim at least 1, stored as float32 lists of fixed size.
        metadata: Metadata of the file.
        others: Further columns of n values by name; one of the same name replaces keys or vectors.

    Raises:
        pyarrow.ArrowInvalid, pyarrow.ArrowTypeError: A column has another number of values, or
            values of several types.
    """
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
    lists = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    table = pa.table({key_column: keys, vector_column: lists, **others}).replace_schema_metadata(
        metadata
    )
    return table_to_parquet(table)


def table_to_parquet(table: Any) -> bytes:
    """Encode a table of pyarrow, with its metadata, as the bytes of a Parquet file.

    Nothing is written to a file. The table has at least one column.

    Raises:
        pyarrow.ArrowException: Parquet has no form for the type of a column.
    """
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def read_table(path: Path) -> Any:
    """Read a whole Parquet file into memory, as a table of pyarrow.

    Columns of string_view and binary_view become large_string and large_binary.

    Raises:
        InvalidInputError: The file is missing, or it or one of its pages cannot be read as Parquet.
    """
    try:
        return _without_views(_opened(path).read())
    except (pa.ArrowException, OSError) as error:
        raise InvalidInputError(
            f"{path}: cannot be read as Parquet ({error}); write this file again"
        ) from error


def _without_views(table: Any) -> Any:
    """Convert views of texts and bytes (string_view): pyarrow cannot select rows of these.

    Other columns stay as they are.
    """
    plain = {pa.string_view(): pa.large_string(), pa.binary_view(): pa.large_binary()}
    for number, field in enumerate(table.schema):
        if kind := plain.get(field.type):
            column = table.column(number).cast(kind)
            table = table.set_column(number, field.with_type(kind), column)
    return table


def _opened(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidInputError(
            f"{path}: cannot be read as Parquet ({error}); write this file again"
        ) from error


def _model(schema: Any) -> str | None:
    metadata = schema.metadata or {}
    found = metadata.get(MODEL, metadata.get(SPACE))
    return None if found is None else str(found.decode(errors="replace"))


def _is_vector(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in lists) and pa.types.is_floating(kind.value_type)


def _ids(table: Any, key: str) -> list[str]:
    return list(map(value_as_text, table[key].to_pylist()))


def _take(rows: Rows, places: list[int]) -> Rows:
    """Select rows of a ParquetSource by their numbers."""
    keys: Any = rows.keys
    chosen = np.asarray(places, np.int64)
    return Rows([rows.ids[row] for row in places], rows.vectors[chosen], keys.take(chosen))


def _rows(table: Any, key: str, vector: str, path: Path) -> Rows:
    """Convert a table to rows, without those whose vector is null.

    Raises:
        InvalidInputError: A key is null, or the vectors have several dimensions.
    """
    table = table.filter(pc.is_valid(table[vector]))
    if table[key].null_count:
        raise InvalidInputError(
            f"{path}: expected a key in each row, but {table[key].null_count} rows have none in "
            f"the column {key!r}; name another column with --key"
        )
    ids = _ids(table, key)
    lengths = pc.list_value_length(table[vector]).to_numpy()
    if len(np.unique(lengths)) > 1:
        other = int(np.argmax(lengths != lengths[0]))
        raise InvalidInputError(
            f"{path}: expected one dimension in all rows, got {lengths[0]} in {ids[0]!r} and "
            f"{lengths[other]} in {ids[other]!r}; use the vectors of one model alone"
        )
    dim = int(lengths[0]) if len(lengths) else 0
    values = pc.list_flatten(table[vector]).to_numpy().astype(np.float32)
    return Rows(ids, values.reshape(len(ids), dim), table[key])
