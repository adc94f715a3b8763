"""What a store reports to its listeners."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

import numpy as np

from nobackfill.gallery.search.index import Labels
from nobackfill.vectors import Vectors


@dataclass(frozen=True)
class Change:
    """What one committed transaction did.

    `added`: vectors that came or were replaced, by space id. `deleted`: labels that are gone from
    every space; they go before the others come. `spaces`: a space came, went or changed its state.
    `described`: labels that are new, or whose metadata may be another. `carried`: those of the
    spaces in `added` whose vectors an upgrade has made.
    """

    added: Mapping[str, tuple[Labels, Vectors]]
    deleted: Labels
    spaces: bool = False
    described: Labels = field(default_factory=lambda: np.empty(0, np.int64))
    carried: Collection[str] = ()
