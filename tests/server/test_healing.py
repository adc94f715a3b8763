"""A gallery that heals where people look: hits embedded again from their source, and kept."""

import hashlib
import shutil
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from nobackfill.errors import ConfigurationError, InvalidInputError, NotFoundError
from nobackfill.release.calibration import Scorer
from nobackfill.release.manifest import Manifest
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, search_pb2, upgrade_pb2
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, embedding, ids, images, refused, running, scores
from tests.support.blocks import png
from tests.support.picture_host import PictureHost
from tests.support.waiting import wait_until

COUNT = 24
GALLERIES = [f"g{i}" for i in range(8)]
# What stands for carried vectors that are wrong: the source has other pictures than were put.
TRUE = images(COUNT, seed=5)


@pytest.fixture
def host() -> Iterator[PictureHost]:
    with PictureHost({f"i{i}": png(image) for i, image in enumerate(TRUE)}) as host:
        yield host


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the settings let sources lie."""
    return tmp_path_factory.mktemp("healing") / "pictures"


@pytest.fixture(scope="module")
def healing(stages: Stages, folder: Path) -> Iterator[GatewayServer]:
    """One that has carried COUNT items of each gallery of GALLERIES to release 2."""
    folder.mkdir()
    with upgraded(stages, folder.parent, item_folders=(folder,)) as gateway:
        yield gateway


@contextmanager
def upgraded(stages: Stages, top: Path, **given: Any) -> Iterator[GatewayServer]:
    """A gateway on `top`/data with GALLERIES, just carried over; `token`: an administrator's."""
    token: str | None = given.pop("token", None)
    shutil.copytree(stages[1], top / "repo")
    with running(top / "repo", top / "data", item_hosts=("127.0.0.1",), **given) as gateway:
        with Client(gateway.address, token=token) as client:
            for name in GALLERIES:
                client.create_gallery(name)
                client.put_images(images(COUNT), name)
            publish_stage(top / "repo", stages[2])
            client.swap(2)
        yield gateway


@pytest.fixture
def client(healing: GatewayServer) -> Iterator[Client]:
    with Client(healing.address) as client:
        yield client


@pytest.fixture(scope="module")
def names() -> list[str]:
    """Galleries that no test has had yet."""
    return list(GALLERIES)


@pytest.fixture
def name(names: list[str]) -> str:
    """A gallery of one's own."""
    return names.pop()


def register(client: Client, name: str, address: str, **numbers: float) -> gallery_pb2.ItemSource:
    """A source, `a_day` of 1 by default: the background spends nothing."""
    source = gallery_pb2.ItemSource(address=address, items_a_day=int(numbers.get("a_day", 1)))
    source.patience.FromMilliseconds(int(1000 * numbers.get("seconds", 20)))
    return client.update_gallery(name, source=source).source


def origins(client: Client, name: str) -> dict[str, str | None]:
    """Of all items, as the gallery has them."""
    return {item.id: item.origin for item in client.list(name)}


def healed(client: Client, name: str) -> set[str]:
    return {item for item, origin in origins(client, name).items() if origin == "re-embedded"}


def progress(client: Client, name: str) -> upgrade_pb2.Healing:
    """Once the carried ones are counted."""
    wait_until(lambda: [*client.watch_upgrade(name)][-1].healing.HasField("carried"), "no count")
    return [*client.watch_upgrade(name)][-1].healing


def series(gateway: GatewayServer) -> dict[str, float]:
    """What Prometheus reads, by name and labels."""
    with urllib.request.urlopen(f"http://{gateway.metrics_address}/metrics") as page:
        lines = [line for line in page.read().decode().splitlines() if line[:1] != "#"]
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines)}


def test_hits_are_embedded_again_and_ranked(
    client: Client, name: str, host: PictureHost, two: Manifest
) -> None:
    asked = TRUE[3]
    assert client.find(asked, name).hits[0].distance > 0.1
    register(client, name, host.address, a_day=1000, seconds=20)
    # By embedding, too: a device brings one.
    for found in (client.find(asked, name), client.find_by(embedding(two, asked), name=name)):
        assert found.hits[0].id == "i3"
        assert found.hits[0].distance == pytest.approx(0, abs=1e-5)
        assert {hit.origin for hit in found.hits} == {"re-embedded"}
        assert found.release == 2
    # Several queries of a call.
    queries = [search_pb2.Query(image=png(TRUE[i])) for i in (5, 7)]
    request = search_pb2.SearchBatchRequest(gallery=name, queries=queries, k=1)
    answers = client.raw.searches.SearchBatch(request).responses
    assert [answer.hits[0].id for answer in answers] == ["i5", "i7"]
    wait_until(lambda: len(healed(client, name)) == COUNT, "the rest is not embedded")
    assert set(host.asked.values()) == {1}
    everything = client.find(asked, name, k=100)
    assert sorted(ids(everything)) == sorted(f"i{i}" for i in range(COUNT))


