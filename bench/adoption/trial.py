"""One pair of models: a verdict from some items, the truth on others."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from bench.adoption.curves import (
    Labels,
    class_ranking_figures,
    curve_rows,
    mean_gain,
    same_class_relevance,
)
from bench.adoption.texts import EmbeddedDocuments
from bench.harness import Row, Value
from nobackfill.adopt.judgement import (
    ORDERS,
    SHARES,
    Figures,
    JudgedGallery,
    PerQuery,
    Queries,
    figures_from_distances,
    figures_from_vectors,
    judge_fusion,
    query_item_distances,
    ranking_values_by_option,
)
from nobackfill.adopt.maps import Map, fit_maps
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.verdict import (
    ADAPTER_OPTION,
    AS_GOOD_SHARE,
    WAYS,
    Cost,
    Verdict,
    choose_map,
    decide,
)
from nobackfill.serving.fusion import Block
from nobackfill.vectors import Vectors

# Items of a gallery that no minute embeds again.
_LARGE = Cost(1_000_000, 0.01, 0.02, 1e-6)
KNOWN = ("R@1", "R@10", "MRR")


@dataclass(frozen=True)
class Trial:
    """Items by both models: the first `pair_count` are fitted on and judged, the others truth.
    `labels`: their classes, where they have any. `more_pairs`: pairs of further items, of which
    nothing is asked."""

    name: str
    old: EmbeddedDocuments
    new: EmbeddedDocuments
    pair_count: int
    query_count: int = 1000
    labels: Labels | None = None
    more_pairs: Pairs | None = None

    def verdict_rows(self) -> list[Row]:
        """A row for each way: what the verdict measured and what is true of other items."""
        said, truth = self.fitted_verdict, self.true_figures
        stay, best = truth["stay"], truth["re-embed"]
        worse = {
            way: [f for f in ones if f != "agreement@10" and self._below(ones[f], stay[f])]
            for way, ones in truth.items()
        }
        lost = {way for way in WAYS if set(worse[way]) & set(KNOWN)}
        least = {f: AS_GOOD_SHARE * best[f].mean() for f in KNOWN}
        kept = [way for way in WAYS if all(truth[way][f].mean() >= least[f] for f in KNOWN)]
        right = "stay" if "re-embed" in lost else next(way for way in kept if way not in lost)
        told = {way.name: way.figures for way in said.ways}
        return [
            {
                "pair": self.name,
                "way": way if way != "map" else f"map ({said.map.kind})",
                "R@1 said": 100 * told[way]["R@1"],
                **{f: 100 * float(np.nanmean(values)) for f, values in truth[way].items()},
                "worse than staying": ", ".join(worse[way]) or None,
                "verdict": "named" if said.way == way else None,
                "truth": "best" if right == way else None,
            }
            for way in WAYS
        ]

    @cached_property
    def fitted_verdict(self) -> Verdict:
        """From the first items."""
        part = slice(0, self.pair_count)
        return decide(self.take_pairs(part), _LARGE, self.take_queries(part))

    @cached_property
    def true_figures(self) -> Mapping[str, Figures]:
        """Of the others, served by what the verdict has fitted; where items have classes, also of
        items that ask for theirs."""
        every, queries = (
            self.take_gallery(self.held_out_slice),
            self.take_queries(self.held_out_slice),
        )
        found = judge_fusion(every, queries, self.fitted_verdict.joining)
        adapted = query_item_distances(self.fitted_verdict.adapter(queries.new), every.old)
        found[ADAPTER_OPTION] = figures_from_distances(
            adapted, self.take_pairs(self.held_out_slice), queries
        )
        if self.labels is not None:
            relevance = same_class_relevance(self.labels[self.held_out_slice])
            own = np.arange(len(every.old), dtype=np.int64)
            asked = Queries(every.old, every.new, own, are_gallery_items=True)
            adapted = query_item_distances(self.fitted_verdict.adapter(every.new), every.old)
            blocks = ranking_values_by_option(every, asked, self.fitted_verdict.joining) | {
                ADAPTER_OPTION: adapted
            }
            for way, block in blocks.items():
                found[way] |= class_ranking_figures(block, relevance)
        return found

    def reembedding_rows(self) -> list[Row]:
        """Curves of other items, while they become native at random: as nobackfill.serve ranks by
        what the verdict has fitted to its pairs, and by distance in one index."""
        gallery, asked = (
            self.take_gallery(self.held_out_slice),
            self.take_queries(self.held_out_slice),
        )
        ranked = {
            "nobackfill.serve": self.served_curves,
            "distance": _known_curves(
                asked,
                -query_item_distances(asked.new, gallery.migrated),
                -query_item_distances(asked.new, gallery.new),
            ),
        }
        return [
            row
            for name, curves in ranked.items()
            for row in curve_rows(self.name, name, curves, self.held_out_labels)
        ]

    @cached_property
    def served_curves(self) -> dict[str, PerQuery]:
        """Figures [shares, q] while other items become native, as nobackfill.serve ranks."""
        gallery, asked = (
            self.take_gallery(self.held_out_slice),
            self.take_queries(self.held_out_slice),
        )
        return _known_curves(asked, *self.ranking_scores(gallery, asked))

    def rows_against_old(self) -> list[Row]:
        """Compare searches while items become native at random with those of the old model: mean
        differences and 95 % intervals in points, at each tenth of the way."""
        rows: list[Row] = []
        for figure in KNOWN:
            stay = self.true_figures["stay"][figure]
            row: dict[str, Value] = {"pair": self.name, "figure": figure}
            row["old model"] = 100 * float(stay.mean())
            for share, values in zip(SHARES, self.served_curves[figure], strict=True):
                gain = mean_gain([values], [stay], self.held_out_labels)
                low, mean, high = (100 * one for one in (gain.low, gain.mean, gain.high))
                row[f"{share:.0%}"] = f"{mean:+.1f} ({low:.1f} to {high:.1f})"
            rows.append(row)
        return rows

    def ranking_scores(self, gallery: JudgedGallery, asked: Queries) -> tuple[Block, Block]:
        """Of items as carried ones and as native ones, [q, g], larger is better: as
        nobackfill.serve ranks."""
        joining = self.fitted_verdict.joining
        vectors = asked.old, asked.new, gallery.old, gallery.migrated
        return joining.match_log_odds(*vectors, {}), joining.match_log_odds(
            *vectors, dict(enumerate(gallery.new))
        )

    @property
    def held_out_slice(self) -> slice:
        """Items that nothing is fitted on."""
        return slice(self.pair_count, None)

    @property
    def held_out_labels(self) -> Labels | None:
        """The classes of `rest`; the first of them are those of the queries' items."""
        return None if self.labels is None else self.labels[self.held_out_slice]

    def _below(self, ones: PerQuery, stay: PerQuery) -> bool:
        return mean_gain([stay], [ones], self.held_out_labels).verdict == "holds"

    def take_pairs(self, part: slice) -> Pairs:
        old, new = self.old.bodies[part], self.new.bodies[part]
        return Pairs([str(row) for row in range(len(old))], old, new)

    def take_gallery(self, part: slice | NDArray[np.int64]) -> JudgedGallery:
        """Carried by the verdict's map."""
        old = self.old.bodies[part]
        return JudgedGallery(old, self.fitted_verdict.map(old), self.new.bodies[part])

    def take_queries(self, part: slice) -> Queries:
        old, new = (one.titles[part][: self.query_count] for one in (self.old, self.new))
        return Queries(old, new, np.arange(len(old), dtype=np.int64), are_gallery_items=False)


