"""A gallery as Parquet files, from every engine, while others write."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from nobackfill.adopt.pairs import match_by_id
from nobackfill.adopt.sources.opening import open_source
from nobackfill.errors import AlreadyExistsError, CannotWriteError, NotFoundError
from nobackfill.gallery.staging import run_upgrade
from nobackfill.gallery.store import NewVectors
from nobackfill.server.export import ExportReport, export
from tests.gallery.making import SIDE_DIM, Linear, ids, spec, vectors
from tests.stores.conftest import Engine
from tests.stores.test_items import ONE, TWO, filled


def test_windows_are_of_one_moment(engine: Engine) -> None:
    """Puts, re-puts and deletions between two windows are not seen by the second."""
    store = filled(engine, 20)
    labels, embedding = store.load_vectors(ONE)
    windows = store.iterate_snapshot([ONE], 8)
    first = next(windows)
    store.delete(["item-1", "item-12"])
    store.put(["item-13", "new"], [NewVectors(ONE, vectors(2, 9))], digests=["other", "n"])
    seen = [first, *windows]
    assert [len(one.items) for one in seen] == [8, 8, 4]
    assert [item.id for one in seen for item in one.items] == ids(20)
    np.testing.assert_array_equal(np.concatenate([one.vectors[0].labels for one in seen]), labels)
    found = np.concatenate([one.vectors[0].embedding for one in seen])
    np.testing.assert_array_equal(found, embedding)
    assert store.count() == 19
    # Left before its end, it keeps nobody from changing the spaces.
    left = store.iterate_snapshot([ONE], 8)
    next(left)
    left.close()  # type: ignore[attr-defined]
    run_upgrade(store, Linear(reads_side=False), spec(2))
    store.flip(TWO)


def test_pairs_are_read_from_an_export(engine: Engine, tmp_path: Path) -> None:
    store = filled(engine, 50)
    store.add_staging_space(spec(2))
    run_upgrade(store, Linear(), spec(2))
    new = [NewVectors(space, vectors(30, 5)) for space in (ONE, TWO)]
    store.put([f"both-{n}" for n in range(30)], new, digests=[f"d{n}" for n in range(30)])
    assert export(store, tmp_path / "all", with_side=True, rows_per_window=16) == ExportReport(
        80, {1: 80, 2: 80}
    )
    table = pq.read_table(tmp_path / "all" / "release-2.parquet")
    assert table.schema.metadata[b"nobackfill.space"] == TWO.encode()
    assert table["origin"].to_pylist() == ["upgraded"] * 50 + ["native"] * 30
    assert table["metadata"].to_pylist()[3] == '{"n": 3, "odd": true}'
    assert table["digest"].to_pylist()[50:52] == ["d0", "d1"]
    doubt = np.array(table["uncertainty"].to_pylist()[:50])
    np.testing.assert_allclose(doubt, np.abs(store.load_vectors(ONE)[1][:50, 0]), rtol=1e-6)
    sides = pq.read_table(tmp_path / "all" / "side-1.parquet")
    assert sides["id"].to_pylist() == ids(50)
    np.testing.assert_array_equal(np.array(sides["side"].to_pylist()), vectors(50, 2, SIDE_DIM))
    # What an upgrade carried would teach its own map once more.
    assert export(store, tmp_path / "pairs", native_only=True).vector_counts == {1: 80, 2: 30}
    pairs = match_by_id(
        *(open_source(str(tmp_path / "pairs" / f"release-{n}.parquet")) for n in (1, 2))
    )
    assert len(pairs.pairs) == 30
    np.testing.assert_array_equal(pairs.pairs.old, vectors(30, 5))
    np.testing.assert_array_equal(pairs.pairs.new, pairs.pairs.old)


def test_an_export_is_there_whole_or_not_at_all(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = filled(engine, 20)
    with pytest.raises(NotFoundError, match="release 7; name one of its releases: 1"):
        export(store, tmp_path / "out", [7])

    def full(*_: object) -> object:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(CannotWriteError, match="No space left"):
        patch.setattr(pq.ParquetWriter, "write_batch", full)
        export(store, tmp_path / "out")
    assert list(tmp_path.glob("*out*")) == []
    assert export(store, tmp_path / "out") == ExportReport(20, {1: 20})
    with pytest.raises(AlreadyExistsError, match="exists already"):
        export(store, tmp_path / "out")
    empty = engine.create(spec())
    assert export(empty, tmp_path / "empty") == ExportReport(0, {1: 0})
    assert pq.read_table(tmp_path / "empty" / "release-1.parquet").num_rows == 0