def test_no_item_is_fetched_twice_and_late_ones_are_kept(
    client: Client, name: str, host: PictureHost
) -> None:
    host.gate.clear()
    register(client, name, host.address, a_day=2 * COUNT, seconds=0.2)
    with ThreadPoolExecutor(4) as askers:
        found = list(askers.map(lambda image: client.find(image, name), TRUE[:4]))
    # Ranked by what there is.
    assert [len(one.hits) for one in found] == [3] * 4
    assert {hit.origin for one in found for hit in one.hits} == {"upgraded"}
    host.gate.set()
    wait_until(lambda: len(healed(client, name)) == COUNT, "what was late is not kept")
    assert set(host.asked.values()) == {1}


def test_what_went_does_not_come_back(client: Client, name: str, host: PictureHost) -> None:
    host.gate.clear()
    register(client, name, host.address, a_day=2 * COUNT, seconds=0.2)
    client.find(TRUE[0], name)
    wait_until(lambda: bool(host.asked), "nothing is fetched")
    client.delete(name, ["i0"])
    client.put(name, {"i1": png(images(1, 7)[0])})
    host.gate.set()
    wait_until(lambda: progress(client, name).carried == 0, "the rest is not embedded")
    with pytest.raises(NotFoundError):
        client.get(name, "i0")
    assert "i0" not in ids(client.find(TRUE[0], name, k=100))
    # What it was put with is nearest to itself, and the old picture is not.
    assert client.find(images(1, 7)[0], name).hits[0].id == "i1"
    assert client.find(TRUE[1], name).hits[0].distance > 0.1


def test_native_items_are_candidates_beside_nearer_carried_ones(
    healing: GatewayServer, client: Client, name: str, host: PictureHost
) -> None:
    """Where carried vectors lie nearer to queries than native ones do (the valley)."""
    host.pictures = {}
    source = gallery_pb2.ItemSource(address=host.address, hits=20)
    client.update_gallery(name, source=source)
    assert progress(client, name).carried == COUNT
    # One query to which all but a few carried items are nearer than what is put now.
    late = images(200, seed=11)
    client.put(name, {"late": png(late[0])})
    places = {i: ids(client.find(late[i], name, k=100)).index("late") for i in range(1, 40)}
    far = max(places, key=lambda i: places[i])
    assert places[far] >= 20
    (part,) = healing.galleries.peek(name).plan.parts
    assert isinstance(part.score_curves, dict)
    part.score_curves["upgraded"] = Scorer(Points((0.0, 4.0), (0.01, 0.0)))
    found = client.find(late[far], name, k=3)
    assert ids(found)[0] == "late"
    assert [hit.origin for hit in found.hits] == ["native", "upgraded", "upgraded"]
    assert scores(found) == sorted(scores(found), reverse=True)


class Points(NamedTuple):
    """A calibration."""

    distances: Sequence[float]
    probabilities: Sequence[float]


def test_a_day_has_its_budget(client: Client, name: str, host: PictureHost) -> None:
    register(client, name, host.address, a_day=7)
    for i in range(6):
        client.find(TRUE[i], name)
    assert len(healed(client, name)) == 7
    wait_until(lambda: progress(client, name).carried == COUNT - 7, "another count")
    told = progress(client, name)
    assert (told.today, told.a_day, told.items) == (7, 7, COUNT)
    assert (told.embedded, told.failed) == (7, 0)
    assert told.bytes_read == sum(len(host.pictures[item]) for item in healed(client, name))
    # Another source, the same day.
    register(client, name, host.address, a_day=9)
    client.find(TRUE[0], name)
    assert len(healed(client, name)) == 9


def test_a_folder_of_pictures_some_of_which_are_broken(
    healing: GatewayServer, client: Client, name: str, folder: Path
) -> None:
    before = dict(series(healing))
    folder = folder / "some"
    folder.mkdir()
    for i, image in enumerate(TRUE):
        (folder / f"i{i}.png").write_bytes(png(image))
    (folder / "i2.png").write_bytes(b"no picture")
    (folder / "i4.png").unlink()
    register(client, name, f"folder:{folder}/{{id}}.png", a_day=1000)
    assert ids(client.find(TRUE[3], name))[0] == "i3"
    wait_until(lambda: progress(client, name).carried == 2, "the rest is not embedded")
    assert origins(client, name)["i2"] == origins(client, name)["i4"] == "upgraded"
    told = progress(client, name)
    assert told.embedded == COUNT - 2
    assert told.failed >= 2
    assert "i2" in told.last_failure or "no image or text of 1" in told.last_failure
    after = series(healing)
    made = 'nobackfill_healing_embedded_total{outcome="kept"}'
    shown = 'nobackfill_healing_hits_total{origin="native"}'
    assert after[made] - before[made] == COUNT - 2
    assert after[shown] > before[shown]
    assert after['nobackfill_healing_items{origin="carried"}'] >= 2


