"""Store a gallery: one SQLite file of items, with a table of vectors for each space.

`nobackfill.gallery.search` searches it; `staging` fills and activates a second space.

>>> import numpy as np
>>> from nobackfill.gallery import NewVectors, SpaceSpec, SqliteGallery
>>> spec = SpaceSpec("s1", 1, 2, "squared_l2", unit_norm=False, side_space=None, side_dim=0)
>>> with SqliteGallery.create(folder / "photos.sqlite", spec) as store:
...     vectors = NewVectors("s1", np.eye(2, dtype=np.float32))
...     put = store.put(["cat", "dog"], [vectors], metadata=[{"year": 2026}, None])
...     store.count(), store.get("cat").metadata
(2, {'year': 2026})
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.gallery.filter_engine import passing_labels as passing_labels
    from nobackfill.gallery.filters import (
        All as All,
        AnyOf as AnyOf,
        Exists as Exists,
        Not as Not,
        OneOf as OneOf,
        Range as Range,
        TimeRange as TimeRange,
    )
    from nobackfill.gallery.spec import SpaceInfo as SpaceInfo, SpaceSpec as SpaceSpec
    from nobackfill.gallery.sqlite_file import StoredItem as StoredItem
    from nobackfill.gallery.sqlite_gallery import SqliteGallery as SqliteGallery
    from nobackfill.gallery.staging import Estimate as Estimate, run_upgrade as run_upgrade
    from nobackfill.gallery.store import (
        Change as Change,
        NewVectors as NewVectors,
        PutResult as PutResult,
    )
else:
    __getattr__ = export_lazily(__name__)
