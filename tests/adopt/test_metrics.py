"""The metric that a store searches by is told, judged by, and kept beside."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import lancedb
import numpy as np
import psycopg
import pyarrow as pa
import pytest
import sqlite_vec
from lancedb.index import IvfFlat
from qdrant_client import QdrantClient, models

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.joining import load_rank_fusion, save_rank_fusion
from nobackfill.adopt.judgement import Queries, query_item_distances, sample_item_queries
from nobackfill.adopt.maps import fit_maps, save_map
from nobackfill.adopt.pairs import inspect, match_by_id, read_all
from nobackfill.adopt.sources.opening import open_searchable, open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.adopt.verdict import Cost, decide
from nobackfill.errors import InvalidInputError
from nobackfill.plugins import qdrant
from nobackfill.serve.dual import Dual
from nobackfill.serving.fusion import FittedRankFusion, OddsLine
from nobackfill.serving.natives import NativeVectorFile, digest_old_vector
from nobackfill.vectors import Vectors
from tests.adopt.command import run_nobackfill
from tests.adopt.made import world, write_parquet
from tests.support.postgres import Server
from tests.support.waiting import wait_until

MADE = world(200)
# Lengths that tell the metrics apart.
SCALES = np.random.default_rng(1).uniform(0.3, 3, (200, 1)).astype(np.float32)
OLD, NEW = (MADE.old * SCALES, MADE.new * SCALES)
MAP = fit_maps(OLD, NEW)["affine"]
TARGET = Target("n", MAP.dims[1], MAP.digest)
NAMES = {"cosine": "cosine", "squared_l2": "l2", "inner_product": "ip", "l1": "l1"}
Connection = psycopg.Connection[tuple[Any, ...]]


def far(metric: str, query: Vectors, vectors: Vectors) -> Vectors:
    """By a slow loop."""
    if metric in ("squared_l2", "l1"):
        apart = vectors - query
        return np.asarray((apart**2 if metric == "squared_l2" else abs(apart)).sum(1))
    products = vectors @ query
    return -products / np.linalg.norm(vectors, axis=1) if metric == "cosine" else -products


def nearest(metric: str, query: Vectors, vectors: Vectors) -> list[str]:
    return [str(row) for row in np.argsort(far(metric, query, vectors))[:5]]


@pytest.fixture
def database(postgres: Server) -> Iterator[tuple[str, Connection]]:
    with postgres.connected() as (address, connection):
        connection.execute("CREATE EXTENSION vector")
        yield address, connection


def fill(connection: Connection, kind: str, index: str) -> None:
    connection.execute(f"CREATE TABLE docs (id int PRIMARY KEY, v {kind})".encode())
    rows = [(n, str(v.tolist())) for n, v in enumerate(OLD)]
    connection.cursor().executemany("INSERT INTO docs VALUES (%s, %s)", rows)
    connection.execute(f"CREATE INDEX ON docs USING hnsw ({index})".encode())


def _index_of(connection: Connection, table: str) -> str:
    """The newest index that is no key's."""
    found = connection.execute(
        "SELECT pg_get_indexdef(indexrelid) FROM pg_index WHERE indrelid = %s::regclass "
        "AND NOT indisunique AND indpred IS NULL ORDER BY indexrelid DESC",
        [table],
    ).fetchone()
    assert found
    return str(found[0])


@pytest.mark.parametrize(
    ("to", "kind", "index", "metric"),
    [
        ("n", "vector(24)", "v vector_ip_ops", "inner_product"),
        ("n", "vector(24)", "v vector_l1_ops", "l1"),
        ("n", "halfvec(24)", "v halfvec_l2_ops", "squared_l2"),
        ("n", "vector(24)", "(v::halfvec(24)) halfvec_l2_ops", "squared_l2"),
        ("table:beside", "halfvec(24)", "v halfvec_ip_ops", "inner_product"),
        ("table:beside", "vector(24)", "(v::halfvec(24)) halfvec_cosine_ops", "cosine"),
    ],
)
def test_postgresql_keeps_metric_type_and_index(
    database: tuple[str, Connection], to: str, kind: str, index: str, metric: str
) -> None:
    address, connection = database
    fill(connection, kind, index)
    with closing(open_searchable(f"{address}#docs")) as source:
        assert source.facts().metric == metric
        assert source.nearest(MADE.queries_old[0], 5) == nearest(metric, MADE.queries_old[0], OLD)
        done = carry(source, Target(to, MAP.dims[1], MAP.digest), MAP)
        assert done.new_vector_count == 200
        table, column = ("docs", "n") if to == "n" else ("beside", "v")
        connection.execute(done.next_steps[0].encode())
        made = _index_of(connection, table)
        assert made.endswith(f"_{NAMES[metric]}_ops)")
        assert ("::halfvec(32)" in made) == ("::" in index)
        assert connection.execute(
            "SELECT format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s::regclass AND attname = %s",
            [table, column],
        ).fetchone() == (kind.replace("24", "32"),)
        query = MADE.queries_new[0]
        wanted = nearest(metric, query, MAP(OLD))
        assert len(set(source.nearest(query, 5, new_name=to)) & set(wanted)) >= 4


