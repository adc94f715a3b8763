"""Queries that ask for items of their own class, and curves while items become native."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from bench.harness import Row
from nobackfill.adopt.judgement import ORDERS, SHARES, Figures
from nobackfill.metrics.bootstrap import Difference, paired_bootstrap
from nobackfill.metrics.ranking import Ranking, Relevance, rank_block, relevance_by_label
from nobackfill.metrics.retrieval import PerQuery, average_precision, cmc
from nobackfill.serving.fusion import Block

Labels = NDArray[np.str_]
NOTE = (
    f"In %, by shares of items embedded again at random, means of {ORDERS} orders. `valley`: how "
    "far the lowest lies below the lower end, `95 %`: its interval by a paired bootstrap over "
    "queries, over classes where items have 10 and more, none where they have fewer (the lowest of "
    "eleven was looked for, so chance alone shows a little)."
)
AGAINST_OLD_TITLE = "On the way, less the old model"
AGAINST_OLD = (
    "In points, as `nobackfill.serve` ranks while items are embedded again at random, by shares of "
    f"these items, means of {ORDERS} orders; in brackets the 95 % interval of a paired bootstrap "
    "over queries, over classes where items have any."
)


def mean_gain(
    ours: Sequence[PerQuery], theirs: Sequence[PerQuery], labels: Labels | None
) -> Difference:
    """By the paired bootstrap over draws and queries; over classes, where `labels` tells those of
    all items, of which the first are asked for."""
    classes = None if labels is None else [labels[: len(values)] for values in ours]
    return paired_bootstrap(ours, theirs, classes=classes)


def format_interval(gain: Difference) -> str | None:
    """In points; None of too few classes."""
    if gain.is_limited_to_classes:
        return None
    return f"{100 * gain.low:.1f} to {100 * gain.high:.1f}"


def same_class_relevance(labels: Labels) -> Relevance:
    """Each item asks for those of its class, itself left out."""
    own = np.arange(len(labels))
    return relevance_by_label(labels, labels, own, own)


def class_ranking_figures(block: Block, relevance: Relevance) -> Figures:
    """Of distances [q, g]."""
    ranks = rank_block(block.copy(), 0, relevance)
    ranking = Ranking(ranks, np.array([len(one) for one in ranks], np.int64))
    return {"class CMC-1": cmc(ranking, 1), "class mAP": average_precision(ranking)}


def class_curves(carried: Block, native: Block, labels: Labels) -> dict[str, PerQuery]:
    """`class_ranking_figures` [shares, q] of distances [q, g] to carried and to native items."""
    relevance = same_class_relevance(labels)
    found: dict[str, list[list[PerQuery]]] = {}
    for seed in range(ORDERS):
        order = np.random.default_rng(seed).random(carried.shape[1])
        mixed = (np.where(order < share, native, carried) for share in SHARES)
        by_share = [class_ranking_figures(block, relevance) for block in mixed]
        for name in by_share[0]:
            found.setdefault(name, []).append([one[name] for one in by_share])
    return {name: np.mean(orders, axis=0) for name, orders in found.items()}


def curve_rows(
    pair: str, ranked: str, curves: Mapping[str, PerQuery], labels: Labels | None
) -> list[Row]:
    """One for each figure, of values [shares, q]; `labels`: the classes of the queries, and of
    what stands behind them, where they have any."""
    return [_row(pair, ranked, name, values, labels) for name, values in curves.items()]


def _row(pair: str, ranked: str, figure: str, values: PerQuery, labels: Labels | None) -> Row:
    curve = np.nanmean(values, axis=1)
    end, lowest = (0 if curve[0] <= curve[-1] else -1), int(curve.argmin())
    fallen = mean_gain([values[end]], [values[lowest]], labels)
    return {
        "pair": pair,
        "ranked by": ranked,
        "figure": figure,
        **{f"{10 * n} %": 100 * float(share) for n, share in enumerate(curve)},
        "valley": 100 * max(0.0, fallen.mean),
        "95 %": format_interval(fallen),
    }
