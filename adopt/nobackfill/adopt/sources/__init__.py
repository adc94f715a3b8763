"""Read and extend the vector stores of users, each through the Protocols of source.py.

>>> import numpy as np
>>> from nobackfill.adopt.sources import open_source
>>> np.save(folder / "ids.npy", np.arange(3))
>>> np.save(folder / "vectors.npy", np.eye(3, dtype=np.float32))
>>> open_source(str(folder)).count()
3
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.adopt.sources.opening import (
        open_searchable as open_searchable,
        open_source as open_source,
    )
    from nobackfill.adopt.sources.source import (
        TargetVectors as TargetVectors,
        Rows as Rows,
        Searchable as Searchable,
        Source as Source,
        Target as Target,
        Window as Window,
    )
else:
    __getattr__ = export_lazily(__name__)
