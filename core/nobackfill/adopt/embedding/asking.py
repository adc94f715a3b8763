"""Queries of a space whose model reads its items alone: another model, with weights of its own."""

from pathlib import Path

from nobackfill.adopt.embedding.embedder import QUERIES, Embedder
from nobackfill.items.kind import Kind
from nobackfill.vectors import Vectors


class Asking:
    """`encoder` reads what is asked of vectors that `model` made: texts asked of texts, or of
    images. Its vectors are of that model's space, whose fingerprint they carry."""

    def __init__(self, model: Embedder, encoder: Embedder) -> None:
        self._encoder = encoder
        self.kind: Kind | None = encoder.kind
        self.fingerprint = model.fingerprint
        self.reads = f"{QUERIES} by {encoder.fingerprint}"

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        return self._encoder.embed(items)
