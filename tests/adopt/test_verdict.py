"""The verdict on worlds whose best way is known beforehand."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nobackfill.adopt import judgement
from nobackfill.adopt.crossfit import cross_fit
from nobackfill.adopt.joining import load_rank_fusion, save_rank_fusion
from nobackfill.adopt.judgement import (
    Figures,
    JudgedGallery,
    Queries,
    judge_options,
    valley_depth,
)
from nobackfill.adopt.pairs import Pairs
from nobackfill.adopt.verdict import (
    Cost,
    CurvePoint,
    Verdict,
    VerdictOption,
    choose_option,
    decide,
    gain_of_doubling_pairs,
)
from nobackfill.errors import InvalidInputError
from nobackfill.serving.fusion import FittedRankFusion, OddsLine
from nobackfill.vectors import Vectors, normalise
from tests.adopt.made import World, kinds, world

SLOW = Cost(1_000_000, 0.01, 0.02, 1e-6)


def figures(verdict: Verdict, way: str) -> dict[str, float]:
    return next(one.figures for one in verdict.ways if one.name == way)


def test_lazily_where_the_old_model_saw_half() -> None:
    """A map cannot invent what the old model did not see; embedding the hits again can."""
    made = world(500)
    found = decide(made.pairs, SLOW, made.queries)
    assert found.way == "lazily"
    assert figures(found, "lazily")["R@1"] >= 0.99 * figures(found, "re-embed")["R@1"]
    assert figures(found, "re-embed")["R@1"] > figures(found, "stay")["R@1"] + 0.1
    assert found.search == "finding that very item"
    # On the way to all native, no valley.
    assert (
        set(found.healing.curves_by_score)
        == set(found.healing.curves_by_distance)
        == set(figures(found, "stay"))
    )
    for curve in found.healing.curves_by_score.values():
        assert len(curve) == 11
        assert valley_depth(curve) <= 0.01
    # Who was found while all was carried helps to be found by the new model's own vector, too.
    assert figures(found, "lazily")["MRR"] >= figures(found, "re-embed")["MRR"] - 0.01
    end = found.healing.curves_by_score["MRR"][-1]
    assert end == pytest.approx(figures(found, "lazily")["MRR"], abs=0.01)


def test_query_adapter_where_the_old_model_reads_queries_badly() -> None:
    """The new space is the old one turned, so that queries can be mapped as well as items."""
    found = noisy_queries()
    assert found.way == "query adapter"
    again = figures(found, "re-embed")["MRR"]
    for way in ("query adapter", "map"):
        assert figures(found, way)["MRR"] == pytest.approx(again, abs=0.01)
    (adapter,) = (way for way in found.ways if way.name == "query adapter")
    assert adapter.all_seconds == 0 and adapter.query_seconds == SLOW.new_seconds
    assert "MRR" in adapter.better
    assert found.adapter.direction == "new to old"


def noisy_queries(noise: float = 0.25, *, old_model_available: bool = True) -> Verdict:
    made = world(unseen=0, noise=0.5)
    blur = np.random.default_rng(1).normal(size=made.queries_old.shape).astype(np.float32)
    queries = Queries(
        made.queries_old + noise * blur, made.queries_new, made.answers, are_gallery_items=False
    )
    return decide(made.pairs, SLOW, queries, old_model_available=old_model_available)


def test_the_query_adapter_is_needed_where_the_old_model_is_gone() -> None:
    """Both models read queries equally well: there is no reason to leave a model that works."""
    assert noisy_queries(0).way == "stay"
    found = noisy_queries(0, old_model_available=False)
    assert found.way == "query adapter"
    (adapter,) = (way for way in found.ways if way.name == "query adapter")
    assert adapter.better == adapter.worse == ()


def test_map_where_the_old_vectors_hold_more_than_the_new_model_sees() -> None:
    """A map leaves out of each item what the new model does not see. A query adapter cannot."""
    made = world(unseen=0, noise=0.5)
    rng = np.random.default_rng(1)

    def more(vectors: Vectors) -> Vectors:
        others = rng.lognormal(sigma=0.5, size=(len(vectors), 1)) * normalise(
            rng.normal(size=(len(vectors), 4)).astype(np.float32)
        )
        return normalise(np.concatenate([vectors, others], 1).astype(np.float32))

    pairs = Pairs(made.ids, more(made.old), made.new)
    queries = Queries(
        more(made.queries_old), made.queries_new, made.answers, are_gallery_items=False
    )
    found = decide(pairs, SLOW, queries)
    assert found.way == "map"
    again = figures(found, "re-embed")["MRR"]
    assert figures(found, "map")["MRR"] == pytest.approx(again, abs=0.01)
    assert figures(found, "query adapter")["MRR"] < 0.98 * again


@pytest.mark.long
@pytest.mark.slow
def test_the_query_adapter_is_refused_below_staying() -> None:
    """Each model sees a half that the other one does not; the new one sees its own half better."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(size=(400, 36)).astype(np.float32)
    asked = hidden[:200] + 0.7 * rng.normal(size=(200, 36)).astype(np.float32)
    old, by_old = (normalise(one[:, :14]) for one in (hidden, asked))
    new, by_new = (normalise(one[:, 6:]) for one in (hidden, asked))
    queries = Queries(by_old, by_new, np.arange(200, dtype=np.int64), are_gallery_items=False)
    pairs = Pairs([str(row) for row in range(400)], old, new)
    # The other pairs, of which no query asks, say what is true.
    mapping = np.linalg.lstsq(new[200:], old[200:], rcond=None)[0]
    near = normalise(by_new @ mapping) @ old.T
    place = (near >= near[np.arange(200), np.arange(200)][:, None]).sum(1)
    for items, old_model, way in (
        (True, True, "lazily"), (True, False, "re-embed"), (False, False, "stay"),
    ):  # fmt: skip
        found = decide(pairs, SLOW, queries, items_available=items, old_model_available=old_model)
        (adapter,) = (way for way in found.ways if way.name == "query adapter")
        assert "MRR" in adapter.worse
        assert adapter.figures["MRR"] == pytest.approx((1 / place).mean(), abs=0.04)
        assert found.way == way
    assert "restore it" in found.words


