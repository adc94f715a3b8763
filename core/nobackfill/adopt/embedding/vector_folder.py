"""The folder that `nobackfill embed` writes: Parquet files of ids and vectors, and who made them.

A killed run, or an endpoint that gave up, leaves whole files; the next run embeds the rest.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.embedding.items import Items
from nobackfill.adopt.sources.parquet import MODEL, READS, SECONDS, ParquetSource, table_bytes
from nobackfill.durable import make_dir, sweep, write_file
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError
from nobackfill.extras import extra
from nobackfill.vectors import Vectors

with extra("adopt"):
    import pyarrow as pa

# Items of a file.
PART = 500


def embed_into(
    folder: Path,
    items: Items,
    embedder: Embedder,
    *,
    batch: int = 32,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Embed what is not yet in `folder`; how many that were.

    Raises IncompatibleSpaceError where the folder holds another model's vectors, and what the
    embedder raises; what was finished before stays.
    """
    if embedder.kind not in (None, items.kind):
        raise InvalidInputError(f"this model reads {embedder.kind}s, the items are {items.kind}s")
    make_dir(folder)
    sweep(folder)
    done, files = _done(folder, embedder)
    rest = [row for row, name in enumerate(items.ids) if name not in done]
    for first in range(0, len(rest), PART):
        rows = rest[first : first + PART]
        ids, vectors = [items.ids[row] for row in rows], []
        started = time.perf_counter()
        for start in range(0, len(rows), batch):
            some = [items.values[row] for row in rows[start : start + batch]]
            vectors.append(embedder.embed(some))  # type: ignore[arg-type]
            if progress is not None:
                progress(first + min(start + batch, len(rows)))
        seconds = (time.perf_counter() - started) / len(rows)
        metadata = {MODEL: embedder.fingerprint.encode(), SECONDS: f"{seconds:.6g}".encode()}
        if embedder.reads:
            metadata[READS] = embedder.reads.encode()
        data = table_bytes("id", pa.array(ids), "vector", _joined(vectors, folder), metadata)
        # Vectors are private: nobody else reads the file.
        write_file(folder / f"part-{files:05d}.parquet", data, 0o600)
        files += 1
    return len(rest)


def _done(folder: Path, embedder: Embedder) -> tuple[set[str], int]:
    """Ids that are there, and the number of the next file."""
    files = sorted(folder.glob("part-*.parquet"))
    if not files:
        return set(), 0
    source = ParquetSource(folder)
    if source.facts().model != embedder.fingerprint:
        raise IncompatibleSpaceError(
            f"{folder}: holds vectors of another model (or of this one, declared otherwise); give "
            "each model a folder of its own"
        )
    if source.reads() != embedder.reads:
        raise IncompatibleSpaceError(
            f"{folder}: holds vectors of {source.reads()[:30] or 'all texts alike'}, not of "
            f"{embedder.reads[:30] or 'all texts alike'}; give queries a folder of their own"
        )
    done = {name for window in source.windows(0) for name in source.read(window).ids}
    return done, int(files[-1].stem.removeprefix("part-")) + 1


def _joined(parts: list[Vectors], folder: Path) -> Vectors:
    dims = {part.shape[1] for part in parts}
    if len(dims) != 1:
        raise InvalidInputError(f"{folder}: the model gave vectors of dimensions {sorted(dims)}")
    return np.concatenate(parts)
