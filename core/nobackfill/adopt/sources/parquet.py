"""Vectors in a Parquet file or a folder of them: a frozen export. New vectors go into files of
their own in a folder `_NAME` beside, a file a row group; nothing that was there is written."""

import io
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill.adopt.sources.source import (
    Column,
    Facts,
    Rows,
    Target,
    Window,
    file_name,
    read_mark,
    same_model,
)
from nobackfill.durable import make_dir, remove_tree, sweep, write_file
from nobackfill.errors import AlreadyExistsError, InvalidInputError, NotFoundError, few
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("adopt"):
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

# What made the vectors: a model's fingerprint, or, in an export of a gateway, a release's space.
MODEL, SPACE = b"nobackfill.model", b"nobackfill.space"
SECONDS = b"nobackfill.seconds_per_item"
READS = b"nobackfill.reads"
_MARK = "carried.json"


class ParquetSource:
    """A file, or the *.parquet files of a folder in the order of their names.

    A window is one row group. `key`: column of unique keys; `vector`: column of lists of floats,
    None for the only one. Raises NotFoundError, InvalidInputError.
    """

    def __init__(self, path: Path, key: str = "id", vector: str | None = None) -> None:
        self._path = path
        self._files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not self._files or not all(file.is_file() for file in self._files):
            raise NotFoundError(f"{path}: no Parquet file is there")
        self._schema = _opened(self._files[0]).schema_arrow
        self._wanted = vector
        names = self._schema.names
        if len(set(names)) != len(names):
            raise InvalidInputError(f"{path}: expected each column once, got {few(names)}")
        if key not in names:
            raise InvalidInputError(
                f"{path}: expected a column {key!r} of unique keys, got "
                f"{few(self._schema.names)}; name it with --key"
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
            f"vectors (lists of floats), found {few(lists) or 'none'}; name one with --vector"
        )

    def facts(self) -> Facts:
        others = tuple(name for name in self._schema.names if name not in (self._key, self._vector))
        kind = self._schema.field(self._vector).type
        dim = kind.list_size if pa.types.is_fixed_size_list(kind) else None
        name = f"{self._path}#{self._vector}"
        return Facts(name, dim, None, _model(self._schema), others)

    def seconds_per_item(self) -> float | None:
        """What `nobackfill embed` measured, where it wrote the file."""
        found = (self._schema.metadata or {}).get(SECONDS)
        return None if found is None else float(found)

    def reads(self) -> str:
        """Which texts a model that reads queries otherwise was given (see Embedder), where
        `nobackfill embed` wrote the file; empty for one that reads all alike."""
        return str((self._schema.metadata or {}).get(READS, b"").decode())

    def count(self) -> int:
        return sum(len(self.read(window)) for window in self.windows(0))

    def windows(self, rows: int) -> Iterator[Window]:
        del rows  # A row group is what can be read alone.
        for file in self._files:
            opened = _opened(file)
            first = self._files[0].name
            same_model(_model(self._schema), _model(opened.schema_arrow), f"{first} and {file}")
            for group in range(opened.num_row_groups):
                yield Window(file.name, group)

    def read(self, window: Window) -> Rows:
        return _rows(self._table(window, self._vector), self._key, self._vector, self._path)

    def column(self, window: Window, name: str) -> Column:
        if name not in self._schema.names:
            raise InvalidInputError(f"{self._path}: no column {name!r}")
        table = self._table(window, name).drop_null()
        return Column(_ids(table, self._key), [str(v) for v in table[name].to_pylist()])

    def _table(self, window: Window, column: str) -> Any:
        file = next(file for file in self._files if file.name == window.after)
        columns = [self._key] if column == self._key else [self._key, column]
        opened = _opened(file)
        kinds = {field.name: field.type for field in opened.schema_arrow}
        if not set(columns) <= set(kinds) or (
            _is_vector(self._schema.field(column).type) and not _is_vector(kinds[column])
        ):
            raise InvalidInputError(
                f"{file}: expected columns {few(columns)} as in {self._files[0].name}, found "
                f"{few(f'{name} ({kind})' for name, kind in kinds.items()) or 'none'}"
            )
        try:
            return opened.read_row_group(window.last, columns=columns)
        except (pa.ArrowException, OSError) as error:
            raise InvalidInputError(f"{file}: cannot be read as Parquet ({error})") from error

    def beside(self, target: Target) -> "ParquetBeside":
        folder = self._folder(target.name)
        mark = {"map": target.mark, "dim": target.dim}
        if folder.exists():
            if read_mark(folder / _MARK) != mark:
                raise AlreadyExistsError(
                    f"{folder}: exists already and was not made by this map; choose another --to, "
                    "or remove it with --rollback"
                )
            sweep(folder)
        else:
            make_dir(folder)
            write_file(folder / _MARK, json.dumps(mark).encode())
        return ParquetBeside(self, folder, target, self._key)

    def rollback(self, name: str) -> bool:
        folder = self._folder(name)
        if not (folder / _MARK).is_file():
            return False
        # The mark goes last: killed half-way, the rest is still known as ours.
        for path in sorted(folder.glob("*.parquet")):
            remove_tree(path)
        remove_tree(folder)
        return True

    def _folder(self, name: str) -> Path:
        inside = self._path if self._path.is_dir() else self._path.parent
        stem = "" if self._path.is_dir() else f"{self._path.stem}."
        # Readers of a folder of Parquet files pass over names with an underscore.
        return inside / f"_{stem}{file_name(name)}"


