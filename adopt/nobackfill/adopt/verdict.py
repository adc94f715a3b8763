"""The verdict on a gallery whose model changes: a map, a way to go on, and figures for each way.

The map is the candidate that serves the queries best on pairs that it was not fitted on. Staying
with the old model is one of the ways. No way is recommended that is measurably worse than staying.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from nobackfill.adopt import crossfit, judgement
from nobackfill.adopt.crossfit import CONVERTER, CORRECTED, HeldOutResult, correct_converter
from nobackfill.adopt.gallery_scan import (
    FEWEST_QUERIES,
    MOST_DISTANCES,
    ScanQueries,
    ScanResult,
    scan_gallery,
)
from nobackfill.adopt.judgement import (
    MOST_BELOW,
    Figures,
    JudgedGallery,
    LazyReembeddingCurves,
    PerQuery,
    Queries,
    deciding_figure,
    figures_from_distances,
    query_item_distances,
    valley_depth,
)
from nobackfill.adopt.maps import (
    MAP_KINDS,
    RESIDUAL_KIND,
    Map,
    MapSolver,
    Trainer,
    fit_maps,
    is_unit,
    needs_strength,
    train_residual,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.sources.source import Source
from nobackfill.errors import InvalidInputError
from nobackfill.metrics.bootstrap import paired_bootstrap
from nobackfill.metrics.ranking import Ints
from nobackfill.ridge import Moments, split_into_blocks
from nobackfill.serving.fusion import CANDIDATES_PER_SEARCH, Block, FittedRankFusion, Mask
from nobackfill.vectors import Vectors, normalise


@dataclass(frozen=True)
class MapChoice:
    """The candidate map that serves the queries best.

    Attributes:
        kind: Its name.
        figures: The figure of each candidate by which `kind` was chosen.
        held_out_result: The cross-fit of the chosen candidate.
        fitted_queries: Queries that it is fitted on as further pairs; None for none.
        trainer: Trains the residual map, if that is the chosen kind.
    """

    kind: str
    figures: dict[str, float]
    held_out_result: HeldOutResult
    fitted_queries: Queries | None
    trainer: Trainer | None = None

    @property
    def figure(self) -> float:
        """Return the figure of the chosen candidate.

        Raises:
            ValueError: There are no figures, as in the choices of a query adapter.
        """
        return max(self.figures.values())

    def fit(self, pairs: Pairs, converter: Map | None = None) -> Map:
        """Fit the chosen candidate to all pairs, and to its queries.

        The figures and the cross-fit are not used.

        Errors of the trainer pass through.

        Args:
            pairs: All pairs.
            converter: The published map; required for the kinds "converter" and "corrected".

        Raises:
            InvalidInputError: The trainer returns unusable layers. There are fewer than 2 pairs, or
                `kind` needs a converter or a trainer that is missing.
            IncompatibleSpaceError: The converter has other dimensions than the pairs.
            ValueError: A vector holds NaN or infinity. Or there are fewer than 2 pairs, for the
                kind "corrected" or with queries.
            numpy.linalg.LinAlgError: The equations cannot be solved.
            Exception: Any error of the trainer.
        """
        if converter is not None and self.kind in (CONVERTER, CORRECTED):
            if self.kind == CONVERTER:
                return converter
            return correct_converter(converter, pairs)
        if self.kind == RESIDUAL_KIND and self.trainer is not None:
            straight = fit_maps(pairs.old, pairs.new, kinds=["affine"])["affine"]
            return train_residual(straight, pairs.old, pairs.new, self.trainer)
        if self.fitted_queries is None:
            return fit_maps(pairs.old, pairs.new, kinds=[self.kind])[self.kind]
        rows = crossfit.append_queries_as_pairs(pairs, self.fitted_queries)
        moments = Moments.from_blocks(split_into_blocks(rows.old, rows.new)())
        penalty = None
        if needs_strength([self.kind]):
            penalty = crossfit.choose_strength(rows, np.arange(len(pairs)), moments)
        mapping = MapSolver(moments).solve_maps(penalty, is_unit(pairs.new), [self.kind])[self.kind]
        counts = {"pairs": str(len(pairs)), "queries": str(len(self.fitted_queries.gallery_rows))}
        return replace(mapping, facts=mapping.facts | counts)

    def fit_without(self, pairs: Pairs, left_out: Mask, converter: Map | None = None) -> Map:
        """Fit the chosen candidate without some of the pairs, and without the queries for them.

        Args:
            pairs: All n pairs.
            left_out: Bool [n]: pairs to leave out. If all are left out, none is.
            converter: As in `fit`.

        Raises:
            InvalidInputError: Fewer than 2 pairs are left, or the trainer returns unusable layers.
                `kind` needs a converter or a trainer that is missing.
            IncompatibleSpaceError: The converter has other dimensions than the pairs.
            ValueError: A vector holds NaN or infinity. Or fewer than 2 pairs are left, for the kind
                "corrected" or with queries.
            numpy.linalg.LinAlgError: The equations cannot be solved.
            Exception: Any error of the trainer.
        """
        if left_out.all():
            return self.fit(pairs, converter)
        rows = np.flatnonzero(~left_out)
        part = Pairs([pairs.ids[row] for row in rows], pairs.old[rows], pairs.new[rows])
        queries = self.fitted_queries
        if queries is not None:
            some = queries.select(np.flatnonzero(~left_out[queries.gallery_rows]))
            queries = replace(some, gallery_rows=np.searchsorted(rows, some.gallery_rows))
        return replace(self, fitted_queries=queries).fit(part, converter)


def choose_map(
    pairs: Pairs,
    query_sets: Sequence[Queries],
    converter: Map | None = None,
    trainer: Trainer | None = None,
) -> MapChoice:
    """Choose the candidate map that serves the first set of queries best.

    The figure is MRR for known items, and agreement@10 where items are the queries. The chosen map
    is fitted to the queries as well, if that raises the figure on queries that are left out. A
    converter and a trained map are not.

    Among equal figures the first candidate wins, in the order of `cross_fit_candidates`. The same
    arguments give the same choice.

    Args:
        pairs: At least 10 pairs.
        query_sets: One set of queries among the pairs, or more. The cross-fit has the distances of
            each set.
        converter: A published map between these two models: two more candidates.
        trainer: Trains a residual map: one more candidate. It is called several times, and its
            errors pass through.

    Raises:
        InvalidInputError: Fewer than 10 pairs, or unusable layers of the trainer.
        IncompatibleSpaceError: The converter has other dimensions than the pairs.
        ValueError: A vector holds NaN or infinity, or with cosine is zero.
        IndexError: There is no set of queries.
        numpy.linalg.LinAlgError: The equations cannot be solved.
        Exception: Any error of the trainer.
    """
    candidates = crossfit.cross_fit_candidates(pairs, query_sets, converter, trainer=trainer)
    queries = query_sets[0]
    figures = {kind: _figure(one, pairs, queries) for kind, one in candidates.items()}
    kind = max(figures, key=figures.__getitem__)
    choice = MapChoice(kind, figures, candidates[kind], None, trainer)
    if queries.are_gallery_items or kind not in MAP_KINDS:
        return choice
    # Queries may be of another kind than items, or embedded in another way: they may not help.
    with_queries = crossfit.cross_fit(pairs, query_sets, [kind], fitted_queries=queries)[kind]
    figure = _figure(with_queries, pairs, queries)
    figures[f"{kind}, fitted on queries too"] = figure
    return MapChoice(kind, figures, with_queries, queries) if figure > figures[kind] else choice


def _figure(candidate: HeldOutResult, pairs: Pairs, queries: Queries) -> float:
    figures = figures_from_distances(candidate.query_distances[0], pairs, queries)
    return float(np.mean(deciding_figure(figures, queries.are_gallery_items)))


@dataclass(frozen=True)
class AdapterChoice:
    """The query adapter that serves the queries best. Its choices fit reversed pairs.

    Attributes:
        choice: Chosen by all queries of the first set.
        half_choices: Chosen by the odd queries, to judge the even ones; and the reverse.
    """

    choice: MapChoice
    half_choices: tuple[MapChoice, MapChoice]

    def by_half(self, set_number: int, query_count: int) -> list[tuple[MapChoice, Ints]]:
        """Return the choices that judge a set of queries, each with its queries' numbers.

        Args:
            set_number: Which set, from 0; the first one chose. It need not exist.
            query_count: Number of its queries.

        Returns:
            For the first set: the even queries by one half's choice, the odd ones by the other's.
            For other sets: one choice for all.
        """
        every = np.arange(query_count)
        if set_number > 0:
            return [(self.choice, every)]
        return [(self.half_choices[0], every[::2]), (self.half_choices[1], every[1::2])]

    def distances(self, set_number: int) -> Block:
        """Return the distances [q, n] of a set of queries, mapped to the old space, to the pairs.

        No query is judged by a candidate that it chose, nor by a map that its item is fitted on.

        Args:
            set_number: Which of the sets of `choose_adapter`, from 0; the first one chose.

        Returns:
            A new array, float32.

        Raises:
            IndexError: There is no such set.
        """
        block = self.choice.held_out_result.query_distances[set_number].copy()
        for choice, rows in self.by_half(set_number, len(block)):
            block[rows] = choice.held_out_result.query_distances[set_number][rows]
        return block

    def map_queries(self, set_number: int, queries: Queries, pairs: Pairs, fold: Ints) -> Vectors:
        """Map a set of queries to the old space, each by a map that was fitted without its fold.

        It fits one map for each fold and half.

        Args:
            set_number: Which set, from 0; the first one chose.
            queries: Its q queries.
            pairs: The n pairs.
            fold: The fold of each pair [n].

        Returns:
            float32 [q, a].

        Raises:
            InvalidInputError: A fold leaves fewer than 2 pairs.
            ValueError: A vector holds NaN or infinity. Or a fold leaves fewer than 2 pairs, where
                queries are fitted, too.
            numpy.linalg.LinAlgError: The equations cannot be solved.
        """
        mapped = np.empty((len(queries.gallery_rows), pairs.old.shape[1]), np.float32)
        for choice, rows in self.by_half(set_number, len(queries.gallery_rows)):
            of = fold[queries.gallery_rows[rows]]
            for one in np.unique(of):
                mapping = choice.fit_without(pairs.exchange_models, fold == one)
                mapped[rows[of == one]] = mapping(queries.new[rows[of == one]])
        return mapped


def choose_adapter(pairs: Pairs, query_sets: Sequence[Queries]) -> AdapterChoice:
    """Choose the query adapter as `choose_map` chooses a map, with the two models exchanged.

    Among equal figures the first kind wins. Queries with known answers are also tried as further
    pairs. A half without queries, as of a single query, gets the first kind; numpy warns of it.

    Args:
        pairs: At least 10 pairs.
        query_sets: Sets of queries among the pairs, as in `choose_map`.

    Raises:
        InvalidInputError: Fewer than 10 pairs.
        ValueError: A vector holds NaN or infinity, or with cosine is zero.
        IndexError: There is no set of queries.
        numpy.linalg.LinAlgError: The equations cannot be solved.
    """
    reverse, queries = pairs.exchange_models, query_sets[0]
    sets = [one.exchange_models for one in query_sets]
    candidates = [
        MapChoice(kind, {}, one, None)
        for kind, one in crossfit.cross_fit(reverse, sets, adapts_queries=True).items()
    ]

    def figures(choice: MapChoice) -> PerQuery:
        found = figures_from_distances(choice.held_out_result.query_distances[0], pairs, queries)
        return deciding_figure(found, queries.are_gallery_items)

    by_query = [figures(one) for one in candidates]
    if not queries.are_gallery_items:
        kind = candidates[int(np.argmax([one.mean() for one in by_query]))].kind
        with_queries = crossfit.cross_fit(
            reverse, sets, [kind], fitted_queries=sets[0], adapts_queries=True
        )[kind]
        candidates.append(MapChoice(kind, {}, with_queries, sets[0]))
        by_query.append(figures(candidates[-1]))

    def best(some: slice) -> MapChoice:
        return candidates[int(np.argmax([one[some].mean() for one in by_query]))]

    return AdapterChoice(best(slice(None)), (best(slice(1, None, 2)), best(slice(0, None, 2))))


# A way with this share of the figures of re-embedding is as good as re-embedding.
AS_GOOD_SHARE = 0.99
# Re-embedding that takes no longer than this needs no other way.
SOON_SECONDS = 600.0
# Shares of the pairs that the learning curve is measured at.
CURVE_SHARES = (0.125, 0.25, 0.5, 1.0)
# The new model's queries are mapped to the old space, and no stored vector changes.
ADAPTER_OPTION = "query adapter"
# Cheapest first: of ways that are as good, the first is recommended.
WAYS = ("stay", ADAPTER_OPTION, "map", "both", "lazily", "re-embed")
# One more way where both models have one space: the same model on another host, in another
# precision, or exported again. It goes before the others.
SWITCH = "switch"
# Models of one space agree so well on all but 1 % of the items and queries, as a cosine.
ONE_SPACE = 0.95
# And on so many of the ten neighbours of an item, where no query says more.
ONE_SPACE_NEIGHBOURS = 0.8
NEEDS_ITEMS = ("lazily", "re-embed")
# Ways in which the old model embeds each query.
NEEDS_OLD_MODEL = ("stay", "both", "lazily")


@dataclass(frozen=True)
class Cost:
    """Measured costs of the two models and the store.

    Attributes:
        item_count: Items of the gallery.
        old_seconds: Seconds to embed an item or a query by the old model; None: not measured.
        new_seconds: Seconds to embed an item by the new model; None: not measured.
        migrate_seconds: Seconds to migrate an item: read, map, write and check; None: not measured.
        new_query_seconds: Seconds to embed a query by the new model; None: as for an item.
        embedded_items: Items whose vector by the new model exists already; re-embedding reuses it.
        index_seconds: Seconds to build an index of all new vectors; 0: none, or not measured.
    """

    item_count: int
    old_seconds: float | None
    new_seconds: float | None
    migrate_seconds: float | None
    new_query_seconds: float | None = None
    embedded_items: int = 0
    index_seconds: float = 0.0


@dataclass(frozen=True)
class VerdictOption:
    """One way to go on with the gallery.

    Attributes:
        name: One of WAYS, or SWITCH.
        figures: Mean of each figure, 0 to 1.
        worse: Figures in which it is measurably below staying.
        better: Figures in which it is measurably above staying.
        query_seconds: Seconds a query, on one thread; None: not measured.
        all_seconds: Seconds to get there, on one thread; None: not measured.
        estimated: Figures that are estimates; all others are measured.
        interval: The 95 % interval of agreement@10 where that is an estimate; None otherwise.
    """

    name: str
    figures: dict[str, float]
    worse: tuple[str, ...]
    better: tuple[str, ...]
    query_seconds: float | None
    all_seconds: float | None
    estimated: tuple[str, ...] = ()
    interval: tuple[float, float] | None = None


@dataclass(frozen=True)
class CurvePoint:
    """A point of the learning curve: a number of pairs, and the chosen candidate's figure."""

    pairs: int
    figure: float


