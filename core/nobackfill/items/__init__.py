"""Where the items themselves are, and how they are embedded again from there, within limits.

>>> from nobackfill.items import FolderItems
>>> FolderItems(folder).read("no such.png", most_bytes=1000)
"""

from typing import TYPE_CHECKING

from nobackfill.faces import offer

if TYPE_CHECKING:
    from nobackfill.items.sources import LineItems as LineItems
    from nobackfill.items.reembedding import (
        EmbeddingCost as EmbeddingCost,
        Limits as Limits,
        Reembedding as Reembedding,
        Work as Work,
    )
    from nobackfill.items.reembedding import Resting as Resting
    from nobackfill.items.sources import (
        FolderItems as FolderItems,
        FunctionItems as FunctionItems,
        Items as Items,
        UrlItems as UrlItems,
    )
else:
    __getattr__ = offer(
        __name__,
        {
            "reembedding": "EmbeddingCost Limits Reembedding Resting Work",
            "sources": "FolderItems FunctionItems Items LineItems UrlItems",
        },
    )
