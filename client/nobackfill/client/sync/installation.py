"""Bringing a release to the device: downloads, and a trial of its models on this runtime."""

from collections.abc import Iterable, Iterator
from importlib.metadata import version
from pathlib import Path

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Output
from nobackfill.client.photos.encoding import threads
from nobackfill.client.sync.plan import Plan, embedding_files
from nobackfill.digests import sha256_file
from nobackfill.errors import UnfitError, VerificationError
from nobackfill.release import paths
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.models import CHUNK
from nobackfill.release.probes import check_probes
from nobackfill.release.trial import try_release
from nobackfill.release.trust.trust import Trust


def missing(models: Path, files: Iterable[PublishedFile]) -> list[PublishedFile]:
    """Those of `files` that are not on the device, or not as they were published."""
    return [file for file in files if not _is_here(models, file)]


def _is_here(models: Path, file: PublishedFile) -> bool:
    path = models / file.path
    return (
        path.is_file() and path.stat().st_size == file.length and sha256_file(path) == file.sha256
    )


def download(models: Path, trust: Trust, files: Iterable[PublishedFile], output: Output) -> int:
    """Bring what is missing; its bytes. Raises VerificationError, UnavailableError."""
    wanted = missing(models, files)
    total = sum(file.length for file in wanted)
    done = 0
    with output.progress("downloading") as advance:
        for file in wanted:
            trust.download(file.path, models)
            done += file.length
            advance(done, total)
    return total


def check(device: GalleryFile, plan: Plan) -> None:
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


def digest_of(trust: Trust, release: int) -> str:
    """The signed digest of a release's manifest."""
    return trust.target(paths.manifest_path(release)).hashes["sha256"]


def tidy(device: GalleryFile) -> int:
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
