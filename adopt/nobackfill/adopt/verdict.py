"""The verdict on a gallery when its model changes: a map, a way to go on, figures for each way.

The map is the candidate that serves the queries best on pairs that it has not seen. Staying with
the old model is a way like the others: nothing is recommended that is measurably worse than
yesterday's search.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nobackfill.adopt import crossfit, judgement
from nobackfill.adopt.crossfit import CONVERTER, CORRECTED, Held, corrected
from nobackfill.adopt.judgement import (
    MOST_BELOW,
    Figures,
    Gallery,
    HealingCurves,
    Queries,
    chosen_by,
    figures_of,
    valley,
)
from nobackfill.adopt.maps import (
    KINDS,
    RESIDUAL,
    Map,
    Solver,
    Trainer,
    fit_maps,
    is_unit,
    needs_strength,
    trained,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.metrics.bootstrap import paired_bootstrap
from nobackfill.ridge import Moments, in_blocks
from nobackfill.serving.fusion import HITS, Joining


@dataclass(frozen=True)
class Choice:
    """`figures`: of each candidate, by which `kind` was chosen; `held`: the chosen one. `more`:
    queries that it is fitted on beside the pairs. `also`: who trains a residual map."""

    kind: str
    figures: dict[str, float]
    held: Held
    more: Queries | None
    also: Trainer | None = None

    @property
    def figure(self) -> float:
        """Of the chosen one."""
        return max(self.figures.values())

    def fitted(self, pairs: Pairs, prior: Map | None = None) -> Map:
        """The chosen candidate, from all pairs."""
        if prior is not None and self.kind in (CONVERTER, CORRECTED):
            return prior if self.kind == CONVERTER else corrected(prior, pairs)
        if self.kind == RESIDUAL and self.also is not None:
            straight = fit_maps(pairs.old, pairs.new, kinds=["affine"])["affine"]
            return trained(straight, pairs.old, pairs.new, self.also)
        if self.more is None:
            return fit_maps(pairs.old, pairs.new, kinds=[self.kind])[self.kind]
        rows = crossfit.with_queries(pairs, self.more)
        blocks = in_blocks(rows.old, rows.new)
        moments = Moments.of(blocks())
        chosen = None
        if needs_strength([self.kind]):
            chosen = crossfit.strength(rows, np.arange(len(pairs)), moments)
        found = Solver(moments).maps(chosen, is_unit(pairs.new), [self.kind])[self.kind]
        counts = {"pairs": str(len(pairs)), "queries": str(len(self.more.rows))}
        return replace(found, facts=found.facts | counts)


def choose(
    pairs: Pairs,
    asked: Sequence[Queries],
    prior: Map | None = None,
    also: Trainer | None = None,
) -> Choice:
    """By MRR of the first set of queries, by neighbours kept where they are items; the chosen one's
    distances are of all sets. It is fitted on these queries, too, where others of them are found
    better so. Raises InvalidInputError for fewer than 10 pairs."""
    held = crossfit.candidates(pairs, asked, prior, also=also)
    figures = {kind: _figure(one, pairs, asked[0]) for kind, one in held.items()}
    kind = max(figures, key=figures.__getitem__)
    without, queries = Choice(kind, figures, held[kind], None, also), asked[0]
    if queries.own or kind not in KINDS:
        return without
    # Pairs of both models as the items are; but they may be of another kind, or read otherwise.
    again = crossfit.cross_fitted(pairs, asked, [kind], more=queries)[kind]
    figure = _figure(again, pairs, queries)
    figures[f"{kind}, fitted on queries too"] = figure
    return Choice(kind, figures, again, queries) if figure > figures[kind] else without


def _figure(held: Held, pairs: Pairs, asked: Queries) -> float:
    return float(np.mean(chosen_by(figures_of(held.apart[0], pairs, asked), asked.own)))


# A way that keeps this share of what embedding everything again brings is as good as that.
AS_GOOD = 0.99
# Below this, everything is embedded again while one waits.
SOON_SECONDS = 600.0
CURVE = (0.125, 0.25, 0.5, 1.0)
# Cheapest first: of ways that are as good, the first is recommended.
WAYS = ("stay", "map", "both", "lazily", "re-embed")
NEEDS_ITEMS = ("lazily", "re-embed")


@dataclass(frozen=True)
class Cost:
    """Measured costs: items of the gallery, seconds to embed one by each model, seconds to carry
    one (read, map, write and check; None: not measured), seconds to embed a query by the new model,
    where that was measured apart."""

    items: int
    old_seconds: float | None
    new_seconds: float | None
    carry_seconds: float | None
    new_query_seconds: float | None = None


@dataclass(frozen=True)
class Way:
    """One way. `figures`: means, 0 to 1. `worse`, `better`: figures in which it is measurably below
    and above staying. Seconds are of one thread, None where a model's were not measured."""

    name: str
    figures: dict[str, float]
    worse: tuple[str, ...]
    better: tuple[str, ...]
    query_seconds: float | None
    all_seconds: float | None


@dataclass(frozen=True)
class CurvePoint:
    """Of the learning curve: pairs, and the best candidate's figure."""

    pairs: int
    figure: float


