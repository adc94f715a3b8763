"""A converter improved by pairs of one's own: ridge towards the converter in place of zero.

Minimises the squared error plus lambda |W - W0|²: with few pairs it stays the converter, with many
it becomes the map of one's own; lambda by leave-one-out, as everywhere.
"""

from dataclasses import replace

import numpy as np

from nobackfill import ridge
from nobackfill.adopt.closed_form import LEFT_OUT
from nobackfill.adopt.maps import Map, normalised
from nobackfill.adopt.pairs import Pairs
from nobackfill.errors import IncompatibleSpaceError
from nobackfill.ridge import in_blocks
from nobackfill.vectors import Vectors

CONVERTER, CORRECTED = "converter", "corrected"


def corrected(prior: Map, pairs: Pairs) -> Map:
    """The converter and what it leaves over of the pairs, as one map."""
    rest = left_over(prior, pairs)
    more = ridge.fit(in_blocks(rest.old, rest.new), left_out=LEFT_OUT)
    weight = (prior.weight + more.weight).astype(np.float32)
    bias = (prior.bias + more.bias).astype(np.float32)
    facts = {**prior.facts, "own_pairs": str(len(pairs)), "penalty": f"{more.penalty:.3g}"}
    return replace(prior, kind=CORRECTED, weight=weight, bias=bias, facts=facts)


def left_over(prior: Map, pairs: Pairs) -> Pairs:
    """The same items, with what the converter's linear part misses as the new side. Raises
    IncompatibleSpaceError for pairs of other dimensions."""
    dims = (pairs.old.shape[1], pairs.new.shape[1])
    if dims != prior.dims:
        raise IncompatibleSpaceError(
            f"the converter maps dimensions {prior.dims}, the pairs have {dims}; are these its "
            "two models' vectors?"
        )
    linear = replace(prior, unit=False)
    return Pairs(pairs.ids, pairs.old, (pairs.new - linear(pairs.old)).astype(np.float32))


def added(prior: Map, old: Vectors, more: Vectors) -> Vectors:
    """The converter's vectors with a correction [n, b] of its linear part."""
    mapped = replace(prior, unit=False)(old) + more
    return normalised(mapped) if prior.unit else mapped
