"""WatchUpgrade with a metadata key: quality by its values, as served, against slow loops."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nobackfill.errors import InvalidInputError
from nobackfill.release.manifest import Manifest
from nobackfill.server.cli.main import main
from nobackfill.server.gateway import GatewayServer
from nobackfill.v1 import gallery_pb2, upgrade_pb2
from nobackfill.wire.values import metadata_value_message
from tests.server.conftest import Stages, publish_stage
from tests.server.support import Client, images, refused
from tests.support.blocks import png
from tests.support.commands import run_here

COUNT = 45
KINDS = ("cat", "dog", "eel")


def put(client: Client, first: int, end: int) -> None:
    """Items from `i<first>` to before `i<end>`, of each kind in turn."""
    pictures = {f"i{i}": png(image) for i, image in enumerate(images(end)[first:], first)}
    client.put("g", pictures, {f"i{i}": {"kind": KINDS[i % 3]} for i in range(first, end)})


@pytest.fixture
def ready(client: Client, repo: Path, stages: Stages) -> Client:
    """COUNT items with a kind, and one without, in release 1; release 2 published."""
    client.create_gallery("g")
    put(client, 0, COUNT)
    client.put("g", {"bare": png(images(1, 99)[0])})
    publish_stage(repo, stages[2])
    return client


def watched(client: Client, key: str = "kind") -> upgrade_pb2.UpgradeProgress:
    """The first progress that is told."""
    return next(client.watch_upgrade("g", by_key=key))


def cmc1(quality: upgrade_pb2.SubgroupQuality, probes: int) -> Mapping[str, float]:
    """By kind, worst first; each of `probes` items."""
    assert [group.probes for group in quality.subgroups] == [probes] * len(KINDS)
    rates = [group.cmc1 for group in quality.subgroups]
    assert rates == sorted(rates)
    return {group.value.text: group.cmc1 for group in quality.subgroups}


def slow_cmc1(
    kinds: Sequence[str], vectors: NDArray[np.float32], probes: Sequence[int]
) -> dict[str, float]:
    """Share of each kind's probes whose nearest other item, of all there are, is of the kind."""
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for i in probes:
        far = [float(((vectors[i] - other).astype(float) ** 2).sum()) for other in vectors]
        far[i] = np.inf
        right[kinds[i]].append(kinds[far.index(min(far))] == kinds[i])
    return {kind: float(np.mean(values)) for kind, values in right.items()}


def stored_cmc1(gateway: GatewayServer, manifest: Manifest) -> dict[str, float]:
    """The slow loop over what lies in a space; every item that has a kind is a probe."""
    store = gateway.galleries.peek("g").store
    labels, vectors = store.load_vectors(manifest.space)
    items = [item for item in store.items(labels) if item is not None]
    kinds = [str(item.metadata.get("kind", "")) for item in items]
    return slow_cmc1(kinds, vectors, [i for i, kind in enumerate(kinds) if kind])


