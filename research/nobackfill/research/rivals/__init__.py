"""Rivals: ways to search vectors of an old model with queries of a new one, on frozen vectors.

A rival is one file of this folder with one class. To add yours, write a class with the members of
`Rival`, and add a line to rows.py. `python training/compare.py --vectors FILE.npz` measures it
beside all others.

>>> import numpy as np
>>> from nobackfill.research.rivals import TrainingVectors, list_rivals
>>> old = np.eye(4, dtype=np.float32)
>>> rotation = list_rivals()["procrustes"]()
>>> rotation.fit(TrainingVectors(old, old[::-1].copy(), None, None, unit_norm=True), seed=0)
>>> rotation.mapped_vectors, int(rotation.transform(old[:1], None).argmax())
('items', 3)
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.research.rivals.rival import (
        Rival as Rival,
        TrainingVectors as TrainingVectors,
    )
    from nobackfill.research.rivals.rows import list_rivals as list_rivals
else:
    __getattr__ = export_lazily(__name__)
