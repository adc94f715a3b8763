"""Vectors searched by a real Milvus, truth in PostgreSQL: what only an index beside the truth can
get wrong, and a gateway's swap. What every engine does is in tests/stores."""

from pathlib import Path

import numpy as np
import psycopg
import pytest

from nobackfill.errors import ConfigurationError
from nobackfill.gallery.filters import OneOf
from nobackfill.gallery.search.index import EXACT_EF
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.milvus import candidates, journal
from nobackfill.plugins.milvus.collections import Collections
from nobackfill.plugins.milvus.columns import columns_of
from nobackfill.plugins.milvus.gallery import MilvusGallery, wait_for_milvus_recall
from nobackfill.server.storage import split_store_address
from nobackfill.server.stores.postgresql.graphs import RECALL
from tests.gallery.making import Linear, ids, spec, vectors
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, running
from tests.server.test_move import moved
from tests.stores.milvus_engine import MilvusEngine
from tests.support.postgres import Server
from tests.support.waiting import wait_until

ONE, TWO = spec(1).space, spec(2).space
COUNT = 3_000


@pytest.fixture
def engine(milvus_engine: MilvusEngine) -> MilvusEngine:
    """Behaviour that every engine has is tested in tests/stores."""
    return milvus_engine


def test_acknowledged_is_found_and_deleted_is_not_whatever_milvus_knows(
    engine: MilvusEngine,
) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    content = vectors(COUNT, 1)
    store.put(ids(COUNT), [NewVectors(ONE, content)])
    engine.searcher(store, ONE)
    name = engine.collection(store, ONE)
    assert engine.collections.count(name) == COUNT
    # Milvus is told nothing of this.
    store.delete(["item-7"])
    fresh = vectors(3, 99)
    labels = store.put(["new-0", "new-1", "item-8"], [NewVectors(ONE, fresh)], digests=["a"] * 3)
    near = engine.unfed(store, ONE)
    found = near.search(fresh, 1)
    np.testing.assert_array_equal(found.labels[:, 0], labels.labels)
    np.testing.assert_array_equal(found.distances[:, 0], [0, 0, 0])
    asked = content[[7, 8]]
    gone = {8, 9}
    assert not gone & set(near.search(asked, 10).labels.ravel().tolist())
    engine.feed(store)
    assert engine.collections.count(name) == COUNT + 1
    again = near.search(np.concatenate([fresh, asked]), 10)
    true = near.search(np.concatenate([fresh, asked]), 10, None, EXACT_EF)
    assert np.mean([len(set(a) & set(b)) / 10 for a, b in zip(
        again.labels.tolist(), true.labels.tolist(), strict=True)]) > RECALL  # fmt: skip


def test_what_was_told_a_moment_ago_is_found(engine: MilvusEngine) -> None:
    """Though a search does not wait for Milvus' clock where it need not."""
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    store.put(ids(COUNT), [NewVectors(ONE, vectors(COUNT, 1))])
    near = engine.searcher(store, ONE)
    number = store.space(ONE).table_number
    before = 0
    for turn, vector in enumerate(vectors(20, 77)):
        put = store.put([f"new-{turn}"], [NewVectors(ONE, vector[None])])
        engine.feed(store)
        assert near.search(vector[None], 1).labels.tolist() == [put.labels.tolist()]
        told = store.database.read(lambda c: journal.fed_until(c, store.schema, number))
        assert told is not None and told > before
        before = told


def test_a_switch_waits_for_the_graph(engine: MilvusEngine) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    store.put(ids(COUNT), [NewVectors(ONE, vectors(COUNT, 1))])
    looked = 0

    def between() -> None:
        nonlocal looked
        looked += 1

    engine.feeder.wait_until_fed(store.schema, store.space(ONE), between)
    state = engine.collections._client.describe_index(engine.collection(store, ONE), "embedding")
    assert (int(state["indexed_rows"]), int(state["pending_index_rows"])) == (COUNT, 0)
    assert looked