def test_searches_use_the_index_that_is_there(database: tuple[str, Connection]) -> None:
    address, connection = database
    fill(connection, "vector(24)", "(v::halfvec(24)) halfvec_ip_ops")
    connection.execute("ALTER ROLE postgres SET enable_seqscan = off")
    with closing(open_searchable(f"{address}#docs")) as source:
        source.nearest(MADE.queries_old[0], 5)
        used = "SELECT sum(idx_scan) FROM pg_stat_user_indexes WHERE indexrelname LIKE '%%v%%'"
        source.close()
        connection.execute("SELECT pg_stat_clear_snapshot()")
        connection.execute("ALTER ROLE postgres RESET enable_seqscan")
    wait_until(lambda: connection.execute(used, ()).fetchone() == (1,), what="an index is used")


def test_two_metrics_and_other_types_are_refused(database: tuple[str, Connection]) -> None:
    address, connection = database
    fill(connection, "vector(24)", "v vector_ip_ops")
    connection.execute("CREATE INDEX ON docs USING hnsw (v vector_l2_ops)")
    with pytest.raises(InvalidInputError, match="of one metric, found inner_product, squared_l2"):
        open_source(f"{address}#docs").facts()
    connection.execute("CREATE TABLE bits (id int PRIMARY KEY, v bit(24), w sparsevec(9))")
    with pytest.raises(InvalidInputError, match=r"bit\(24\), sparsevec\(9\) \(in v, w\) cannot"):
        open_source(f"{address}#bits")
    connection.execute("CREATE DOMAIN emb AS vector(24)")
    connection.execute("CREATE TABLE domains (id int PRIMARY KEY, v emb)")
    assert open_source(f"{address}#domains").facts().dim == 24


@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_a_vector_of_zeros_gets_no_direction_where_only_directions_count(
    tmp_path: Path, metric: str
) -> None:
    """By cosine no search finds it, and none should after a migration."""
    connection = apsw.Connection(str(tmp_path / "store.db"))
    connection.enable_load_extension(True)
    sqlite_vec.load(connection)
    connection.execute(f"CREATE VIRTUAL TABLE d USING vec0(v float[24] distance_metric={metric})")
    old = OLD[:40].copy()
    old[7] = 0
    for row, vector in enumerate(old):
        values = (row, vector.astype("<f4").tobytes())
        connection.execute("INSERT INTO d (rowid, v) VALUES (?, ?)", values)
    mapping = fit_maps(MADE.old, MADE.new)["affine"]
    wanted = mapping(old)
    if metric == "cosine":
        wanted[7] = 0
    source = open_source(f"sqlite:{tmp_path / 'store.db'}#d")
    for _ in range(2):
        assert (
            carry(source, Target("n", mapping.dims[1], mapping.digest), mapping).new_vector_count
            == 40
        )
    np.testing.assert_allclose(
        read_all(open_source(f"sqlite:{tmp_path / 'store.db'}#n")).vectors, wanted, atol=1e-6
    )
    connection.close()
    if metric == "cosine":
        rest = np.delete(np.arange(40), 7)
        best = rest[np.argsort(far("cosine", MADE.queries_old[0], old[rest]))]
        with closing(open_searchable(f"sqlite:{tmp_path / 'store.db'}#d")) as searched:
            for count in (1, 5, 39, 40, 100):
                hits = searched.nearest(MADE.queries_old[0], count)
                assert hits == [str(row) for row in best[:count]]


