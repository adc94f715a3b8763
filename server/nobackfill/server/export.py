"""Export a gallery's vectors as Parquet files, one for each space, from one snapshot.

OUT/release-2.parquet    id, digest, metadata (JSON), origin, uncertainty, embedding
OUT/side-2.parquet       id, side: only on request
"""

import json
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill import durable
from nobackfill.errors import AlreadyExistsError, CannotWriteError, NotFoundError, join_few
from nobackfill.extras import require_extra
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem, StoredVectors

with require_extra("export"):
    import pyarrow as pa
    import pyarrow.parquet as pq

# Items of a window, which becomes one row group.
WINDOW = 8192
_ID = pa.field("id", pa.string(), nullable=False)


@dataclass(frozen=True)
class ExportReport:
    """Report an export.

    Attributes:
        item_count: number of items in the gallery.
        vector_counts: number of vectors in the file of each release, by its number.
    """

    item_count: int
    vector_counts: dict[int, int]


def export(
    store: GalleryStore, out: Path, releases: Sequence[int] = (), *, native_only: bool = False,
    with_side: bool = False, rows_per_window: int = WINDOW,
) -> ExportReport:  # fmt: skip
    """Write vectors of one snapshot into a new folder, which exists only once it is complete.

    Without `releases`, the vectors of a space that an upgrade still fills are exported, too. Two
    exports into one folder must not run at once: one would delete the files of the other. Others
    may write to the gallery meanwhile; their changes are not in the files. An item without a vector
    of a release has no row in that release's file. Rows are in the order in which items were first
    put. After an error nothing is left but new parent folders.

    Args:
        store: the gallery's store.
        out: the folder to create; its parents are created as well.
        releases: numbers of the releases to export; empty means all that the gallery has. Repeated
            ones count once.
        native_only: only vectors that the space's own model computed, at a put or by re-embedding.
        with_side: also write side-information, where a space has some.
        rows_per_window: items read at once, at least 1; each window becomes a row group.

    Returns:
        The numbers of items and of rows; an empty gallery gives files without rows.

    Raises:
        AlreadyExistsError: the folder exists, or appears meanwhile.
        NotFoundError: the gallery has no vectors of a release, or was deleted.
        CannotWriteError: the files cannot be written.
        BusyError: the store is locked.
        VerificationError: the gallery is damaged.
        UnavailableError: the database does not answer.
        ConfigurationError: the database refuses the statement.
        IncompatibleSpaceError: a space was deleted meanwhile.
    """
    if out.exists():
        raise AlreadyExistsError(
            f"{out}: a file or folder of this name exists already; name a new folder with --out"
        )
    infos = _select_spaces(store, releases)
    staged = out.with_name(f".{out.name}.part")
    durable.make_dir(out.parent)
    durable.remove_tree(staged)
    durable.make_dir(staged, 0o700)
    count, rows = 0, {info.spec.release: 0 for info in infos}
    try:
        with ExitStack() as closing:
            files = [closing.enter_context(_Files(staged, info.spec, with_side)) for info in infos]
            for piece in store.iterate_snapshot(
                [info.spec.space for info in infos], rows_per_window
            ):
                count += len(piece.items)
                items = {item.label: item for item in piece.items}
                for file, stored in zip(files, piece.vectors, strict=True):
                    rows[file.release] += file.add(items, stored, native_only)
        durable.publish_dir(staged, out)
    except BaseException as error:
        shutil.rmtree(staged, ignore_errors=True)
        if isinstance(error, OSError):
            raise CannotWriteError(
                f"{out}: the vectors cannot be written ({error.strerror or error}); free some "
                "space or check the permissions, then run the command again"
            ) from error
        raise
    return ExportReport(count, rows)


def _select_spaces(store: GalleryStore, releases: Sequence[int]) -> list[SpaceInfo]:
    infos = {info.spec.release: info for info in store.spaces()}
    if missing := set(releases) - set(infos):
        raise NotFoundError(
            f"--release: the gallery has no vectors of release {join_few(sorted(missing))}; name "
            f"one of its releases: {join_few(sorted(infos))}"
        )
    return [infos[release] for release in sorted(set(releases) or infos)]


class _Files:
    """Write the files of one space."""

    def __init__(self, folder: Path, spec: SpaceSpec, side: bool) -> None:
        self.release, self._spec = spec.release, spec
        self._vectors = _schema(
            spec, pa.field("digest", pa.string()), pa.field("metadata", pa.string()),
            pa.field("origin", pa.string()), pa.field("uncertainty", pa.float32()),
            pa.field("embedding", pa.list_(pa.float32(), spec.dim), nullable=False),
        )  # fmt: skip
        self._file = pq.ParquetWriter(folder / f"release-{spec.release}.parquet", self._vectors)
        self._side_file = None
        if side and spec.side_dim:
            field = pa.field("side", pa.list_(pa.float32(), spec.side_dim), nullable=False)
            self._sides = _schema(spec, field)
            path = folder / f"side-{spec.release}.parquet"
            self._side_file = pq.ParquetWriter(path, self._sides)

    def __enter__(self) -> "_Files":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        if self._side_file is not None:
            self._side_file.close()

    def add(self, items: dict[int, StoredItem], vectors: StoredVectors, native: bool) -> int:
        """Write a row group; returns its number of rows."""
        selected = [
            (row, items[label])
            for row, label in enumerate(vectors.labels.tolist())
            if not native or vectors.origins[row] in ("native", "re-embedded")
        ]
        if not selected:
            return 0
        rows = [row for row, _ in selected]
        columns = [
            pa.array([item.id for _, item in selected]),
            pa.array([item.digest for _, item in selected], pa.string()),
            pa.array([json.dumps(item.metadata, ensure_ascii=False) for _, item in selected]),
            pa.array([vectors.origins[row] for row in rows]),
            pa.array([vectors.uncertainties[row] for row in rows], pa.float32()),
            _lists(vectors.embedding[rows]),
        ]
        self._file.write_batch(pa.record_batch(columns, schema=self._vectors))
        if self._side_file is not None:
            with_side = [
                (row, item) for row, item in selected if vectors.side_blobs[row] is not None
            ]
            data = b"".join(vectors.side_blobs[row] or b"" for row, _ in with_side)
            sides = np.frombuffer(data, "<f4").reshape(-1, self._spec.side_dim)
            columns = [pa.array([entry.id for _, entry in with_side], pa.string()), _lists(sides)]
            self._side_file.write_batch(pa.record_batch(columns, schema=self._sides))
        return len(selected)


def _schema(spec: SpaceSpec, *fields: Any) -> Any:
    """Make a schema whose metadata names the space, so that vectors are not mistaken for
    another's.
    """
    metadata = {"nobackfill.space": spec.space, "nobackfill.release": str(spec.release)}
    metadata |= {"nobackfill.metric": spec.metric, "nobackfill.side_space": spec.side_space or ""}
    return pa.schema([_ID, *fields], metadata=metadata)


def _lists(vectors: Any) -> Any:
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
