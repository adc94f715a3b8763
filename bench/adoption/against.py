"""Ways beside ours, figure by figure: rows with signs."""

import numpy as np

from bench.adoption.curves import Labels, mean_gain
from bench.harness import Row, Value
from nobackfill.adopt.judgement import Figures

FIGURES = ("agreement@10", "R@1", "R@10")
OURS = "affine"
_SIGNS = {"holds": "+", "fails": "-", "undecided": "="}


def compare_with_ours(
    named: Row, way: str, found: dict[str, list[Figures]], labels: Labels | None
) -> Row:
    """A row of `way`: means of its FIGURES in %, and for each whether it is measurably above (+) or
    below (-) that of OURS; `found`: figures of each query, a draw each, by way; `labels`: the
    classes of all items, of which the first are asked for, where they have any."""
    row: dict[str, Value] = {**named, "way": way}
    signs = ""
    for figure in FIGURES:
        mine, ours = ([one[figure] for one in found[which]] for which in (way, OURS))
        row[figure] = 100 * float(np.mean(mine))
        if way != OURS:
            signs += _SIGNS[mean_gain(mine, ours, labels).verdict]
    return {**row, "against": signs or None}
