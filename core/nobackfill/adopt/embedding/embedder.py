"""What embeds items: texts, or image files."""

from pathlib import Path
from typing import Literal, Protocol

from nobackfill.vectors import Vectors

Kind = Literal["text", "image"]


class Embedder(Protocol):
    """`fingerprint` names the model that makes the vectors: equal dimensions are not equal spaces.

    `kind`: what it reads; None where it takes either.
    """

    fingerprint: str
    kind: Kind | None

    def embed(self, items: list[str] | list[Path]) -> Vectors:
        """Vectors [n, dim]. Raises InvalidInputError, UnavailableError, BusyError."""