@pytest.mark.slow
def test_what_chose_the_query_adapter_does_not_judge_it() -> None:
    """Of two models that have nothing in common, every figure of an adapter is chance."""
    rng = np.random.default_rng(0)
    old, new = (normalise(rng.normal(size=(150, 60)).astype(np.float32)) for _ in range(2))
    rows = np.arange(150, dtype=np.int64)
    by_old, by_new = (
        normalise(one + 0.05 * rng.normal(size=one.shape).astype(np.float32)) for one in (old, new)
    )
    queries = Queries(by_old, by_new, rows, are_gallery_items=False)
    found = decide(Pairs([str(row) for row in rows], old, new), SLOW, queries)
    chance = (1 / np.arange(1, 151)).mean()
    assert figures(found, "query adapter")["MRR"] == pytest.approx(chance, abs=0.02)
    # On what it is fitted on, the same map is far from chance.
    mapped = found.adapter(by_new) @ old.T
    place = (mapped >= np.diag(mapped)[:, None]).sum(1)
    assert (1 / place).mean() > 5 * chance


@pytest.mark.long
def test_switch_where_both_models_have_one_space() -> None:
    made = world()
    rng = np.random.default_rng(2)

    def rounded(vectors: Vectors, noise: float) -> Vectors:
        return vectors + noise * rng.normal(size=vectors.shape).astype(np.float32)

    def exported(noise: float) -> Verdict:
        again = World(
            made.new, rounded(made.new, noise), made.queries_new,
            rounded(made.queries_new, noise), made.answers,
        )  # fmt: skip
        return decide(again.pairs, SLOW, again.queries)

    found = exported(0.01)
    assert found.way == "switch"
    assert [way.name for way in found.ways][:2] == ["stay", "switch"]
    assert figures(found, "switch")["R@1"] == pytest.approx(figures(found, "stay")["R@1"], abs=0.02)
    # Another model of the same dimension, and a copy that is too coarse, are none of one space.
    assert exported(0.2).way != "switch"
    turn = np.linalg.qr(rng.normal(size=(32, 32)))[0].astype(np.float32)
    turned = World(
        made.new, made.new @ turn, made.queries_new, made.queries_new @ turn, made.answers
    )
    assert decide(turned.pairs, SLOW, turned.queries).way != "switch"


