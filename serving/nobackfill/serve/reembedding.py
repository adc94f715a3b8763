"""Re-embed items of a database into a file of native vectors."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np

from nobackfill.adopt.embedding.embedder import Embedder
from nobackfill.adopt.sources.source import Rows, Searchable
from nobackfill.errors import BusyError, InvalidInputError, NotPermittedError, UnavailableError
from nobackfill.serving.natives import ItemVersion, NativeVectorFile, digest_old_vector
from nobackfill.serving.reembedding import Reembedding, ReembeddingLimits
from nobackfill.serving.sources import ItemSource, check_item_size
from nobackfill.vectors import InputKind, Vectors


class ColumnItems:
    """Items whose texts are a column of the table or collection that holds the vectors.

    Args:
        source: the store.
        column: the name of the column or field.
    """

    kind: InputKind = "text"

    def __init__(self, source: Searchable, column: str) -> None:
        self._source, self._column = source, column

    def read(self, name: str, most_bytes: int) -> str | None:
        """Read an item's text from the store.

        Args:
            name: the item's id.
            most_bytes: the largest size to accept, in UTF-8.

        Returns:
            The text; None if there is no such item, or its text is empty.

        Raises:
            TooLargeError: the text is larger than `most_bytes`.
            InvalidInputError: there is no such column, or the store refuses the call. A store
                without fixed columns returns None instead.
            UnavailableError, NotPermittedError: the store cannot be read.
            BusyError: the store is locked, or its server has too many requests.
            NotFoundError: the table or the collection was deleted.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        contents = self._source.texts([name], self._column).get(name)
        if contents is not None:
            check_item_size(contents.encode("utf-8", "surrogatepass"), name, most_bytes)
        return contents


class SourceReembedding(Reembedding[ItemVersion]):
    """Re-embed items of a store on threads, and put their vectors into a file of native vectors.

    Args:
        source: the store with the old vectors.
        items: where to read the items.
        embedder: the new model.
        natives: the file, which is also the ledger of claims.
        limits: bounds of time, bytes, concurrency and budget.

    Raises:
        InvalidInputError: the model cannot read this kind of items.
    """

    def __init__(
        self,
        source: Searchable,
        items: ItemSource,
        embedder: Embedder,
        natives: NativeVectorFile,
        limits: ReembeddingLimits,
    ) -> None:
        if embedder.input_kind not in (None, items.kind):
            raise InvalidInputError(
                f"source of items: expected {embedder.input_kind}s, which the model reads, got "
                f"{items.kind}s; name another source, or another model"
            )
        super().__init__(items, limits, natives)
        self._source, self._embedder, self._natives = source, embedder, natives

    def embed_and_store(
        self, contents: Mapping[ItemVersion, str | bytes], missing: Sequence[ItemVersion]
    ) -> Collection[ItemVersion]:
        """Embed items and store their native vectors durably; settle their claims.

        Vectors of items that changed meanwhile are deleted again.

        Args:
            contents: texts or encoded images by item; may be empty.
            missing: items that their source lacks, perhaps none; their native vectors are deleted.

        Returns:
            The items that were embedded. One that the model rejects does not affect the others:
            each is then embedded alone, and the error is the last failure.

        Raises:
            UnavailableError, BusyError, NotPermittedError: the embedder, the store or the file
                cannot be used; the items may not be stored.
            CannotWriteError, DamagedError: the file cannot be written.
            InvalidInputError: the model's vectors have another dimension or are not finite, and
                none is stored; or the store refuses the call.
            NotFoundError: the table or the collection was deleted; the vectors are stored.
            ConfigurationError: the process was forked after LanceDB or Milvus was opened.
        """
        vectors = self._embed(contents)
        if vectors:
            ids, digests = zip(*vectors, strict=True)
            self._natives.store_vectors(ids, digests, np.stack(list(vectors.values())))
            current = item_versions(self._source.lookup(ids))
            self._natives.delete_outdated(dict(one for one in vectors if one not in current))
        self._natives.delete_vectors([name for name, _ in missing])
        return vectors

    def _embed(self, contents: Mapping[ItemVersion, str | bytes]) -> dict[ItemVersion, Vectors]:
        """Embed items; one that fails does not affect the others."""
        if not contents:
            return {}
        try:
            embeddings = self._embedder.embed(list(contents.values()))  # type: ignore[arg-type]
            return dict(zip(contents, embeddings, strict=True))
        except (UnavailableError, BusyError, NotPermittedError):
            # The embedder's host fails, not an item: retrying each item alone cannot help.
            raise
        except Exception as error:  # noqa: BLE001 - a model may raise anything
            self.record_failure(error)
            if len(contents) == 1:
                return {}
        return {
            key: vector
            for one in contents
            for key, vector in self._embed({one: contents[one]}).items()
        }


def item_versions(rows: Rows) -> dict[ItemVersion, str]:
    """Return the names of items in their source, by item version.

    Args:
        rows: n items with their old vectors, float32 [n, dim].

    Returns:
        The id, by (id, digest of the old vector); empty without rows.
    """
    return {(name, digest_old_vector(rows.vectors[row])): name for row, name in enumerate(rows.ids)}
