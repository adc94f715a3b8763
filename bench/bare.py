"""What a command cannot do without, bare: onnxruntime, SQLite, numpy and Pillow, one after the
other, nothing checked, staged or durable in pieces. Sessions are open before the clock starts."""

import sqlite3
import time
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from bench.published import Publication
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.release.manifest import embedder_path
from nobackfill.release.models import CHUNK_ROWS

ADD_BATCH = 32


def open_session(path: Path, threads: int = 1) -> Any:
    """An onnxruntime session on the processor."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def upgrade_file(pair: Publication, kind: str) -> Path:
    """The upgrade 1 to 2, `fp32` or `int8`."""
    upgrade = pair.manifests[2].upgrades[0]
    file = upgrade.int8_file if kind == "int8" else upgrade.file
    assert file is not None
    return pair.repo / file.path


@dataclass(frozen=True)
class UpgradeSeconds:
    """Seconds of its parts."""

    read: float
    transform: float
    write: float

    @property
    def total(self) -> float:
        return self.read + self.transform + self.write


def time_upgrade(
    store: SqliteGallery, pair: Publication, kind: str, threads: int
) -> UpgradeSeconds:
    """Release 1 to 2: all rows read, run in batches as ours, written in one transaction."""
    model = open_session(upgrade_file(pair, kind), threads)
    staging.add_staging_space(store, SpaceSpec.of(pair.manifests[2]))
    started = time.perf_counter()
    with store.read_snapshot() as connection:
        rows = connection.execute("SELECT label, embedding, side FROM vectors_1").fetchall()
    labels, blobs, sides = zip(*rows, strict=True)
    old, side = (np.frombuffer(b"".join(b), "<f4").reshape(len(b), -1) for b in (blobs, sides))
    read = time.perf_counter()
    upgraded = [
        model.run(
            ["upgraded"], {"embedding": old[i : i + CHUNK_ROWS], "side": side[i : i + CHUNK_ROWS]}
        )[0]
        for i in range(0, len(rows), CHUNK_ROWS)
    ]
    transformed = time.perf_counter()
    vectors = [vector.tobytes() for vector in np.concatenate(upgraded)]
    with store.transaction() as connection:
        connection.executemany(
            "INSERT INTO vectors_2 (label, origin, embedding, side) VALUES (?, 'upgraded', ?, ?)",
            zip(labels, vectors, sides, strict=True),
        )
    written = time.perf_counter()
    return UpgradeSeconds(read - started, transformed - read, written - transformed)


def time_adding(pair: Publication, images: Path, file: Path, threads: int) -> float:
    """Every image of a folder decoded, run through release 1's two encoders, and its two vectors
    inserted into a table of a new `file`, in one transaction."""
    one = pair.manifests[1]
    assert one.side_encoder is not None
    embedder = open_session(pair.repo / embedder_path(one.release), threads)
    encoder = open_session(pair.repo / one.side_encoder.file.path, threads)
    paths = sorted(images.iterdir())
    started = time.perf_counter()
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("CREATE TABLE vectors (path TEXT, embedding BLOB, side BLOB)")
        for start in range(0, len(paths), ADD_BATCH):
            some = paths[start : start + ADD_BATCH]
            inputs = {"image": np.stack([_pixels(path) for path in some])}
            vectors = (model.run(None, inputs)[0] for model in (embedder, encoder))
            blobs = ([row.tobytes() for row in rows] for rows in vectors)
            connection.executemany(
                "INSERT INTO vectors VALUES (?, ?, ?)", zip(map(str, some), *blobs, strict=True)
            )
    return time.perf_counter() - started


def time_search(pair: Publication, image: Path, file: Path, threads: int) -> float:
    """An image decoded and embedded by release 1, all of a gallery's rows read, the nearest 10."""
    model = open_session(pair.repo / embedder_path(1), threads)
    started = time.perf_counter()
    (query,) = model.run(None, {"image": _pixels(image)[None]})[0]
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute("SELECT label, embedding FROM vectors_1").fetchall()
    vectors = np.frombuffer(b"".join(blob for _, blob in rows), "<f4").reshape(len(rows), -1)
    near = np.argpartition(vectors @ -query, 9)[:10]
    assert len({rows[row][0] for row in near}) == len(near)
    return time.perf_counter() - started


def _pixels(image: Path) -> Any:
    with Image.open(image) as file:
        return np.asarray(file.convert("RGB"))
