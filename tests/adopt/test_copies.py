"""Stores beside whose vectors a copy is made: all that an item holds goes along, and who searches
flips in one step. Real engines: `make test-scale`."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.embedding.vector_folder import read_items
from nobackfill.adopt.fitting import FitFiles
from nobackfill.adopt.fitting import fit_and_judge as fit
from nobackfill.adopt.maps import fit_maps, load_map
from nobackfill.adopt.pairs import inspect, match_by_id, read_all, sample_spread_rows
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target, Window
from nobackfill.errors import (
    ConfigurationError,
    InvalidInputError,
    NotFoundError,
    UnavailableError,
)
from tests.adopt.copies import Chroma, Milvus
from tests.adopt.made import write_parquet
from tests.adopt.stores import MADE, opened

MAP = fit_maps(MADE.old, MADE.new)["affine"]
TARGET = Target("docs_to", MAP.dims[1], MAP.digest, model="new")
every = pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=pytest.mark.scale) for name in ("chroma", "milvus-lite", "milvus")],
    indirect=True,
)


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chroma | Milvus]:
    with opened(request.param, request, tmp_path / "store") as found:
        assert isinstance(found, Chroma | Milvus)
        yield found


@every
def test_what_an_item_holds_goes_along_and_is_kept_up_with(store: Chroma | Milvus) -> None:
    carry(store.open(), TARGET, MAP, rows_per_window=100)
    name, other = MADE.ids[5], MADE.ids[6]
    assert store.text(name, "docs_to") == f"on {name}"
    store.touch(name)
    store.delete(other)
    again = carry(store.open(), TARGET, MAP, rows_per_window=100)
    assert (again.write_count, again.new_vector_count) == (1, 229)
    assert store.text(name, "docs_to") == "changed"
    assert other not in read_all(store.open("docs_to")).ids


@every
def test_nothing_and_one_item_are_carried(store: Chroma | Milvus) -> None:
    for name in MADE.ids[1:]:
        store.delete(name)
    assert carry(store.open(), TARGET, MAP).new_vector_count == 1
    store.delete(MADE.ids[0])
    assert carry(store.open(), TARGET, MAP).new_vector_count == 0
    assert inspect(store.open()).count == 0
    assert carry(store.open(), Target("empty", MAP.dims[1], MAP.digest), MAP).new_vector_count == 0


@every
def test_every_window_is_read_back(store: Chroma | Milvus) -> None:
    source = store.open()
    beside = source.open_target(TARGET)
    seen = 0
    for window in source.windows(50):
        rows = beside.pending(window)
        beside.write(rows, MAP(rows.vectors))
        assert sorted(beside.read(window).ids) == sorted(rows.ids)
        seen += len(rows)
    assert seen == 230


@every
def test_every_command_knows_the_store(store: Chroma | Milvus, tmp_path: Path) -> None:
    source = store.open()
    found = inspect(source)
    assert (found.count, found.dim, found.facts.metric) == (230, 24, "cosine")
    assert "text" in found.facts.columns
    assert len(sample_spread_rows(read_all(source), 40)) == 40
    place = store.place if isinstance(store, Milvus) else f"http://{store.address}"
    kind = "milvus" if isinstance(store, Milvus) else "chroma"
    items = read_items(f"{kind}:{place}#docs", column="text", only=MADE.ids[:3])
    assert list(items.contents) == [f"on {name}" for name in MADE.ids[:3]]
    new = write_parquet(tmp_path / "new.parquet", MADE.ids[:60], MADE.new[:60])
    assert len(match_by_id(source, open_source(str(new))).pairs) == 60
    files = FitFiles(tmp_path / "map.npz", verdict_page=tmp_path / "page.html")
    said = fit(f"{kind}:{place}#docs", str(new), files, None, None, True, key=None, vector=None)
    assert any(
        "leaves out writing to the store and its index" in one for one in said.terminal_lines
    )
    assert said.terminal_lines[0].startswith("verdict: ") and (tmp_path / "page.html").exists()
    fitted = load_map(tmp_path / "map.npz")
    target = Target("docs_fitted", fitted.dims[1], fitted.digest)
    assert carry(source, target, fitted).new_vector_count == len(MADE.ids)
    with pytest.raises(NotFoundError, match=r"no such collection in .*docs"):
        store.open("nowhere")


@pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=pytest.mark.scale) for name in ("milvus-lite", "milvus")],
    indirect=True,
)
def test_an_item_without_a_vector_is_named(store: Milvus, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server answers None for it where the field is nullable, milvus-lite zeros."""
    source, query = store.open(), type(store.client).query

    def with_null(*args: object, **options: object) -> list[dict[str, object]]:
        found = [dict(one) for one in query(*args, **options)]
        return [one | {"vector": None} if one["id"] == MADE.ids[3] else one for one in found]

    monkeypatch.setattr(type(store.client), "query", with_null)
    with pytest.raises(InvalidInputError, match=f"got an empty one for '{MADE.ids[3]}'"):
        source.read(Window())


@pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=pytest.mark.scale) for name in ("milvus-lite", "milvus")],
    indirect=True,
)
def test_a_copy_forgets_items_as_its_original_does(store: Milvus) -> None:
    store.client.alter_collection_properties("docs", {"collection.ttl.seconds": "86400"})
    carry(store.open(), TARGET, MAP)
    properties = store.client.describe_collection("docs_to")["properties"]
    assert properties["collection.ttl.seconds"] == "86400"
    assert carry(store.open(), TARGET, MAP).write_count == 0


@pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=pytest.mark.scale) for name in ("milvus-lite", "milvus")],
    indirect=True,
)
def test_an_alias_flips_and_what_it_leads_to_is_not_taken_back(store: Milvus) -> None:
    store.client.create_alias("docs", "live")
    by_alias = open_source(f"milvus:{store.place}#live")
    steps = carry(by_alias, TARGET, MAP).next_steps
    (flip,) = [step for step in steps if "alter_alias" in step]
    # The step as it is said.
    eval(flip, {"client": store.client})
    flipped = open_source(f"milvus:{store.place}#live")
    assert flipped.facts().dim == MAP.dims[1] and flipped.facts().model == "new"
    with pytest.raises(InvalidInputError, match="while the alias live leads to it"):
        store.open().drop_new_vectors("docs_to")
    assert not flipped.drop_new_vectors("docs_to")
    # Who puts items knows nothing of what carrying keeps in them.
    row = {"id": "new", "vector": MADE.new[0], "text": "t", "number": 1}
    store.client.upsert("live", [row])
    assert flipped.count() == 231
    eval(flip.replace("'docs_to'", "'docs'"), {"client": store.client})
    assert store.open().drop_new_vectors("docs_to")


@pytest.mark.parametrize(
    "store",
    [pytest.param(name, marks=pytest.mark.scale) for name in ("milvus-lite", "milvus")],
    indirect=True,
)
def test_partitions_go_along(store: Milvus) -> None:
    for name in ("red", "blue", "empty"):
        store.client.create_partition("docs", name)
    for row, name in enumerate(MADE.ids[:90]):
        store.delete(name)
        store.put(name, MADE.old[row], partition="red" if row % 2 else "blue")
    assert carry(store.open(), TARGET, MAP, rows_per_window=100).new_vector_count == 230

    def within(partition: str, collection: str = "docs_to") -> list[str]:
        found = store.client.query(
            collection, filter='id >= ""', output_fields=["id"], partition_names=[partition],
            consistency_level="Strong",
        )  # fmt: skip
        return sorted(one["id"] for one in found)

    for name in ("red", "blue", "empty", "_default"):
        assert within(name) == within(name, "docs")
    hits = store.client.search(
        "docs_to", data=[MADE.new[3].tolist()], limit=5, partition_names=["red"]
    )
    assert len(hits[0]) == 5 and {hit["id"] for hit in hits[0]} <= set(MADE.ids[1:90:2])
    # One that moves, into a partition that came later.
    store.client.create_partition("docs", "green")
    store.delete(MADE.ids[1])
    store.put(MADE.ids[1], MADE.old[1], partition="green")
    again = carry(store.open(), TARGET, MAP, rows_per_window=100)
    assert (again.write_count, again.new_vector_count) == (1, 230)
    assert within("green") == [MADE.ids[1]] and MADE.ids[1] not in within("red")


