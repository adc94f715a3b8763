"""One ranking of old, carried and native vectors; hits embedded again where people look."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import psycopg
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.joining import save_rank_fusion
from nobackfill.adopt.judgement import (
    JudgedGallery,
    Queries,
    judge_fusion,
    judge_options,
    ranking_values_by_option,
)
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.sources.arrays import MemorySource
from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.source import Rows, Searchable, Target
from nobackfill.errors import DamagedError, IncompatibleSpaceError, InvalidInputError
from nobackfill.serve import Dual, FunctionItems, NativeVectorFile, ReembeddingLimits
from nobackfill.serving import reembedding
from nobackfill.serving.fusion import OddsLine
from nobackfill.vectors import normalise
from tests.serve.shop import JOINING, MADE, MAP, NewModel, dual, files, loaded
from tests.support.postgres import Server
from tests.support.waiting import wait_until

QUERIES = range(0, 200, 8)


def ask(found: Dual, query: int, k: int = 10) -> list[str]:
    answer = found.search(MADE.queries_old[query], MADE.queries_new[query], k)
    return [hit.id for hit in answer.hits]


def by(vectors: np.ndarray, query: np.ndarray) -> list[str]:
    return [f"item-{row}" for row in np.argsort(-(vectors @ query), kind="stable")]


@pytest.mark.slow
def test_hits_are_ranked_by_the_new_model_and_kept(tmp_path: Path) -> None:
    model = NewModel()
    with closing(dual(tmp_path, loaded(tmp_path), model)) as found:
        right = sum(ask(found, q)[0] == by(MADE.new, MADE.queries_new[q])[0] for q in QUERIES)
        assert right >= len(QUERIES) - 1
        assert max(model.times.values()) == 1
        done = found.progress()
        assert (done.gallery_item_count, done.native_item_count, done.claimed_today_count) == (
            300,
            len(model.times),
            len(model.times),
        )
        before = model.times.copy()
        answer = found.search(MADE.queries_old[0], MADE.queries_new[0])
        assert model.times == before
        assert answer.native_share == 1
        assert {hit.origin for hit in answer.hits} == {"native"}
        odds = [hit.probability for hit in answer.hits]
        assert odds == sorted(odds, reverse=True)
    # Another process finds them again.
    with closing(dual(tmp_path, loaded(tmp_path), model)) as found:
        assert found.progress().native_item_count == len(before)
        ask(found, 0)
        assert model.times == before


def test_without_items_it_is_the_joined_ranking_and_every_item_comes_once(tmp_path: Path) -> None:
    with closing(dual(tmp_path, loaded(tmp_path), None)) as found:
        answer = found.search(MADE.queries_old[3], MADE.queries_new[3], 50)
        assert answer.native_share == 0
        assert len({hit.id for hit in answer.hits}) == 50
        assert found.heal(10) == 0
        if JOINING.new_weight == 0:
            expected = by(MADE.old, MADE.queries_old[3])[:50]
            assert [hit.id for hit in answer.hits] == expected
        with pytest.raises(InvalidInputError, match="expected 1 to 100, got 0"):
            found.search(MADE.queries_old[3], MADE.queries_new[3], 0)
        with pytest.raises(InvalidInputError, match="query by the new model"):
            found.search(MADE.queries_old[3], MADE.queries_old[3], 5)


@pytest.mark.long
@pytest.mark.slow
def test_what_fit_predicts_is_what_the_documented_dual_finds(tmp_path: Path) -> None:
    """Each model weighs what it sees in its own way, so that the old one's first 100 of 1,500 hold
    few of the new one's: the page carries first. Each query meets a gallery without natives."""
    rng = np.random.default_rng(0)
    hidden, weights = rng.normal(size=(1500, 24)), np.linspace(0.1, 2, 24)
    old, new = (normalise((hidden * one).astype(np.float32)) for one in (weights, weights[::-1]))
    names = [f"item-{row}" for row in range(1500)]
    rows = np.arange(0, 1500, 50)
    asked = Queries(old[rows], new[rows], rows, are_gallery_items=True)
    mapping = fit_maps(old, new)["affine"]
    gallery = JudgedGallery(old, mapping(old), new)
    joining = replace(judge_options(gallery, asked).rank_fusion, map_digest=mapping.digest)
    told = judge_fusion(gallery, asked, joining)
    files(tmp_path, mapping, joining, old)
    source = open_searchable(str(tmp_path / "store"))
    assert carry(source, Target("new", 24, mapping.digest), mapping).new_vector_count == 1500
    items = FunctionItems(lambda name: f"text of {name}", "text")

    def found(way: str, carried: str | None) -> float:
        right = []
        for query in range(len(asked.gallery_rows)):
            with closing(
                Dual.open(
                    source, tmp_path / "map.npz", tmp_path / "joining.npz",
                    tmp_path / f"{way}-{carried}-{query}.db", NewModel(vectors=new),
                    items=items if way == "lazily" else None,
                    limits=ReembeddingLimits(wait_seconds=30),
                    carried=carried,
                )
            ) as dual:  # fmt: skip
                hits = [hit.id for hit in dual.search(asked.old[query], asked.new[query], 11).hits]
            own = names[asked.gallery_rows[query]]
            expected = np.argsort(-(new @ asked.new[query]))[1:11]
            hits = [one for one in hits if one != own][:10]
            right.append(len({names[row] for row in expected} & set(hits)) / 10)
        return float(np.mean(right))

    for way in ("both", "lazily"):
        assert found(way, "new") == pytest.approx(told[way]["agreement@10"].mean(), abs=0.01)
    # Without carried vectors, the query mapped back finds candidates of the new model, too.
    assert found("lazily", None) > told["lazily"]["agreement@10"].mean() - 0.1


