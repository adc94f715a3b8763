"""What embeds items: texts, image files, or the bytes of images."""

from pathlib import Path
from typing import Protocol

from nobackfill.items.kind import Kind
from nobackfill.vectors import Vectors


class Embedder(Protocol):
    """`fingerprint` names the model that makes the vectors: equal dimensions are not equal spaces.

    `kind`: what it reads; None where it takes either.
    """

    fingerprint: str
    kind: Kind | None

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Vectors [n, dim]. Raises InvalidInputError, UnavailableError, BusyError."""