def test_only_admins_see_why_an_item_failed(stages: Stages, tmp_path: Path) -> None:
    """It may name folders and hosts. Two watches of one gallery share no message."""
    tokens = tmp_path / "tokens"
    tokens.write_text(
        "".join(
            f"{role} {role} {hashlib.sha256(role.encode()).hexdigest()}\n"
            for role in ("admin", "reader")
        )
    )
    top, name = tmp_path / "top", GALLERIES[0]
    pictures = top / "pictures"
    pictures.mkdir(parents=True)
    with (
        upgraded(
            stages, top, token="admin", tokens_file=tokens, item_folders=(pictures,)
        ) as gateway,
        Client(gateway.address, token="admin") as client,
        Client(gateway.address, token="reader") as reader,
    ):
        register(client, name, f"folder:{pictures}/{{id}}.png", a_day=9)
        client.find(TRUE[0], name)
        wait_until(lambda: progress(client, name).last_failure, "a failure is told")
        told = progress(reader, name)
        assert told.failed and not told.last_failure
        assert progress(client, name).last_failure


def test_a_source_is_where_the_settings_say(client: Client, name: str, folder: Path) -> None:
    top = folder.parent
    (top / "elsewhere").mkdir()
    for address, kind, why in (
        ("https://images.example/{id}.jpg", ConfigurationError, "item_hosts"),
        ("http://127.0.0.1:1/no.jpg", ConfigurationError, "{id} in the path"),
        (f"folder:{top}/elsewhere", ConfigurationError, "item_folders"),
        (f"folder:{top}/pictures/../elsewhere", ConfigurationError, "item_folders"),
        (f"folder:{top}/pictures/none", NotFoundError, "found none"),
        ("foldr:pictures", ConfigurationError, "expected folder:DIR"),
    ):
        with refused(kind, why):
            client.update_gallery(name, source=gallery_pb2.ItemSource(address=address))
    for seconds in (10**15, -(10**15), 31):
        patient = gallery_pb2.ItemSource(address="folder:/a")
        patient.patience.seconds = seconds
        with refused(InvalidInputError, "seconds: expected 0.01 to 30"):
            client.update_gallery(name, source=patient)
    with refused(InvalidInputError, "hits: expected 20 to 200"):
        client.update_gallery(
            name, source=gallery_pb2.ItemSource(address=f"folder:{top}/pictures", hits=7)
        )
    assert not client.get_gallery(name).HasField("source")
    assert register(client, name, f"folder:{top}/pictures").hits == 100
    assert client.update_gallery(name, exact_distances=True).source.hits == 100
    assert not client.update_gallery(name, source=gallery_pb2.ItemSource()).HasField("source")
    assert client.find(TRUE[0], name).hits


def test_a_restart_and_a_rollback_heal_on(
    stages: Stages, host: PictureHost, tmp_path: Path
) -> None:
    name = GALLERIES[0]
    with upgraded(stages, tmp_path) as gateway, Client(gateway.address) as client:
        register(client, name, host.address, a_day=5)
        client.find(TRUE[0], name)
        kept = healed(client, name)
        assert len(kept) == 5
    with (
        running(tmp_path / "repo", tmp_path / "data", item_hosts=("127.0.0.1",)) as gateway,
        Client(gateway.address) as client,
    ):
        client.find(TRUE[0], name)
        # The day's budget is spent still.
        assert healed(client, name) == kept
        register(client, name, host.address, a_day=6)
        client.find(TRUE[0], name)
        assert healed(client, name) > kept
        assert client.rollback(confirm=True).done
        # In release 1 all is native: nothing heals, and nothing is asked for.
        asked = sum(host.asked.values())
        assert client.find(images(COUNT)[0], name).hits[0].id == "i0"
        assert sum(host.asked.values()) == asked


def test_a_source_that_changes_fails_no_query_and_no_scrape(
    client: Client, healing: GatewayServer, name: str, host: PictureHost
) -> None:
    kept = 'nobackfill_healing_embedded_total{outcome="kept"}'
    with ThreadPoolExecutor(4) as others:
        seen = others.submit(lambda: [series(healing).get(kept, 0) for _ in range(15)])
        asked = others.map(lambda n: client.find(TRUE[n % 3], name), range(45))
        for number in range(30):
            register(client, name, host.address, a_day=2000 + number)
        assert len(list(asked)) == 45
        # A counter never falls, whichever healer counts.
        assert sorted(seen.result()) == seen.result()
    wait_until(lambda: len(healed(client, name)) == COUNT, "all heal")
