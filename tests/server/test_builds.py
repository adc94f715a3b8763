"""Builds of indexes: several galleries side by side, one on all the threads there may be."""

import threading
from pathlib import Path
from typing import Any

import pytest

from nobackfill.gallery.search import hnsw
from nobackfill.release.manifest import Manifest
from nobackfill.server.galleries.indexing import ThreadBudget
from nobackfill.server.settings import Settings, usable_cores
from tests.server.support import Client, in_file, running
from tests.server.test_indexing import put
from tests.support.waiting import wait_until

WAIT_S = 60.0


@pytest.mark.long
def test_two_galleries_are_built_side_by_side_and_one_on_all_threads(
    repo: Path, tmp_path: Path, one: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of two builds waits for the other, and uses half; alone, a build uses all."""
    build, both, shares = hnsw.build_index, threading.Barrier(2), []

    def together(*args: Any, count_threads: hnsw.CountThreads, **options: Any) -> hnsw.HnswIndex:
        both.wait(WAIT_S)
        shares.append(count_threads())
        both.wait(WAIT_S)
        return build(*args, count_threads=count_threads, **options)

    def alone(*args: Any, count_threads: hnsw.CountThreads, **options: Any) -> hnsw.HnswIndex:
        shares.append(count_threads())
        return build(*args, count_threads=count_threads, **options)

    monkeypatch.setattr(hnsw, "build_index", together)
    with (
        running(repo, tmp_path / "data", index_threads=2) as gateway,
        Client(gateway.address) as client,
    ):
        for name in ("left", "right"):
            client.create_gallery(name)
            put(client, one, name=name)
        hosts = [in_file(gateway, name) for name in ("left", "right")]
        wait_until(
            lambda: all(hosted.index_path(one.space).exists() for hosted in hosts), "no index files"
        )
        assert shares == [1, 1]
        monkeypatch.setattr(hnsw, "build_index", alone)
        client.create_gallery("third")
        put(client, one, name="third")
        third = in_file(gateway, "third")
        wait_until(third.index_path(one.space).exists, "no index file")
        assert shares == [1, 1, 2]
        for hosted in (*hosts, third):
            base = hosted.view(one.space).snapshot().base.index
            assert isinstance(base, hnsw.HnswIndex) and base.links_fit_space


def test_builds_share_what_there_is() -> None:
    sharing, told = ThreadBudget(5), []
    with sharing.build():
        told.append(sharing.threads())
        with sharing.build():
            told.append(sharing.threads())
    # More builds than threads never come; if so, each goes on.
    with (
        sharing.build(),
        sharing.build(),
        sharing.build(),
        sharing.build(),
        sharing.build(),
        sharing.build(),
    ):
        told.append(sharing.threads())
    assert told == [5, 2, 1]


def test_half_of_the_cores_build_unless_somebody_says(tmp_path: Path) -> None:
    assert Settings(data=tmp_path).index_threads == max(1, usable_cores() // 2)
    assert Settings(data=tmp_path, index_threads=3).index_threads == 3
