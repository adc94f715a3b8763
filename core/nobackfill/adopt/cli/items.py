"""Sources as a command means them: of items, or of what asks for items."""

from nobackfill.adopt.embedding.embedder import QUERIES
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import ParquetSource
from nobackfill.adopt.sources.source import Source
from nobackfill.errors import InvalidInputError


def open_items(
    address: str, called: str, *, key: str | None = None, vector: str | None = None
) -> Source:
    """A source of items' vectors; `called`: what its user knows it by.

    Raises InvalidInputError where its vectors are a model's of queries, which it reads otherwise
    than items; and as open_source.
    """
    source = open_source(address, key=key, vector=vector)
    not_read_as(source, QUERIES, f"{called}: expected the items' vectors, got those of queries")
    return source


def not_read_as(source: Source, role: str, why: str) -> None:
    """Raises InvalidInputError with `why` where it says that its vectors were read so."""
    if isinstance(source, ParquetSource) and source.reads().startswith(role):
        raise InvalidInputError(why)
