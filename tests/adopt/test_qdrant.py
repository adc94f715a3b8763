"""New vectors beside those of Qdrant: what is kept of the old one's settings, what is refused, and
the flip where others write."""

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx
import numpy as np
import pytest
from pydantic import TypeAdapter
from qdrant_client import QdrantClient, models
from qdrant_client.http.exceptions import UnexpectedResponse

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.migrating import Migration, MigrationPlan
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target, Window
from nobackfill.errors import AlreadyExistsError, BusyError, CannotWriteError, InvalidInputError
from nobackfill.plugins.qdrant import QdrantSource, point_id
from tests.adopt.racing import Racing
from tests.adopt.stores import MADE, Qdrant

MAP = fit_maps(MADE.old, MADE.new)["affine"]
TARGET = Target("new", MAP.dims[1], MAP.digest)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Qdrant]:
    memory = Path("/dev/shm")
    with TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        made = Qdrant(Path(folder))
        yield made
        made.client.close()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("0", 0),
        ("18446744073709551615", 2**64 - 1),
        ("18446744073709551616", None),
        ("9" * 5000, None),
        ("07", None),
        ("-1", None),
        ("", None),
        ("67e55044-10b1-426f-9247-bb680e5fe0c8", "67e55044-10b1-426f-9247-bb680e5fe0c8"),
        ("67E55044-10B1-426F-9247-BB680E5FE0C8", None),
    ],
)
def test_texts_are_ids_only_where_a_point_can_have_them(name: str, key: int | str | None) -> None:
    assert point_id(name) == key


def test_several_vectors_an_item_are_refused(store: Qdrant) -> None:
    several = models.VectorParams(
        size=4, distance=models.Distance.COSINE,
        multivector_config=models.MultiVectorConfig(
            comparator=models.MultiVectorComparator.MAX_SIM
        ),
    )  # fmt: skip
    store.client.create_collection("late", vectors_config={"v": several})
    point = models.PointStruct(id=1, vector={"v": [[1, 0, 0, 0], [0, 1, 0, 0]]})
    store.client.upsert("late", [point])
    with pytest.raises(InvalidInputError, match="but 'v' has several"):
        open_source(f"qdrant:{store.folder}#late")


def test_a_new_vector_is_kept_and_indexed_as_the_old_one(store: Qdrant) -> None:
    """The local mode forgets what a server keeps: what it is asked for is looked at."""
    params = models.VectorParams(
        size=24, distance=models.Distance.DOT, on_disk=True, datatype=models.Datatype.FLOAT16,
        hnsw_config=models.HnswConfigDiff(m=7),
        quantization_config=models.ScalarQuantization(
            scalar=models.ScalarQuantizationConfig(type=models.ScalarType.INT8)
        ),
    )  # fmt: skip
    store.client.create_collection("tuned", vectors_config={"v": params})
    made, changed = QdrantClient.create_vector_name, QdrantClient.update_collection
    with (
        patch.object(QdrantClient, "create_vector_name", autospec=True, side_effect=made) as create,
        patch.object(QdrantClient, "update_collection", autospec=True, side_effect=changed) as diff,
    ):
        open_source(f"qdrant:{store.folder}#tuned").open_target(TARGET)
    dense = create.call_args.args[3].dense
    assert (dense.size, dense.distance, dense.datatype) == (
        MAP.dims[1], models.Distance.DOT, models.VectorStorageDatatype.FLOAT16,
    )  # fmt: skip
    kept = diff.call_args.kwargs["vectors_config"]["new"]
    assert kept.on_disk and kept.hnsw_config.m == 7
    assert kept.quantization_config == params.quantization_config


@pytest.mark.parametrize("datatype", [models.Datatype.UINT8, models.Datatype.TURBO4])
def test_a_new_vector_is_not_rounded_as_integers(store: Qdrant, datatype: models.Datatype) -> None:
    """A server keeps 0 or 1 of each number as uint8, and --flip reads no vector back."""
    params = models.VectorParams(size=24, distance=models.Distance.COSINE, datatype=datatype)
    store.client.create_collection("whole", vectors_config={"v": params})
    made = QdrantClient.create_vector_name
    with patch.object(
        QdrantClient, "create_vector_name", autospec=True, side_effect=made
    ) as create:
        open_source(f"qdrant:{store.folder}#whole").open_target(TARGET)
    assert create.call_args.args[3].dense.datatype is None