def test_a_put_does_not_hide_that_a_collection_was_lost(engine: MilvusEngine) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    store.put(ids(200), [NewVectors(ONE, vectors(200, 1))])
    engine.feed(store)
    name = engine.collection(store, ONE)
    engine.collections.drop(name)
    store.put(["late"], [NewVectors(ONE, vectors(1, 9))])
    engine.feed(store)
    assert engine.collections.count(name) == 201


def test_a_flip_waits_for_measured_recall(engine: MilvusEngine) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    store.put(ids(COUNT), [NewVectors(ONE, vectors(COUNT, 1))])
    run_upgrade(store, Linear(reads_side=False), spec(2))
    info, looked = store.space(TWO), 0
    name = engine.collection(store, TWO)
    # Milvus was told all, and answers with half of it.
    engine.feed(store)
    engine.collections.delete(name, store.load_vectors(TWO)[0][::2])

    def between() -> None:
        nonlocal looked
        looked += 1
        if looked == 3:
            labels, content = store.load_vectors(TWO)
            engine.collections.upsert(name, labels, content, [columns_of({})] * len(labels))

    def feed() -> int:
        return engine.feeder.feed(store.schema)

    wait_for_milvus_recall(store, info, engine.candidates, feed, between)
    assert looked >= 3
    probes = vectors(20, 5)
    true = engine.unfed(store, TWO).search(probes, 10, None, EXACT_EF).labels.tolist()
    found = [engine.candidates.nearest_labels(store.schema, info, probe, 10) for probe in probes]
    shares = [len(set(a) & set(b or [])) / 10 for a, b in zip(true, found, strict=True)]
    assert np.mean(shares) >= RECALL


def test_what_milvus_lost_is_told_again_and_what_is_gone_is_dropped(engine: MilvusEngine) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    store.put(ids(200), [NewVectors(ONE, vectors(200, 1))])
    store.add_staging_space(spec(2))
    engine.feeder.start()
    name = engine.collection(store, ONE)
    try:
        wait_until(lambda: engine.collections.is_loaded(name), seconds=60, what="it is fed")
        engine.collections.drop(name)
        # Searched exactly meanwhile.
        query = vectors(200, 1)[:1]
        assert engine.unfed(store, ONE).search(query, 1).labels.tolist() == [[1]]
        wait_until(
            lambda: engine.collections.is_loaded(name) and engine.collections.count(name) == 200,
            seconds=60, what="it is told again",
        )  # fmt: skip
        run_upgrade(store, Linear(reads_side=False), spec(2))
        two = engine.collection(store, TWO)
        wait_until(lambda: two in engine.collections.names(), seconds=60, what="it is fed")
        store.drop_space(TWO)
        wait_until(lambda: two not in engine.collections.names(), seconds=60, what="it is dropped")
    finally:
        engine.feeder.close()


def test_a_collection_of_an_older_layout_is_made_anew(engine: MilvusEngine) -> None:
    store = engine.create(spec())
    assert isinstance(store, MilvusGallery)
    metadata = [{"half": number % 2 == 0} for number in range(200)]
    store.put(ids(200), [NewVectors(ONE, vectors(200, 1))], metadata=metadata)
    store.database.write(lambda connection: journal.take_pending(connection, store.schema, 1000))
    name = engine.collection(store, ONE)
    before = name.rpartition("_")[0]
    engine.collections._client.create_collection(before, dimension=12)
    asked = OneOf("half", (True,))
    true = engine.unfed(store, ONE).search(vectors(200, 1)[:3], 5, asked, EXACT_EF).labels.tolist()
    assert engine.unfed(store, ONE).search(vectors(200, 1)[:3], 5, asked).labels.tolist() == true
    engine.feeder.start()
    try:
        wait_until(
            lambda: engine.collections.is_loaded(name) and engine.collections.count(name) == 200,
            seconds=60, what="it is told all",
        )  # fmt: skip
        wait_until(lambda: before not in engine.collections.names(), seconds=60, what="it is gone")
    finally:
        engine.feeder.close()
    assert engine.unfed(store, ONE).search(vectors(200, 1)[:3], 5, asked).labels.tolist() == true