@dataclass(frozen=True)
class Verdict:
    """`way`: the recommended one, and why in `words`. `search`: the kind that it holds for.
    `candidates`: the figure of each map by which one was chosen, called `judged_by`. `joining`: how
    old, carried and native scores make one ranking; `healing`: figures on the way to all native."""

    way: str
    words: str
    search: str
    judged_by: str
    ways: list[Way]
    candidates: dict[str, float]
    chosen: Map
    joining: Joining
    curve: list[CurvePoint]
    healing: HealingCurves
    pairs: int
    notes: list[str] = field(default_factory=list)


def decide(
    pairs: Pairs,
    cost: Cost,
    queries: Queries | None = None,
    *,
    items_there: bool = True,
    prior: Map | None = None,
    also: Trainer | None = None,
) -> Verdict:
    """Fit the candidates, judge each way on pairs that its map has not seen, and choose.

    `queries`: with known answers among the pairs; without any, the verdict holds for similar things
    only. `items_there`: whether the items themselves can still be embedded. `prior`: a converter of
    these two models, a candidate as it is and corrected by the pairs. `also`: who trains a residual
    map, one more candidate. Raises InvalidInputError for fewer than 10 pairs.
    """
    alike = judgement.among_items(pairs)
    asked = alike if queries is None else judgement.sampled(queries, len(pairs))
    judged_by = "agreement@10" if asked.own else "MRR"
    choice = choose(pairs, [asked] if asked.own else [asked, alike], prior, also)
    apart = choice.held.apart
    gallery = Gallery(pairs.old, choice.held.vectors, pairs.new)
    judged = judgement.judge(gallery, asked, apart[0])
    figures = judged.ways
    if not asked.own:
        # Neighbours kept by each way as it is served to queries that seek an item.
        kept = judgement.judge_joined(gallery, alike, judged.joining, apart[1])
        for name, one in kept.items():
            figures[name]["agreement@10"] = one["agreement@10"]
    ways = [_way(name, figures, cost, judged_by) for name in WAYS]
    way, words = choose_way(ways, judged_by, items_there)
    chosen = choice.fitted(pairs, prior)
    joining = replace(judged.joining, mark=chosen.digest)
    curve = _curve(pairs, asked, choice, judged_by, prior)
    search = "finding that very item" if not asked.own else "finding similar things"
    notes = _notes(asked, pairs, cost, joining.weight, curve, judged_by)
    if choice.more is not None:
        notes.append(
            f"the map is fitted on the {len(asked.rows)} queries, too, whose vectors both models "
            "have given: so others of them are found better"
        )
    notes += _healing(judged.healing, ways[-1], judged_by)
    return Verdict(
        way, words, search, judged_by, ways, choice.figures, chosen, joining, curve, judged.healing,
        len(pairs), notes,
    )  # fmt: skip


def _way(name: str, figures: Mapping[str, Figures], cost: Cost, judged_by: str) -> Way:
    stay = figures["stay"]
    known = [one for one in stay if one != "agreement@10" or judged_by == one]

    def above(one: Figures, other: Figures) -> tuple[str, ...]:
        return tuple(f for f in known if paired_bootstrap([one[f]], [other[f]]).verdict == "holds")

    worse, better = above(stay, figures[name]), above(figures[name], stay)
    means = {figure: _mean(figures[name], figure) for figure in figures[name]}
    old, new, items = cost.old_seconds, cost.new_seconds, cost.items
    asking = new if cost.new_query_seconds is None else cost.new_query_seconds
    both = None if old is None or asking is None else old + asking
    hits = None if both is None or new is None else both + HITS * new
    a_query = {"stay": old, "map": asking, "both": both, "lazily": hits, "re-embed": asking}
    again = None if new is None else items * new
    carry = None if cost.carry_seconds is None else items * cost.carry_seconds
    in_all = {
        "stay": 0.0,
        "map": carry,
        "both": carry,
        "lazily": None if carry is None or again is None else carry + again,
        "re-embed": again,
    }
    return Way(name, means, worse, better, a_query[name], in_all[name])