class ParquetBeside:
    """Files `_NAME/FILE.GROUP.parquet` with the same keys and column name as the source's."""

    at_once = 1

    def __init__(self, source: ParquetSource, folder: Path, target: Target, key: str) -> None:
        self._source, self._folder, self._target, self._key = source, folder, target, key

    def pending(self, window: Window) -> Rows:
        if self._file(window).is_file():
            return Rows([], np.empty((0, 0), np.float32))
        rows = self._source.read(window)
        return Rows(rows.ids, rows.vectors, [window] * len(rows))

    def write(self, rows: Rows, vectors: Vectors) -> None:
        (window,) = set(rows.keys)
        assert isinstance(window, Window)
        keys = pa.array(rows.ids)
        model = self._target.model
        metadata = {MODEL: model.encode()} if model else {}
        data = table_bytes(self._key, keys, self._target.name, vectors, metadata)
        write_file(self._file(window), data)

    def read(self, window: Window) -> Rows:
        file = self._file(window)
        if not file.is_file():
            return Rows([], np.empty((0, self._target.dim), np.float32))
        return _rows(_opened(file).read(), self._key, self._target.name, file)

    def count(self) -> int:
        files = self._folder.glob("*.parquet")
        return sum(_opened(file).metadata.num_rows for file in files)

    def finish(self) -> list[str]:
        return [
            f"read column {self._target.name!r} of {self._folder} in place of the old vectors; "
            f"rows have the same {self._key!r}"
        ]

    def _file(self, window: Window) -> Path:
        return self._folder / f"{Path(str(window.after)).stem}.{window.last}.parquet"


def table_bytes(
    key: str, keys: Any, vector: str, vectors: Vectors, metadata: dict[bytes, bytes]
) -> bytes:
    """A Parquet file of keys and float32 vectors [n, dim]."""
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
    lists = pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
    table = pa.table({key: keys, vector: lists}).replace_schema_metadata(metadata)
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def _opened(path: Path) -> Any:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise InvalidInputError(f"{path}: cannot be read as Parquet ({error})") from error


def _model(schema: Any) -> str | None:
    metadata = schema.metadata or {}
    found = metadata.get(MODEL, metadata.get(SPACE))
    return None if found is None else str(found.decode())


def _is_vector(kind: Any) -> bool:
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    return any(is_kind(kind) for is_kind in lists) and pa.types.is_floating(kind.value_type)


def _ids(table: Any, key: str) -> list[str]:
    return [str(value) for value in table[key].to_pylist()]


def _rows(table: Any, key: str, vector: str, path: Path) -> Rows:
    """Rows whose vector is not null. Raises InvalidInputError for rows of several dimensions."""
    table = table.filter(pc.is_valid(table[vector]))
    if table[key].null_count:
        raise InvalidInputError(f"{path}: {table[key].null_count} rows have no key in {key!r}")
    ids = _ids(table, key)
    lengths = pc.list_value_length(table[vector]).to_numpy()
    if len(np.unique(lengths)) > 1:
        other = int(np.argmax(lengths != lengths[0]))
        raise InvalidInputError(
            f"{path}: expected one dimension in all rows, got {lengths[0]} in {ids[0]!r} and "
            f"{lengths[other]} in {ids[other]!r}; are these two models' vectors?"
        )
    dim = int(lengths[0]) if len(lengths) else 0
    values = pc.list_flatten(table[vector]).to_numpy().astype(np.float32)
    return Rows(ids, values.reshape(len(ids), dim))
