"""Name a model of texts by the files that determine its vectors, for documents and for queries."""

from nobackfill.adopt.sources.source import DOCUMENTS, QUERIES
from nobackfill.release.publishing.declaration import fingerprint_model
from nobackfill.release.publishing.text_folder import RoleFiles, TextFiles


def fingerprint_and_role(files: RoleFiles, *, queries: bool) -> tuple[str, str]:
    """Return the fingerprint and the role that vectors of texts are stored with.

    The fingerprint names the space, so it is that of the documents' model for queries, too. Where
    another model embeds queries, the role of their vectors names that one.

    Args:
        files: The files of both roles; they are read whole.
        queries: Whether the texts are queries.

    Returns:
        `fingerprint` and `reads` of an `Embedder`.

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


def _fingerprint(files: TextFiles) -> str:
    return fingerprint_model(files.weights, files.declaration, files.tokenizer)
