"""What a map is fitted on and by, where queries are given."""

import numpy as np

from nobackfill.adopt.choice import choose
from nobackfill.adopt.figures import Queries
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import Pairs
from tests.adopt.made import world

MADE = world(260, unseen=8)
PAIRS = Pairs(MADE.ids[:50], MADE.old[:50], MADE.new[:50])
ASKED = MADE.queries.part(np.flatnonzero(MADE.answers < 50))


def test_queries_are_fitted_on_where_others_of_them_are_found_better() -> None:
    found = choose(PAIRS, [ASKED])
    assert found.more is ASKED
    both = found.fitted(PAIRS)
    assert (both.facts["pairs"], both.facts["queries"]) == ("50", str(len(ASKED.rows)))
    assert both.unit
    alone = fit_maps(PAIRS.old, PAIRS.new, kinds=[found.kind])[found.kind]
    errors = [np.square(one(MADE.old[50:]) - MADE.new[50:]).sum() for one in (both, alone)]
    assert errors[0] < errors[1]


def test_queries_that_are_read_by_another_model_are_not() -> None:
    rng = np.random.default_rng(0)
    other = Queries(rng.permutation(ASKED.old), ASKED.new, ASKED.rows, own=False)
    found = choose(PAIRS, [other])
    assert found.more is None
    assert "queries" not in found.fitted(PAIRS).facts
