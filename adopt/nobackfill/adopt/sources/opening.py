"""Open sources of vectors, of items or of queries, by their addresses."""

from inspect import signature
from pathlib import Path

from nobackfill.adopt.sources.source import QUERIES, EmbeddedSource, Searchable, Source
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.extras import load_plugin, plugin_names

# In one line: a terminal shows the line ends of a message escaped.
KINDS = (
    "FILE.parquet or a folder of them, a folder of numpy files (ids.npy and one array of vectors), "
    "postgresql://USER@HOST/DATABASE#TABLE with pgvector, qdrant:https://HOST:PORT#COLLECTION or "
    "qdrant:FOLDER#COLLECTION, milvus:https://HOST:PORT#COLLECTION or milvus:FILE.db#COLLECTION, "
    "chroma:https://HOST:PORT#COLLECTION, lancedb:FOLDER#TABLE, sqlite:FILE#TABLE with sqlite-vec"
)


_POSTGRES = "postgresql://…/DATABASE#TABLE"


def open_source(
    address: str,
    *,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
) -> Source:
    """Open the store at an address.

    The plug-in KIND of the group `nobackfill.sources` opens KIND:PLACE#COLLECTION. It is called
    with the place, the collection, `vector`, and `key` where one is given, and returns a Source.

    Args:
        address: An address, as KINDS lists them.
        key: Column of the keys; None for the primary key, or `id` in Parquet.
        vector: Column of the old vectors; None for the only one.
        where: Condition of the rows in SQL, for a table of PostgreSQL with vectors of several
            models; None for all rows. Never take it from a stranger.

    Raises:
        NotFoundError: There is no such file, table or collection.
        UnavailableError: The server does not answer.
        InvalidInputError: The address or a column is not one that can be read.
        ConfigurationError: The address would send vectors or a password unencrypted.
    """
    if address.startswith(("postgresql://", "postgres://")):
        from nobackfill.adopt.sources.pgvector import PgvectorSelection, PgvectorSource

        try:
            address.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(f"{_POSTGRES}: expected it in UTF-8") from error
        server, _, table = address.partition("#")
        if not table:
            raise InvalidInputError(f"name the table as well: {_POSTGRES}")
        if where is not None:
            return PgvectorSelection(server, table, key, vector, where=where)
        return PgvectorSource(server, table, key, vector)
    if where is not None:
        raise InvalidInputError(
            f"--where: expected a table of PostgreSQL, {_POSTGRES}; the other stores are read whole"
        )
    kind, colon, rest = address.partition(":")
    if colon and kind in plugin_names("sources"):
        place, _, collection = rest.partition("#")
        if not place or not collection:
            raise InvalidInputError(f"name the collection as well: {kind}:PLACE#COLLECTION")
        plugin = load_plugin("sources", kind)
        if key is not None and "key" not in signature(plugin).parameters:
            raise InvalidInputError(f"{kind}: omit --key, because its items have keys of their own")
        source: Source = plugin(place, collection, vector, *([] if key is None else [key]))
        return source
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
    address: str,
    *,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
) -> Searchable:
    """Open the store at an address for searches. Files are read into memory.

    The arguments and errors are those of `open_source`.
    """
    source = open_source(address, key=key, vector=vector, where=where)
    if isinstance(source, Searchable):
        return source
    from nobackfill.adopt.sources.arrays import MemorySource

    return MemorySource(source)


def open_items(
    address: str,
    option: str,
    *,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
) -> Source:
    """Open a source of items' vectors, by the arguments of `open_source`.

    Args:
        address: An address, as KINDS lists them.
        option: The source's name in an error, as its user gave it.
        key: Column of the keys.
        vector: Column of the old vectors.
        where: Condition of the rows; None for all.

    Raises:
        InvalidInputError: The vectors are those of queries, from a model that encodes queries and
            documents in two ways. Also as `open_source`, whose other errors it raises, too.
    """
    source = open_source(address, key=key, vector=vector, where=where)
    not_read_as(source, QUERIES, f"{option}: expected the items' vectors, got those of queries")
    return source


def not_read_as(source: Source, role: str, why: str) -> None:
    """Raise InvalidInputError with the message `why` if the vectors of a source have a role."""
    if isinstance(source, EmbeddedSource) and source.reads().startswith(role):
        raise InvalidInputError(why)