def choose_way(ways: list[Way], judged_by: str, items_there: bool) -> tuple[str, str]:
    """The cheapest way that is as good as embedding everything again, else the best one; among
    those that are in no figure worse than staying, and that can be gone."""
    by_name = {way.name: way for way in ways}
    stay, best = by_name["stay"].figures, by_name["re-embed"].figures
    known = [name for name in stay if judged_by == name or name != "agreement@10"]
    if "re-embed" in by_name and by_name["re-embed"].worse:
        lost = ", ".join(by_name["re-embed"].worse)
        return "stay", f"the new model itself is worse than the old one here ({lost})"
    if stay[judged_by] >= best[judged_by]:
        return "stay", "the new model finds no more than the old one does here"
    if not by_name["re-embed"].better:
        return "stay", "that the new model finds more than the old one may be chance here"
    open_ways = [
        way for way in ways if not way.worse and (items_there or way.name not in NEEDS_ITEMS)
    ]
    # Two models asked for each query must find more than the better one of them would alone.
    alone = [way.figures[judged_by] for way in open_ways if way.name in ("map", "re-embed")]
    open_ways = [
        way
        for way in open_ways
        if way.name != "both" or way.figures[judged_by] >= max(alone, default=0.0)
    ]
    good = [w for w in open_ways if all(w.figures[f] >= AS_GOOD * best[f] for f in known)]
    again = by_name["re-embed"].all_seconds
    if items_there and again is not None and again <= SOON_SECONDS:
        return "re-embed", f"embedding everything again takes {again:.0f} s: do that"
    if good:
        way = good[0]
        return way.name, {
            "stay": "the old model finds as much as the new one would",
            "map": "carried vectors find as much as embedding everything again would",
            "both": "old and new scores together find as much as embedding everything again would",
            "lazily": "with the hits of each query embedded again as people look, searches are as "
            "good as embedding everything again from the first day",
            "re-embed": "nothing cheaper reaches what embedding everything again brings",
        }[way.name]
    way = max(open_ways, key=lambda way: way.figures[judged_by])
    without = "" if items_there else "the items are gone, and "
    if way.name == "stay":
        return "stay", f"{without}every other way that is open is measurably worse"
    return way.name, f"{without}of the ways that are open this one is best and not worse than today"


def _curve(
    pairs: Pairs, asked: Queries, choice: Choice, judged_by: str, prior: Map | None
) -> list[CurvePoint]:
    """The figure with an eighth, a quarter and a half of the pairs, and with all; none of a
    converter as it is, which no pairs change, and of a trained map, which takes as long again."""
    points: list[CurvePoint] = []
    kind = choice.kind
    if kind in (CONVERTER, RESIDUAL):
        return points
    seen = crossfit.seen(crossfit.folds_of(pairs))
    fitted = seen * len(pairs)
    for share in CURVE:
        if share == 1:
            points.append(CurvePoint(round(fitted), choice.figure))
        elif share * fitted >= 20:
            # By few folds: each map sees less of the pairs, so more of what it may see is fitted.
            few = crossfit.FEW
            subset = share * seen / crossfit.seen(few)
            found = crossfit.candidates(
                pairs, [asked], prior, kinds=[kind], subset=subset, folds=few, more=choice.more
            )
            figure = _mean(judgement.figures_of(found[kind].apart[0], pairs, asked), judged_by)
            points.append(CurvePoint(round(share * fitted), figure))
    return points


def _healing(healing: HealingCurves, again: Way, judged_by: str) -> list[str]:
    """What a gallery meets on its way, by scores of `nobackfill.serve` and by distance; `again`:
    the new model alone."""
    name = judged_by if judged_by == "agreement@10" else "R@1"
    curve, raw = healing.calibrated[name], healing.raw[name]
    said = [
        f"while items become native at random, {name} goes from {100 * curve[0]:.1f} to "
        f"{100 * curve[-1]:.1f}, lowest {100 * min(curve):.1f}, ranked by nobackfill.serve"
    ]
    if curve[-1] > again.figures[name] + MOST_BELOW:
        said.append(
            f"with all items native both models together have {name} {100 * curve[-1]:.1f}, the "
            f"new one alone {100 * again.figures[name]:.1f}: to keep asking both is worth it"
        )
    if (below := valley(raw)) > MOST_BELOW:
        said.append(
            f"in one index by distance {name} falls to {100 * min(raw):.1f} on the way, "
            f"{100 * below:.1f} points below the lower of its ends: do not mix carried and native "
            "vectors in one column without calibrated scores"
        )
    return said


def gain_of_doubling(curve: list[CurvePoint]) -> float | None:
    """What twice the pairs would bring by the last two doublings, in points of the figure."""
    if len(curve) < 2:
        return None
    last = np.diff([point.figure for point in curve])[-2:]
    # Gains of doublings shrink; the next is taken to be as much smaller as this one was.
    if len(last) == 2 and last[0] > 0:
        return float(max(0.0, last[1] * min(1.0, last[1] / last[0])))
    return float(max(0.0, last[-1]))


def _notes(
    asked: Queries, pairs: Pairs, cost: Cost, weight: float, curve: list[CurvePoint], judged_by: str
) -> list[str]:
    measured = f"measured among {len(pairs)} items with {len(asked.rows)} queries"
    if cost.items > len(pairs):
        measured += f"; the gallery has {cost.items}, where every figure is lower"
    notes = [measured]
    gain = gain_of_doubling(curve)
    if gain is not None:
        notes.append(
            f"twice as many pairs would bring the map about +{100 * gain:.1f} points of {judged_by}"
        )
    if asked.own:
        notes.append(
            "without queries whose answer is known nothing is said about finding that very item: "
            "a map can keep what is similar and still lose it; give --queries-old and --queries-new"
        )
        notes.append("the new model's own neighbours are taken as the truth: staying cannot win")
    if weight in (0.0, 1.0):
        alone = "old" if weight == 0 else "new"
        notes.append(f"joined scores are best with the {alone} model's alone")
    return notes


def _mean(figures: Figures, name: str) -> float:
    return float(np.mean(figures[name]))
