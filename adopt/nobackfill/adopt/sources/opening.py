"""Open sources of vectors, of items or of queries, by their addresses."""

from inspect import signature
from pathlib import Path

from nobackfill.adopt.sources.source import QUERIES, EmbeddedSource, Searchable, Source
from nobackfill.errors import InvalidInputError, NotFoundError
from nobackfill.extras import load_plugin, plugin_names

# In one line: a terminal shows the line ends of a message escaped.
ADDRESS_FORMS = (
    "FILE.parquet or a folder of them, a folder of numpy files (ids.npy and one array of vectors), "
    "postgresql://USER@HOST/DATABASE#TABLE with pgvector, qdrant:https://HOST:PORT#COLLECTION or "
    "qdrant:FOLDER#COLLECTION, milvus:https://HOST:PORT#COLLECTION or milvus:FILE.db#COLLECTION, "
    "chroma:https://HOST:PORT#COLLECTION, lancedb:FOLDER#TABLE, sqlite:FILE#TABLE with sqlite-vec"
)
# Beginnings of the address of a table of PostgreSQL.
POSTGRESQL_SCHEMES = ("postgresql://", "postgres://")
_POSTGRES = "postgresql://…/DATABASE#TABLE"
# Why a store does not take an option.
_NO_OPTION = {
    "key": "expected no --key, because the items of such a store have keys of their own; leave "
    "--key out",
    "where": "expected a table of PostgreSQL, LanceDB or SQLite with --where, because other stores "
    "are read whole; copy the vectors of one model into a place of their own, and name that as "
    "SOURCE without --where",
}


def open_source(
    address: str,
    *,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
) -> Source:
    """Open the store at an address, for reading and for new vectors. Nothing is written.

    The plug-in KIND of the group `nobackfill.sources` opens KIND:PLACE#COLLECTION. It is called
    with PLACE, COLLECTION, `vector`, and with `key` and `where` by name if they are given.
    It returns a Source.

    Connections open at once or at the first use; a source that is Searchable has `close`, which the
    caller calls.

    Args:
        address: An address, in one of the forms of ADDRESS_FORMS.
        key: Column of the keys; None for the primary key, or `id` in Parquet.
        vector: Column of the old vectors; None for the only one. Some stores choose it when their
            facts are read first.
        where: Condition of the rows in SQL, for a table with vectors of several models; None for
            all rows. Never take it from a stranger.

    Raises:
        NotFoundError: There is no such file, table or collection.
        UnavailableError: The server does not answer.
        NotPermittedError: The server refuses the user or the key.
        InvalidInputError: The address has another form; the table, the key or the column of vectors
            cannot be used; or the store takes no `where`.
        ConfigurationError: The address would send vectors or a password unencrypted, the extra of
            the store is not installed, or its plug-in cannot be imported.
        IncompatibleSpaceError: As the plug-in raises it.
        BusyError: Others hold a file or a folder of an embedded store, or the server has too many
            requests.
        AlreadyExistsError: A flip in Chroma was killed, and a program has taken the name since.
        OSError: The path is too long, this user may not search its folder, or the lock file of an
            embedded store cannot be opened.
    """
    if address.startswith(POSTGRESQL_SCHEMES):
        from nobackfill.adopt.sources.pgvector import PgvectorSelection, PgvectorSource

        try:
            address.encode()
        except UnicodeEncodeError as error:
            raise InvalidInputError(
                f"SOURCE: expected an address in UTF-8, as in {_POSTGRES}, got other bytes; "
                "correct SOURCE"
            ) from error
        server, _, table = address.partition("#")
        if not table:
            raise InvalidInputError(
                f"SOURCE: expected the name of a table after #, as in {_POSTGRES}, got none; add it"
            )
        if where is not None:
            return PgvectorSelection(server, table, key, vector, where=where)
        return PgvectorSource(server, table, key, vector)
    kind, colon, rest = address.partition(":")
    if colon and kind in plugin_names("sources"):
        store_address, _, collection = rest.partition("#")
        if not store_address or not collection:
            # Not the address itself: it may hold a password.
            raise InvalidInputError(
                f"SOURCE: expected {kind}:PLACE#COLLECTION, where PLACE is the address of a "
                "server, a file or a folder, found no "
                f"{'COLLECTION' if store_address else 'PLACE'}; add it"
            )
        plugin = load_plugin("sources", kind)
        options = {"key": key, "where": where}
        options = {name: value for name, value in options.items() if value is not None}
        for name in options.keys() - signature(plugin).parameters.keys():
            raise InvalidInputError(f"{kind}: {_NO_OPTION[name]}")
        source: Source = plugin(store_address, collection, vector, **options)
        return source
    if where is not None:
        raise InvalidInputError(f"--where: {_NO_OPTION['where']}")
    if "://" in address:
        # Not the address itself: it may hold a password.
        raise InvalidInputError(
            f"{kind}://…: expected a SOURCE in one of these forms: {ADDRESS_FORMS}"
        )
    if not address:
        raise InvalidInputError(
            "SOURCE: expected an address, got an empty one; give it one of these forms: "
            f"{ADDRESS_FORMS}"
        )
    path = Path(address)
    if (path / "ids.npy").is_file():
        from nobackfill.adopt.sources.arrays import ArraySource

        return ArraySource(path, vector)
    if not path.exists():
        if colon and "#" in rest:
            kinds = ", ".join(sorted(plugin_names("sources")))
            raise InvalidInputError(
                f"{kind}:…: no plug-in for this kind of store is installed; installed are {kinds}. "
                "Correct the name, or install its plug-in (in a checkout: `make setup`)"
            )
        raise NotFoundError(
            f"{address}: no such file or folder; expected a SOURCE in one of these forms: "
            f"{ADDRESS_FORMS}"
        )
    from nobackfill.adopt.sources.parquet import ParquetSource

    return ParquetSource(path, key or "id", vector)