def test_stay_where_the_new_model_is_worse() -> None:
    made = world()
    swapped = World(made.new, made.old, made.queries_new, made.queries_old, made.answers)
    found = decide(swapped.pairs, SLOW, swapped.queries)
    assert found.way == "stay"
    assert "worse" in found.words
    (again,) = (way for way in found.ways if way.name == "re-embed")
    assert "R@1" in again.worse


def test_stay_where_the_gain_may_be_chance() -> None:
    """Two models of the same truth, each with noise of its own: which finds more is chance."""
    words = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        hidden = rng.normal(size=(300, 12))
        asked = hidden[:40] + rng.normal(size=(40, 12))
        (old, new), (asked_old, asked_new) = (
            [normalise((one + 0.3 * rng.normal(size=one.shape)).astype(np.float32)) for _ in "ab"]
            for one in (hidden, asked)
        )
        queries = Queries(
            asked_old, asked_new, np.arange(40, dtype=np.int64), are_gallery_items=False
        )
        found = decide(Pairs([str(row) for row in range(300)], old, new), SLOW, queries)
        assert found.way == "stay"
        assert not found.ways[-1].better
        words.append(found.words)
    assert any("not statistically significant" in one for one in words)


def test_never_worse_than_staying_when_the_items_are_gone() -> None:
    made = world(noise=0.5)
    found = decide(made.pairs, SLOW, made.queries, items_available=False)
    assert found.way in ("stay", "query adapter", "map", "both")
    (chosen,) = (way for way in found.ways if way.name == found.way)
    assert chosen.worse == ()


def test_what_carrying_takes_is_told_of_each_way_that_carries_first() -> None:
    made = world(90)
    found = decide(made.pairs, replace(SLOW, item_count=1000, migrate_seconds=0.5), made.queries)
    told = {way.name: way.all_seconds for way in found.ways}
    assert told == {
        "stay": 0, "query adapter": 0, "map": 500, "both": 500, "lazily": 1020, "re-embed": 520,
    }  # fmt: skip
    # Vectors that the new model has made already are reused: 910 items at .02 s are left.
    rest = decide(
        made.pairs,
        replace(SLOW, item_count=1000, migrate_seconds=0.5, embedded_items=90),
        made.queries,
    )
    again = {way.name: way.all_seconds for way in rest.ways}
    assert again == told | {"lazily": pytest.approx(1018.2), "re-embed": pytest.approx(518.2)}
    # Lazily indexes the migrated vectors, and later the native ones.
    indexed = decide(
        made.pairs,
        replace(SLOW, item_count=1000, migrate_seconds=0.5, index_seconds=30),
        made.queries,
    )
    assert {way.name: way.all_seconds for way in indexed.ways} == {
        "stay": 0, "query adapter": 0, "map": 530, "both": 530, "lazily": 1080, "re-embed": 550,
    }  # fmt: skip
    unknown = decide(made.pairs, replace(SLOW, migrate_seconds=None), made.queries)
    assert [way.all_seconds for way in unknown.ways][2:5] == [None] * 3


def test_a_larger_gallery_is_only_told_of_where_there_is_one() -> None:
    made = world(90)
    for items, larger in ((90, False), (91, True)):
        notes = decide(made.pairs, replace(SLOW, item_count=items), made.queries).notes
        assert any("every figure is lower" in note for note in notes) == larger


