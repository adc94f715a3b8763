"""Search a gallery in its own database while its model changes; needs the extra `adopt`.

`Dual` ranks by the old and the new model together. With a source of items it embeds the first hits
again, bounded in time, in bytes and by a daily budget. `AdapterSearch` maps queries of the new
model to the space of the old vectors.

>>> import numpy as np
>>> from nobackfill.serve import NativeVectorFile
>>> natives = NativeVectorFile(folder / "natives.db", "the new model's fingerprint", 2)
>>> natives.store_vectors(["a"], [b"digest of a's old vector"], np.eye(2, dtype=np.float32)[:1])
>>> natives.nearest_ids(np.ones((1, 2), np.float32), 5)
['a']
>>> natives.close()
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.serve.dual import (
        AdapterSearch as AdapterSearch,
        DualAnswer as DualAnswer,
        Dual as Dual,
        DualHit as DualHit,
        ReembeddingProgress as ReembeddingProgress,
    )
    from nobackfill.serving.natives import NativeVectorFile as NativeVectorFile
    from nobackfill.serve.reembedding import (
        ColumnItems as ColumnItems,
        SourceReembedding as SourceReembedding,
    )
    from nobackfill.serving.reembedding import ReembeddingLimits as ReembeddingLimits
    from nobackfill.serving.sources import (
        FolderItems as FolderItems,
        FunctionItems as FunctionItems,
        ItemSource as ItemSource,
        UrlItems as UrlItems,
    )
else:
    __getattr__ = export_lazily(__name__)
