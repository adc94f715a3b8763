"""What embeds items: texts, image files, or the bytes of images."""

from pathlib import Path
from typing import Protocol

from nobackfill.items.kind import Kind
from nobackfill.vectors import Vectors

# What a model reads where it reads queries otherwise than what they find.
DOCUMENTS, QUERIES = "documents", "queries"


class Embedder(Protocol):
    """`fingerprint` names the model that makes the vectors: equal dimensions are not equal spaces.

    `kind`: what it reads; None where it takes either. `reads`: DOCUMENTS or QUERIES, by what is
    declared or by an encoder that is named behind it; empty where it reads both alike.
    """

    fingerprint: str
    kind: Kind | None
    reads: str

    def embed(self, items: list[str] | list[Path] | list[bytes]) -> Vectors:
        """Vectors [n, dim]. Raises UnusableItemsError where one of the items may be at fault, or
        their number; InvalidInputError, UnavailableError, BusyError for what no item can help."""
