"""What an upgrade cannot do without, bare: read all rows, run the model, write all rows."""

import time

import numpy as np

from bench.published import Publication
from gallery import staging
from gallery.spec import SpaceSpec
from gallery.store import Store
from gallery.upgrade import CHUNK
from release.models import open_upgrade


def upgrade_seconds(store: Store, pair: Publication, kind: str, threads: int) -> float:
    """Release 1 to 2, onnxruntime on the same batches as ours; nothing staged, one transaction."""
    new = pair.manifests[2]
    model = open_upgrade(pair.repo, new, new.upgrades[0], int8=kind == "int8", threads=threads)
    staging.begin(store, SpaceSpec.of(new))
    started = time.perf_counter()
    with store.reading() as connection:
        rows = connection.execute("SELECT label, embedding, side FROM vectors_1").fetchall()
    labels, blobs, sides = zip(*rows, strict=True)
    embedding, side = (
        np.frombuffer(b"".join(b), "<f4").reshape(len(b), -1) for b in (blobs, sides)
    )
    upgraded = [
        model.run(embedding[i : i + CHUNK], side[i : i + CHUNK]).embedding
        for i in range(0, len(rows), CHUNK)
    ]
    vectors = [vector.tobytes() for vector in np.concatenate(upgraded)]
    with store.writing() as connection:
        connection.executemany(
            "INSERT INTO vectors_2 (label, origin, embedding, side) VALUES (?, 'upgraded', ?, ?)",
            zip(labels, vectors, sides, strict=True),
        )
    return time.perf_counter() - started