@dataclass(frozen=True)
class Verdict:
    """The advice of `nobackfill fit`, with the figures behind it.

    Attributes:
        way: The recommended way, one of WAYS, or SWITCH.
        words: Why.
        search: The kind of search that the verdict holds for.
        judged_by: The figure that decides: "MRR" or "agreement@10".
        ways: Figures and costs of each way.
        candidates: The deciding figure of each candidate map.
        map: The map that serves the queries best, fitted on all pairs.
        adapter: The query adapter that serves the queries best, fitted on all pairs.
        joining: The rank fusion that "both" and "lazily" are served by.
        curve: The learning curve; empty for a converter or a trained map.
        healing: Figures while items become native, none to all.
        pairs: Number of pairs.
        notes: Sentences that qualify the figures.
        items: Items that the ways are judged among: the pairs, or the whole gallery.
        candidate_recall: Recall of a search that ranks only each model's best candidates, as rank
            fusion and lazy re-embedding do: the share, 0 to 1, of the right items that are among
            these candidates. None if only the pairs were judged.
    """

    way: str
    words: str
    search: str
    judged_by: str
    ways: list[VerdictOption]
    candidates: dict[str, float]
    map: Map
    adapter: Map
    joining: FittedRankFusion
    curve: list[CurvePoint]
    healing: LazyReembeddingCurves
    pairs: int
    notes: list[str] = field(default_factory=list)
    items: int = 0
    candidate_recall: float | None = None


