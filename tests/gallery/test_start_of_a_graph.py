"""How wide a graph searches lies in its file: a start compares vectors with all only where some
have changed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nobackfill.gallery.search import hnsw
from tests.gallery.making import spec, vectors

COUNT = 600


def test_what_has_not_changed_is_not_tuned_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    labels, content, file = np.arange(COUNT), vectors(COUNT, 1), tmp_path / "index"
    index = hnsw.build_index(spec(), labels, content)
    tuned: list[hnsw.HnswIndex] = []
    tune = hnsw._tune

    def counted(index: hnsw.HnswIndex, *more: object) -> float:
        tuned.append(index)
        return tune(index, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(hnsw, "_tune", counted)
    moved, other = content.copy(), spec(2)
    moved[7] += 1
    for ef, now in ((64, content), (64, moved), (0, content), (65, content)):
        replace(index.skeleton(), ef=ef).write(file)
        loaded, rest = hnsw.load_index(file, spec(), labels, now)
        as_it_was = ef == 64 and now is content
        assert len(tuned) == (not as_it_was) and len(rest) == (now is moved)
        assert loaded.ef == (64 if as_it_was else index.ef)
        tuned.clear()
    # Of another space the same links find less.
    hnsw.rebuild_from_skeleton(replace(index.skeleton(), ef=64), other, labels, content)
    hnsw.load_index(file, spec(), labels[5:], content[5:])
    assert len(tuned) == 2
