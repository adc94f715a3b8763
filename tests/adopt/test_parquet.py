"""New vectors beside an export in Parquet: keys keep their type, and an export that was replaced is
carried anew."""

import datetime
import json
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nobackfill.adopt.carrying import CarryResult, carry
from nobackfill.adopt.maps import fit_maps
from nobackfill.adopt.pairs import match_by_id, read_all
from nobackfill.adopt.sources.opening import open_source
from nobackfill.adopt.sources.parquet import read_table
from nobackfill.adopt.sources.source import Target, Window
from nobackfill.errors import AlreadyExistsError, InvalidInputError
from nobackfill.vectors import Vectors
from tests.adopt.made import world, write_parquet

MADE = world(60)
MAP = fit_maps(MADE.old, MADE.new)["procrustes"]
TARGET = Target("new", MAP.dims[1], MAP.digest)
_DAY = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
KEYS = {
    "int64": pa.array(range(60), pa.int64()),
    "binary": pa.array([b"\x00k%02d\xff" % n for n in range(60)], pa.binary()),
    "double": pa.array([n + 0.5 for n in range(60)]),
    "timestamp": pa.array(
        [_DAY + datetime.timedelta(seconds=n) for n in range(60)], pa.timestamp("us", "UTC")
    ),
    "uuid": pa.array([uuid.UUID(int=n).bytes for n in range(60)], pa.uuid()),
    "text": pa.array(MADE.ids),
}


def carried(path: Path) -> CarryResult:
    return carry(open_source(str(path)), TARGET, MAP)


def right(old: Path, new: Path) -> bool:
    """Whether each item has the map of its own vector."""
    before, after = read_all(open_source(str(old))), read_all(open_source(str(new), vector="new"))
    places = {name: row for row, name in enumerate(after.ids)}
    assert sorted(before.ids) == sorted(after.ids)
    order = [places[name] for name in before.ids]
    return np.allclose(MAP(before.vectors), after.vectors[order], atol=1e-5)