def decide(
    pairs: Pairs,
    cost: Cost,
    queries: Queries | None = None,
    *,
    items_available: bool = True,
    old_model_available: bool = True,
    converter: Map | None = None,
    trainer: Trainer | None = None,
    source: Source | None = None,
) -> Verdict:
    """Fit candidate maps, judge each option on pairs that its map was not fitted to, and choose.

    Nothing is written. The same arguments give the same verdict.

    It takes seconds to minutes, and holds up to 20,000,000 distances of each option in memory. More
    than 2,000 queries are sampled.

    Args:
        pairs: At least 10 pairs of old and new vectors.
        cost: Number of items of the gallery, and measured seconds of the models and of the store.
        queries: At least 2 queries with known answers among the pairs. None: items are the queries,
            and the verdict holds for finding similar things only.
        items_available: Whether the items themselves can still be embedded; if not, the verdict is
            never "lazily" or "re-embed".
        old_model_available: Whether the old model can still embed queries; if not, the verdict is
            never "both" or "lazily".
        converter: A published map between these two models: two more candidates.
        trainer: Trains a residual map: one more candidate, which takes minutes. Its errors pass
            through.
        source: The store of the old vectors. With more items than the pairs, it is read once, and
            the options are judged among all of its items. None judges them among the pairs.

    Raises:
        InvalidInputError: Fewer than 10 pairs, fewer than 2 queries, unusable layers of the
            trainer, or an unusable vector in `source`.
        IncompatibleSpaceError: The converter has other dimensions than the pairs. Files of `source`
            record different models.
        ValueError: A vector of the pairs or the queries holds NaN or infinity, or with cosine is
            zero.
        UnavailableError: The server of `source` does not answer.
        NotPermittedError: The server refuses the user, or may hide rows from this role.
        BusyError: Others hold the store, or its server has too many requests.
        NotFoundError: The table or the collection was deleted meanwhile.
        numpy.linalg.LinAlgError: The equations cannot be solved.
        ConfigurationError: The process was forked after `source` was opened (LanceDB).
        Exception: Any error of the trainer.
    """
    if queries is not None and len(queries.gallery_rows) < 2:
        raise InvalidInputError(
            "expected at least 2 queries, because one half of the queries chooses a map and the "
            f"other half measures it, got {len(queries.gallery_rows)}; add queries, or leave the "
            "queries out"
        )
    similar = judgement.sample_item_queries(pairs)
    judged_queries = similar if queries is None else judgement.sample_queries(queries, len(pairs))
    known_items = not judged_queries.are_gallery_items
    judged_by = "MRR" if known_items else "agreement@10"
    query_sets = [judged_queries, similar] if known_items else [judged_queries]
    choice = choose_map(pairs, query_sets, converter, trainer)
    adapter = choose_adapter(pairs, query_sets)
    distances = choice.held_out_result.query_distances
    gallery = JudgedGallery(pairs.old, choice.held_out_result.migrated_vectors, pairs.new)
    judged = judgement.judge_options(gallery, judged_queries, distances[0])
    figures = judged.figures_by_option
    by_set = [figures]
    if known_items:
        # agreement@10 of each way, with the rank fusion that is served to queries for known items.
        by_set.append(judgement.judge_fusion(gallery, similar, judged.rank_fusion, distances[1]))
    for number, one in enumerate(query_sets):
        by_set[number][ADAPTER_OPTION] = figures_from_distances(
            adapter.distances(number), pairs, one
        )
    figures = _with_agreement(by_set)
    switch = _switch(pairs, judged_queries, similar, figures, cost, judged_by)
    scans: list[ScanResult] = []
    items = len(pairs)
    if source is not None and cost.item_count > len(pairs):
        names = () if switch is None else (SWITCH,)
        items, scans = _scan(
            source, pairs, query_sets, choice, adapter, judged, gallery, by_set, cost.item_count,
            converter, names,
        )  # fmt: skip
        figures = _with_agreement([one.figures_by_option for one in scans])
        intervals = scans[-1].agreement_intervals
        if switch is not None:
            switch = _estimated(_way(SWITCH, figures, cost, judged_by), intervals)
        ways = [_estimated(_way(name, figures, cost, judged_by), intervals) for name in WAYS]
    else:
        ways = [_way(name, figures, cost, judged_by) for name in WAYS]
    way, words = choose_option(
        ways, judged_by, items_available, old_model_available=old_model_available
    )
    if switch is not None:
        ways.insert(1, switch)
        way = SWITCH
        words = "the new model finds as much in the stored vectors as in its own: one space"
    mapping = choice.fit(pairs, converter)
    joining = replace(judged.rank_fusion, map_digest=mapping.digest)
    curve = _learning_curve(pairs, judged_queries, choice, judged_by, converter)
    search = "finding that very item" if known_items else "finding similar things"
    recall = float(scans[0].candidate_recall.mean()) if scans else None
    notes = _scan_notes(scans, pairs, items, known_items) if scans else []
    notes += _notes(
        judged_queries, pairs, cost, joining.new_weight, curve, judged_by, scanned=bool(scans)
    )
    if adapter.choice.fitted_queries is not None:
        notes.append("the query adapter is also fitted on the queries")
    if choice.fitted_queries is not None:
        notes.append(
            f"the map is also fitted on the {len(judged_queries.gallery_rows)} queries, because "
            "that finds more of the queries that are left out"
        )
    notes += _curve_notes(judged.lazy_reembedding, len(pairs), judged_by)
    return Verdict(
        way, words, search, judged_by, ways, choice.figures, mapping,
        replace(adapter.choice.fit(pairs.exchange_models), direction="new to old"), joining, curve,
        judged.lazy_reembedding, len(pairs), notes, items, recall,
    )  # fmt: skip