def test_each_fraction_of_a_backfill_has_its_report(
    gateway: GatewayServer, ready: Client, one: Manifest, two: Manifest
) -> None:
    quality = watched(ready).quality
    assert cmc1(quality, COUNT // 3) == pytest.approx(stored_cmc1(gateway, one))
    assert not any(group.HasField("cmc1_before") for group in quality.subgroups)
    ready.swap(2)
    # Other images than those that were upgraded, so that the answers change.
    others = images(COUNT, 7)
    seen = [cmc1(watched(ready).quality, COUNT // 3)]
    for first in range(0, COUNT, 15):
        backfill = {f"i{i}": png(others[i]) for i in range(first, first + 15)}
        ready.start_upgrade("g", 0, backfill=backfill)
        quality = watched(ready).quality
        assert cmc1(quality, COUNT // 3) == pytest.approx(stored_cmc1(gateway, two))
        before = {group.value.text: group.cmc1_before for group in quality.subgroups}
        assert before == pytest.approx(stored_cmc1(gateway, one))
        assert quality.re_embedded_share == pytest.approx((first + 15) / COUNT)
        assert [group.re_embedded for group in quality.subgroups] == [(first + 15) // 3] * 3
        seen.append(cmc1(quality, COUNT // 3))
    assert len({tuple(sorted(rates.items())) for rates in seen}) > 1


def test_a_mixed_gallery_is_reported_as_it_is_served(
    client: Client, repo: Path, stages: Stages, gateway: GatewayServer, one: Manifest
) -> None:
    """Those put since the activation are asked; they find those of both spaces."""
    old, every = 21, 42
    client.create_gallery("g")
    put(client, 0, old)
    client.pause_upgrade("g")
    publish_stage(repo, stages[2])
    client.begin(2, "dual")
    for group in watched(client).quality.subgroups:
        assert (group.items, group.probes, group.HasField("cmc1")) == (7, 0, False)
    put(client, old, every)
    quality = watched(client).quality
    assert [group.items for group in quality.subgroups] == [14] * 3
    # Blocks hold the same projection: the mixed ranking is that of release 1, where all items are.
    _, vectors = gateway.galleries.peek("g").store.load_vectors(one.space)
    kinds = [KINDS[i % 3] for i in range(every)]
    expected = slow_cmc1(kinds, vectors, range(old, every))
    assert cmc1(quality, 7) == pytest.approx(expected)
    assert {g.value.text: g.cmc1_before for g in quality.subgroups} == pytest.approx(expected)


def test_a_key_that_makes_no_groups_is_refused(ready: Client) -> None:
    with refused(InvalidInputError, "'colour' has 0 values"):
        watched(ready, "colour")
    names = [f"m{i}" for i in range(201)]
    notes = {name: {"serial": i} for i, name in enumerate(names)}
    ready.put("g", dict.fromkeys(names, png(images(1)[0])), notes)
    with refused(InvalidInputError, "has 201 values"):
        watched(ready, "serial")


def test_an_item_with_a_list_has_each_of_its_texts(client: Client) -> None:
    client.create_gallery("g")
    tags = {"tags": metadata_value_message(["red", "blue"])}
    items = [
        gallery_pb2.PutItem(id=f"i{i}", image=png(image), metadata=tags)
        for i, image in enumerate(images(6))
    ]
    assert not client.put_items("g", items)
    groups = watched(client, "tags").quality.subgroups
    assert [group.value.text for group in groups] == ["blue", "red"]
    assert [(group.items, group.cmc1) for group in groups] == [(6, 1.0), (6, 1.0)]


def test_a_number_is_no_flag(client: Client) -> None:
    """Each kind of value has its own group, although True == 1."""
    client.create_gallery("g")
    names = ["flag", "other flag", "number", "other number"]
    pictures = dict.fromkeys(names, png(images(1)[0]))
    client.put("g", pictures, {name: {"key": 1 if "number" in name else True} for name in names})
    groups = {
        group.value.WhichOneof("kind"): group for group in watched(client, "key").quality.subgroups
    }
    assert {kind: group.items for kind, group in groups.items()} == {"integer": 2, "flag": 2}
    # All are equally near, so that the first item, a flag, is the nearest of each number.
    assert {kind: group.cmc1 for kind, group in groups.items()} == {"integer": 0.0, "flag": 1.0}


def test_the_command_shows_the_worst_first(gateway: GatewayServer, ready: Client) -> None:
    ready.put("g", {"odd": png(images(1, 5)[0])}, {"odd": {"kind": "fox"}})
    ready.swap(2)

    def run(*arguments: str) -> str:
        watch = ("watch", "g", "--by", "kind", f"--server={gateway.address}", *arguments)
        done = run_here(main, "gateway", *watch)
        assert done.returncode == 0, done.stderr
        return done.stdout

    told = json.loads(run("--json").splitlines()[-1])["quality"]
    rates = [group.get("cmc1") for group in told["subgroups"]]
    assert rates[:3] == sorted(rates[:3])
    assert rates[3] is None
    lines = run().splitlines()
    assert lines[-1] == "  fox: 1 items, too few to measure"
    worst = told["subgroups"][0]
    assert lines[1] == (
        f"  {worst['value']['text']}: right first {worst['cmc1']:.1%} "
        f"(before {worst['cmc1_before']:.1%}), 0 of 15 items re-embedded"
    )
