"""Ways beside ours, figure by figure: rows with signs."""

import numpy as np

from bench.harness import Row, Value
from nobackfill.adopt.figures import Figures
from nobackfill.metrics.bootstrap import paired_bootstrap

FIGURES = ("agreement@10", "R@1", "R@10")
OURS = "affine"


def compared(named: Row, way: str, found: dict[str, list[Figures]]) -> Row:
    """A row of `way`: means of its FIGURES in %, and for each whether it is measurably above (+) or
    below (-) that of OURS; `found`: figures of each query, a draw each, by way."""
    row: dict[str, Value] = {**named, "way": way}
    signs = ""
    for figure in FIGURES:
        mine, ours = ([one[figure] for one in found[which]] for which in (way, OURS))
        row[figure] = 100 * float(np.mean(mine))
        if way != OURS:
            apart = paired_bootstrap(mine, ours)
            signs += "+" if apart.low > 0 else "-" if apart.high < 0 else "="
    return {**row, "against": signs or None}
