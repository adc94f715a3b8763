"""Migrate vectors in a user's own store between models of others; needs the extra `adopt`.

Vectors stay in their store. A map is fitted to a few thousand items that the new model embedded.
It is compared with staying with the old model, and migrated vectors are written next to the old
ones. The command is `nobackfill`.

>>> import numpy as np
>>> from nobackfill.adopt import fit_maps
>>> old = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
>>> maps = fit_maps(old, old[:, ::-1])
>>> sorted(maps)
['affine', 'low_rank', 'procrustes']
>>> np.abs(maps["procrustes"](old) - old[:, ::-1]).max() < 1e-5
np.True_
"""

from typing import TYPE_CHECKING

from nobackfill.faces import export_lazily

if TYPE_CHECKING:
    from nobackfill.adopt.carrying import carry as carry
    from nobackfill.adopt.judgement import Queries as Queries
    from nobackfill.adopt.maps import (
        Map as Map,
        fit_maps as fit_maps,
        load_map as load_map,
        save_map as save_map,
    )
    from nobackfill.adopt.pairs import (
        Pairs as Pairs,
        inspect as inspect,
        match_by_id as match_by_id,
        sample_spread_rows as sample_spread_rows,
    )
    from nobackfill.adopt.verdict import Cost as Cost, Verdict as Verdict, decide as decide
else:
    __getattr__ = export_lazily(__name__)