def _known_curves(asked: Queries, carried: Block, native: Block) -> dict[str, PerQuery]:
    """Figures [shares, q] of scores [q, g] of items as carried and as native ones."""
    every = np.arange(len(asked.gallery_rows))
    places = []
    for seed in range(ORDERS):
        order = np.random.default_rng(seed).random(carried.shape[1])
        for share in SHARES:
            scores = np.where(order < share, native, carried)
            places.append((scores >= scores[every, asked.gallery_rows][:, None]).sum(1))
    found = np.reshape(places, (ORDERS, len(SHARES), -1))
    return {
        "R@1": (found == 1).mean(0),
        "R@10": (found <= 10).mean(0),
        "MRR": (1 / found).mean(0),
    }


def correction_rows(foreign: Trial, own: Trial, counts: tuple[int, ...]) -> list[Row]:
    """R@1 of a converter from a foreign corpus, of own pairs, and of both, on other own items."""
    from nobackfill.adopt.crossfit import correct_converter as correct

    prior = choose_best_map(foreign.take_pairs(slice(0, None)))
    gallery, queries = own.take_pairs(own.held_out_slice), own.take_queries(own.held_out_slice)
    rows: list[Row] = []
    for count in counts:
        some = own.take_pairs(slice(0, count))
        alone = fit_maps(some.old, some.new)["affine"]
        ways = {"converter": prior, "own": alone, "both": correct(prior, some)}
        found = {
            name: known_item_share(one(gallery.old), gallery, queries) for name, one in ways.items()
        }
        rows.append({"pair": own.name, "own pairs": count, **found})
    return rows


def choose_best_map(pairs: Pairs) -> Map:
    """The candidate that keeps most neighbours."""
    some = Pairs(pairs.ids[:2000], pairs.old[:2000], pairs.new[:2000])
    rows = np.arange(min(500, len(some)), dtype=np.int64)
    asked = Queries(some.old[rows], some.new[rows], rows, are_gallery_items=True)
    return choose_map(some, [asked]).fit(pairs)


def known_item_share(vectors: Vectors, gallery: Pairs, queries: Queries) -> float:
    return 100 * float(figures_from_vectors(vectors, gallery, queries)["R@1"].mean())