def open_searchable(
    address: str,
    *,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
) -> Searchable:
    """Open the store at an address for searches.

    A store that does not search by itself (files) is read into memory, and searched exactly by
    cosine.

    The caller closes the source. Vectors that files get later are not found.

    Args:
        address: An address, in one of the forms of ADDRESS_FORMS.
        key: Column of the keys, as in `open_source`.
        vector: Column of the old vectors, as in `open_source`.
        where: Condition of the rows, as in `open_source`.

    Raises:
        InvalidInputError: As `open_source`; or vectors of a file hold NaN or several dimensions, or
            an id occurs twice.
        NotFoundError: There is no such file, table or collection.
        UnavailableError: The server does not answer.
        NotPermittedError: The server refuses the user or the key.
        ConfigurationError: As `open_source`.
        IncompatibleSpaceError: Files of one folder record different models.
        BusyError: Others hold a file or a folder of an embedded store, or the server has too many
            requests.
        AlreadyExistsError: A flip in Chroma was killed, and a program has taken the name since.
        OSError: The path is too long, this user may not search its folder, or the lock file of an
            embedded store cannot be opened.
    """
    source = open_source(address, key=key, vector=vector, where=where)
    if isinstance(source, Searchable):
        return source
    from nobackfill.adopt.sources.arrays import MemorySource

    return MemorySource(source)


def open_item_vectors(
    address: str,
    option: str,
    *,
    key: str | None = None,
    vector: str | None = None,
    where: str | None = None,
) -> Source:
    """Open a source as `open_source` does, and refuse vectors of queries.

    Args:
        address: An address, in one of the forms of ADDRESS_FORMS.
        option: Name of the source in the error, for example "--old".
        key: Column of the keys, as in `open_source`.
        vector: Column of the old vectors, as in `open_source`.
        where: Condition of the rows, as in `open_source`.

    Raises:
        InvalidInputError: `nobackfill embed` recorded that the vectors are those of queries, from a
            model that encodes queries and documents in two ways; or as `open_source`.
        NotFoundError: There is no such file, table or collection.
        UnavailableError: The server does not answer.
        NotPermittedError: The server refuses the user or the key.
        ConfigurationError: As `open_source`.
        BusyError: Others hold a file or a folder of an embedded store, or the server has too many
            requests.
        IncompatibleSpaceError: As `open_source`.
        AlreadyExistsError: A flip in Chroma was killed, and a program has taken the name since.
        OSError: The path is too long, this user may not search its folder, or the lock file of an
            embedded store cannot be opened.
    """
    source = open_source(address, key=key, vector=vector, where=where)
    why = (
        f"{option}: expected vectors of the items, got vectors of queries; embed the items without "
        "--queries"
    )
    refuse_vectors_with_role(source, QUERIES, why)
    return source


def refuse_vectors_with_role(source: Source, role: str, why: str) -> None:
    """Refuse a source whose vectors `nobackfill embed` recorded with a role.

    The recorded role counts by its beginning.

    Args:
        source: The source; one without a recorded role passes.
        role: DOCUMENTS or QUERIES.
        why: Message of the error.

    Raises:
        InvalidInputError: The vectors have this role.
    """
    if isinstance(source, EmbeddedSource) and source.text_role().startswith(role):
        raise InvalidInputError(why)