class Watched(MemorySource):
    """Notes whose vectors are looked up."""

    def lookup(self, ids: Sequence[str]) -> Rows:
        self.asked = list(ids)
        return super().lookup(ids)


def test_dual_ranks_the_candidates_that_fit_judges(tmp_path: Path) -> None:
    files(tmp_path)
    store = str(tmp_path / "store")
    carry(open_searchable(store), Target("new", MAP.dims[1], MAP.digest), MAP)
    source = Watched(open_source(store))
    gallery = JudgedGallery(MADE.old, MAP(MADE.old), MADE.new)
    asked = MADE.queries
    judged = np.isfinite(ranking_values_by_option(gallery, asked, JOINING)["both"])
    with closing(
        Dual.open(
            source, tmp_path / "map.npz", tmp_path / "joining.npz", tmp_path / "n.db", NewModel(),
            carried="new",
        )
    ) as found:  # fmt: skip
        for query in QUERIES:
            ask(found, query)
            assert len(source.asked) == len(set(source.asked))
            assert set(source.asked) == {MADE.ids[row] for row in np.flatnonzero(judged[query])}
    assert 100 < judged.sum(1).min() < judged.sum(1).max() <= 200


def test_native_items_keep_a_share_of_what_they_were_carried(tmp_path: Path) -> None:
    """Against the same sums, made here from the anchors that the joining holds."""
    model = NewModel()
    joining = replace(
        JOINING,
        new_weight=0.5,
        native_line=OddsLine(1.0, 0.0, 0.4),
        hub_queries=JOINING.hub_queries[:0],
    )
    files(tmp_path)
    save_rank_fusion(tmp_path / "joining.npz", joining)
    source = MemorySource(open_source(str(tmp_path / "store")))
    items = FunctionItems(lambda name: f"text of {name}", "text")
    with closing(
        Dual.open(
            source, tmp_path / "map.npz", tmp_path / "joining.npz", tmp_path / "natives.db", model,
            items=items, limits=ReembeddingLimits(wait_seconds=30),
        )
    ) as found:  # fmt: skip
        assert found.heal(1000) == 300
        for query in QUERIES:
            near = []
            for asked, vectors, anchors in (
                (MADE.queries_new, MADE.new, joining.new_anchors),
                (MADE.queries_old, MADE.old, joining.old_anchors),
                (MADE.queries_new, MAP(MADE.old), joining.migrated_anchors),
            ):
                among = anchors @ asked[query]
                near.append((vectors @ asked[query] - among.mean()) / among.std())
            scores = near[0] + 0.4 * (near[1] + near[2]) / 2
            best = np.argsort(-scores, kind="stable")[:10]
            assert ask(found, query) == [f"item-{row}" for row in best]


