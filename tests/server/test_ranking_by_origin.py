"""A gallery whose carried vectors are ranked along its release's scale, native puts beside them."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from nobackfill.release.manifest import Manifest
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import search_pb2
from tests.server.conftest import Stages
from tests.server.support import Client, embedding, ids, images, running, vector
from tests.server.test_immediate_answers import answer_immediately, on_a_thread, told
from tests.support import postgres as servers
from tests.support import trials
from tests.support.blocks import publish_block_release

OLD, ALL = 20, 30
# A carried vector is as likely a match as a native one that is farther by this.
SLOPE, OFFSET = 1.5, 0.4


@contextmanager
def carried(
    stages: Stages, folder: Path, store: str | None = None
) -> Iterator[tuple[GatewayServer, Client, Manifest]]:
    """A gateway that has carried OLD items to a release with a scale."""
    repo = folder / "repo"
    shutil.copytree(stages[1], repo)
    for name in ("repo.keys", "repo.drafts"):
        shutil.copytree(stages[1].parent / name, folder / name)
    given = {} if store is None else {"store": store}
    with running(repo, folder / "data", **given) as gateway, Client(gateway.address) as client:
        client.create_gallery("g")
        client.put_images(images(ALL)[:OLD])
        with trials.near():
            two = publish_block_release(repo, 2, [1], scale=(SLOPE, OFFSET))
        client.swap(2)
        yield gateway, client, two


def test_in_a_database_the_nearest_are_ranked_along_the_scale(
    stages: Stages, tmp_path: Path, postgres: servers.Server
) -> None:
    with postgres.database() as url, carried(stages, tmp_path, url) as (_, client, two):
        client.put_images(images(ALL)[OLD:], first=OLD)
        made = np.stack([vector(two, image) for image in images(ALL)]).astype(float)
        for query in (0, ALL - 1):
            apart = ((made - made[query]) ** 2).sum(axis=1)
            keys = np.where(np.arange(ALL) < OLD, SLOPE * apart + OFFSET, apart)
            order = [f"i{i}" for i in np.argsort(keys, kind="stable")]
            for k in (8, 100):
                assert ids(client.find(images(ALL)[query], k=k)) == order[:k]


def test_carried_and_native_are_one_ranking_along_the_scale(
    stages: Stages, tmp_path: Path, untimed: None
) -> None:
    with carried(stages, tmp_path) as (gateway, client, two):
        made = np.stack([vector(two, image) for image in images(ALL)]).astype(float)

        def check(native: set[int], count: int) -> None:
            for query in (0, OLD - 1, count - 1):
                apart = ((made[:count] - made[query]) ** 2).sum(axis=1)
                of_native = np.isin(np.arange(count), list(native))
                keys = np.where(of_native, apart, SLOPE * apart + OFFSET)
                order = [f"i{i}" for i in np.argsort(keys, kind="stable")]
                image = images(ALL)[query]
                for k in (3, 10, 100):
                    by_image = client.find(image, k=k)
                    assert ids(by_image) == order[:k]
                    assert ids(client.find_by(embedding(two, image), k=k)) == order[:k]
                    # What is told is each one's own distance.
                    shown = [apart[int(name[1:])] for name in order[:k]]
                    told_of = [hit.distance for hit in by_image.hits]
                    assert told_of == pytest.approx(shown, rel=0.01, abs=1e-5)

        def same_bytes(*, routed: bool) -> None:
            """On a thread, where it arrives, and, of one origin alone, in one compiled call."""
            asked = search_pb2.Query(
                embeddings=search_pb2.Embeddings(embeddings=[embedding(two, images(ALL)[4])])
            )
            request = search_pb2.SearchRequest(gallery="g", query=asked, k=12)
            for farthest in (None, 0.3):
                if farthest is not None:
                    request.max_distance = farthest
                expected = on_a_thread(client, request)
                assert answer_immediately(gateway, request) == expected
                message = request.SerializeToString()
                assert client.raw.searches.Search(request) == expected
                answers = gateway.search._immediate.search_by_last_plan([message])
                assert (answers == [told(gateway, message)]) or not routed

        check(set(), OLD)
        client.put_images(images(ALL)[OLD:], first=OLD)
        check(set(range(OLD, ALL)), ALL)
        same_bytes(routed=False)
        # Put again, it is native; and with the others gone there is one origin again.
        client.put_images(images(ALL)[:1])
        check({0, *range(OLD, ALL)}, ALL)
        client.delete("g", [f"i{i}" for i in range(1, OLD)])
        hits = client.find(images(ALL)[0], k=100).hits
        assert {hit.origin for hit in hits} == {"native"}
        assert [h.distance for h in hits] == sorted(h.distance for h in hits)