@pytest.mark.parametrize(("both", "way"), [(0.79, "lazily"), (0.81, "both")])
def test_two_models_are_never_named_below_the_better_of_map_and_new_model(
    both: float, way: str
) -> None:
    found = {"stay": 0.5, "map": 0.7, "both": both, "lazily": 0.85, "re-embed": 0.8}
    ways = [
        VerdictOption(name, {"MRR": one}, (), ("MRR",) if name != "stay" else (), 0.1, 1e6)
        for name, one in found.items()
    ]
    # Of AS_GOOD_SHARE either would do.
    assert choose_option(ways, "MRR", items_available=True)[0] == way


@pytest.mark.parametrize(
    ("adapter", "better", "gone", "way"),
    [
        (0.82, ("MRR",), False, "query adapter"),
        # Not measurably better than staying: no reason to change the queries.
        (0.82, (), False, "map"),
        (0.82, (), True, "query adapter"),
        # Of the ways that are left, the best one.
        (0.6, ("MRR",), False, "map"),
        (0.6, (), True, "map"),
    ],
)
def test_the_query_adapter_comes_after_staying_and_before_the_map(
    adapter: float, better: tuple[str, ...], gone: bool, way: str
) -> None:
    found = {"stay": 0.5, "query adapter": adapter, "map": 0.81, "both": 0.7, "lazily": 0.85,
             "re-embed": 0.8}  # fmt: skip
    ways = [
        VerdictOption(
            name, {"MRR": one}, (), better if name == "query adapter" else ("MRR",), 0.1, 1e6
        )
        for name, one in found.items()
    ]
    assert choose_option(ways, "MRR", True, old_model_available=not gone)[0] == way


def test_embed_again_where_that_takes_a_minute() -> None:
    made = world(90)
    found = decide(made.pairs, Cost(3000, 0.01, 0.02, 1e-6), made.queries)
    assert found.way == "re-embed"
    assert "60 s" in found.words


def test_without_queries_it_holds_for_similar_things_and_says_so() -> None:
    made = world()
    found = decide(made.pairs, SLOW)
    assert found.search == "finding similar things"
    assert set(figures(found, "stay")) == {"agreement@10"}
    assert figures(found, "re-embed")["agreement@10"] == 1
    assert any("--queries-old" in note for note in found.notes)


def test_figures_are_those_of_a_slow_loop() -> None:
    made = world(60)
    ways = judge_options(
        JudgedGallery(made.old, made.new, made.new), made.queries
    ).figures_by_option
    for query, answer in enumerate(made.answers[:20]):
        nearness = made.old @ made.queries_old[query]
        place = int((nearness > nearness[answer]).sum()) + 1
        assert ways["stay"]["R@1"][query] == (place == 1)
        assert ways["stay"]["R@10"][query] == (place <= 10)
        assert ways["stay"]["MRR"][query] == pytest.approx(1 / place)
        own = np.argsort(-(made.new @ made.queries_new[query]))[:10]
        here = np.argsort(-nearness)[:10]
        assert ways["stay"]["agreement@10"][query] == len(set(own) & set(here)) / 10


def test_the_weight_is_not_judged_on_what_it_was_chosen_by() -> None:
    """With weights chosen on the other half, noise joined in never helps by luck alone."""
    made = world(200)
    rng = np.random.default_rng(3)
    noise = rng.normal(size=made.new.shape).astype(np.float32)
    judged = judge_options(JudgedGallery(made.old, noise, made.new), made.queries)
    ways = judged.figures_by_option
    assert judged.rank_fusion.new_weight == 0
    assert ways["both"]["MRR"].mean() <= ways["stay"]["MRR"].mean() + 1e-6