def test_a_gateway_swaps_on_milvus(
    stages: Stages, tmp_path: Path, postgres: Server, milvus_address: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(candidates, "SMALL", 10)
    repo = tmp_path / "repo"
    publish_stage(repo, stages[1])
    with postgres.database() as url:
        store = f"{url}&vectors={milvus_address}"
        with (
            running(repo, tmp_path / "data", store=store) as gateway,
            Client(gateway.address) as client,
        ):
            client.create_gallery("g")
            client.put_images(images(40))
            assert graphs(url) == []
            publish_stage(repo, stages[2])
            for rollout in ("dual", "cutover"):
                assert client.find(images(1)[0]).hits[0].id == "i0"
                client.swap(2, rollout)
                hit = client.find(images(3)[2]).hits[0]
                assert (hit.id, hit.origin, hit.release) == ("i2", "upgraded", 2)
                client.delete("g", ["i1"])
                assert client.find(images(2)[1]).hits[0].id != "i1"
                client.rollback(confirm=True)
        with (
            running(repo, tmp_path / "data", store=store) as gateway,
            Client(gateway.address) as client,
        ):
            assert client.find(images(1)[0]).hits[0].id == "i0"


def graphs(url: str) -> list[str]:
    """Those of the database, which nobody would ask."""
    with psycopg.connect(url) as connection:
        found = connection.execute("SELECT indexname FROM pg_indexes WHERE indexdef LIKE '%hnsw%'")
        return [name for (name,) in found]


def test_galleries_move_to_milvus_and_away(
    stages: Stages, tmp_path: Path, postgres: Server, milvus_address: str
) -> None:
    repo, files = tmp_path / "repo", f"sqlite:{tmp_path / 'data'}"
    publish_stage(repo, stages[1])
    with postgres.database() as url, postgres.database() as plain:
        store = f"{url}&vectors={milvus_address}"
        with running(repo, tmp_path / "data") as gateway, Client(gateway.address) as client:
            client.create_gallery("g")
            client.put_images(images(40))
            assert moved(files, store, beside=True) == {"g": (40, 40, 0, True)}
            client.delete("g", ["i3"])
        assert moved(files, store) == {"g": (39, 0, 1, True)}
        with (
            running(repo, tmp_path / "other", store=store) as gateway,
            Client(gateway.address) as client,
        ):
            assert client.find(images(1)[0]).hits[0].id == "i0"
            # The vault lies in the gateway's data folder.
            vault = "--from-data", str(tmp_path / "other")
            assert moved(store, plain, *vault, beside=True) == {"g": (39, 39, 0, True)}
            client.put_images(images(41)[40:], first=40)
        assert moved(store, plain, *vault) == {"g": (40, 1, 0, True)}
        assert moved(plain, f"sqlite:{tmp_path / 'back'}", *vault) == {"g": (40, 40, 0, True)}


def test_an_address_names_its_engine_once() -> None:
    url = "postgresql://u@h/d?host=/x&vectors=milvus+http://127.0.0.1:1&sslmode=require"
    assert split_store_address(url) == (
        "postgresql://u@h/d?host=/x&sslmode=require", "milvus+http://127.0.0.1:1",
    )  # fmt: skip
    assert split_store_address("postgresql://u@h/d") == ("postgresql://u@h/d", None)
    for wrong in ("?vectors=qdrant", "?vectors=milvus+http://a&vectors=milvus+http://b"):
        with pytest.raises(ConfigurationError, match="milvus"):
            split_store_address(f"postgresql://u@h/d{wrong}")
    with pytest.raises(ConfigurationError, match="TLS"):
        Collections("milvus+http://far.example:19530")
