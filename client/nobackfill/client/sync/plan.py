"""What a sync would do: which release, along which routes, at what cost."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from nobackfill.client.gallery_file import GalleryFile
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.routes import Route, kept_by_chain, plan_route
from nobackfill.release.trust.trust import Trust

# Of quantised against fp32 arithmetic, and of reading and writing rows of 512 + 512 bytes: both as
# measured with onnxruntime and SQLite on two cores.
INT8_SPEEDUP = 3.5
ROWS_A_SECOND = 150_000


@dataclass(frozen=True)
class Leg:
    """Items of one source space and the route that carries them into the target.

    A route without steps takes the vectors as they are: the target searches that space directly.
    """

    source: SpaceInfo
    route: Route
    items: int


@dataclass(frozen=True)
class Plan:
    """A sync from the active release to `target`.

    `legs` are in the order in which they are run: an item goes with the first leg whose source has
    it. `int8`: some of the upgrades are quantised.
    """

    target: Manifest
    legs: tuple[Leg, ...]
    int8: bool

    def files(self) -> list[PublishedFile]:
        """The published files it needs: what embeds in the target, and the upgrades on the way."""
        files = {file.path: file for file in embedding_files(self.target)}
        for leg in self.legs:
            for manifest, upgrade in leg.route.steps:
                chosen = upgrade.int8_file if self.int8 and upgrade.int8_file else upgrade.file
                for file in (manifest.probes.file, chosen):
                    files[file.path] = file
        return list(files.values())

    def kept(self) -> float | None:
        """Expected share of new/new mAP over all items; None where a route was never measured."""
        shares = [(leg.route.kept, leg.items) for leg in self.legs if leg.items]
        total = sum(items for _, items in shares)
        known = [(kept, items) for kept, items in shares if kept is not None]
        if not total or len(known) < len(shares):
            return None
        return sum(kept * items for kept, items in known) / total


def embedding_files(manifest: Manifest) -> list[PublishedFile]:
    """What it takes to embed in a release's space, and to probe that."""
    return [*manifest.embedding_files(), manifest.probes.file]


def make_plan(device: GalleryFile, trust: Trust, target: int, *, int8: bool) -> Plan | None:
    """How to reach release `target` from the active space, or None if no route leads there.

    Kept originals come first where their direct route is expected to keep more than the chain that
    the active vectors have already begun. `int8`: use quantised twins where they are published.
    """
    manifests = dict(trust.manifests())
    active = device.store.active()
    manifests.setdefault(active.spec.release, device.active())
    main = _leg(device, manifests, active, target)
    if main is None:
        return None
    originals = [] if not device.state("keep_original") else _originals(device, manifests, target)
    legs = [leg for leg in originals if _better(leg.route, main.route, manifests)]
    carried = sum(leg.items for leg in legs)
    legs.append(Leg(active, main.route, max(0, main.items - carried)))
    return Plan(manifests[target], tuple(legs), int8 and any(leg.route.quantised for leg in legs))


def _leg(
    device: GalleryFile, manifests: Mapping[int, Manifest], source: SpaceInfo, target: int
) -> Leg | None:
    spec = source.spec
    route = plan_route(manifests, spec.release, target, spec.side_space, directly=spec.space)
    if route is None:
        return None
    return Leg(source, route, device.store.count(spec.space))


def _originals(device: GalleryFile, manifests: Mapping[int, Manifest], target: int) -> list[Leg]:
    kept = [space for space in device.store.spaces() if space.state == "previous"]
    legs = (_leg(device, manifests, s, target) for s in kept if s.spec.release < target)
    return sorted(
        (leg for leg in legs if leg is not None),
        key=lambda leg: (-(leg.route.kept or 0), leg.source.number),
    )


def _better(direct: Route, rest: Route, manifests: Mapping[int, Manifest]) -> bool:
    """Whether a route from the original beats the chain that has led to the active space."""
    if not direct.steps or not rest.steps:
        return False
    original, *way = (direct.releases[0], *rest.releases)
    known = kept_by_chain(manifests)
    chained = known.get((original, *way))
    if chained is None:
        begun = known.get((original, way[0]))
        chained = None if begun is None or rest.kept is None else begun * rest.kept
    return direct.kept is not None and (chained is None or direct.kept > chained)


def estimate_seconds(plan: Plan) -> float:
    """What the upgrade of a plan may take, from the size of its models and this machine's speed.

    A dense layer does one multiply-accumulate for each of its 4-byte weights, so a file's length
    reports an item's work.
    """
    rate = _multiply_accumulates_a_second()
    total = 0.0
    for leg in plan.legs:
        for _, upgrade in leg.route.steps:
            faster = INT8_SPEEDUP if plan.int8 and upgrade.int8_file is not None else 1.0
            total += leg.items * upgrade.file.length / 4 / rate / faster
        total += leg.items / ROWS_A_SECOND
    return total


def _multiply_accumulates_a_second() -> float:
    side = 1024
    matrix = np.ones((side, side), np.float32)
    matrix @ matrix
    started = time.perf_counter()
    matrix @ matrix
    return float(side**3 / (time.perf_counter() - started))
