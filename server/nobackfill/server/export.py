"""A gallery's vectors as Parquet files, for training elsewhere: one file a space, all of one
snapshot of the store, written window by window.

    OUT/release-2.parquet    id, digest, metadata (JSON), origin, uncertainty, embedding
    OUT/side-2.parquet       id, side: only where it is asked for
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from nobackfill import durable
from nobackfill.errors import AlreadyExistsError, CannotWriteError, NotFoundError, few
from nobackfill.extras import extra
from nobackfill.gallery.gallery_store import GalleryStore
from nobackfill.gallery.reading import StoredItem, StoredVectors
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec

with extra("export"):
    import pyarrow as pa
    import pyarrow.parquet as pq

# Items of a window: one row group.
WINDOW = 8192
_ID = pa.field("id", pa.string(), nullable=False)


@dataclass(frozen=True)
class Exported:
    """`items` were looked at; `rows` of each release's file."""

    items: int
    rows: dict[int, int]


def export(
    store: GalleryStore, out: Path, releases: Sequence[int] = (), *, native: bool = False,
    side: bool = False, window: int = WINDOW,
) -> Exported:  # fmt: skip
    """Write the vectors of `releases` (all that the gallery has, where none is named) into the new
    folder `out`; killed half-way, it is not there.

    `native`: only vectors that a space's own model made, as pairs for training want them. `side`:
    side-information, too. Raises AlreadyExistsError, NotFoundError for a release without a space,
    CannotWriteError, and what the store raises.
    """
    if out.exists():
        raise AlreadyExistsError(f"{out}: exists already; give a folder that is to be made")
    infos = _chosen(store, releases)
    staged = out.with_name(f".{out.name}.part")
    durable.make_dir(out.parent)
    durable.remove_tree(staged)
    durable.make_dir(staged, 0o700)
    count, rows = 0, {info.spec.release: 0 for info in infos}
    try:
        with _writing(out), ExitStack() as closing:
            files = [closing.enter_context(_Files(staged, info.spec, side)) for info in infos]
            for one in store.frozen([info.spec.space for info in infos], window):
                count += len(one.items)
                items = {item.label: item for item in one.items}
                for file, stored in zip(files, one.stored, strict=True):
                    rows[file.release] += file.add(items, stored, native)
        durable.publish_dir(staged, out)
    except BaseException:
        shutil.rmtree(staged, ignore_errors=True)
        raise
    return Exported(count, rows)


def _chosen(store: GalleryStore, releases: Sequence[int]) -> list[SpaceInfo]:
    known = {info.spec.release: info for info in store.spaces()}
    if missing := set(releases) - set(known):
        raise NotFoundError(
            f"the gallery has no vectors of release {few(sorted(missing))}; it has "
            f"{few(sorted(known))}"
        )
    return [known[release] for release in sorted(set(releases) or known)]


@contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CannotWriteError(f"{out}: {error.strerror or error}; free some space") from error


class _Files:
    """Those of one space."""

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

    def add(self, items: dict[int, StoredItem], stored: StoredVectors, native: bool) -> int:
        """A row group; how many rows it has."""
        kept = [
            (row, items[label])
            for row, label in enumerate(stored.labels.tolist())
            if not native or stored.origins[row] in ("native", "re-embedded")
        ]
        if not kept:
            return 0
        rows = [row for row, _ in kept]
        columns = [
            pa.array([item.id for _, item in kept]),
            pa.array([item.digest for _, item in kept], pa.string()),
            pa.array([json.dumps(item.metadata, ensure_ascii=False) for _, item in kept]),
            pa.array([stored.origins[row] for row in rows]),
            pa.array([stored.uncertainties[row] for row in rows], pa.float32()),
            _lists(stored.embedding[rows]),
        ]
        self._file.write_batch(pa.record_batch(columns, schema=self._vectors))
        if self._side_file is not None:
            with_side = [(row, item) for row, item in kept if stored.sides[row] is not None]
            data = b"".join(stored.sides[row] or b"" for row, _ in with_side)
            sides = np.frombuffer(data, "<f4").reshape(-1, self._spec.side_dim)
            columns = [pa.array([i.id for _, i in with_side], pa.string()), _lists(sides)]
            self._side_file.write_batch(pa.record_batch(columns, schema=self._sides))
        return len(kept)


def _schema(spec: SpaceSpec, *fields: Any) -> Any:
    """With what the vectors are, so that they are never taken for another space's."""
    told = {"nobackfill.space": spec.space, "nobackfill.release": str(spec.release)}
    told |= {"nobackfill.metric": spec.metric, "nobackfill.side_space": spec.side_space or ""}
    return pa.schema([_ID, *fields], metadata=told)


def _lists(vectors: Any) -> Any:
    flat = pa.array(np.ascontiguousarray(vectors, np.float32).ravel())
    return pa.FixedSizeListArray.from_arrays(flat, vectors.shape[1])
