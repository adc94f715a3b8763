"""Search the vectors of one space: exactly, or by a graph (`hnsw`, which needs hnswlib).

An index is immutable; a `LiveView` adds changes in a second index.

>>> import numpy as np
>>> from nobackfill.gallery import SpaceSpec
>>> from nobackfill.gallery.search import ExactIndex
>>> spec = SpaceSpec("s1", 1, 2, "squared_l2", unit_norm=False, side_space=None, side_dim=0)
>>> index = ExactIndex(spec, np.array([7, 9]), np.array([[1, 0], [0, 1]], np.float32))
>>> index.search(np.array([[0, 2]], np.float32), k=2).labels.tolist()
[[9, 7]]
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.gallery.search.exact import ExactIndex as ExactIndex
    from nobackfill.gallery.search.index import (
        Content as Content,
        Index as Index,
        Neighbours as Neighbours,
    )
    from nobackfill.gallery.search.view import LiveView as LiveView, Snapshot as Snapshot
else:
    __getattr__ = export_lazily(__name__)