def test_more_pairs_bring_more_and_the_next_doubling_is_told() -> None:
    made = world(600, unseen=0)
    noisy = World(
        made.old + 0.1 * np.random.default_rng(0).normal(size=made.old.shape).astype(np.float32),
        made.new, made.queries_old, made.queries_new, made.answers,
    )  # fmt: skip
    found = decide(noisy.pairs, SLOW, noisy.queries)
    assert [point.pairs for point in found.curve] == [60, 120, 240, 480]
    assert found.curve[-1].figure > found.curve[0].figure
    assert gain_of_doubling_pairs(
        [CurvePoint(1, 0.2), CurvePoint(2, 0.3), CurvePoint(4, 0.35)]
    ) == pytest.approx(0.025)
    assert gain_of_doubling_pairs([CurvePoint(1, 0.2)]) is None


def test_too_few_queries_are_refused() -> None:
    made = world(20)
    for count in (0, 1):
        with pytest.raises(InvalidInputError, match=f"at least 2 queries, .*, got {count};"):
            decide(made.pairs, SLOW, made.queries.select(np.arange(count)))


@pytest.mark.parametrize("count", [0, 1, 9])
@pytest.mark.parametrize("known", [True, False])
def test_too_few_pairs_are_refused(count: int, known: bool) -> None:
    made = world(20)
    pairs = Pairs(made.ids[:count], made.old[:count], made.new[:count])
    with pytest.raises(InvalidInputError, match=f"expected at least 10 items .*, got {count};"):
        decide(pairs, SLOW, made.queries if known else None)


def test_hubs_are_told_by_other_queries_and_taken_off_where_that_helps(tmp_path: Path) -> None:
    """All that is asked shares a direction, and a tenth of the carried items have too much of it:
    they are near to every query."""
    rng = np.random.default_rng(0)

    def drawn(rows: int) -> Vectors:
        return normalise(rng.normal(size=(rows, 32)).astype(np.float32))

    shared, items = drawn(1), drawn(400)
    answers = np.arange(200, dtype=np.int64)
    hub = rng.random(400) < 0.1
    carried = normalise(items + np.where(hub, 2, 1)[:, None].astype(np.float32) * shared)
    asked = normalise(normalise(items[:200] + 1.2 * drawn(200)) + shared)
    gallery = JudgedGallery(drawn(400), carried, normalise(items + shared))
    judged = judge_options(gallery, Queries(drawn(200), asked, answers, are_gallery_items=False))
    assert (
        judged.figures_by_option["both"]["R@1"].mean()
        > judged.figures_by_option["map"]["R@1"].mean() + 0.03
    )
    save_rank_fusion(tmp_path / "j.npz", judged.rank_fusion)
    kept = load_rank_fusion(tmp_path / "j.npz")
    assert len(kept.hub_queries) == 200
    assert (kept.migrated_line, kept.native_line) == (
        judged.rank_fusion.migrated_line,
        judged.rank_fusion.native_line,
    )
    # What an earlier nobackfill wrote is read as it was meant.
    with np.load(tmp_path / "j.npz") as arrays:
        header = json.loads(str(arrays["header"])) | {"format": 2, "native": [2.0, -3.0]}
        np.savez(tmp_path / "two.npz", **(dict(arrays) | {"header": np.array(json.dumps(header))}))
    assert load_rank_fusion(tmp_path / "two.npz").native_line == OddsLine(2.0, -3.0, 0.0)
    with_crowd, without = (
        one.match_log_odds(gallery.old[:1], asked[:1], gallery.old, carried, {})[0]
        for one in (kept, replace(kept, hub_queries=kept.hub_queries[:0]))
    )
    every = kept.migrated_nearness(gallery.old[:9], asked[:9], gallery.old, carried)
    for row in range(9):
        some = slice(row, row + 1)
        alone = kept.migrated_nearness(gallery.old[some], asked[some], gallery.old, carried)
        np.testing.assert_allclose(every[some], alone, atol=1e-4)
    less = without - with_crowd
    assert less[hub].mean() > less[~hub].mean()