def test_queries_at_once_embed_no_item_twice(tmp_path: Path) -> None:
    model = NewModel(seconds=0.02)
    limits = ReembeddingLimits(wait_seconds=30, concurrent_batches=2)
    with closing(dual(tmp_path, loaded(tmp_path), model, limits)) as found:
        with ThreadPoolExecutor(6) as people:
            list(people.map(lambda q: ask(found, q), [*range(6)] * 2))
        assert max(model.times.values()) == 1
        assert model.most_at_once <= 2
        # A second process with the same file is kept off by the claims.
        assert found.progress().native_item_count == len(model.times)


def test_who_is_late_is_ranked_by_what_there_is_and_kept_all_the_same(tmp_path: Path) -> None:
    model = NewModel(seconds=0.5)
    limits = ReembeddingLimits(wait_seconds=0.05, concurrent_batches=8, batch_size=20)
    with closing(dual(tmp_path, loaded(tmp_path), model, limits)) as found:
        begun = time.monotonic()
        answer = found.search(MADE.queries_old[1], MADE.queries_new[1])
        assert answer.native_share < 1
        assert len(answer.hits) == 10
        assert time.monotonic() - begun < 30
        wait_until(
            lambda: found.progress().native_item_count >= 90, seconds=30, what="late hits are kept"
        )


def test_a_day_has_its_budget_and_healing_begins_with_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = NewModel()
    with closing(
        dual(tmp_path, loaded(tmp_path), model, ReembeddingLimits(wait_seconds=30, items_per_day=7))
    ) as found:
        ask(found, 2)
        ask(found, 2)
        assert found.progress().native_item_count == sum(model.times.values()) == 7
        assert found.heal(50) == 0
        monkeypatch.setattr(reembedding, "today_utc", lambda: "2031-01-01")
        wanted = set(by(MADE.old, MADE.queries_old[2])[:100])
        assert found.heal(5) == 5
        assert set(model.times) <= wanted
        assert max(model.times.values()) == 1


@pytest.mark.slow
def test_healing_ends_when_all_is_native(tmp_path: Path) -> None:
    model = NewModel()
    with closing(dual(tmp_path, loaded(tmp_path), model)) as found:
        # As a slice, -1 meant all but one.
        assert found.heal(-1) == 0
        assert not model.times
        assert found.heal(1000) == 300
        assert found.heal(1000) == 0
        for query in QUERIES:
            assert ask(found, query) == by(MADE.new, MADE.queries_new[query])[:10]
        assert sum(model.times.values()) == 300


def test_one_bad_item_takes_no_other_along(tmp_path: Path) -> None:
    model = NewModel()
    bad = by(MADE.old, MADE.queries_old[0])[0]

    def text(name: str) -> str:
        if name == bad:
            raise OSError("gone to the moon")
        return f"text of {name}"

    source = loaded(tmp_path)
    found = Dual.open(
        source, tmp_path / "map.npz", tmp_path / "joining.npz", tmp_path / "n.db", model,
        items=FunctionItems(text, "text"), limits=ReembeddingLimits(wait_seconds=30),
    )  # fmt: skip
    with closing(found):
        assert len(ask(found, 0)) == 10
        cost = found.progress().cost
        assert bad not in model.times
        assert cost.failed_count == 1
        assert "moon" in cost.last_failure
        assert found.progress().native_item_count == 99
        # It is tried again, and others have their turn all the same.
        assert found.heal(50) == 50


def test_another_model_or_map_is_refused(tmp_path: Path) -> None:
    source = loaded(tmp_path)
    dual(tmp_path, source, NewModel()).close()
    with pytest.raises(IncompatibleSpaceError, match="another model"):
        dual(tmp_path, source, NewModel(fingerprint="same dimension"))
    natives = NativeVectorFile(tmp_path / "n.db", "m", MADE.new.shape[1])
    (tmp_path / "text.db").write_text(
        "this is no database, and it is long enough to be looked at" * 9
    )
    with pytest.raises(DamagedError):
        NativeVectorFile(tmp_path / "text.db", "m", 2)
    other = type(MAP)("affine", MAP.weight * 2, MAP.bias, MAP.unit_norm)
    with closing(natives), pytest.raises(IncompatibleSpaceError, match="another map"):
        Dual(source, other, JOINING, natives)


