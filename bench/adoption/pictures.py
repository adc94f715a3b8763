"""Pictures and their vectors by pretrained EfficientNet-Lite models: embedded once, then kept.

A picture's query is a second view of it: another part, light and side.
"""

import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.adoption.texts import EmbeddedDocuments
from demo.adoption import lite
from demo.adoption.pictures import make_second_view
from nobackfill.adopt.embedding import open_embedder
from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.vectors import Vectors, normalise

_BATCH = 16


@dataclass(frozen=True)
class Pictures:
    """Files and the names of their folders."""

    files: list[Path]
    labels: NDArray[np.str_]


def draw_pictures(folder: Path, count: int, seed: int = 0, *, after: int = 0) -> Pictures:
    """`count` PNGs of class folders, behind the first `after` of that order. Raises ValueError
    where there are less."""
    every = sorted(folder.glob("*/*.png"))
    if len(every) < after + count:
        raise ValueError(
            f"{folder}: expected {after + count} PNGs in class folders, found {len(every)}"
        )
    rows = np.random.default_rng(seed).permutation(len(every))[after : after + count]
    files = [every[row] for row in rows.tolist()]
    return Pictures(files, np.array([one.parent.name for one in files]))


def embed_pictures(
    pictures: Pictures,
    asked: NDArray[np.int64],
    packages: Path,
    model: str,
    size: int,
    file: Path,
) -> EmbeddedDocuments:
    """By `model` at `size` pixels, as far as an earlier run has not kept them in `file`. `asked`:
    the rows that have a second view; those of others are 0, or what that run asked for."""
    kept = EmbeddedDocuments.read(file) if file.exists() else None
    lacking = asked if kept is None else asked[~kept.titles[asked].any(1)]
    if kept is None or len(lacking):
        graph = file.with_suffix(".onnx")
        lite.export_features(packages, model, size, graph)
        embedder = open_embedder(str(graph))
        if kept is None:
            bodies = _by(embedder, [one.read_bytes() for one in pictures.files])
            kept = EmbeddedDocuments(bodies, np.zeros_like(bodies))
        if views := [_view(pictures.files[row], row) for row in lacking.tolist()]:
            kept.titles[lacking] = _by(embedder, views)
        kept.write(file)
    return kept


def _by(embedder: Embedder, images: list[bytes]) -> Vectors:
    """Rows of norm 1."""
    starts = range(0, len(images), _BATCH)
    parts = [embedder.embed(images[first : first + _BATCH]) for first in starts]
    return normalise(np.concatenate(parts))


def _view(file: Path, row: int) -> bytes:
    """A PNG of the second view."""
    kept = io.BytesIO()
    with Image.open(file) as opened:
        make_second_view(opened.convert("RGB"), row).save(kept, "PNG")
    return kept.getvalue()