def test_nothing_is_lost_where_others_write_at_the_flip(store: Qdrant) -> None:
    """Writers put both vectors from a moment on; one is late, and puts the old one alone."""
    carry(store.open(), TARGET, MAP)
    native = {}

    def put_both(name: str, row: int) -> None:
        old, new = MADE.old[row], MADE.new[row]
        vectors = {"vector": old.tolist(), "new": new.tolist()}
        store.client.upsert("docs", [models.PointStruct(id=name, vector=vectors)])
        native[name] = new

    calls = itertools.count()

    def others() -> None:
        """Before and after each window is written, to points that it holds, too."""
        call = next(calls)
        store.put(MADE.ids[20 + call], MADE.old[call])
        put_both(MADE.ids[40 + call], 3)
        put_both(f"ffffffff-0000-4000-8000-{call:012d}", call)

    for row in range(40, 120):
        store.put(MADE.ids[row], MADE.old[row])
    racing = Racing(store.open(), others, others)
    steps = carry(racing, TARGET, MAP, rows_per_window=20, flip=True).next_steps  # type: ignore[arg-type]
    assert "using='new'" in steps[0] and next(calls) > 2
    store.put(MADE.ids[5], MADE.old[6])
    assert carry(store.open(), TARGET, MAP).write_count >= 1
    found = read_all(store.open("new"))
    assert sorted(found.ids) == sorted(store.names())
    old = read_all(store.open("vector"))
    vectors = dict(zip(old.ids, old.vectors, strict=True))
    for name, vector in zip(found.ids, found.vectors, strict=True):
        expected = native.get(name, MAP(vectors[name][None])[0])
        np.testing.assert_allclose(vector, expected, atol=1e-5)
    # Vectors in use cannot be rolled back.
    assert not store.open().drop_new_vectors("new")
    assert carry(store.open(), TARGET, MAP, flip=True).next_steps == []


REVERSIBLE = replace(TARGET, must_be_reversible=True)


def reversible(store: Qdrant, vector: str | None = None) -> QdrantSource:
    source = store.open(vector)
    assert isinstance(source, QdrantSource)
    return source


def named_vectors(store: Qdrant) -> set[str]:
    vectors = store.client.get_collection("docs").config.params.vectors
    assert isinstance(vectors, dict)
    return set(vectors)


def collections(store: Qdrant) -> set[str]:
    return {one.name for one in store.client.get_collections().collections}


def update(store: Qdrant, name: str, **vectors: list[float]) -> None:
    store.client.update_vectors("docs", [models.PointVectors(id=name, vector=dict(vectors))])


def put(store: Qdrant, name: str, **vectors: list[float]) -> None:
    store.client.upsert("docs", [models.PointStruct(id=name, vector=dict(vectors))])


def test_a_flip_goes_back_and_keeps_what_writers_put_twice(store: Qdrant) -> None:
    done = carry(store.open(), REVERSIBLE, MAP, flip=True)
    assert done.new_vector_count == 230 and "using='new'" in done.next_steps[0]
    assert reversible(store).flip_state(MAP.digest) == "flipped"
    assert reversible(store).flip_state("another") == "unknown"
    old, new = MADE.old[9].tolist(), MADE.new[9].tolist()
    put(store, MADE.ids[0], new=new)
    update(store, MADE.ids[1], new=new)
    put(store, MADE.ids[2], vector=old, new=new)
    update(store, MADE.ids[3], vector=old, new=new)
    # One that is put with the old vector alone has no new one; it is no loss.
    put(store, MADE.ids[4], vector=old)
    with pytest.raises(InvalidInputError, match="2 points were written since the flip"):
        reversible(store).flip_back("new")
    assert named_vectors(store) == {"vector", "new"}
    assert reversible(store).flip_back("new", allow_loss=True) == 2
    assert reversible(store).flip_state(MAP.digest) == "old"
    assert named_vectors(store) == {"vector"}
    found = read_all(store.open())
    assert set(found.ids) == set(MADE.ids[2:])
    vectors = dict(zip(found.ids, found.vectors, strict=True))
    for name in MADE.ids[2:5]:
        np.testing.assert_allclose(vectors[name], MADE.old[9], atol=1e-6)
    assert len(store.names()) == 230
    assert collections(store) == {"docs"}


