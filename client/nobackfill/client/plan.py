"""What a sync would do, and what it needs on the device: routes, downloads, trials of models."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Output
from nobackfill.client.photos import threads
from nobackfill.digests import sha256_file
from nobackfill.errors import UnfitError, VerificationError
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.models import CHUNK
from nobackfill.release.paths import manifest_path
from nobackfill.release.probes import check_probes
from nobackfill.release.routes import Route, kept_by_chain, plan_route
from nobackfill.release.trial import try_release
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
class SyncPlan:
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


def make_plan(device: GalleryFile, trust: Trust, target: int, *, int8: bool) -> SyncPlan | None:
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
    return SyncPlan(
        manifests[target], tuple(legs), int8 and any(leg.route.quantised for leg in legs)
    )


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


def estimate_seconds(plan: SyncPlan) -> float:
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


def missing_files(models: Path, files: Iterable[PublishedFile]) -> list[PublishedFile]:
    """Those of `files` that are not on the device, or not as they were published."""
    return [file for file in files if not _is_here(models, file)]


def _is_here(models: Path, file: PublishedFile) -> bool:
    path = models / file.path
    return (
        path.is_file() and path.stat().st_size == file.length and sha256_file(path) == file.sha256
    )


def download_files(
    models: Path, trust: Trust, files: Iterable[PublishedFile], output: Output
) -> int:
    """Bring what is missing; its bytes. Raises VerificationError, UnavailableError."""
    wanted = missing_files(models, files)
    total = sum(file.length for file in wanted)
    done = 0
    with output.progress("downloading") as advance:
        for file in wanted:
            trust.download(file.path, models)
            done += file.length
            advance(done, total)
    return total


def try_plan(device: GalleryFile, plan: SyncPlan) -> None:
    """Try every model of a plan in a child with limits, golden probes included.

    Which files passed this version's trial is remembered by their digests, as it takes longer than
    the rest of a small sync. Raises UnfitError with the reason.
    """
    version_of_trial = f"nobackfill {version('nobackfill')}, {CHUNK} rows"
    passed = set(device.state("tried", {}).get(version_of_trial, []))
    used: dict[int, tuple[Manifest, set[int]]] = {plan.target.release: (plan.target, set())}
    for leg in plan.legs:
        for manifest, upgrade in leg.route.steps:
            used.setdefault(manifest.release, (manifest, set()))[1].add(upgrade.from_release)
    for manifest, sources in used.values():
        here = {
            file.sha256
            for file in _tried(manifest, sources)
            if (device.models / file.path).is_file()
        }
        check_models(device.models, manifest, sources, tried=here <= passed)
        passed |= here
    device.store.state_set({"tried": {version_of_trial: sorted(passed)}})


def _tried(manifest: Manifest, upgrades_from: set[int]) -> Iterator[PublishedFile]:
    """The files that a trial of these upgrades loads, if they are here."""
    yield from embedding_files(manifest)
    for upgrade in manifest.upgrades:
        if upgrade.from_release in upgrades_from:
            yield upgrade.file
            if upgrade.int8_file is not None:
                yield upgrade.int8_file


def check_models(
    models: Path, manifest: Manifest, upgrades_from: set[int], *, tried: bool = False
) -> None:
    """The same for one release's encoders and some of its upgrades; what was `tried` in a child
    before is probed in this process. Raises UnfitError."""
    try:
        check = check_probes if tried else try_release
        check(models, manifest, upgrades=upgrades_from, threads=threads())
    except VerificationError as error:
        raise UnfitError(f"release {manifest.release}: {error}") from error


def manifest_digest(trust: Trust, release: int) -> str:
    """The signed digest of a release's manifest."""
    return trust.target(manifest_path(release)).hashes["sha256"]


def tidy_models(device: GalleryFile) -> int:
    """Remove published files that no space of the gallery needs; bytes freed.

    Upgrades are needed while they run only; an unfinished staging space keeps everything.
    """
    spaces = device.store.spaces()
    if any(space.state == "staging" for space in spaces):
        return 0
    needed = {
        file.path
        for space in spaces
        for file in embedding_files(device.manifest(space.spec.release))
    }
    freed = 0
    models = device.models
    kept = [*models.rglob("*.onnx"), *models.rglob("tokenizer.json"), *models.glob("*.npz")]
    for path in sorted(kept):
        if path.relative_to(models).as_posix() not in needed:
            freed += path.stat().st_size
            durable.remove_tree(path)
    for part in sorted(models.rglob("*.part")):
        freed += part.stat().st_size
        durable.remove_tree(part)
    for folder in sorted((p for p in models.rglob("*") if p.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            durable.remove_tree(folder)
    return freed
