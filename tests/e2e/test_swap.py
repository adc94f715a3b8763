"""Swaps under load between orthogonal-block releases, through the real commands.

Release n embeds into its own block: a query that met a vector of another space would find it at
squared distance 2 exactly, and an item asked for by its own image is found at distance 0.
"""

import json
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from demo import gateway, serve
from demo.children import Children
from demo.device import Device
from nobackfill.errors import NobackfillError
from nobackfill.wire import Gateway
from tests.e2e.conftest import ITEMS, Place
from tests.support.blocks import publish_block_release, write_pngs

CLIENTS = 4


@dataclass
class Asker(threading.Thread):
    """Asks for the gallery's own images all the time, and notes everything that is not right."""

    address: str
    images: list[Path]
    first: int
    stop: threading.Event
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    releases: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        with gateway.connect(self.address) as connection:
            while not self.stop.is_set():
                self.ask(connection, self.images[(self.first + self.asked) % len(self.images)])
                self.asked += 1

    def ask(self, connection: Gateway, image: Path) -> None:
        try:
            answer = connection.search("blocks", image=image, k=5)
        except NobackfillError as error:
            self.wrong.append(str(error))
            return
        hits = [(hit.id, hit.distance) for hit in answer.hits]
        if len({item for item, _ in hits}) != 5:
            self.wrong.append(f"{image.name}: not five items, each once: {hits}")
        if hits and (hits[0][0] != f"images/{image.name}" or hits[0][1] > 0.01):
            self.wrong.append(f"{image.name}: not found by itself: {hits}")
        if any(abs(distance - 2) < 1e-4 for _, distance in hits):
            self.wrong.append(f"{image.name}: met another space: {hits}")
        if not self.releases or self.releases[-1] != answer.release:
            self.releases.append(answer.release)


def swap_under_load(place: Place, rollout: str) -> list[Asker]:
    """Activate release 2, go back, and activate it again, all while clients ask."""
    stop = threading.Event()
    askers = [Asker(place.address, place.images, 50 * n, stop) for n in range(CLIENTS)]
    for asker in askers:
        asker.start()
    try:
        serve.activate_release(place.gateway, 2, rollout)
        place.gateway.rollback(confirm=True)
        serve.activate_release(place.gateway, 2, rollout)
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    return askers


@pytest.mark.long
@pytest.mark.parametrize("rollout", ["cutover", "dual"])
def test_no_search_fails_and_none_meets_another_space(place: Place, rollout: str) -> None:
    publish_block_release(place.repo, 2, [1])
    askers = swap_under_load(place, rollout)
    assert [asker.wrong[:3] for asker in askers] == [[]] * CLIENTS
    assert sum(asker.asked for asker in askers) >= 100
    # Every client saw the old release, the new one, and none in between but by the rollback.
    for asker in askers:
        assert set(asker.releases) == {1, 2}
        assert asker.releases[-1] == 2
        assert len(asker.releases) <= 4
    assert place.gateway.delete("blocks", ["images/0-0000.png"]) == 1


@pytest.mark.long
def test_device_and_server_answer_alike_before_and_after(
    place: Place, children: Children, tmp_path: Path
) -> None:
    """The same images, the same releases, two programs: the same hits at the same distances."""
    device = Device(children, tmp_path / "device")
    root = place.repo / "1.root.json"
    assert device.create(f"grpc://{place.address}", root, tmp_path / "gallery") == ITEMS
    queries = write_pngs(tmp_path / "queries", 30, seed=7)
    assert_alike(place, children, device, queries, release=1)
    publish_block_release(place.repo, 2, [1])
    serve.activate_release(place.gateway, 2, "cutover")
    _, answered, failed = device.sync(f"grpc://{place.address}", queries[0])
    assert (answered > 0, failed) == (True, 0)
    assert_alike(place, children, device, queries, release=2)


def assert_alike(
    place: Place, children: Children, device: Device, queries: list[Path], release: int
) -> None:
    client = serve.COMMAND.with_name("edge-client")
    command: list[str | Path] = [
        client,
        "--gallery",
        device.gallery,
        "search",
        *queries,
        "-k",
        "10",
        "--json",
    ]
    output = children.run("search", command)
    for query, offline in zip(queries, json.loads(output)["answers"], strict=True):
        online = place.gateway.search("blocks", image=query, k=10)
        assert (online.release, offline["release"]) == (release, release)
        assert online.space == offline["space"]
        assert [hit.id.split("/")[-1] for hit in online.hits] == [
            Path(hit["path"]).name for hit in offline["hits"]
        ]
        # A gateway tells three digits of a distance, and scores are of what it tells.
        assert [hit.distance for hit in online.hits] == pytest.approx(
            [hit["distance"] for hit in offline["hits"]], rel=0.005
        )
        assert [hit.score for hit in online.hits] == pytest.approx(
            [hit["score"] for hit in offline["hits"]], abs=0.02
        )