def test_a_change_of_the_old_vector_or_the_text_alone_is_computed_again(store: Qdrant) -> None:
    wanted = replace(REVERSIBLE, content_column="text")
    assert carry(store.open(), wanted, MAP).write_count == 230
    assert carry(store.open(), wanted, MAP).write_count == 0
    update(store, MADE.ids[0], vector=MADE.old[9].tolist())
    store.client.set_payload("docs", {"text": "changed"}, points=[MADE.ids[1]])
    store.client.overwrite_payload("docs", {"text": "changed"}, points=[MADE.ids[2]])
    store.client.set_payload("docs", {"other": "changed"}, points=[MADE.ids[3]])
    assert carry(store.open(), wanted, MAP).write_count == 3
    found = read_all(store.open("new"))
    vectors = dict(zip(found.ids, found.vectors, strict=True))
    np.testing.assert_allclose(vectors[MADE.ids[0]], MAP(MADE.old[9:10])[0], atol=1e-5)
    # A new vector whose old one is gone was computed from nothing.
    store.client.delete_vectors("docs", ["vector"], [MADE.ids[0]])
    assert carry(store.open(), wanted, MAP).new_vector_count == 229


def test_a_flip_holds_no_whole_collection_in_memory(store: Qdrant) -> None:
    """Its last window has no ends. As Python's numbers, all of its vectors need more than this."""
    place = store.open().open_target(TARGET)
    old, new = MADE.old[0].tolist(), MADE.new[0].tolist()
    points = [models.PointStruct(id=one, vector={"vector": old, "new": new}) for one in range(4000)]
    store.client.upsert("docs", points)
    tracemalloc.start()
    try:
        assert len(place.pending(Window())) == 230
        assert tracemalloc.get_traced_memory()[1] < len(points) * (len(old) + len(new)) * 32
    finally:
        tracemalloc.stop()


def test_points_that_are_deleted_at_the_writing_stop_no_other(store: Qdrant) -> None:
    place = store.open().open_target(REVERSIBLE)
    rows = place.pending(next(store.open().windows(300)))
    store.delete(MADE.ids[0])
    place.write(rows, MAP(rows.vectors))
    assert place.count() == 229
    assert carry(store.open(), REVERSIBLE, MAP).write_count == 0


def test_a_writer_s_new_vector_stays_only_where_writers_put_both(store: Qdrant) -> None:
    old, new = MADE.old[9].tolist(), MADE.new[9].tolist()
    for wanted, expected in ((TARGET, MADE.new[9]), (REVERSIBLE, MAP(MADE.old[9:10])[0])):
        carry(store.open(), wanted, MAP)
        put(store, MADE.ids[0], vector=old, new=new)
        update(store, MADE.ids[1], vector=old, new=new)
        store.client.upsert("docs", [models.PointStruct(id=1, vector={"vector": old, "new": new})])
        carry(store.open(), wanted, MAP, flip=True)
        found = read_all(store.open("new"))
        vectors = dict(zip(found.ids, found.vectors, strict=True))
        for name in (*MADE.ids[:2], "1"):
            np.testing.assert_allclose(vectors[name], expected, atol=1e-5)
        reversible(store).flip_back("new")


def test_another_s_collection_is_not_taken_for_notes(store: Qdrant) -> None:
    params = models.VectorParams(size=4, distance=models.Distance.DOT)
    store.client.create_collection("docs-nobackfill-new", vectors_config=params)
    with pytest.raises(AlreadyExistsError, match="'docs-nobackfill-new' exists already"):
        carry(store.open(), TARGET, MAP)
    assert store.open().drop_new_vectors("new")
    assert store.client.collection_exists("docs-nobackfill-new")


def test_a_sparse_vector_is_neither_replaced_nor_rolled_back(store: Qdrant) -> None:
    sparse = models.SparseVectorNameConfig(sparse=models.SparseVectorConfig())
    store.client.create_vector_name("docs", "new", sparse)
    words = models.SparseVector(indices=[1], values=[2.0])
    point = models.PointVectors(id=MADE.ids[0], vector={"new": words})
    store.client.update_vectors("docs", [point])
    with pytest.raises(AlreadyExistsError, match="'new' exists already"):
        carry(store.open(), TARGET, MAP)
    # As an earlier version left it: the mark is ours, the vector is not.
    marks = {"nobackfill": {"new": {"map": MAP.digest}}}
    store.client.update_collection("docs", metadata=marks)
    assert not store.open().drop_new_vectors("new")
    record = store.client.retrieve("docs", [MADE.ids[0]], with_vectors=True)[0]
    assert isinstance(record.vector, dict) and record.vector["new"] == words


