"""Follow a publication: open its source, verify, plan, upgrade into a staging space, flip.

A kill at any moment leaves the gallery wholly in the old space or wholly in the new one. The next
sync resumes. The old space stays, so that `rollback` can return to it. It is dropped when the
release is confirmed: by `gc`, or by a sync at least a week later that finds nothing newer. The
gallery stores five numbers about its last sync, which `report` can send.

Backfill is optional: it re-embeds the items with the least certain upgrades from their images.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from tuf.api.exceptions import DownloadError, DownloadHTTPError, SlowRetrievalError

from nobackfill import durable
from nobackfill.client.gallery_file import Failure, GalleryFile, is_gateway_address
from nobackfill.client.output import Output, format_bytes
from nobackfill.client.photos import ReleaseEncoder, local_image
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    DamagedError,
    DeadlineError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    OutOfRangeError,
    PreconditionError,
    UnavailableError,
    UnfitError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.sqlite_file import StoredItem, vector_table_name
from nobackfill.gallery.staging import Runner, neighbour_overlap, run_upgrade
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.models import CHUNK_ROWS, Upgraded, count_cores
from nobackfill.release.paths import manifest_path
from nobackfill.release.probes import check_probes
from nobackfill.release.routes import (
    Route,
    explain_duplicate_space,
    open_route,
    plan_route,
    retention_by_chain,
)
from nobackfill.release.trial import try_release
from nobackfill.release.trust.trust import READ_TIMEOUT_SECONDS, Fetcher, Trust, fetcher_for
from nobackfill.vectors import Vectors

if TYPE_CHECKING:
    from nobackfill.client.vault.transfer import VaultReader
    from nobackfill.wire.gateway import Gateway

# How much faster quantised upgrades run than fp32 ones, and how many rows of 512 + 512 bytes are
# read and written in a second. Both measured with onnxruntime and SQLite on two cores.
INT8_SPEEDUP = 3.5
ROWS_A_SECOND = 150_000
_BATCH = 32
# How often a sync restarts because other commands changed the gallery during it.
_TRIES = 3
# How long a release must serve before a sync that finds nothing newer drops the previous space.
_CONFIRMED_AFTER = timedelta(days=7)
# How long a sync waits for another command to release the change lock.
_CHANGE_SECONDS = 60.0


def normalise_source(source: str) -> str:
    """Return the address of a publication in the form that galleries store.

    Args:
        source: a gateway (grpc(s)://HOST:PORT), a static host (http(s)://…) or an existing folder;
            empty: the current folder.

    Returns:
        The absolute path of a folder, with links resolved; any other address unchanged. Nothing is
        fetched: an address may lead to no publication.

    Raises:
        ConfigurationError: the folder does not exist, or the scheme is unknown.
        OSError: this user may not look into the folder.
    """
    if is_gateway_address(source) or source.startswith(("http://", "https://")):
        return source
    folder = Path(source).resolve()
    if "://" in source or not folder.is_dir():
        raise ConfigurationError(
            "the address of a publication: expected grpc://HOST:PORT, grpcs://HOST:PORT, "
            f"http(s)://… or an existing publication folder, got {source!r}; correct the address"
        )
    return str(folder)


@contextmanager
def open_source(source: str) -> Iterator[tuple[Fetcher, str]]:
    """Open the source of a publication; a connection to a gateway is closed at the end.

    Args:
        source: an address as `normalise_source` returns it.

    Yields:
        The fetcher of its files, and the base URL in front of their published paths.

    Raises:
        ConfigurationError: the address of the gateway, or its token or certificate, is not valid.
            Nothing is fetched yet, so a source that does not answer raises no error here.
    """
    if not is_gateway_address(source):
        yield fetcher_for(source)
        return
    # Imported here: most sources need no gRPC.
    from nobackfill.wire.gateway import Gateway

    with Gateway(source) as gateway:
        fetcher = GatewayFetcher(gateway)
        yield fetcher, fetcher.base_url


_HTTP = {NotFoundError: 404, OutOfRangeError: 416}


class GatewayFetcher:
    """Fetch files of a gateway's publication; a URL is `base_url` + published path."""

    def __init__(self, gateway: "Gateway") -> None:
        self._gateway = gateway
        self.base_url = f"{gateway.address}/"

    def fetch_from(self, url: str, offset: int) -> Iterator[bytes]:
        """Yield the bytes of a published file, in pieces.

        Each stream has a deadline of READ_TIMEOUT_SECONDS. A stream that delivered bytes before its
        deadline is resumed where it ended, so a slow file has no time limit here. An error may
        follow pieces that were yielded.

        Args:
            url: `base_url` + published path.
            offset: the first byte, from 0; at the end of the file nothing is yielded.

        Raises:
            NotPermittedError: the gateway refuses the call.
            DownloadHTTPError: no such file (404), or `offset` lies past its end (416).
            SlowRetrievalError: no byte came within READ_TIMEOUT_SECONDS.
            DownloadError: the download failed otherwise, such as a gateway that does not answer or
                is busy.
            ValueError: the connection to the gateway was closed.
        """
        path = url.removeprefix(self.base_url)
        position = offset
        while True:
            started = position
            try:
                for chunk in self._gateway.fetch_file(path, position, seconds=READ_TIMEOUT_SECONDS):
                    position += len(chunk)
                    yield chunk
                return
            except NotPermittedError:
                # Not a network failure: trying again does not help.
                raise
            except DeadlineError as error:
                if position == started:
                    raise SlowRetrievalError(
                        f"{path}: no bytes arrived for {READ_TIMEOUT_SECONDS:g} s"
                    ) from error
            except NobackfillError as error:
                status = _HTTP.get(type(error))
                text = f"{path}: {error}"
                raise (
                    DownloadError(text) if status is None else DownloadHTTPError(text, status)
                ) from error


@dataclass(frozen=True)
class SyncLeg:
    """A part of a plan: the items of one source space, and their route into the target space.

    A route without steps copies the vectors unchanged: the target searches that space directly.

    Attributes:
        source: the space whose vectors are read.
        route: the upgrades, in order.
        item_count: the expected number of items, from 0.
    """

    source: SpaceInfo
    route: Route
    item_count: int


@dataclass(frozen=True)
class SyncPlan:
    """The steps of a sync from the active release to another one.

    Attributes:
        target: the manifest of the release to reach.
        legs: in execution order; an item goes with the first leg whose source space holds it.
        int8: whether at least one upgrade runs from its quantised file.
    """

    target: Manifest
    legs: tuple[SyncLeg, ...]
    int8: bool

    def files(self) -> list[PublishedFile]:
        """List the published files that the plan needs, each once.

        Returns:
            The target's encoders and probes, and the upgrades with the probes of their releases, in
            this order. With `int8`, an upgrade that was published quantised counts by that file
            alone.
        """
        files = {file.path: file for file in embedding_files(self.target)}
        for leg in self.legs:
            for manifest, upgrade in leg.route.steps:
                model = upgrade.int8_file if self.int8 and upgrade.int8_file else upgrade.file
                for file in (manifest.probes.file, model):
                    files[file.path] = file
        return list(files.values())

    def expected_retention(self) -> float | None:
        """Return the mean share of new/new mAP that the routes preserve, weighted by items.

        Returns:
            At least 0, as the publisher measured it; above 1 if migrated items were found better
            than re-embedded ones. None if no items are expected, or a route with
            items was not measured.
        """
        legs = [leg for leg in self.legs if leg.item_count]
        shares = [leg.route.retention for leg in legs if leg.route.retention is not None]
        if not legs or len(shares) < len(legs):
            return None
        total = sum(leg.item_count for leg in legs)
        return sum(s * leg.item_count for s, leg in zip(shares, legs, strict=True)) / total


def embedding_files(manifest: Manifest) -> list[PublishedFile]:
    """List the published files of a release's encoders and of its golden probes.

    Returns:
        The probes come last. Upgrades are not among them. A release without a model has only its
        probes.
    """
    return [*manifest.embedding_files(), manifest.probes.file]


def plan_sync(
    device: GalleryFile, trust: Trust, target_release: int, *, int8: bool
) -> SyncPlan | None:
    """Plan how the gallery reaches a release from its active space; changes nothing in the gallery.

    Original vectors, where the gallery stores them, come first if their direct route is expected to
    preserve more quality than the chain that the active vectors have passed.

    Args:
        device: the gallery.
        trust: the verified publication; manifests that it lacks are downloaded.
        target_release: the number of the release to reach.
        int8: use quantised upgrades where they are published.

    Returns:
        The plan; its last leg starts from the active space. None if no route leads to
        `target_release`, also where `target_release` is older than the active release.

    Raises:
        NotFoundError: `target_release` is withdrawn, unfit, shares its space with an older release,
            or is not published; or the publication was never fetched; or the gallery was closed.
        VerificationError: a manifest or the gallery file is damaged, or the source sends another
            file than was signed.
        UnavailableError: the source does not answer.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: a manifest cannot be written.
        NotPermittedError: the gateway refuses the token.
    """
    manifests = dict(trust.manifests())
    active = device.store.active()
    if active.spec.release not in manifests:
        manifests[active.spec.release] = device.manifest(active.spec.release)
    main = _leg(device, manifests, active, target_release)
    if main is None:
        return None
    originals = (
        [] if not device.state("keep_original") else _originals(device, manifests, target_release)
    )
    legs = [leg for leg in originals if _better(leg.route, main.route, manifests)]
    from_originals = sum(leg.item_count for leg in legs)
    legs.append(SyncLeg(active, main.route, max(0, main.item_count - from_originals)))
    return SyncPlan(
        manifests[target_release], tuple(legs), int8 and any(leg.route.has_int8 for leg in legs)
    )


def _leg(
    device: GalleryFile, manifests: Mapping[int, Manifest], source: SpaceInfo, target: int
) -> SyncLeg | None:
    spec = source.spec
    # A device runs no query adapter: vectors that only an adapter searches cannot stay.
    adapted = target in manifests and manifests[target].adapter_to(spec.space) is not None
    directly = None if adapted else spec.space
    route = plan_route(
        manifests, spec.release, target, spec.side_space, direct_search_space=directly
    )
    if route is None:
        return None
    return SyncLeg(source, route, device.store.count(spec.space))


def _originals(
    device: GalleryFile, manifests: Mapping[int, Manifest], target: int
) -> list[SyncLeg]:
    previous = [space for space in device.store.spaces() if space.state == "previous"]
    legs = (_leg(device, manifests, s, target) for s in previous if s.spec.release < target)
    return sorted(
        (leg for leg in legs if leg is not None),
        key=lambda leg: (-(leg.route.retention or 0), leg.source.table_number),
    )


def _better(direct: Route, remaining: Route, manifests: Mapping[int, Manifest]) -> bool:
    """Return whether a route from the original vectors beats their chain through the active space.

    `remaining` is the part of that chain that leads from the active space to the target.
    """
    if not direct.steps or not remaining.steps:
        return False
    original, *chain = (direct.releases[0], *remaining.releases)
    shares = retention_by_chain(manifests)
    chained = shares.get((original, *chain))
    if chained is None:
        first = shares.get((original, chain[0]))
        if first is not None and remaining.retention is not None:
            chained = first * remaining.retention
    return direct.retention is not None and (chained is None or direct.retention > chained)


def estimate_seconds(plan: SyncPlan) -> float:
    """Estimate the seconds that the upgrade of a plan takes on this machine, without downloads.

    Runs a matrix product for some milliseconds to measure the machine. A dense layer does one
    multiply-accumulate for each of its 4-byte weights. The length of a model file therefore gives
    the work for one item.

    Returns:
        Seconds, 0 for a plan without items. They differ from call to call.
    """
    rate = _multiply_accumulates_a_second()
    total = 0.0
    for leg in plan.legs:
        for _, upgrade in leg.route.steps:
            faster = INT8_SPEEDUP if plan.int8 and upgrade.int8_file is not None else 1.0
            total += leg.item_count * upgrade.file.length / 4 / rate / faster
        total += leg.item_count / ROWS_A_SECOND
    return total


def _multiply_accumulates_a_second() -> float:
    side = 1024
    matrix = np.ones((side, side), np.float32)
    matrix @ matrix
    started = time.perf_counter()
    matrix @ matrix
    return float(side**3 / (time.perf_counter() - started))


def missing_files(model_folder: Path, files: Iterable[PublishedFile]) -> list[PublishedFile]:
    """Return the published files that a folder lacks, or holds with another length or SHA-256.

    Reads every file of the right length.

    Args:
        model_folder: the folder.
        files: the files that it should hold.

    Returns:
        The files in the order of `files`; empty if none is missing. A link is followed.

    Raises:
        OSError: a file cannot be read.
    """
    return [
        file
        for file in files
        if not (path := model_folder / file.path).is_file()
        or path.stat().st_size != file.length
        or sha256_file(path) != file.sha256
    ]


def download_files(
    model_folder: Path, trust: Trust, files: Iterable[PublishedFile], output: Output
) -> int:
    """Download those of the given files that `model_folder` lacks or holds damaged.

    Each file is durable and verified when it appears. Files that are complete before an error stay.
    An interrupted download is resumed later. The caller holds the sync lock, because overlapping
    downloads would mix their bytes.

    Args:
        model_folder: the folder of the downloaded files.
        trust: the verified publication.
        files: the files that must lie in `model_folder` afterwards.
        output: where to write progress.

    Returns:
        The bytes of the files that were missing, 0 if no file was. A resumed download counts as a
        whole.

    Raises:
        VerificationError: a file differs from its signed digest.
        NotFoundError: a file is not published.
        UnavailableError: the source does not answer.
        CannotWriteError: the disk is full or read-only.
        NotPermittedError: the gateway refuses the token.
        OSError: a file in `model_folder` cannot be read.
    """
    to_download = missing_files(model_folder, files)
    total = sum(file.length for file in to_download)
    finished = 0
    with output.progress("downloading") as advance:
        for file in to_download:
            trust.download(file.path, model_folder)
            finished += file.length
            advance(finished, total)
    return total


def try_plan(device: GalleryFile, plan: SyncPlan) -> None:
    """Try every downloaded model of a plan in a child process with limits, and run its probes.

    The gallery remembers which files passed the trial of this program version, because a trial
    takes longer than the other steps of a small sync. Such files only run their golden probes, in
    this process. Results of other program versions are forgotten.

    Args:
        device: the gallery; the digests of the files that passed are added to its state.
        plan: the plan; its files must be downloaded.

    Raises:
        UnfitError: a model fails, or needs the extra `text`, which is not installed; the error
            gives the reason. Nothing is remembered then.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        ConfigurationError: the models passed a trial before, and the extra `text`, which they need,
            is not installed any more.
        OSError: a child process cannot be started.
        NotFoundError: the gallery was closed.
    """
    version_of_trial = f"nobackfill {version('nobackfill')}, {CHUNK_ROWS} rows"
    passed_files = set(device.state("tried", {}).get(version_of_trial, []))
    trials: dict[int, tuple[Manifest, set[int]]] = {plan.target.release: (plan.target, set())}
    for leg in plan.legs:
        for manifest, upgrade in leg.route.steps:
            trials.setdefault(manifest.release, (manifest, set()))[1].add(upgrade.from_release)
    for manifest, sources in trials.values():
        present = {
            file.sha256
            for file in _trial_files(manifest, sources)
            if (device.models / file.path).is_file()
        }
        check_models(device.models, manifest, sources, trial_passed=present <= passed_files)
        passed_files |= present
    device.store.update_state({"tried": {version_of_trial: sorted(passed_files)}})


def _trial_files(manifest: Manifest, upgrades_from: set[int]) -> Iterator[PublishedFile]:
    """Yield the files that a trial of these upgrades loads."""
    yield from embedding_files(manifest)
    for upgrade in manifest.upgrades:
        if upgrade.from_release in upgrades_from:
            yield upgrade.file
            if upgrade.int8_file is not None:
                yield upgrade.int8_file


def check_models(
    model_folder: Path, manifest: Manifest, upgrades_from: set[int], *, trial_passed: bool = False
) -> None:
    """Check the encoders of one release, and its upgrades from some earlier releases.

    Loads each model in a child process with limits of memory and time, and compares its outputs
    with the release's golden probes. With `trial_passed`, there are no limits. Nothing is
    remembered.

    Args:
        model_folder: the folder of the downloaded files.
        manifest: the manifest of the release.
        upgrades_from: source releases of the upgrades to check; empty: none.
        trial_passed: the same files passed a trial before; run only the probes, in this process.

    Raises:
        UnfitError: a file is missing or damaged, or a model fails its trial or its probes, or it
            needs the extra `text`, which is not installed. The message begins with the release.
        ConfigurationError: `trial_passed`, and the extra `text`, which the release needs, is not
            installed any more.
        OSError: a child process cannot be started.
    """
    try:
        check = check_probes if trial_passed else try_release
        check(model_folder, manifest, upgrades=upgrades_from, threads=count_cores())
    except VerificationError as error:
        raise UnfitError(f"release {manifest.release}: {error}") from error


def manifest_digest(trust: Trust, release: int) -> str:
    """Return the signed SHA-256 of a release's manifest, as 64 hex digits.

    Args:
        trust: the verified publication.
        release: the number of the release.

    Raises:
        NotFoundError: the release is not published, or the publication was never fetched.
    """
    return trust.signed_entry(manifest_path(release)).hashes["sha256"]


def remove_unused_models(device: GalleryFile) -> int:
    """Remove downloaded models that no space of the gallery uses, and unfinished downloads.

    Upgrades are needed only while they run. Nothing is removed while the gallery has a staging
    space, because the next sync continues it. Empty folders are removed too. Manifests and trusted
    metadata stay. Call it under the sync lock, or files of a running download disappear.

    Returns:
        The bytes that were freed.

    Raises:
        NotFoundError: the release of a space is not installed, or the gallery was closed.
        VerificationError: a manifest or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: a file cannot be removed; earlier ones are gone. Or the gallery cannot be
            opened.
        OSError: a folder cannot be read, or a file disappears meanwhile.
    """
    spaces = device.store.spaces()
    if any(space.state == "staging" for space in spaces):
        return 0
    in_use = {
        file.path
        for space in spaces
        for file in embedding_files(device.manifest(space.spec.release))
    }
    freed = 0
    models = device.models
    downloads = [*models.rglob("*.onnx"), *models.rglob("tokenizer.json"), *models.glob("*.npz")]
    surplus = [path for path in downloads if path.relative_to(models).as_posix() not in in_use]
    for path in sorted([*surplus, *models.rglob("*.part")]):
        freed += path.stat().st_size
        durable.remove_tree(path)
    for folder in sorted((p for p in models.rglob("*") if p.is_dir()), reverse=True):
        if not any(folder.iterdir()):
            durable.remove_tree(folder)
    return freed


def re_embed(device: GalleryFile, manifest: Manifest, max_images: int, output: Output) -> int:
    """Re-embed the items that need it most, from their images, in a release's space.

    Items without a vector in that space come first, then migrated ones by falling uncertainty. An
    item whose vector has no uncertainty is never taken. See `re_embed_items` for the images, and
    for items whose image is missing. Each batch of 32 is durable before the next begins.

    Args:
        device: the gallery.
        manifest: the release of the space.
        max_images: the most items to take, those without an image included; 0 or less does nothing.
        output: where to write progress, and a note if no item can be taken.

    Returns:
        The number of items that got a new vector.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space.
        NoEncoderError: the release embeds no images.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
        OSError: the part of an earlier download from the vault cannot be read.
    """
    if max_images <= 0:
        return 0
    space = manifest.space
    items = staging.items_without_vector(device.store, space, limit=max_images)
    items += staging.least_certain_items(device.store, space, limit=max_images - len(items))
    if not items:
        output.print_note(
            f"release {manifest.release}: no upgraded item has an uncertainty, so none is "
            "re-embedded"
        )
        return 0
    return re_embed_items(device, manifest, items, output)


def re_embed_items(
    device: GalleryFile, manifest: Manifest, items: Sequence[StoredItem], output: Output
) -> int:
    """Re-embed the given items from their images, in a release's space.

    An image comes from its file if the file is unchanged, else from the vault. An item keeps its
    vector if its image is missing or cannot be embedded; a note gives the reason. Each batch is
    durable before the next begins. The models are opened also if `items` is empty, so call it once
    for many items. An item whose vault cannot be read is left as it is, and the vault is not asked
    again.

    Args:
        device: the gallery.
        manifest: the release of the space.
        items: any items of the gallery; items that were deleted meanwhile are skipped.
        output: where to write progress and notes.

    Returns:
        The number of items that got a new vector; its origin is "re-embedded", whatever vector was
        there.

    Raises:
        IncompatibleSpaceError: the gallery does not have the space.
        NoEncoderError: the release embeds no images.
        VerificationError: a model file or the gallery file is damaged. A vault that returns wrong
            bytes only causes a note.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
        OSError: the part of an earlier download from the vault cannot be read.
    """
    # Imported here: most syncs need neither gRPC nor age.
    from nobackfill.client.vault.transfer import VaultReader

    encoder = ReleaseEncoder(device.models, manifest)
    count = 0
    with output.progress("re-embedding") as advance, closing(VaultReader(device)) as vault:
        images = _OriginalImages(vault, output)
        for start in range(0, len(items), _BATCH):
            batch = {
                item.label: pixels
                for item in items[start : start + _BATCH]
                if (pixels := images.pixels_of(item, encoder)) is not None
            }
            count += _write(device, encoder, batch)
            advance(start + _BATCH, len(items))
    return count


def _write(device: GalleryFile, encoder: ReleaseEncoder, batch: dict[int, Pixels]) -> int:
    if not batch:
        return 0
    try:
        vectors = encoder.embed_with_side(list(batch.values()))
    except UnusableOutputError as error:
        good = [label for row, label in enumerate(batch) if row not in error.unusable_rows]
        return _write(device, encoder, {label: batch[label] for label in good})
    labels = staging.write_vectors(
        device.store,
        vectors.space,
        np.fromiter(batch, np.int64),
        vectors.embedding,
        side=vectors.side_information,
        origin="re-embedded",
        replace=True,
    )
    return len(labels)


class _OriginalImages:
    """Images of items, from their files or from the vault, as long as the vault answers."""

    def __init__(self, vault: "VaultReader", output: Output) -> None:
        self._vault: VaultReader | None = vault
        self._output = output

    def pixels_of(self, item: StoredItem, encoder: ReleaseEncoder) -> Pixels | None:
        """Return the image at the encoder's size; None if it is missing or cannot be decoded."""
        image = self.of(item)
        try:
            return None if image is None else encoder.pixels(image)
        except InvalidInputError as error:
            self._output.print_note(f"{item.id}: {error}")
        return None

    def of(self, item: StoredItem) -> bytes | None:
        """Return the image that an item was made from; None if it is missing."""
        image = local_image(item)
        if image is not None or self._vault is None:
            return image
        try:
            return self._vault.read_image(item.id)
        except (UnavailableError, NotPermittedError, ConfigurationError) as error:
            self._output.print_note(f"no images from the vault: {error}")
            self._vault.close()
            self._vault = None
        except (VerificationError, NotFoundError) as error:
            self._output.print_note(f"{item.id}: {error}")
        return None


@dataclass(frozen=True)
class MigrationOutcome:
    """The result of `migrate`.

    Attributes:
        reembedded_count: how many items were re-embedded from their images.
        left_behind_count: how many items have no route into the target's space. If it is not 0,
            nothing was flipped.
    """

    reembedded_count: int
    left_behind_count: int


def migrate(
    device: GalleryFile, plan: SyncPlan, max_images: int, state: dict[str, Any], output: Output
) -> MigrationOutcome:
    """Fill the target's space along a plan, re-embed some items, and flip to that space.

    Vectors that earlier runs wrote are reused, and images added during the run are migrated too.
    Staging spaces of other releases are dropped first.

    The target's space becomes active in one transaction, unless items stay behind. The caller holds
    the change lock. After another error than the first two below, the vectors that were written
    stay for the next run.

    Args:
        device: the gallery.
        plan: the plan; its files must be downloaded.
        max_images: the most items to re-embed from their images, as `re_embed`; 0: none.
        state: values for the gallery's state, written in the transaction of the flip.
        output: where to write progress and notes.

    Raises:
        UnusableOutputError: an upgrade returns no usable vector for an item of this gallery. The
            target's space is dropped.
        UnfitError: a model of the release fails. The target's space is dropped.
        NoEncoderError: `max_images` is not 0, and the target embeds no images.
        VerificationError: a model file or the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
        IncompatibleSpaceError: a source space of the plan was dropped since it was made.
        InvalidInputError: the target's space exists with another dimension, metric or side space.
        OSError: the part of an earlier download from the vault cannot be read.
    """
    target = SpaceSpec.of(plan.target)
    for space in device.store.spaces():
        # Staged for a release that a newer one has replaced.
        if space.state == "staging" and space.spec.space != target.space:
            staging.drop_space(device.store, space.spec.space)
    re_embedded = 0
    while True:
        try:
            stuck = _fill(device, plan, target, output)
        except (UnusableOutputError, UnfitError):
            # The release is held back, so its vectors of the other items are useless.
            staging.drop_space(device.store, target.space)
            raise
        re_embedded += re_embed(device, plan.target, max_images - re_embedded, output)
        stuck_items = staging.count_items_without_vector(device.store, target.space)
        if 0 < stuck_items <= stuck:
            return MigrationOutcome(re_embedded, stuck_items)
        try:
            staging.flip(device.store, target.space, state=state)
        except PreconditionError:
            # Images were added after the last chunk: migrate them too.
            continue
        return MigrationOutcome(re_embedded, 0)


def _fill(device: GalleryFile, plan: SyncPlan, target: SpaceSpec, output: Output) -> int:
    """Run the legs; return the number of items that no leg could migrate."""
    stuck = 0
    for leg in plan.legs:
        runner: Runner = _CopyRunner(leg.source.spec.side_space == target.side_space)
        if leg.route.steps:
            runner = open_route(device.models, leg.route, count_cores(), int8=plan.int8)
        with output.progress(f"upgrading to release {target.release}") as advance:
            try:
                outcome = run_upgrade(
                    device.store,
                    runner,
                    target,
                    source_space=leg.source.spec.space,
                    origin="upgraded" if leg.route.steps else "direct",
                    transform_ahead=True,
                    on_progress=lambda progress: advance(
                        progress.complete_count, progress.item_count
                    ),
                )
            except (DamagedError, UnusableOutputError):
                raise
            except VerificationError as error:
                raise UnfitError(f"release {target.release}: {error}") from error
        stuck = outcome.left_behind_count
    return stuck


@dataclass(frozen=True)
class _CopyRunner:
    """A runner that copies vectors unchanged, into a space that searches theirs directly."""

    keeps_side: bool
    reads_side: ClassVar[bool] = False

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        return Upgraded(embedding, side if self.keeps_side else None, None)


def record_sync(
    device: GalleryFile,
    release: int,
    failure: Failure,
    seconds: float = 0.0,
    spaces: tuple[SpaceSpec, SpaceSpec] | None = None,
) -> float | None:
    """Record in the gallery how the sync to a release went, for `report`.

    The previous record is replaced.

    Args:
        device: the gallery.
        release: the release that the sync tried.
        failure: the reason why the sync changed nothing, or "none".
        seconds: the duration of the upgrade; it is stored in seconds, rounded to milliseconds.
        spaces: the space before the upgrade and the one after it, between which to measure the
            share of preserved nearest neighbours; None: do not measure it.

    Returns:
        The share of preserved nearest neighbours, 0 to 1, over up to 1,000 random items that both
        spaces hold. None if it was not measured, or if at most 10 items are in both spaces.

    Raises:
        IncompatibleSpaceError: the gallery does not have one of `spaces`.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
    """
    share = None
    if spaces is not None:
        share = neighbour_overlap(partial(staging.sample_pairs, device.store), *spaces)
    device.store.update_state(
        {
            "last_sync": {
                "release": release,
                "probes_passed": failure != "refused",
                "seconds": round(seconds, 3),
                "neighbours_kept": share,
                "failure": failure,
            }
        }
    )
    return share


def send_report(device: GalleryFile, address: str | None) -> dict[str, Any]:
    """Send the summary of the last sync to a gateway, once. It contains no vector and no id.

    It also waits for the gateway, at most 30 seconds, with retries. A repeated call sends the same
    summary again, and a retry after a lost answer may count twice.

    Args:
        device: the gallery.
        address: the gateway, grpc(s)://HOST:PORT; None sends nothing.

    Returns:
        The summary, by the keys of `report --json`: `release`, `probes_passed`, `seconds`,
        `neighbours_kept` (0 to 1 or None) and `failure`.

    Raises:
        NotFoundError: no sync to another release was tried yet, or the gallery was closed.
        DamagedError: the gallery file is damaged.
        ConfigurationError: `address` is not the address of a gateway, or the token or certificate
            cannot be read.
        UnavailableError: the gateway does not answer.
        NotPermittedError: the gateway refuses the call.
        BusyError: another process holds the gallery file, or the gateway has too much work.
        InvalidInputError: the gateway refuses the summary.
        CannotWriteError: the file cannot be opened, or the disk fails.
        DeadlineError: the gateway does not answer in time.
    """
    summary: dict[str, Any] | None = device.state("last_sync")
    if summary is None:
        raise NotFoundError(
            "no sync has tried another release yet, so there is nothing to report; run "
            "`edge-client sync` first"
        )
    if address is None:
        return summary
    if not is_gateway_address(address):
        raise ConfigurationError(
            "--to: expected the address of a gateway, grpc(s)://HOST:PORT, got "
            f"{address!r}; correct it"
        )
    from nobackfill.v1 import release_pb2 as pb
    from nobackfill.wire.gateway import Gateway

    failure = summary["failure"].upper()
    message = pb.ReportSyncRequest(
        release=summary["release"],
        probes_passed=summary["probes_passed"],
        seconds=summary["seconds"],
        neighbours_kept=summary["neighbours_kept"],
        failure="SYNC_FAILURE_UNSPECIFIED" if failure == "NONE" else f"SYNC_FAILURE_{failure}",
    )
    with Gateway(address) as gateway:
        gateway.report_sync(message)
    return summary


def return_to_previous_space(device: GalleryFile, state: dict[str, Any]) -> int:
    """Make the space before the last upgrade the active one again.

    The upgraded vectors stay in a staging space, so that a later sync is fast. Nothing is computed.

    Args:
        device: the gallery; the caller holds its change lock.
        state: values for the gallery's state, written in the same transaction.

    Returns:
        The release that is active now.

    Raises:
        NotFoundError: there is no previous space; a later sync or `gc` confirmed the upgrade; or
            the gallery was closed.
        PreconditionError: some items have no vector in the previous space; nothing was changed.
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
    """
    previous = device.previous_space()
    if previous is None:
        raise NotFoundError(
            "a rollback is not possible: the gallery was not upgraded yet, was rolled back "
            "already, or a later `edge-client sync` or `gc` deleted the vectors of the previous "
            "release; to move on, run `edge-client sync`, after a rollback with --retry"
        )
    staging.rollback(device.store, state={**state, "return_to": None})
    return previous.spec.release


def roll_back(device: GalleryFile) -> tuple[int, int]:
    """Return to the previous release, and hold the present one back on this device.

    Later syncs skip the present release until they are told to retry, or it is published again with
    another manifest. A sync that waits for its source continues from the previous release. This
    does not wait for a sync that writes vectors.

    Returns:
        The release that was active, and the release that is active now.

    Raises:
        NotFoundError: there is no previous space, or the gallery was closed.
        PreconditionError: some items have no vector in the previous space; nothing was changed.
        BusyError: a sync is writing vectors, or another process holds the gallery file.
        DamagedError: the gallery file is damaged.
        CannotWriteError: the disk is full or read-only.
    """
    with device.change_lock():
        release = device.store.active().spec.release
        digest = device.state("installed", {}).get(str(release))
        state = held_back_state(device, release, f"release {release} was rolled back here", digest)
        return release, return_to_previous_space(device, state)


def held_back_state(
    device: GalleryFile, release: int, reason: str, digest: str | None
) -> dict[str, Any]:
    """Return the values of the gallery's state that hold a release back; writes nothing.

    A sync skips a release that is held back.

    Args:
        device: the gallery.
        release: the release.
        reason: a sentence for people.
        digest: SHA-256 of its manifest: a release that is published again under the same number,
            with another manifest, is tried. None: only a retry tries it.

    Returns:
        The whole values of `held_back` and `held_digests`; other releases in them stay. An earlier
        reason of this release is replaced.

    Raises:
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the file cannot be opened, or the disk fails.
        NotFoundError: the gallery was closed.
    """
    digests = {**device.state("held_digests", {}), str(release): digest}
    return {
        "held_back": {**device.state("held_back", {}), str(release): reason},
        "held_digests": digests,
    }


def drop_rollback_spaces(device: GalleryFile, spared_space: str | None = None) -> list[int]:
    """Drop the spaces that only a rollback needs.

    In a gallery that stores originals (`--keep-original`), spaces with vectors that were embedded
    from images stay. Staging spaces and the active one stay. After an error, spaces that were
    dropped before it are gone.

    Args:
        device: the gallery; the caller holds its change lock.
        spared_space: id of a space that a rollback may still need. None: drop all; no rollback is
            possible afterwards.

    Returns:
        The releases of the dropped spaces, oldest space first.

    Raises:
        DamagedError: the gallery file is damaged.
        BusyError: another process holds the gallery file for 5 seconds.
        CannotWriteError: the disk is full or read-only.
        NotFoundError: the gallery was closed.
    """
    if spared_space is None:
        device.store.update_state({"return_to": None})
    dropped = []
    for space in device.store.spaces():
        superfluous = space.state == "previous" and space.spec.space != spared_space
        if superfluous and not (device.state("keep_original") and _has_originals(device, space)):
            staging.drop_space(device.store, space.spec.space)
            dropped.append(space.spec.release)
    return dropped


def _has_originals(device: GalleryFile, space: SpaceInfo) -> bool:
    with device.store.read_snapshot() as connection:
        table = vector_table_name(space.table_number)
        query = f"SELECT 1 FROM {table} WHERE origin = 'native' LIMIT 1"  # noqa: S608
        return connection.execute(query).fetchone() is not None


@dataclass(frozen=True)
class SyncOptions:
    """Options of one sync.

    Attributes:
        dry_run: change nothing; only report what a sync would do.
        backfill: how many of the least certain items to re-embed from their images.
        keep_original: keep vectors embedded from images after an upgrade. None: as before.
        int8: use quantised upgrades where they are published; their measured loss is within the
            release's tolerance.
        retry: also try releases that this device holds back.
        source: another address of the same publication. None: as before.
        join_early: also follow a release that is rolled out to a share of devices without this one.
    """

    dry_run: bool = False
    backfill: int = 0
    keep_original: bool | None = None
    int8: bool = True
    retry: bool = False
    source: str | None = None
    join_early: bool = False


@dataclass
class SyncReport:
    """The result of a sync, or with dry_run its forecast.

    Attributes:
        state: upgraded, up-to-date, planned, rolled-back, or behind. *Behind* means that no newer
            release can be followed; `notes` gives the reason.
        release: the release that is active, or would be.
        from_release: the release that was active at the start.
        routes: the releases of each route, source first.
        items: how many items the gallery has.
        expected_kept: the share of the mAP of re-embedding, 0 to 1, that the publisher measured on
            other images; None if it is unknown.
        neighbours_kept: the share of each item's nearest neighbours, 0 to 1, that this gallery
            preserved; None if it was not measured.
        int8: whether a quantised upgrade was used.
        download_bytes: bytes downloaded, or to download.
        upgrade_seconds: duration of the upgrade, or its estimate.
        re_embedded: how many items were re-embedded from their images.
        left_behind: always 0; older programs read it.
        confirmed: releases whose spaces were dropped, because nothing newer was found for a week.
        notes: sentences for people.
    """

    state: str
    release: int
    from_release: int
    routes: list[list[int]] = field(default_factory=list)
    items: int = 0
    expected_kept: float | None = None
    neighbours_kept: float | None = None
    int8: bool = False
    download_bytes: int = 0
    upgrade_seconds: float = 0.0
    re_embedded: int = 0
    left_behind: int = 0
    confirmed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for --json.

        Returns:
            The fields by name, copied.
        """
        return asdict(self)


def sync(device: GalleryFile, options: SyncOptions, output: Output) -> SyncReport:
    """Bring a gallery to the newest release that it can follow, without the images.

    Searches use the old space until one transaction flips to the new one. A release that fails its
    trial or an upgrade is held back, and the next older one is tried. If the active release was
    withdrawn and no newer one can be followed, the sync returns to the previous release. If a
    rollback or gc runs while the sync waits for its source, the sync restarts from the result.
    Blocks until it is complete. It downloads, tries each model in a child process, and writes.

    The metadata versions and lasting options are stored before the first candidate is tried. With
    `dry_run`, only metadata and manifests are downloaded. A sync that finds nothing newer downloads
    missing files, re-embeds as requested, and confirms a release that has served for a week.

    Args:
        device: the gallery.
        options: the options of this sync; with `dry_run` the gallery does not change.
        output: where to write progress and notes.

    Returns:
        A report, or with `dry_run` a forecast. Its `state` is "up-to-date" if no newer release is
        offered to this device, and "behind" if none of the offered ones can be followed. A release
        that is rolled out to other devices only causes a note.

    Raises:
        BusyError: another sync runs (this does not wait), another command holds the change lock for
            60 seconds, other commands keep changing the gallery, or another process holds the
            gallery file.
        ConfigurationError: the source has an unknown form, or its folder does not exist; the token
            or certificate of a gateway cannot be read; or the extra `text`, which a tried release
            needs, is not installed any more.
        VerificationError: the publication fails verification, and nothing was changed; or a file
            of the gallery is damaged.
        UnfitError: this program cannot use a release that a space of the gallery belongs to.
        NotFoundError: nothing is published at the source, or it lacks a release that a space of the
            gallery belongs to.
        NoEncoderError: a backfill was requested, and the release embeds no images.
        NotPermittedError: the gateway refuses the token.
        UnavailableError: the source does not answer; finished downloads stay.
        CannotWriteError: the disk is full or read-only.
        OSError: a file of the models folder cannot be read, or this user may not look into the
            folder of `source`.
    """
    source = normalise_source(options.source) if options.source else device.state("source")
    with device.sync_lock(), open_source(source) as (fetcher, base_url):
        durable.remove_temporary_files(device.models)
        trust = device.trust(fetcher, base_url)
        trust.refresh()
        for space in device.store.spaces():
            # Downloads a manifest again if its file was damaged.
            trust.manifest(space.spec.release)
        if options.dry_run:
            return _Sync(device, trust, options, output).preview()
        for _ in range(_TRIES):
            try:
                return _Sync(device, trust, options, output).follow()
            except _OvertakenError:
                # A rollback that has just happened overrides `retry`.
                options = replace(options, retry=False)
        raise BusyError(
            "other commands changed the gallery during each try of this sync; run `edge-client "
            "sync` again when they have ended"
        )


class _OvertakenError(Exception):
    """Another command changed the spaces or removed files while the sync waited for its source."""


class _Sync:
    def __init__(
        self, device: GalleryFile, trust: Trust, options: SyncOptions, output: Output
    ) -> None:
        self._device = device
        self._trust = trust
        self._options = options
        self._output = output
        # Galleries made by earlier versions have no cohort.
        self._cohort: str = device.state("cohort") or secrets.token_hex(16)
        # The spaces that the plans start from.
        self._spaces = device.store.spaces()
        active = device.store.active().spec.release
        self._report = SyncReport("up-to-date", active, active, items=device.store.count())

    def preview(self) -> SyncReport:
        """Report what `follow` would do; changes nothing but the downloaded metadata."""
        for release in self._candidates():
            if release < self._report.from_release:
                self._report.release, self._report.state = release, "planned"
                break
            plan = self._plan(release)
            if plan is not None:
                missing = missing_files(self._device.models, plan.files())
                self._describe(plan, "planned")
                self._report.download_bytes = sum(file.length for file in missing)
                self._report.upgrade_seconds = round(estimate_seconds(plan), 3)
                break
        return self._report

    def follow(self) -> SyncReport:
        """Try the candidates, best first; settle if none can be followed.

        A candidate that fails its trial or its upgrade is held back in the gallery. One without a
        route is recorded for `report`, and skipped. A candidate older than the active release is
        a return to the previous space.

        Raises:
            _OvertakenError: another command changed the spaces or removed files meanwhile.
            NobackfillError: the other errors of `sync`, by their classes.
        """
        self._remember()
        for release in self._candidates():
            if release < self._report.from_release:
                with self._changing():
                    return_to_previous_space(self._device, {})
                self._report.release, self._report.state = release, "rolled-back"
                return self._report
            plan = self._plan(release)
            if plan is None:
                record_sync(self._device, release, "no_route")
                continue
            try:
                self._report.download_bytes += download_files(
                    self._device.models, self._trust, plan.files(), self._output
                )
                try_plan(self._device, plan)
                with self._changing():
                    if missing_files(self._device.models, plan.files()):
                        raise _OvertakenError
                    if self._upgrade(plan):
                        return self._report
            except (UnfitError, UnusableOutputError) as error:
                self._hold_back(release, str(error))
        return self._settle()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Hold the change lock, if the spaces are still those that the plans start from."""
        with self._device.change_lock(_CHANGE_SECONDS):
            if self._device.store.spaces() != self._spaces:
                raise _OvertakenError
            try:
                yield
            finally:
                self._spaces = self._device.store.spaces()

    def _remember(self) -> None:
        """Store the versions of the metadata and the options that outlast this sync."""
        state: dict[str, Any] = {
            "floor": self._trust.version_floor().model_dump(),
            "cohort": self._cohort,
        }
        if self._options.source is not None:
            state["source"] = normalise_source(self._options.source)
        if self._options.keep_original is not None:
            state["keep_original"] = self._options.keep_original
        if self._options.retry:
            state["held_back"] = None
        self._device.store.update_state(state)

    def _candidates(self) -> Iterator[int]:
        """Yield releases to try, best first; an older one only if the active one is withdrawn."""
        active, releases = self._report.from_release, self._trust.releases()
        reasons = {} if self._options.retry else self._held_back()
        for release in sorted(releases, reverse=True):
            if release <= active or releases[release] is not None:
                continue
            if not self._options.join_early and not self._trust.is_offered_to(
                release, self._cohort
            ):
                share = self._trust.offered_share(release)
                self._report.notes.append(
                    f"release {release} is rolled out to {100 * share:g} % of the devices so far, "
                    "not to this one; `sync --now` takes it early"
                )
                continue
            if str(release) in reasons:
                self._fall_behind(
                    f"held back here: {reasons[str(release)]}; `edge-client sync --retry` tries it "
                    "again"
                )
                continue
            try:
                manifest = self._trust.manifest(release)
                twin = explain_duplicate_space(manifest, self._trust.manifests().values())
                if twin is not None:
                    raise UnfitError(twin)
            except UnfitError as error:
                # Not held back: a newer version of this program may be able to use the release.
                self._fall_behind(str(error))
                continue
            yield release
        if releases.get(active) is not None:
            self._report.notes.append(f"release {active} was withdrawn: {releases[active]}")
            previous = self._device.previous_space()
            if previous is not None and releases.get(previous.spec.release, "") is None:
                yield previous.spec.release
            else:
                self._fall_behind("no other release can be followed from here, so it stays active")

    def _held_back(self) -> dict[str, str]:
        """Return the releases that failed here, with reasons, except those published again."""
        digests = self._device.state("held_digests", {})
        return {
            release: reason
            for release, reason in self._device.state("held_back", {}).items()
            if int(release) not in self._trust.releases()
            or digests.get(release) in (None, manifest_digest(self._trust, int(release)))
        }

    def _plan(self, release: int) -> SyncPlan | None:
        plan = plan_sync(self._device, self._trust, release, int8=self._options.int8)
        if plan is None:
            at = self._report.from_release
            has_adapter = bool(self._trust.manifest(release).adapters)
            self._fall_behind(
                f"release {release}: no route of upgrades leads there from release {at}, so this "
                "gallery cannot follow it"
                + "; its query adapter is for gateways, and devices do not use it"
                * has_adapter
            )
        return plan

    def _fall_behind(self, why: str) -> None:
        self._report.notes.append(why)
        self._report.state = "behind"

    def _hold_back(self, release: int, reason: str) -> None:
        with self._device.change_lock(_CHANGE_SECONDS):
            digest = manifest_digest(self._trust, release)
            self._device.store.update_state(held_back_state(self._device, release, reason, digest))
            record_sync(self._device, release, "refused")
        self._fall_behind(reason)

    def _describe(self, plan: SyncPlan, state: str) -> None:
        report = self._report
        report.state = state
        report.release = plan.target.release
        report.routes = self._routes(plan)
        report.expected_kept = plan.expected_retention()
        report.int8 = plan.int8

    def _routes(self, plan: SyncPlan) -> list[list[int]]:
        directly = [self._report.from_release, plan.target.release]
        return [list(leg.route.releases) or directly for leg in plan.legs]

    def _upgrade(self, plan: SyncPlan) -> bool:
        """Migrate the gallery along a plan; return False if items would be left behind."""
        device, release = self._device, plan.target.release
        old = next(space.spec for space in self._spaces if space.state == "active")
        installed = device.state("installed", {})
        migration = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "routes": self._routes(plan),
        }
        state = {
            "floor": self._trust.version_floor().model_dump(),
            "installed": {**installed, str(release): manifest_digest(self._trust, release)},
            "return_to": old.space,
            "carried": {**device.state("carried", {}), str(release): migration},
        }
        started = time.monotonic()
        outcome = migrate(device, plan, self._options.backfill, state, self._output)
        self._report.re_embedded += outcome.reembedded_count
        if outcome.left_behind_count:
            record_sync(device, release, "left_behind")
            self._fall_behind(
                f"release {release}: {outcome.left_behind_count} items have no side-information "
                f"for its upgrade; `sync --backfill {outcome.left_behind_count}` embeds them from "
                "their images"
            )
            return False
        self._describe(plan, "upgraded")
        self._report.upgrade_seconds = round(time.monotonic() - started, 3)
        self._report.items = device.store.count()
        self._report.neighbours_kept = record_sync(
            device, release, "none", self._report.upgrade_seconds, (old, SpaceSpec.of(plan.target))
        )
        drop_rollback_spaces(device, spared_space=old.space)
        remove_unused_models(device)
        return True

    def _settle(self) -> SyncReport:
        """Complete the active and the previous release where nothing newer can be followed.

        Downloads their missing files, re-embeds on request, and confirms the active release once it
        is the newest and has served for a week.
        """
        device, report = self._device, self._report
        manifest = device.active_manifest()
        files = list(embedding_files(manifest))
        previous = device.previous_space()
        if previous is not None and self._trust.releases().get(previous.spec.release, "") is None:
            files += embedding_files(device.manifest(previous.spec.release))
        report.download_bytes += download_files(device.models, self._trust, files, self._output)
        report.re_embedded += re_embed(device, manifest, self._options.backfill, self._output)
        if report.state == "up-to-date":
            with self._changing():
                way_back = None if self._has_served() else device.state("return_to")
                report.confirmed = drop_rollback_spaces(device, spared_space=way_back)
                remove_unused_models(device)
        return report

    def _has_served(self) -> bool:
        """Return whether the active release has served long enough to be confirmed. Galleries of
        earlier versions did not record the time; they count as confirmed."""
        migration = self._device.state("carried", {}).get(str(self._report.release))
        if migration is None:
            return True
        return datetime.now(UTC) - datetime.fromisoformat(migration["at"]) >= _CONFIRMED_AFTER


def describe_report(report: SyncReport) -> str:
    """Describe in one line what a sync did or would do.

    Returns:
        The line, without a newline and without `notes`.

    Raises:
        KeyError: the report's state is none of the five.
    """
    line = {
        "upgraded": f"{report.items} items now in release {report.release}'s space "
        f"(from {report.from_release}, {report.upgrade_seconds:.1f} s)",
        "planned": f"would go from release {report.from_release} to {report.release}: "
        f"{format_bytes(report.download_bytes)} to download, about {report.upgrade_seconds:.1f} s "
        f"for {report.items} items",
        "up-to-date": f"release {report.release} is the newest that can be followed",
        "rolled-back": f"returned to release {report.release}",
        "behind": f"stays at release {report.from_release}",
    }[report.state]
    if report.routes:
        line += f"; by the routes {' and '.join('>'.join(map(str, r)) for r in report.routes)}"
    if report.neighbours_kept is not None:
        line += f"; kept {report.neighbours_kept:.1%} of the items' nearest neighbours"
    if report.expected_kept is not None:
        line += f"; on the publisher's images {report.expected_kept:.1%} of the mAP of re-embedding"
    if report.re_embedded:
        line += f"; {report.re_embedded} re-embedded from their images"
    return line