@pytest.mark.scale
def test_a_field_that_says_where_items_lie_says_so_in_the_copy(tmp_path: Path) -> None:
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    from pymilvus import DataType, MilvusClient

    path = str(tmp_path / "k.db")
    client = MilvusClient(uri=path)
    schema = client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=24)
    schema.add_field("of", DataType.VARCHAR, max_length=9, is_partition_key=True)
    index = client.prepare_index_params()
    index.add_index("v", index_type="FLAT", metric_type="COSINE")
    client.create_collection("docs", schema=schema, index_params=index)
    rows = [{"id": n, "v": vector, "of": f"u{n % 3}"} for n, vector in enumerate(MADE.old)]
    client.upsert("docs", rows)
    assert carry(open_source(f"milvus:{path}#docs"), TARGET, MAP).new_vector_count == 230
    found = client.query("docs_to", filter='of == "u1"', output_fields=["id"])
    assert sorted(one["id"] for one in found) == list(range(1, 230, 3))
    client.close()


@pytest.mark.parametrize("store", [pytest.param("chroma", marks=pytest.mark.scale)], indirect=True)
def test_names_flip_and_what_answers_is_not_taken_back(store: Chroma) -> None:
    carry(store.open(), TARGET, MAP)
    for old, new in (("docs", "docs_before"), ("docs_to", "docs")):
        path = f"/{store.asked('GET', f'/{old}')['id']}"
        store.asked("PUT", path, {"new_name": new})
    flipped = store.open()
    assert flipped.facts().dim == MAP.dims[1] and flipped.facts().model == "new"
    assert not flipped.drop_new_vectors("docs")
    assert not store.open("docs_before").drop_new_vectors("docs")
    assert store.open("docs_before").count() == 230


def test_addresses_that_cannot_be_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="NOBACKFILL_CHROMA_TOKEN") as refused:
        open_source("chroma:https://u:SECRET@host#docs")
    assert "SECRET" not in str(refused.value)
    with pytest.raises(ConfigurationError, match="private"):
        open_source("chroma:http://elsewhere:8000#docs")
    with pytest.raises(InvalidInputError, match="chroma run --path"):
        open_source(f"chroma:{tmp_path}#docs")
    with pytest.raises(InvalidInputError, match="found no COLLECTION"):
        open_source("chroma:http://localhost:8000")
    with pytest.raises(InvalidInputError, match="TENANT/DATABASE"):
        open_source("chroma:http://localhost:8000/one#docs")
    with pytest.raises(UnavailableError, match="does not answer"):
        open_source("chroma:http://127.0.0.1:1#docs")


@pytest.mark.scale
def test_numbers_as_keys_and_a_field_among_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("milvus_lite", reason="milvus-lite is not installed")
    from pymilvus import DataType, MilvusClient

    from nobackfill.plugins.milvus import source as milvus

    path = str(tmp_path / "n.db")
    client = MilvusClient(uri=path)
    schema = client.create_schema(auto_id=False, enable_dynamic_field=True)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("a", DataType.FLOAT_VECTOR, dim=24)
    schema.add_field("b", DataType.FLOAT_VECTOR, dim=3)
    index = client.prepare_index_params()
    index.add_index("a", index_type="HNSW", metric_type="L2", params={"M": 7, "efConstruction": 50})
    index.add_index("b", index_type="FLAT", metric_type="COSINE")
    client.create_collection("numbers", schema=schema, index_params=index)
    rows = [
        {"id": n - 100, "a": vector, "b": [n, 1, 2], "extra": {"n": n}}
        for n, vector in enumerate(MADE.old)
    ]
    client.upsert("numbers", rows)
    with pytest.raises(InvalidInputError, match="found 'a', 'b'; name one with --vector"):
        open_source(f"milvus:{path}#numbers")
    source = open_source(f"milvus:{path}#numbers", vector="a")
    assert source.facts().metric == "squared_l2"
    assert (
        carry(
            source, Target("to", MAP.dims[1], MAP.digest), MAP, rows_per_window=60
        ).new_vector_count
        == 230
    )
    # What does not fit one answer comes in several.
    monkeypatch.setattr(milvus, "_MOST_BYTES", 1000)
    carried = open_source(f"milvus:{path}#to", vector="a")
    assert len(read_all(carried)) == 230
    (one,) = client.query("to", filter="id == -97", output_fields=["*"])
    assert one["b"] == [3, 1, 2] and one["extra"] == {"n": 3}
    client.close()