def test_old_vectors_are_dropped_and_their_name_leads_to_the_new_ones(store: Qdrant) -> None:
    carry(store.open(), REVERSIBLE, MAP, flip=True)
    other = fit_maps(MADE.old, MADE.new)["procrustes"]
    with pytest.raises(AlreadyExistsError, match=r"since a flip by another map; .* finish"):
        store.open().open_target(replace(REVERSIBLE, computer_digest=other.digest))
    # Killed after the vectors, before the rest.
    with (
        patch.object(QdrantClient, "delete_collection", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        reversible(store).drop_old()
    assert named_vectors(store) == {"new"}
    source = reversible(store, "vector")
    assert source.flip_state(MAP.digest) == "flipped"
    source.drop_old()
    assert reversible(store, "vector").flip_state(MAP.digest) == "finished"
    assert collections(store) == {"docs"}
    # The next migration begins with them.
    again = reversible(store)
    assert again.vector == "new" and again.flip_state("another") == "old"
    second = fit_maps(MADE.new, MADE.old)["affine"]
    target = Target("next", second.dims[1], second.digest, must_be_reversible=True)
    assert carry(again, target, second, flip=True).new_vector_count == 230
    assert reversible(store, "new").flip_state(second.digest) == "flipped"
    assert reversible(store, "new").flip_back("next") == 0
    assert reversible(store).vector == "new"


def test_a_flip_that_is_half_taken_back_can_be_taken_back_and_made_anew(store: Qdrant) -> None:
    """The new vectors go before the mark: the next verdict must not meet those of another map."""
    other = fit_maps(MADE.old, MADE.new)["procrustes"]
    for killed, state in (("delete_vector_name", "flipped"), ("delete_collection", "old")):
        carry(store.open(), REVERSIBLE, MAP, flip=True)
        with (
            patch.object(QdrantClient, killed, side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            reversible(store, "vector").flip_back("new")
        source = reversible(store, "vector")
        assert source.flip_state(MAP.digest) == state
        if state == "flipped":
            assert source.flip_back("new") == 0
        assert named_vectors(store) == {"vector"}
        anew = replace(REVERSIBLE, computer_digest=other.digest)
        assert carry(store.open(), anew, other, flip=True).new_vector_count == 230
        assert reversible(store, "vector").flip_back("new") == 0
        assert named_vectors(store) == {"vector"} and collections(store) == {"docs"}


def test_old_vectors_are_not_dropped_while_a_point_has_nothing_else(store: Qdrant) -> None:
    carry(store.open(), REVERSIBLE, MAP, flip=True)
    store.put(MADE.ids[0], MADE.old[9])
    with pytest.raises(InvalidInputError, match="1 points have a vector 'vector' and no 'new'"):
        reversible(store).drop_old()
    assert named_vectors(store) == {"vector", "new"}
    assert carry(store.open("vector"), TARGET, MAP).write_count == 1
    reversible(store).drop_old()
    assert len(read_all(store.open()).ids) == 230


def test_new_and_old_vectors_keep_their_names_at_a_flip(store: Qdrant, tmp_path: Path) -> None:
    plan = MigrationPlan(
        f"qdrant:{store.folder}#docs", "new:embed", vector_column="vector", new_column="vector_new"
    )
    values = TypeAdapter(MigrationPlan).dump_python(plan, by_alias=True)
    (tmp_path / "migration.json").write_text(json.dumps(values))
    assert Migration(tmp_path).vector_names() == ("vector_new", "vector")


@pytest.mark.long
def test_an_alias_is_the_same_collection(store: Qdrant) -> None:
    alias = models.CreateAlias(collection_name="docs", alias_name="live")
    operation = models.CreateAliasOperation(create_alias=alias)
    store.client.update_collection_aliases([operation])
    live = open_source(f"qdrant:{store.folder}#live")
    carry(live, REVERSIBLE, MAP, flip=True)
    assert collections(store) == {"docs", "docs-nobackfill-new"}
    assert isinstance(live, QdrantSource)
    with (
        live.migration_lock(),
        pytest.raises(BusyError),
        reversible(store, "vector").migration_lock(),
    ):
        pass
    update(store, MADE.ids[0], new=MADE.new[9].tolist())
    with pytest.raises(InvalidInputError, match="1 points were written since the flip"):
        reversible(store).flip_back("new")


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("http://localhost:6333", "http://127.0.0.1:6333", True),
        ("http://localhost:6333", "http://[::1]:6333", True),
        ("http://localhost:6333", "http://localhost:6333/", True),
        ("http://localhost:6333", "http://localhost", True),
        ("https://db.example/q", "https://DB.example:6333/q/", True),
        ("http://localhost:6333", "http://localhost:6334", False),
        ("https://a.example", "https://b.example", False),
        ("https://db.example/q", "https://db.example/r", False),
    ],
)
def test_a_server_has_one_lock_by_every_spelling_of_its_address(
    store: Qdrant, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, one: str, other: str, same: bool
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("nobackfill.adopt.sources.source.LOCK_WAIT_SECONDS", 0.05)
    first, second = reversible(store), reversible(store)
    # There is no server here: its lock lies on this machine.
    monkeypatch.setattr(first, "_address", one)
    monkeypatch.setattr(second, "_address", other)
    refused: AbstractContextManager[object] = pytest.raises(BusyError) if same else nullcontext()
    with first.migration_lock(), refused, second.migration_lock():
        pass


def test_a_key_that_may_not_list_aliases_reads_its_collection(store: Qdrant) -> None:
    """Only a server has keys."""
    refusal = UnexpectedResponse(403, "Forbidden", b"", httpx.Headers())
    with patch.object(QdrantClient, "get_aliases", side_effect=refusal) as aliases:
        assert store.open().count() == 230
    assert aliases.called


def add_vectors(store: Qdrant, name: str, shift: int) -> None:
    """Give each point the old vectors under another name, too, rotated by some numbers."""
    dense = models.DenseVectorConfig(size=24, distance=models.Distance.COSINE)
    store.client.create_vector_name("docs", name, models.DenseVectorNameConfig(dense=dense))
    for one, vector in zip(MADE.ids, MADE.old, strict=True):
        update(store, one, **{name: np.roll(vector, shift).tolist()})


def test_two_of_several_vectors_keep_notes_of_their_own(store: Qdrant) -> None:
    for shift, name in enumerate(("a.b", "a_b")):
        add_vectors(store, name, shift)
        carry(store.open(name), replace(REVERSIBLE, name=f"{name}_new"), MAP, flip=True)
    update(store, MADE.ids[0], **{"a.b_new": MADE.new[9].tolist()})
    with pytest.raises(InvalidInputError, match="1 points were written since the flip"):
        reversible(store, "a.b").flip_back("a.b_new")


def test_several_vectors_stay_ambiguous_after_a_migration_of_one(store: Qdrant) -> None:
    add_vectors(store, "other", 1)
    carry(store.open("vector"), REVERSIBLE, MAP, flip=True)
    reversible(store, "vector").drop_old()
    with pytest.raises(InvalidInputError, match="expected one vector, found"):
        store.open()


def test_a_folder_that_cannot_be_written_is_refused_and_goes_on_later(store: Qdrant) -> None:
    """A full disk fails in the same way."""
    points: Any = store.client._client
    file = points.collections["docs"].storage.storage
    file.execute("PRAGMA query_only = 1")
    with pytest.raises(CannotWriteError, match=r"cannot be written \(attempt to write a readonly"):
        carry(store.open(), REVERSIBLE, MAP)
    file.execute("PRAGMA query_only = 0")
    assert carry(store.open(), REVERSIBLE, MAP).new_vector_count == 230
    assert reversible(store).drop_new_vectors("new")
    assert named_vectors(store) == {"vector"}


def test_a_switch_names_the_model_and_makes_no_vector_new(store: Qdrant) -> None:
    reversible(store).record_model("the new model")
    assert store.open().facts().model == "the new model"
    assert not store.open().drop_new_vectors("vector")
    assert reversible(store).flip_digest() is None


def test_a_vector_without_a_name_is_refused_before_anything_is_embedded(
    store: Qdrant, tmp_path: Path
) -> None:
    params = models.VectorParams(size=24, distance=models.Distance.COSINE)
    store.client.create_collection("unnamed", vectors_config=params)
    request = MigrationPlan(f"qdrant:{store.folder}#unnamed", "new:embed", text_column="text")
    with pytest.raises(InvalidInputError, match="its vector has no name"):
        Migration(tmp_path / "work").decide(request, print)
    assert not (tmp_path / "work").exists()
