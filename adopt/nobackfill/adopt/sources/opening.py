"""Sources by their addresses: of items, or of queries that ask for items."""

from pathlib import Path

from nobackfill.adopt.sources.source import QUERIES, EmbeddedSource, Searchable, Source
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.extras import load_plugin, plugin_names

# For a sentence: a message of several lines is shown with its line ends escaped.
KINDS = (
    "FILE.parquet or a folder of them, a folder of numpy files (ids.npy and one array of vectors), "
    "postgresql://USER@HOST/DATABASE#TABLE with pgvector, qdrant:https://HOST:PORT#COLLECTION or "
    "qdrant:FOLDER#COLLECTION, milvus:https://HOST:PORT#COLLECTION or milvus:FILE.db#COLLECTION, "
    "chroma:https://HOST:PORT#COLLECTION"
)


_POSTGRES = "postgresql://…/DATABASE#TABLE"


def open_source(address: str, *, key: str | None = None, vector: str | None = None) -> Source:
    """The store at an address. `key`, `vector`: columns, None where there is only one choice.

    KIND:PLACE#COLLECTION is opened by the plug-in KIND of the group `nobackfill.sources`, which is
    called with the place, the collection and `vector`, and returns a Source.

    Raises NotFoundError, UnavailableError, InvalidInputError, ConfigurationError.
    """
    if address.startswith(("postgresql://", "postgres://")):
        from nobackfill.adopt.sources.pgvector import PgvectorSource

        try:
            address.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"{_POSTGRES}: expected it in UTF-8") from error
        server, _, table = address.partition("#")
        if not table:
            raise InvalidInputError(f"name the table as well: {_POSTGRES}")
        return PgvectorSource(server, table, key, vector)
    kind, colon, rest = address.partition(":")
    if colon and kind in plugin_names("sources"):
        place, _, collection = rest.partition("#")
        if not place or not collection:
            raise InvalidInputError(f"name the collection as well: {kind}:PLACE#COLLECTION")
        found: Source = load_plugin("sources", kind)(place, collection, vector)
        return found
    if "://" in address:
        # Not the address itself: it may hold a password.
        raise InvalidInputError(f"{kind}://…: expected {KINDS}")
    path = Path(address)
    if (path / "ids.npy").is_file():
        from nobackfill.adopt.sources.arrays import ArraySource

        return ArraySource(path, vector)
    if not path.exists():
        raise NotFoundError(f"{address}: no such file or folder; a source is {KINDS}")
    from nobackfill.adopt.sources.parquet import ParquetSource

    return ParquetSource(path, key or "id", vector)


def open_searchable(
    address: str, *, key: str | None = None, vector: str | None = None
) -> Searchable:
    """The same, to be searched: files are read into memory. Raises as open_source."""
    source = open_source(address, key=key, vector=vector)
    if isinstance(source, Searchable):
        return source
    from nobackfill.adopt.sources.arrays import MemorySource

    return MemorySource(source)


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
    if isinstance(source, EmbeddedSource) and source.reads().startswith(role):
        raise InvalidInputError(why)
