"""New vectors beside those of Qdrant: what is kept of the old one's settings, what is refused, and
the flip where others write."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import numpy as np
import pytest
from qdrant_client import QdrantClient, models

from nobackfill.adopt.carrying import carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.source import Target
from nobackfill.errors import InvalidInputError
from nobackfill.plugins.qdrant import point_id
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
    steps = carry(racing, TARGET, MAP, window=20, flip=True).steps  # type: ignore[arg-type]
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
    assert not store.open().rollback("new")
    assert carry(store.open(), TARGET, MAP, flip=True).steps == []