def _with_agreement(by_set: Sequence[Mapping[str, Figures]]) -> dict[str, Figures]:
    """Take agreement@10 from the last set of queries, all other figures from the first."""
    return {
        name: {**figures, "agreement@10": by_set[-1][name]["agreement@10"]}
        for name, figures in by_set[0].items()
    }


def _scan(
    source: Source,
    pairs: Pairs,
    query_sets: Sequence[Queries],
    choice: MapChoice,
    adapter: AdapterChoice,
    judged: judgement.Judgement,
    gallery: JudgedGallery,
    by_set: Sequence[Mapping[str, Figures]],
    items: int,
    converter: Map | None,
    names: Sequence[str],
) -> tuple[int, list[ScanResult]]:
    """Judge the ways among all items of a store, with maps that were fitted without each query.

    Args:
        items: Items of the store, about.
        names: Further ways to judge: SWITCH or none. All other arguments are those of
            `decide`.
    """
    # As many folds as leave out about the pairs that the two folds of a cross-fit do.
    fold = np.random.default_rng(0).permutation(np.arange(len(pairs)) % crossfit.FEW)
    # A converter is fitted on no pairs.
    of_map = np.zeros_like(fold) if choice.kind == CONVERTER else fold
    maps = [choice.fit_without(pairs, of_map == one, converter) for one in np.unique(of_map)]
    most = max(FEWEST_QUERIES, MOST_DISTANCES // items // len(query_sets))
    sets, figures = [], []
    for number, (queries, block) in enumerate(
        zip(query_sets, choice.held_out_result.query_distances, strict=True)
    ):
        joinings = (
            judged.half_rank_fusions if number == 0 else (judged.rank_fusion, judged.rank_fusion)
        )
        rows = np.arange(len(queries.gallery_rows))
        in_old = {ADAPTER_OPTION: adapter.map_queries(number, queries, pairs, fold)}
        in_old_distances = {ADAPTER_OPTION: adapter.distances(number)}
        if SWITCH in names:
            in_old[SWITCH] = queries.new
            in_old_distances[SWITCH] = query_item_distances(queries.new, pairs.old, queries.metric)
        whole = ScanQueries(queries, block, joinings, rows % 2 == 0, in_old, in_old_distances)
        if len(rows) > most:
            rows = np.sort(np.random.default_rng(0).choice(rows, most, replace=False))
        sets.append(whole.select(rows))
        figures.append(
            {
                way: {figure: values[rows] for figure, values in one.items()}
                for way, one in by_set[number].items()
            }
        )
    anchors = judgement.anchor_rows(gallery)
    return scan_gallery(source, pairs, sets, figures, gallery.migrated, anchors, maps, of_map)


def _estimated(way: VerdictOption, intervals: Mapping[str, tuple[float, float]]) -> VerdictOption:
    """Mark the figures of a way that are estimates in a gallery of which a sample is native."""
    names = tuple(way.figures) if way.name in NEEDS_ITEMS else ("agreement@10",)
    if way.name == "re-embed":
        # The new model agrees with itself.
        names = tuple(name for name in names if name != "agreement@10")
    return replace(way, estimated=names, interval=intervals.get(way.name))


def _scan_notes(
    scans: Sequence[ScanResult], pairs: Pairs, items: int, known_items: bool
) -> list[str]:
    """State what was measured over the whole gallery, and what is an estimate."""
    queries = len(scans[0].candidate_recall)
    recall = 100 * float(scans[0].candidate_recall.mean())
    what = "the items to find" if known_items else "the new model's ten neighbours, an estimate,"
    return [
        f"judged among all {items} items of the gallery with {queries} queries; ~ marks an "
        f"estimate from the {len(pairs)} items that both models embedded, and the other figures "
        "are measured",
        f"the candidates of both models hold {recall:.1f} % of {what} with 100 items by each model",
    ]


def _switch(
    pairs: Pairs,
    queries: Queries,
    similar: Queries,
    figures: Mapping[str, Figures],
    cost: Cost,
    judged_by: str,
) -> VerdictOption | None:
    """Judge the way to use the new model on the stored vectors; None where the models differ."""
    if pairs.old.shape[1] != pairs.new.shape[1]:
        return None
    for old, new in ((pairs.old, pairs.new), (queries.old, queries.new)):
        cosines = (normalise(old) * normalise(new)).sum(1)
        if np.quantile(cosines, 0.01) < ONE_SPACE:
            return None
    found = judgement.judge_switch(pairs, queries)
    found["agreement@10"] = judgement.judge_switch(pairs, similar)["agreement@10"]
    way = _way(SWITCH, {**figures, SWITCH: found}, cost, judged_by)
    if way.figures["agreement@10"] < ONE_SPACE_NEIGHBOURS:
        return None
    if not queries.are_gallery_items:
        below = (
            paired_bootstrap([figures["re-embed"][one]], [found[one]])
            for one in found
            if one != "agreement@10"
        )
        if way.worse or any(one.verdict == "holds" for one in below):
            return None
    return way


def _way(name: str, figures: Mapping[str, Figures], cost: Cost, judged_by: str) -> VerdictOption:
    stay = figures["stay"]
    compared = [one for one in stay if one != "agreement@10" or judged_by == one]

    def measurably_above(one: Figures, other: Figures) -> tuple[str, ...]:
        return tuple(
            name
            for name in compared
            if paired_bootstrap([one[name]], [other[name]]).verdict == "holds"
        )

    worse = measurably_above(stay, figures[name])
    better = measurably_above(figures[name], stay)
    means = {figure: _mean(figures[name], figure) for figure in figures[name]}
    old, new, items = cost.old_seconds, cost.new_seconds, cost.item_count
    query = new if cost.new_query_seconds is None else cost.new_query_seconds
    both = None if old is None or query is None else old + query
    hits = None if both is None or new is None else both + CANDIDATES_PER_SEARCH * new
    query_seconds = {
        "stay": old, SWITCH: query, ADAPTER_OPTION: query, "map": query, "both": both,
        "lazily": hits, "re-embed": query,
    }  # fmt: skip
    migrate = None
    if cost.migrate_seconds is not None:
        migrate = items * cost.migrate_seconds + cost.index_seconds
    # Native vectors are read, written, checked and indexed like migrated ones.
    left = max(0, items - cost.embedded_items)
    reembed = None if new is None else left * new + (migrate or 0.0)
    all_seconds = {
        "stay": 0.0,
        SWITCH: 0.0,
        ADAPTER_OPTION: 0.0,
        "map": migrate,
        "both": migrate,
        "lazily": None if migrate is None or reembed is None else migrate + reembed,
        "re-embed": reembed,
    }
    return VerdictOption(name, means, worse, better, query_seconds[name], all_seconds[name])


def choose_option(
    ways: list[VerdictOption],
    judged_by: str,
    items_available: bool,
    *,
    old_model_available: bool = True,
) -> tuple[str, str]:
    """Choose the cheapest option that is as good as re-embedding, or else the best option.

    "As good" is 99 % of each figure. An option that is measurably worse than staying in any figure
    is never chosen. If re-embedding takes at most 10 minutes, it is chosen before cheaper options.
    A query adapter must be measurably better than staying in the deciding figure, unless the old
    model is gone.

    Among options that are as good, the first of `ways` wins; among the others, the one with the
    best deciding figure. "both" is chosen only if it finds at least as much as either model alone.

    Args:
        ways: All of WAYS, cheapest first, without SWITCH.
        judged_by: The figure that decides: "MRR" or "agreement@10".
        items_available: Whether the items themselves can still be embedded; if not, "lazily" and
            "re-embed" are never chosen.
        old_model_available: Whether the old model can still embed queries; if not, "both" and
            "lazily" are never chosen, and "stay" only if every other option is worse.

    Returns:
        The name of the option, and the reason in words.

    Raises:
        KeyError: A way of "stay" or "re-embed", or the deciding figure, is missing.
    """
    by_name = {way.name: way for way in ways}
    stay, reembed = by_name["stay"], by_name["re-embed"]
    compared = [name for name in stay.figures if judged_by == name or name != "agreement@10"]
    if old_model_available:
        if reembed.worse:
            figures = ", ".join(reembed.worse)
            return "stay", f"the new model is worse than the old one on this sample ({figures})"
        if stay.figures[judged_by] >= reembed.figures[judged_by]:
            return "stay", "the new model finds no more than the old one on this sample"
        if not reembed.better:
            return "stay", (
                "the new model's advantage is not statistically significant on this sample"
            )
    open_ways = [
        way
        for way in ways
        if not way.worse
        and (items_available or way.name not in NEEDS_ITEMS)
        and (old_model_available or way.name not in NEEDS_OLD_MODEL)
        and (way.name != ADAPTER_OPTION or not old_model_available or judged_by in way.better)
    ]
    if not open_ways:
        return "stay", (
            "every way without the old model is measurably worse than the old model was: restore "
            "it for queries"
        )
    # A query by two models must find more than the better one of them finds alone.
    single = [way.figures[judged_by] for way in open_ways if way.name in ("map", "re-embed")]
    open_ways = [
        way
        for way in open_ways
        if way.name != "both" or way.figures[judged_by] >= max(single, default=0.0)
    ]
    seconds = reembed.all_seconds
    if reembed in open_ways and seconds is not None and seconds <= SOON_SECONDS:
        return "re-embed", f"re-embedding everything takes only {seconds:.0f} s"
    for way in open_ways:
        if all(way.figures[name] >= AS_GOOD_SHARE * reembed.figures[name] for name in compared):
            return way.name, _WHY[way.name]
    best = max(open_ways, key=lambda way: way.figures[judged_by])
    condition = "" if old_model_available else "the old model is gone, and "
    if not items_available:
        condition += "the items cannot be embedded any more, and "
    if best.name == "stay":
        return "stay", f"{condition}every other possible way is measurably worse"
    return best.name, (
        f"{condition}no cheaper way is as good as re-embedding; this is the best possible way, and "
        "it is not worse than staying"
    )


# Why a way is chosen that is as good as re-embedding.
_WHY = {
    "stay": "the old model finds as much as the new one would",
    ADAPTER_OPTION: "the new model's queries, mapped to the old space, find as much as "
    "re-embedding everything would; no stored vector changes",
    "map": "migrated vectors find as much as re-embedding everything would",
    "both": "old and new scores together find as much as re-embedding everything would",
    "lazily": "if the hits of each query are re-embedded, searches are as good as after "
    "re-embedding everything, from the first day",
    "re-embed": "no cheaper way finds as much",
}


def _learning_curve(
    pairs: Pairs, queries: Queries, choice: MapChoice, judged_by: str, converter: Map | None
) -> list[CurvePoint]:
    """Measure the chosen candidate with an eighth, a quarter and a half of the pairs, and with all.

    Empty for a converter as it is, which no pairs change, and for a trained map, which would take
    as long again for each point. Points of fewer than 20 pairs are left out.
    """
    points: list[CurvePoint] = []
    kind = choice.kind
    if kind in (CONVERTER, RESIDUAL_KIND):
        return points
    share_of_all = crossfit.share_fitted_per_map(crossfit.fold_count(pairs))
    fitted = share_of_all * len(pairs)
    for share in CURVE_SHARES:
        if share == 1:
            points.append(CurvePoint(round(fitted), choice.figure))
        elif share * fitted >= 20:
            # With few folds each map is fitted on a smaller share, so a larger part of it is used.
            few = crossfit.FEW
            candidates = crossfit.cross_fit_candidates(
                pairs,
                [queries],
                converter,
                kinds=[kind],
                fitted_share=share * share_of_all / crossfit.share_fitted_per_map(few),
                folds=few,
                fitted_queries=choice.fitted_queries,
            )
            figures = judgement.figures_from_distances(
                candidates[kind].query_distances[0], pairs, queries
            )
            points.append(CurvePoint(round(share * fitted), _mean(figures, judged_by)))
    return points


def _curve_notes(curves: LazyReembeddingCurves, count: int, judged_by: str) -> list[str]:
    """Describe the figures of the sample while its items become native, by score and by distance.

    They compare with one another alone: among all items of a gallery every figure is lower.
    """
    name = judged_by if judged_by == "agreement@10" else "R@1"
    curve, raw = curves.curves_by_score[name], curves.curves_by_distance[name]
    notes = [
        f"among the {count} items of the sample, {name} goes from {100 * curve[0]:.1f} to "
        f"{100 * curve[-1]:.1f} while they become native at random, lowest {100 * min(curve):.1f}, "
        "ranked by nobackfill.serve"
    ]
    if curve[-1] > raw[-1] + MOST_BELOW:
        notes.append(
            f"with all of them native, both models together have {name} {100 * curve[-1]:.1f} and "
            f"the new one alone {100 * raw[-1]:.1f}: to keep that, let searches ask both models "
            "after re-embedding, too"
        )
    if (below := valley_depth(raw)) > MOST_BELOW:
        notes.append(
            f"in one index ranked by distance, their {name} falls to {100 * min(raw):.1f} on the "
            f"way, {100 * below:.1f} points below the lower end: do not mix migrated and native "
            "vectors in one column without calibrated scores"
        )
    return notes


def gain_of_doubling_pairs(curve: list[CurvePoint]) -> float | None:
    """Estimate how much twice the pairs would raise the figure, from the last two doublings.

    Args:
        curve: Points by increasing number of pairs, each with twice as many.

    Returns:
        The gain, 0 or more, on the scale of the figure; None for fewer than 2 points.
    """
    if len(curve) < 2:
        return None
    gains = np.diff([point.figure for point in curve])[-2:]
    # Gains shrink from doubling to doubling: the next ratio is taken to be that of the last two.
    if len(gains) == 2 and gains[0] > 0:
        return float(max(0.0, gains[1] * min(1.0, gains[1] / gains[0])))
    return float(max(0.0, gains[-1]))


def _notes(
    queries: Queries,
    pairs: Pairs,
    cost: Cost,
    weight: float,
    curve: list[CurvePoint],
    judged_by: str,
    *,
    scanned: bool,
) -> list[str]:
    sample = f"measured among {len(pairs)} items with {len(queries.gallery_rows)} queries"
    if cost.item_count > len(pairs):
        sample += f"; the gallery has {cost.item_count} items, where every figure is lower"
    notes = [] if scanned else [sample]
    gain = gain_of_doubling_pairs(curve)
    if gain is not None:
        notes.append(
            f"twice as many pairs would raise {judged_by} of the map by about {100 * gain:.1f} "
            "points"
        )
    if queries.are_gallery_items:
        notes.append(
            "without queries whose answer is known, the verdict does not cover searches for one "
            "known item: a map can keep similar items near and still lose that one; give "
            "--queries-old and --queries-new, or --old and --queries to `migrate`"
        )
        notes.append("the new model's own neighbours count as the truth, so staying cannot win")
    if weight in (0.0, 1.0):
        model = "old" if weight == 0 else "new"
        notes.append(f"rank fusion is best with the scores of the {model} model alone")
    return notes


def _mean(figures: Figures, name: str) -> float:
    return float(np.mean(figures[name]))
