"""What a map is fitted on and by, where queries are given."""

from dataclasses import replace

import numpy as np

from nobackfill.adopt.crossfit import append_queries_as_pairs, choose_strength
from nobackfill.adopt.judgement import Queries
from nobackfill.adopt.maps import AffineStrength, MapSolver, fit_maps
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.verdict import choose_map
from nobackfill.ridge import Moments, split_into_blocks
from tests.adopt.made import world

MADE = world(260, unseen=8)
PAIRS = Pairs(MADE.ids[:50], MADE.old[:50], MADE.new[:50])
ASKED = MADE.queries.select(np.flatnonzero(MADE.answers < 50))


def test_queries_are_fitted_on_where_others_of_them_are_found_better() -> None:
    found = choose_map(PAIRS, [ASKED])
    assert found.fitted_queries is ASKED
    both = found.fit(PAIRS)
    assert (both.facts["pairs"], both.facts["queries"]) == ("50", str(len(ASKED.gallery_rows)))
    assert both.unit_norm
    alone = fit_maps(PAIRS.old, PAIRS.new, kinds=[found.kind])[found.kind]
    errors = [np.square(one(MADE.old[50:]) - MADE.new[50:]).sum() for one in (both, alone)]
    assert errors[0] < errors[1]


def test_queries_that_are_read_by_another_model_are_not() -> None:
    rng = np.random.default_rng(0)
    other = Queries(
        rng.permutation(ASKED.old), ASKED.new, ASKED.gallery_rows, are_gallery_items=False
    )
    found = choose_map(PAIRS, [other])
    assert found.fitted_queries is None
    assert "queries" not in found.fit(PAIRS).facts


def test_an_item_and_its_query_do_not_vouch_for_one_another() -> None:
    """Fewer pairs than dimensions, queries that are their items nearly: left out in turn each is
    predicted by the other, and the least penalty would seem the best."""
    rng = np.random.default_rng(0)
    old, new = (rng.normal(size=(300, 48)).astype(np.float32) for _ in range(2))
    new += 2 * old
    pairs = Pairs([str(row) for row in range(40)], old[:40], new[:40])
    noise = 0.05 * rng.normal(size=(2, 40, 48)).astype(np.float32)
    asked = Queries(
        pairs.old + noise[0], pairs.new + noise[1], np.arange(40), are_gallery_items=False
    )
    rows = append_queries_as_pairs(pairs, asked)
    moments = Moments.from_blocks(split_into_blocks(rows.old, rows.new)())
    chosen = choose_strength(rows, np.arange(40), moments)
    alone = MapSolver(moments).choose_strength(split_into_blocks(rows.old, rows.new))

    def error(found: AffineStrength) -> float:
        straight = replace(found, rotation_share=0)
        carry = MapSolver(moments).solve_maps(straight, False, ["affine"])["affine"]
        return float(np.square(carry(old[40:]) - new[40:]).sum())

    assert error(chosen) < 0.9 * error(alone)