@pytest.mark.parametrize("store", [pytest.param("milvus", marks=pytest.mark.scale)], indirect=True)
def test_numbers_of_both_signs_are_keys_on_a_server(store: Milvus) -> None:
    """A server cannot parse the least number of 64 bits in a condition."""
    from pymilvus import DataType

    schema = store.client.create_schema(auto_id=False, enable_dynamic_field=False)
    schema.add_field("id", DataType.INT64, is_primary=True)
    schema.add_field("v", DataType.FLOAT_VECTOR, dim=24)
    index = store.client.prepare_index_params()
    index.add_index("v", index_type="FLAT", metric_type="COSINE", params={})
    store.client.create_collection("numbers", schema=schema, index_params=index)
    rows = [{"id": n - 100, "v": vector} for n, vector in enumerate(MADE.old)]
    store.client.upsert("numbers", rows)
    done = carry(
        store.open("numbers"), Target("to", MAP.dims[1], MAP.digest), MAP, rows_per_window=60
    )
    assert done.new_vector_count == 230
    assert sorted(map(int, read_all(store.open("to")).ids)) == list(range(-100, 130))


@pytest.mark.scale
def test_a_server_that_dies_half_way_loses_nothing(tmp_path: Path) -> None:
    from bench.rivals import chroma

    if not chroma.PROGRAM.exists():
        pytest.skip("Chroma is not tested: build/chroma is not there")
    folder = tmp_path / "one"
    folder.mkdir()
    with chroma.run_chroma(folder) as address:
        Chroma(address, MADE)

        def kill(written: int) -> None:
            for path in Path("/proc").glob("[0-9]*/cmdline"):
                words = path.read_bytes().split(b"\0")
                if str(folder / "chroma").encode() in words:
                    os.kill(int(path.parent.name), signal.SIGKILL)

        with pytest.raises(UnavailableError):
            source = open_source(f"chroma:http://{address}#docs")
            carry(source, TARGET, MAP, rows_per_window=50, progress=kill)
    with chroma.run_chroma(folder) as address:
        source = open_source(f"chroma:http://{address}#docs")
        rest = carry(source, TARGET, MAP, rows_per_window=50)
        assert 0 < rest.write_count < 230 and rest.new_vector_count == 230


@every
def test_what_writers_put_into_the_copy_is_left_alone(store: Chroma | Milvus) -> None:
    """Carrying once more keeps items that a writer puts into both collections before the flip."""
    carry(store.open(), TARGET, MAP, rows_per_window=100)
    name = "00000000-0000-4000-8000-9" + "0" * 11
    store.put(name, MADE.old[3])
    store.put_new(name, MADE.new[4], "docs_to")
    store.put(MADE.ids[7], MADE.old[8])
    done = carry(store.open(), TARGET, MAP, rows_per_window=100)
    assert (done.write_count, done.new_vector_count) == (1, 231)
    rows = read_all(store.open("docs_to"))
    vectors = dict(zip(rows.ids, rows.vectors, strict=True))
    np.testing.assert_allclose(vectors[name], MADE.new[4], atol=1e-5)
    np.testing.assert_allclose(vectors[MADE.ids[7]], MAP(MADE.old[8:9])[0], atol=1e-5)
