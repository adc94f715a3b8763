"""Name a model of texts by the files that determine its vectors, for documents and for queries."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nobackfill.adopt.sources.source import DOCUMENTS, QUERIES
from nobackfill.release.manifest import TextRole
from nobackfill.release.publishing.declaration import Declaration, fingerprint_model


@dataclass(frozen=True)
class TextFiles:
    """Files and settings that determine the vectors of texts of one role.

    Attributes:
        weights: The model's files of weights, and others whose content counts.
        declared: How they are used.
        tokenizer: The file of the tokenizer.
    """

    weights: tuple[Path, ...]
    declared: Declaration
    tokenizer: Path


# A model that routes queries elsewhere has other files for each role.
RoleFiles = Mapping[TextRole, TextFiles]


def mark_vectors(files: RoleFiles, *, queries: bool) -> tuple[str, str]:
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
    elif documents.declared.prefix_of_queries != documents.declared.prefix:
        role = QUERIES if queries else DOCUMENTS
    else:
        role = ""
    return fingerprint, role


def _fingerprint(files: TextFiles) -> str:
    return fingerprint_model(files.weights, files.declared, files.tokenizer)
