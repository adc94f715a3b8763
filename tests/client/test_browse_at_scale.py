"""A page of a large gallery reads what it shows, and no more than that of a small one. (A filter
looks at all items: `make bench TOPICS=pages` tells what that takes.)"""

from pathlib import Path

import numpy as np
from starlette.testclient import TestClient

from nobackfill.client.device import Device
from nobackfill.gallery.store import NewVectors
from nobackfill.plugins.web.browse.app import make_site
from tests.support import edge, graphs

SMALL, LARGE = 1_000, 20_000
# Items on a page, and those that are nearest.
SHOWN = (60, 60, 24)
HOST, TOKEN = "127.0.0.1:8642", "token"


def instructions(gallery: Path, items: int) -> dict[str, int]:
    """What SQLite's machine executes for each page of a gallery that is filled with so many."""
    vectors = np.random.default_rng(0).standard_normal((items, graphs.DIM), np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    with Device(gallery) as device:
        device.store.put(
            [f"i{n}" for n in range(items)],
            [NewVectors(device.store.active().spec.space, vectors)],
            metadata=[{"name": f"{n}.png"} for n in range(items)],
        )
        client = TestClient(make_site(device, [HOST], TOKEN))
        # One connection after another is taken from those that are idle, and it is the same.
        counted = 0

        def count() -> int:
            nonlocal counted
            counted += 1
            return 0

        with device.store.read_snapshot() as connection:
            connection.set_progress_handler(count, 1)
        work = {}
        for page in ("", f"?after={items // 2}", "item/7"):
            for _ in range(2):
                # The first time all vectors are read.
                counted = 0
                answer = client.get(f"http://{HOST}/{TOKEN}/{page}")
                assert answer.status_code == 200, answer.text
            work[page.partition("=")[0]] = counted
            assert (counted > 0, answer.text.count('class="tile ')) == (True, SHOWN[len(work) - 1])
    return work


def test_a_page_is_no_more_work_in_a_larger_gallery(tmp_path: Path, world: edge.World) -> None:
    setting = world.setting(tmp_path)
    small, large = (
        instructions(edge.make_device(setting.repo, tmp_path / f"{items}.sqlite"), items)
        for items in (SMALL, LARGE)
    )
    for page, work in large.items():
        assert work <= 2 * small[page], page