@pytest.mark.parametrize(
    ("distance", "metric"),
    [("DOT", "inner_product"), ("EUCLID", "squared_l2"), ("MANHATTAN", "l1")],
)
def test_qdrant_keeps_its_metric(tmp_path: Path, distance: str, metric: str) -> None:
    client = QdrantClient(path=str(tmp_path), force_disable_check_same_thread=True)
    params = models.VectorParams(size=24, distance=models.Distance[distance])
    client.create_collection("docs", vectors_config={"v": params})
    some = OLD[:40]
    points = [models.PointStruct(id=n, vector={"v": v.tolist()}) for n, v in enumerate(some)]
    client.upsert("docs", points)
    qdrant._FOLDERS[tmp_path.resolve()] = client
    source = open_searchable(f"qdrant:{tmp_path}#docs")
    assert inspect(source).sentences[1].startswith(f"metric: {metric}; ")
    assert carry(source, TARGET, MAP).new_vector_count == 40
    for query, column, vectors in (
        (MADE.queries_old[0], None, some),
        (MADE.queries_new[0], "n", MAP(some)),
    ):
        assert source.nearest(query, 5, column) == nearest(metric, query, vectors)
    client.close()


@pytest.mark.parametrize(
    ("distance", "metric"),
    [(None, "squared_l2"), ("l2", "squared_l2"), ("cosine", "cosine"), ("dot", "inner_product")],
)
def test_lancedb_searches_by_its_index_or_by_its_own_default(
    tmp_path: Path, distance: Any, metric: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The oracle is a search of LanceDB itself that names no metric."""
    old = pa.FixedSizeListArray.from_arrays(pa.array(OLD.ravel()), OLD.shape[1])
    rows = pa.table({"id": [str(row) for row in range(len(OLD))], "vector": old})
    table: Any = lancedb.connect(tmp_path).create_table("docs", rows)
    if distance is not None:
        table.create_index("vector", config=IvfFlat(distance_type=distance, num_partitions=1))
    source = open_searchable(f"lancedb:{tmp_path}#docs")
    assert inspect(source).sentences[1].startswith(f"metric: {metric}; ")
    query = MADE.queries_old[0]
    theirs = [hit["id"] for hit in table.search(query).limit(5).to_list()]
    assert source.nearest(query, 5) == theirs == nearest(metric, query, OLD)
    save_map(tmp_path / "map.npz", MAP)
    words = ("--map", str(tmp_path / "map.npz"), "--to", "vector_new", "--flip")
    assert run_nobackfill("carry", f"lancedb:{tmp_path}#docs", *words) == 0
    warning = "has no index, so its metric is taken as squared L2" in capsys.readouterr().err
    assert warning == (distance is None)
    table.checkout_latest()
    query = MADE.queries_new[0]
    theirs = [hit["id"] for hit in table.search(query).limit(5).to_list()]
    flipped = open_searchable(f"lancedb:{tmp_path}#docs", vector="vector")
    assert flipped.facts().metric == metric
    assert flipped.nearest(query, 5) == theirs == nearest(metric, query, MAP(OLD))


def _copied_metric(address: str) -> str | None:
    source = open_searchable(address)
    assert carry(source, Target("docs_to", MAP.dims[1], MAP.digest), MAP).new_vector_count == 200
    metric = source.facts().metric
    copied = open_searchable(address.replace("#docs", "#docs_to"))
    assert copied.facts().metric == metric is not None
    assert copied.nearest(MADE.queries_new[0], 5) == nearest(metric, MADE.queries_new[0], MAP(OLD))
    return metric


@pytest.mark.scale
@pytest.mark.parametrize(("kind", "metric"), [("IP", "inner_product"), ("L2", "squared_l2")])
def test_milvus_keeps_its_metric(tmp_path: Path, kind: str, metric: str) -> None:
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    from pymilvus import DataType, MilvusClient

    path = str(tmp_path / "m.db")
    client = MilvusClient(uri=path)
    schema = client.create_schema(auto_id=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=24)
    index = client.prepare_index_params()
    index.add_index("v", index_type="FLAT", metric_type=kind)
    client.create_collection("docs", schema=schema, index_params=index)
    client.upsert("docs", [{"id": n, "v": v} for n, v in enumerate(OLD)])
    assert _copied_metric(f"milvus:{path}#docs") == metric
    client.close()


@pytest.mark.scale
@pytest.mark.parametrize(
    "made",
    [
        {"configuration": {"hnsw": {"space": "ip"}}},
        {"configuration": {"hnsw": {"space": "l2"}}},
        # As clients of before 1.0 say it.
        {"metadata": {"hnsw:space": "ip", "topic": "shop"}},
    ],
)
def test_chroma_keeps_its_metric(chroma_address: str, made: dict[str, Any]) -> None:
    from nobackfill.plugins.chroma import ChromaServer

    with closing(ChromaServer(f"http://{chroma_address}")) as server:
        for one in server.request_json("GET", "", "all"):
            server.delete_collection(one["name"])
        path = f"/{server.request_json('POST', '', 'docs', {'name': 'docs', **made})['id']}/upsert"
        ids = [str(row) for row in range(200)]
        server.request_json("POST", path, "docs", {"ids": ids, "embeddings": OLD.tolist()})
        metric = _copied_metric(f"chroma:http://{chroma_address}#docs")
        assert metric == ("squared_l2" if "l2" in str(made) else "inner_product")
        copied = server.describe_collection("docs_to")
        assert (copied["metadata"] or {}).get("topic") == made.get("metadata", {}).get("topic")


def test_fit_and_dual_rank_by_the_stores_metric(
    database: tuple[str, Connection], tmp_path: Path
) -> None:
    address, connection = database
    fill(connection, "vector(24)", "v vector_ip_ops")
    ids = [str(row) for row in range(200)]
    new = open_source(str(write_parquet(tmp_path / "new.parquet", ids, NEW)))
    source = open_searchable(f"{address}#docs")
    pairs = match_by_id(source, new).pairs
    assert pairs.metric == sample_item_queries(pairs).metric == "inner_product"
    # Longer items are nearer by the inner product alone.
    products = query_item_distances(MADE.queries_new, pairs.new, pairs.metric)
    np.testing.assert_allclose(products, -MADE.queries_new @ pairs.new.T, atol=1e-5)
    verdict = decide(pairs, Cost(200, 1.0, 1.0, 0.1), Queries(
        MADE.queries_old, MADE.queries_new, MADE.answers, are_gallery_items=False,
        metric=pairs.metric,
    ))  # fmt: skip
    truth = np.argsort(products, axis=1, kind="stable")[:, 0] == MADE.answers
    told = {way.name: way.figures for way in verdict.ways}["re-embed"]["R@1"]
    assert told == pytest.approx(truth.mean(), abs=0.01)
    assert not len(verdict.joining.hub_queries)
    save_rank_fusion(tmp_path / "joining.npz", verdict.joining)
    joining = load_rank_fusion(tmp_path / "joining.npz")
    assert joining.metric == "inner_product"
    natives = NativeVectorFile(tmp_path / "natives.db", "new", 32)
    natives.store_vectors(ids, [digest_old_vector(vector) for vector in pairs.old], NEW)
    dual = Dual(source, verdict.map, joining, natives)
    best = natives.nearest_ids(MADE.queries_new[:1], 5, "inner_product")
    assert best == nearest("inner_product", MADE.queries_new[0], NEW)
    assert natives.nearest_ids(MADE.queries_new[:1], 5, "l2") == nearest(
        "squared_l2", MADE.queries_new[0], NEW
    )
    assert natives.nearest_ids(MADE.queries_new[:1], 5) == nearest(
        "cosine", MADE.queries_new[0], NEW
    )
    hits = dual.search(MADE.queries_old[0], MADE.queries_new[0], k=10).hits
    assert best[0] in {hit.id for hit in hits}
    dual.close()
    source.close()


def test_l1_is_carried_and_not_judged(database: tuple[str, Connection], tmp_path: Path) -> None:
    address, connection = database
    fill(connection, "vector(24)", "v vector_l1_ops")
    ids = [str(row) for row in range(200)]
    new = open_source(str(write_parquet(tmp_path / "new.parquet", ids, NEW)))
    source = open_searchable(f"{address}#docs")
    with pytest.raises(InvalidInputError, match="searched by l1, for which there is no verdict"):
        match_by_id(source, new)
    joining = FittedRankFusion(1.0, OddsLine(), OddsLine(), OLD[:2], NEW[:2], NEW[:2], MAP.digest)
    natives = NativeVectorFile(tmp_path / "natives.db", "new", 32)
    with pytest.raises(InvalidInputError, match="searched by l1"):
        Dual(source, MAP, joining, natives)
    natives.close()
    source.close()
