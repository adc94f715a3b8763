"""Parts that models in files share: their names by these files, and the end of an embedding."""

from collections.abc import Callable, Sequence
from pathlib import Path

from nobackfill.adopt.sources.source import DOCUMENTS, QUERIES
from nobackfill.errors import InvalidInputError, UnusableItemsError, UnusableRowsError
from nobackfill.release.publishing.declaration import Declaration, fingerprint_model
from nobackfill.release.publishing.text_folder import RoleFiles, TextFiles
from nobackfill.vectors import Vectors, check_vectors, normalise


def fingerprint_and_role(files: RoleFiles, *, queries: bool) -> tuple[str, str]:
    """Return the fingerprint and the role that vectors of texts are stored with.

    The fingerprint names the space, so it is that of the documents' model for queries, too. Where
    another model embeds queries, the role of their vectors names that one.

    Args:
        files: The files of both roles; they are read whole.
        queries: Whether the texts are queries.

    Returns:
        `fingerprint` and `text_role` of an `Embedder`.

    Raises:
        OSError: A file cannot be read.
    """
    documents, asked = files["document"], files["query"]
    fingerprint = _fingerprint(documents)
    if documents != asked:
        role = f"{QUERIES} by {_fingerprint(asked)}" if queries else DOCUMENTS
    elif documents.declaration.prefix_of_queries != documents.declaration.prefix:
        role = QUERIES if queries else DOCUMENTS
    else:
        role = ""
    return fingerprint, role


def finish_vectors(
    vectors: Vectors,
    layers: Sequence[Callable[[Vectors], Vectors]],
    declared: Declaration,
    file: Path,
) -> Vectors:
    """Apply the declared layers to pooled vectors, and check and normalise the result.

    Args:
        vectors: float32 [n, dim].
        layers: The layers of `declared`, opened.
        declared: The model's declaration.
        file: The model's file, for messages.

    Returns:
        float32 [n, other], finite; of norm 1 if that is declared.

    Raises:
        InvalidInputError: A layer reads another dimension.
        UnusableItemsError: A vector holds NaN or infinity.
    """
    try:
        for layer in layers:
            vectors = layer(vectors)
        checked = check_vectors(vectors, vectors.shape[1], error_name=f"output of {file}")
    except UnusableRowsError as error:
        raise UnusableItemsError(str(error)) from error
    except ValueError as error:
        raise InvalidInputError(
            f"{file}: the sentence-transformers modules after this model cannot read its vectors "
            f"of dimension {vectors.shape[1]} ({error}); copy all files of the folder from one "
            "model"
        ) from error
    return normalise(checked) if declared.normalise else checked


def _fingerprint(files: TextFiles) -> str:
    return fingerprint_model(files.weights, files.declaration, files.tokenizer)