@pytest.mark.parametrize("kept", [True, False])
def test_hubs_are_corrected_while_no_more_is_lost_than_the_map_loses(kept: bool) -> None:
    """Of the new model's own neighbours, a fusion without the correction has some more."""

    def figures(mrr: float, agreement: float) -> Figures:
        return {"MRR": np.full(50, mrr), "agreement@10": np.full(50, agreement)}

    scores = {
        (0.0, False): figures(0.69, 0.42),
        (0.75, False): figures(0.70, 0.53),
        (0.75, True): figures(0.73, 0.52 if kept else 0.48),
        (1.0, False): figures(0.64, 0.51),
    }
    assert judgement._best(scores, False, np.ones(50, bool)) == (0.75, kept)


@pytest.mark.parametrize("seed", range(3))
def test_hubs_that_the_new_model_has_too_are_left(seed: int) -> None:
    """A model and its 8-bit copy: what asks lies elsewhere than what is found, by both. Both
    together keep what the better of the old vectors and the map keeps."""
    rng = np.random.default_rng(seed)
    width = np.linspace(2, 0.3, 32)
    items = rng.normal(size=(800, 32)) * width + 0.8 * rng.normal(size=(40, 32)).repeat(20, 0)
    asked = items[::4] + 1.2 * rng.normal(size=(200, 32)) * width + 1
    old, by_old = normalise(items.astype(np.float32)), normalise(asked.astype(np.float32))
    new, by_new = (
        normalise((one + 0.01 * rng.normal(size=one.shape)).astype(np.float32))
        for one in (old, by_old)
    )
    queries = Queries(by_old, by_new, np.arange(0, 800, 4), are_gallery_items=False)
    ways = judge_options(JudgedGallery(old, old, new), queries).figures_by_option
    kept = {name: float(one["agreement@10"].mean()) for name, one in ways.items()}
    assert kept["both"] >= max(kept["map"], kept["stay"]) - 0.02


@pytest.mark.parametrize("seed", [0, 3])
def test_no_valley_where_scores_of_two_origins_compare_badly(seed: int) -> None:
    """Kinds of things that either model sees otherwise: how near wrong answers come differs from
    query to query, and by the old model otherwise than by the new one. As it is served, to queries
    that chose nothing."""
    made = kinds(600, 400, seed=seed)
    chose, others = (made.queries.select(np.arange(first, 400, 2)) for first in (0, 1))
    held = cross_fit(made.pairs, [made.queries], ["affine"])["affine"]
    gallery = JudgedGallery(made.old, held.migrated_vectors, made.new)
    judged = judge_options(gallery, chose)
    plain = replace(judged.rank_fusion, migrated_line=OddsLine(), native_line=OddsLine())
    assert valley_depth(judged.lazy_reembedding.curves_by_distance["R@1"]) > 0.01
    assert valley_depth(served(plain, gallery, others)) > 0.03
    curve = served(judged.rank_fusion, gallery, others)
    assert valley_depth(curve) <= 0.01
    assert curve[0] == pytest.approx(judged.figures_by_option["both"]["R@1"].mean(), abs=0.04)
    assert min(curve) >= served(plain, gallery, others)[-1] - 0.01


def served(joining: FittedRankFusion, gallery: JudgedGallery, asked: Queries) -> list[float]:
    """R@1 while items become native at random, query by query as nobackfill.serve ranks."""
    right, every = np.zeros((3, 11)), dict(enumerate(gallery.new))
    for old, new, answer in zip(asked.old, asked.new, asked.gallery_rows, strict=True):
        vectors = old[None], new[None], gallery.old, gallery.migrated
        carried, native = (joining.match_log_odds(*vectors, own)[0] for own in ({}, every))
        for seed in range(3):
            turn = np.random.default_rng(seed).random(len(gallery.old))
            for step in range(11):
                best = np.where(turn < step / 10, native, carried).argmax()
                right[seed, step] += best == answer
    shares: list[float] = (right.mean(0) / len(asked.gallery_rows)).tolist()
    return shares
