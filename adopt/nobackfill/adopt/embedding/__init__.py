"""Embed items by models of others: ONNX files, HTTP endpoints and Python functions.

>>> from nobackfill.adopt.embedding import open_embedder
>>> open_embedder("https://embeddings.example/v1/embeddings", name="small").input_kind
'text'
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.adopt.embedding.embedder import (
        Embedder as Embedder,
        open_embedder as open_embedder,
    )
else:
    __getattr__ = export_lazily(__name__)