@pytest.mark.parametrize("kind", KEYS)
def test_keys_keep_their_type_and_join(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.parquet"
    old = pa.table({"id": KEYS[kind], "vector": pa.array(list(MADE.old))})
    pq.write_table(old, path, row_group_size=25)
    assert carried(path).new_vector_count == 60
    new = pq.read_table(sorted((tmp_path / "_a.new").glob("*.parquet")))
    assert new.schema.field("id").type == KEYS[kind].type
    assert new["id"].combine_chunks().equals(KEYS[kind])
    if kind != "uuid":
        # Arrow joins no extension types.
        both = old.select(["id"]).join(new.select(["id"]), "id", join_type="inner")
        assert both.num_rows == 60
    assert right(path, tmp_path / "_a.new")
    assert carried(path).write_count == 0


@pytest.mark.parametrize("rows", [30, 60])
def test_an_export_that_was_replaced_is_carried_anew(tmp_path: Path, rows: int) -> None:
    """By fewer items, and by as many others of the same keys."""
    folder = tmp_path / "s"
    write_parquet(folder / "a.parquet", MADE.ids, MADE.old, 20)
    write_parquet(folder / "b.parquet", [f"b-{name}" for name in MADE.ids], MADE.old, 20)
    assert carried(folder).new_vector_count == 120
    write_parquet(folder / "a.parquet", MADE.ids[:rows], MADE.old[::-1][:rows], 20)
    done = carried(folder)
    assert (done.write_count, done.new_vector_count) == (rows, 60 + rows)
    assert right(folder, folder / "_new")
    (folder / "b.parquet").unlink()
    assert carried(folder).new_vector_count == rows
    assert right(folder, folder / "_new")


def test_files_of_one_stem_have_folders_of_their_own(tmp_path: Path) -> None:
    one = write_parquet(tmp_path / "a.parquet", MADE.ids, MADE.old)
    other = write_parquet(tmp_path / "a.pq", MADE.ids, MADE.old[::-1])
    assert carried(other).write_count == carried(one).write_count == 60
    assert right(one, tmp_path / "_a.new")
    assert right(other, tmp_path / "_a.pq.new")
    # A name that is another file's folder of new vectors.
    third = write_parquet(tmp_path / "a.pq.parquet", MADE.ids, MADE.old)
    with pytest.raises(AlreadyExistsError, match=r"from a\.pq\.parquet"):
        carried(third)
    assert open_source(str(other)).drop_new_vectors("new")
    assert (tmp_path / "_a.new").exists() and not (tmp_path / "_a.pq.new").exists()


@pytest.mark.parametrize("suffix", ["parquet", "pq"])
def test_a_folder_of_before_november_2026_is_gone_on_with(tmp_path: Path, suffix: str) -> None:
    """Its keys are text, and it does not say which file it was made from."""
    path = write_parquet(tmp_path / f"a.{suffix}", MADE.ids, MADE.old)
    folder = tmp_path / "_a.new"
    folder.mkdir()
    (folder / "carried.json").write_text(json.dumps({"map": MAP.digest, "dim": MAP.dims[1]}))
    made = pa.table({"id": MADE.ids, "new": pa.array(list(MAP(MADE.old)))})
    pq.write_table(made, folder / "a.0.parquet")
    assert len(read_all(open_source(str(folder)))) == 60
    done = carried(path)
    assert (done.write_count, done.new_vector_count) == (60, 60)
    assert right(path, folder)
    assert carried(path).write_count == 0
    assert open_source(str(path)).drop_new_vectors("new") and not folder.exists()


def test_a_copy_of_an_export_is_its_own(tmp_path: Path) -> None:
    """With what was carried beside it: the times of a copy are new."""
    write_parquet(tmp_path / "one" / "a.parquet", MADE.ids, MADE.old)
    carried(tmp_path / "one" / "a.parquet")
    shutil.copytree(tmp_path / "one", tmp_path / "two", copy_function=shutil.copy)
    os.utime(tmp_path / "two" / "a.parquet", (1, 1))
    assert carried(tmp_path / "two" / "a.parquet").new_vector_count == 60
    assert right(tmp_path / "two" / "a.parquet", tmp_path / "two" / "_a.new")


def test_folders_of_partitions_are_read_and_kept(tmp_path: Path) -> None:
    folder = tmp_path / "s"
    for number in range(2):
        here = slice(number * 30, number * 30 + 30)
        inside = folder / "lang=en" / f"year=202{number}"
        write_parquet(inside / "part-0.parquet", MADE.ids[here], MADE.old[here], 20)
    write_parquet(folder / "archive" / "x.parquet", ["no partition"], MADE.old[:1])
    assert carried(folder).new_vector_count == 60
    assert right(folder, folder / "_new")
    assert sorted(path.parent.name for path in (folder / "_new").rglob("*.parquet")) == [
        "year=2020", "year=2020", "year=2021", "year=2021",
    ]  # fmt: skip
    assert carried(folder).write_count == 0
    assert open_source(str(folder)).drop_new_vectors("new") and not (folder / "_new").exists()


def _bytes_ids(folder: Path) -> None:
    folder.mkdir()
    np.save(folder / "ids.npy", np.array([name.encode() for name in MADE.ids]))
    np.save(folder / "vector.npy", MADE.old)


def _binary_ids(folder: Path) -> None:
    ids: Any = pa.array([name.encode() for name in MADE.ids], pa.binary())
    vectors: list[Vectors] = list(MADE.old)
    folder.mkdir()
    pq.write_table(pa.table({"id": ids, "vector": pa.array(vectors)}), folder / "a.parquet")


@pytest.mark.parametrize("make", [_bytes_ids, _binary_ids])
def test_ids_in_bytes_match_the_same_ids_in_text(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "old")
    new = write_parquet(tmp_path / "new.parquet", MADE.ids, MADE.new)
    matched = match_by_id(open_source(str(tmp_path / "old")), open_source(str(new)))
    assert matched.pairs.ids == MADE.ids and not matched.ids_without_old


def test_a_damaged_page_is_refused(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", MADE.ids, MADE.old)
    data = bytearray(path.read_bytes())
    data[4:600] = bytes([0xFF]) * 596
    path.write_bytes(data)
    with pytest.raises(InvalidInputError, match="cannot be read as Parquet"):
        read_table(path)


@pytest.mark.parametrize("kind", [pa.string_view(), pa.binary_view()])
def test_keys_that_are_views_are_read(tmp_path: Path, kind: pa.DataType) -> None:
    """pyarrow cannot select rows of them."""
    ids = [f"k{row}" for row in range(20)]
    vectors = [None if row == 3 else MADE.old[row].tolist() for row in range(20)]
    texts = pa.array([f"on {one}" for one in ids], pa.string_view())
    table = pa.table({"id": pa.array(ids).cast(kind), "v": vectors, "text": texts})
    pq.write_table(table, tmp_path / "a.parquet")
    source = open_source(str(tmp_path))
    assert source.read_column(Window("a.parquet", 0), "text").values[3] == "on k3"
    for count in (19, 0):
        assert carry(source, TARGET, MAP).write_count == count
    new = read_all(open_source(str(tmp_path / "_new"), vector="new"))
    assert new.ids == ids[:3] + ids[4:]
    np.testing.assert_allclose(new.vectors[3:], MAP(MADE.old[4:20]), atol=1e-5)


def test_rows_that_share_a_key_each_get_their_own_vector(tmp_path: Path) -> None:
    """As the parts of a document."""
    table = pa.table({"id": ["a", "a", "b", "b"], "v": [one.tolist() for one in MADE.old[:4]]})
    pq.write_table(table, tmp_path / "a.parquet")
    for count in (4, 0):
        assert carry(open_source(str(tmp_path)), TARGET, MAP).write_count == count
    new = pq.read_table(tmp_path / "_new" / "a.0.parquet")
    np.testing.assert_allclose(np.array(new["new"].to_pylist()), MAP(MADE.old[:4]), atol=1e-5)
