"""A disk that is really full: the kernel refuses to let any file grow (RLIMIT_FSIZE)."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from nobackfill.errors import CannotWriteError
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from tests.gallery.making import Linear, filled, ids, put, rows, spec

FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from nobackfill.gallery import staging
from nobackfill.gallery.search import hnsw
from nobackfill.gallery.sqlite_gallery import SqliteGallery
from nobackfill.gallery.staging import run_upgrade
from nobackfill.errors import CannotWriteError
from tests.gallery.making import Linear, ids, put, spec, vectors

folder, action = Path(sys.argv[1]), sys.argv[2]
largest = max(path.stat().st_size for path in folder.iterdir())
with SqliteGallery.open(folder / "g.sqlite") as store:
    labels, content = store.load_vectors(spec().space)
    index = hnsw.build_index(spec(), labels, content)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest + 30_000, -1))
    try:
        if action == "put":
            for start in range(10_000, 30_000, 500):
                put(store, ids(500, start), seed=start)
                print("acknowledged", flush=True)
        elif action == "upgrade":
            run_upgrade(store, Linear(), spec(2), items_per_chunk=100)
        else:
            resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, -1))
            index.save(folder / "index")
    except CannotWriteError as error:
        print("refused", flush=True)
        # The same process reads on, and writes once there is room again.
        assert len(store.load_vectors(spec().space)[0]) >= 2000
        resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))
        put(store, ["last"], seed=1)
"""


@pytest.mark.parametrize("action", ["put", "upgrade", "index"])
def test_a_full_disk_is_said_and_nothing_is_half_done(tmp_path: Path, action: str) -> None:
    with filled(tmp_path / "g.sqlite", 2000) as store:
        before = rows(store, spec().space)
        labels, content = store.load_vectors(spec().space)
    hnsw.build_index(spec(), labels, content).save(tmp_path / "index")
    cached = (tmp_path / "index").read_bytes()
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path), action], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said = done.stdout.split()
    assert said.count("refused") == 1
    assert (tmp_path / "index").read_bytes() == cached
    with SqliteGallery.open(tmp_path / "g.sqlite") as store:
        assert store.get("last") is not None
        found = rows(store, spec().space)
        assert {label: found[label] for label in before} == before
        assert len(found) == 2001 + 500 * said.count("acknowledged")
        run_upgrade(store, Linear(), spec(2), items_per_chunk=100)
        assert sorted(rows(store, spec(2).space)) == sorted(found)
        with store.read_snapshot() as connection:
            assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert not list(tmp_path.glob(".tmp-*"))


def test_a_read_only_gallery_says_so(tmp_path: Path) -> None:
    with filled(tmp_path / "g.sqlite", 3) as store:
        with store.transaction() as connection:
            connection.execute("PRAGMA query_only = ON")
        with pytest.raises(CannotWriteError, match="cannot be read or written"):
            put(store, ids(1, 9), seed=1)
        with store._connections.writer() as connection:
            connection.execute("PRAGMA query_only = OFF")
        assert np.array_equal(put(store, ids(1, 9), seed=1), [4])