@pytest.fixture
def table(postgres: Server) -> Iterator[tuple[psycopg.Connection, Searchable]]:
    """The same gallery in a table that an application writes to."""
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        connection.execute(
            "CREATE TABLE shop (id text PRIMARY KEY, embedding vector(24), body text)"
        )
        rows = zip(MADE.ids, (str(v.tolist()) for v in MADE.old), strict=True)
        with connection.cursor() as cursor, connection.transaction():
            cursor.executemany("INSERT INTO shop VALUES (%s, %s, 'text of ' || %s)",
                               [(name, v, name) for name, v in rows])  # fmt: skip
        connection.execute("CREATE INDEX ON shop USING hnsw (embedding vector_cosine_ops)")
        with closing(open_searchable(f"{address}#shop")) as source:
            yield connection, source


def test_deletions_are_obeyed_while_a_query_waits_and_later(
    table: tuple[psycopg.Connection, Searchable], tmp_path: Path
) -> None:
    connection, source = table
    files(tmp_path)
    first, second, third = by(MADE.new, MADE.queries_new[0])[:3]
    begun = threading.Event()

    class Slow(NewModel):
        def embed(self, items: list[str] | list[Path] | list[bytes]) -> np.ndarray:
            begun.set()
            time.sleep(0.3)
            return super().embed(items)

    with (
        closing(dual(tmp_path, source, Slow())) as found,
        ThreadPoolExecutor(1) as person,
    ):
        waiting = person.submit(ask, found, 0, 60)
        assert begun.wait(30)
        connection.execute("DELETE FROM shop WHERE id = %s", (first,))
        assert first not in waiting.result()
        # Put again as something else: what was made of the former item is not shown for it.
        vector = str(MADE.old[int(third.removeprefix("item-"))].tolist())
        connection.execute("UPDATE shop SET embedding = %s WHERE id = %s", (vector, second))
        connection.execute("DELETE FROM shop WHERE id = %s", (third,))
        answer = found.search(MADE.queries_old[0], MADE.queries_new[0], 60)
        assert third not in [hit.id for hit in answer.hits]
        found.purge()
        assert found.purge() == 0
    natives = NativeVectorFile(tmp_path / "natives.db", "the new model", MADE.new.shape[1])
    with closing(natives):
        assert not {first, third} & set(natives.read_vectors([first, second, third]))


def test_a_killed_process_loses_nothing_it_kept_and_blocks_nobody(tmp_path: Path) -> None:
    """SIGKILL in the middle of embedding: claims are free at once, vectors whole."""
    files(tmp_path)
    script = (
        "import sys, pathlib\nfrom tests.serve.shop import *\n"
        f"folder = pathlib.Path({str(tmp_path)!r})\n"
        "found = dual(folder, loaded(folder), NewModel(seconds=0.2), "
        "ReembeddingLimits(wait_seconds=30, concurrent_batches=1))\n"
        "print('ready', flush=True)\nfound.search(MADE.queries_old[5], MADE.queries_new[5])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        probe = NativeVectorFile(tmp_path / "natives.db", "the new model", MADE.new.shape[1])
        with closing(probe):
            wait_until(lambda: len(probe) > 0, seconds=60, what="the first batch is kept")
            process.send_signal(signal.SIGKILL)
            process.wait()
            native = {name for name, _ in probe.list_ids("", 1000)}
    assert 0 < len(native) < 100
    model = NewModel()
    with closing(dual(tmp_path, loaded(tmp_path), model)) as found:
        assert found.progress().native_item_count == len(native)
        answer = found.search(MADE.queries_old[5], MADE.queries_new[5])
        assert answer.native_share == 1
        assert max(model.times.values()) == 1
        assert not native & set(model.times)


def test_a_search_that_cannot_be_opened_leaves_no_file_open(tmp_path: Path) -> None:
    files(tmp_path)
    save_rank_fusion(tmp_path / "joining.npz", replace(JOINING, map_digest="another map"))
    source = MemorySource(open_source(str(tmp_path / "store")))
    with pytest.raises(IncompatibleSpaceError) as caught:
        dual(tmp_path, source, None)
    # The traceback keeps the objects of the call alive.
    assert caught.tb is not None
    links = [Path(entry) for entry in Path("/proc/self/fd").iterdir()]
    paths = [str(link.readlink()) for link in links if link.is_symlink()]
    assert not [path for path in paths if path.startswith(str(tmp_path / "natives.db"))]
