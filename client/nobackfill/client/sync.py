"""Following a publication: verified news, a plan, staged vectors, one flip; searchable throughout.

A kill at any moment leaves the gallery wholly in the old space or wholly in the new one, and the
next sync goes on from there. The space that was left is kept, so that `rollback` can return to it,
until a sync at least a week later finds nothing newer to follow (or `gc` is asked to): that
confirms the release. How the last sync went is kept, in five numbers, for `report`.

Backfill is a choice: the items whose upgrade is least certain are embedded again from their images.
"""

import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np

from nobackfill import durable
from nobackfill.client.gallery_file import Failure, GalleryFile
from nobackfill.client.output import Output, size
from nobackfill.client.photos import Encoder, local_image, threads
from nobackfill.client.sources import normalised_source, open_source
from nobackfill.digests import sha256_file
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    DamagedError,
    InvalidInputError,
    NotFoundError,
    NotPermittedError,
    PreconditionError,
    UnavailableError,
    UnfitError,
    UnusableOutputError,
    VerificationError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.reading import StoredItem
from nobackfill.gallery.spec import SpaceInfo, SpaceSpec
from nobackfill.gallery.staging import neighbours_kept
from nobackfill.gallery.tables import vector_table
from nobackfill.gallery.upgrade import Runner, run_upgrade
from nobackfill.images import Pixels
from nobackfill.release.manifest import Manifest, PublishedFile
from nobackfill.release.models import CHUNK, Upgraded
from nobackfill.release.paths import manifest_path
from nobackfill.release.probes import check_probes
from nobackfill.release.routes import Route, kept_by_chain, open_route, plan_route, twin_of
from nobackfill.release.trial import try_release
from nobackfill.release.trust.trust import Trust
from nobackfill.vectors import Vectors

# Of quantised against fp32 arithmetic, and of reading and writing rows of 512 + 512 bytes: both as
# measured with onnxruntime and SQLite on two cores.
INT8_SPEEDUP = 3.5
ROWS_A_SECOND = 150_000
_BATCH = 32
# Times that a sync begins anew because other commands changed the gallery meanwhile.
_TRIES = 3
# How long a release serves before a sync that finds nothing newer removes the way back.
_CONFIRMED_AFTER = timedelta(days=7)
# How long it waits for such a command to end.
_CHANGE_SECONDS = 60.0


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


def re_embed(device: GalleryFile, manifest: Manifest, budget: int, output: Output) -> int:
    """Embed up to `budget` items in a release's space from their images; how many it did.

    Items without a vector there come first, then the least certain ones. An image is taken from its
    file, if that still holds what was added, else from the vault; items whose image cannot be had,
    or makes no vector, keep what they have. Raises VerificationError, CannotWriteError, BusyError.
    """
    if budget <= 0:
        return 0
    space = manifest.space
    chosen = staging.left_behind_items(device.store, space, limit=budget)
    chosen += staging.least_certain(device.store, space, limit=budget - len(chosen))
    if not chosen:
        output.note(
            f"release {manifest.release}: no upgraded item has an uncertainty, so none is "
            "re-embedded"
        )
        return 0
    return embed_again(device, manifest, chosen, output)


def embed_again(
    device: GalleryFile, manifest: Manifest, chosen: Sequence[StoredItem], output: Output
) -> int:
    """Embed these items in a release's space from their images; how many it did. Like `re_embed`
    otherwise."""
    encoder = Encoder(device.models, manifest)
    done = 0
    with output.progress("re-embedding") as advance, _Images(device, output) as images:
        for start in range(0, len(chosen), _BATCH):
            batch = {
                item.label: pixels
                for item in chosen[start : start + _BATCH]
                if (pixels := images.pixels_of(item, encoder)) is not None
            }
            done += _write(device, encoder, batch)
            advance(start + _BATCH, len(chosen))
    return done


def _write(device: GalleryFile, encoder: Encoder, batch: dict[int, Pixels]) -> int:
    if not batch:
        return 0
    try:
        vectors = encoder.vectors(list(batch.values()))
    except UnusableOutputError as error:
        good = [label for row, label in enumerate(batch) if row not in error.rows]
        return _write(device, encoder, {label: batch[label] for label in good})
    written = staging.write(
        device.store,
        vectors.space,
        np.fromiter(batch, np.int64),
        vectors.embedding,
        side=vectors.side,
        origin="re-embedded",
        replace=True,
    )
    return len(written)


class _Images:
    """Images of items, from their files or from the vault, for as long as that answers."""

    def __init__(self, device: GalleryFile, output: Output) -> None:
        # Only here, as most syncs need neither gRPC nor age.
        from nobackfill.client.vault.transfer import Vaulted

        self._output = output
        self._vault: Vaulted | None = Vaulted(device)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        if self._vault is not None:
            self._vault.close()

    def pixels_of(self, item: StoredItem, encoder: Encoder) -> Pixels | None:
        """The image at the encoder's size; None if it cannot be had or be decoded."""
        image = self.of(item)
        try:
            return None if image is None else encoder.pixels(image)
        except InvalidInputError as error:
            self._output.note(f"{item.id}: {error}")
        return None

    def of(self, item: StoredItem) -> bytes | None:
        """The image an item was made from; None if it cannot be had."""
        image = local_image(item)
        if image is not None or self._vault is None:
            return image
        try:
            return self._vault.image(item.id)
        except (UnavailableError, NotPermittedError, ConfigurationError) as error:
            self._output.note(f"no images from the vault: {error}")
            self._vault.close()
            self._vault = None
        except (VerificationError, NotFoundError) as error:
            self._output.note(f"{item.id}: {error}")
        return None


@dataclass(frozen=True)
class CarryOutcome:
    """`left_behind` is not 0: nothing was flipped, so many items cannot follow."""

    re_embedded: int
    left_behind: int


def carry(
    device: GalleryFile, plan: SyncPlan, worst: int, state: dict[str, Any], output: Output
) -> CarryOutcome:
    """Fill the target's space, re-embed up to `worst` items from their images, flip.

    `state` is set in the flip's own transaction. What earlier runs wrote stays, and images that are
    added meanwhile are carried along. Raises UnusableOutputError for a release whose upgrade
    fails on a vector of this gallery, UnfitError for one whose models fail, VerificationError,
    BusyError, CannotWriteError.
    """
    target = SpaceSpec.of(plan.target)
    for space in device.store.spaces():
        # Begun for a release that was overtaken by a newer one.
        if space.state == "staging" and space.spec.space != target.space:
            staging.drop(device.store, space.spec.space)
    re_embedded = 0
    while True:
        try:
            stuck = _fill(device, plan, target, output)
        except (UnusableOutputError, UnfitError):
            # The release is held back: what it did to the others is of no use.
            staging.drop(device.store, target.space)
            raise
        budget = worst - re_embedded
        re_embedded += re_embed(device, plan.target, budget, output)
        behind = staging.left_behind(device.store, target.space)
        if 0 < behind <= stuck:
            return CarryOutcome(re_embedded, behind)
        try:
            staging.flip(device.store, target.space, state=state)
        except PreconditionError:
            # Images were added since the last chunk: carry them along.
            continue
        return CarryOutcome(re_embedded, 0)


def _fill(device: GalleryFile, plan: SyncPlan, target: SpaceSpec, output: Output) -> int:
    """Run the legs; the number of items that none of them could carry."""
    stuck = 0
    for leg in plan.legs:
        runner: Runner = _AsTheyAre(leg.source.spec.side_space == target.side_space)
        if leg.route.steps:
            runner = open_route(device.models, leg.route, threads(), int8=plan.int8)
        with output.progress(f"upgrading to release {target.release}") as advance:
            try:
                outcome = run_upgrade(
                    device.store,
                    runner,
                    target,
                    source=leg.source.spec.space,
                    origin="upgraded" if leg.route.steps else "direct",
                    ahead=True,
                    on_progress=lambda progress: advance(progress.done, progress.total),
                )
            except (DamagedError, UnusableOutputError):
                raise
            except VerificationError as error:
                raise UnfitError(f"release {target.release}: {error}") from error
        stuck = outcome.left_behind
    return stuck


@dataclass(frozen=True)
class _AsTheyAre:
    """What carries vectors into a space that searches theirs directly."""

    keeps_side: bool
    reads_side: ClassVar[bool] = False

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        return Upgraded(embedding, side if self.keeps_side else None, None)


def remember(
    device: GalleryFile, release: int, failure: Failure, seconds: float = 0.0, *, kept: bool = False
) -> float | None:
    """Keep how a sync to `release` went; `kept`: look how many neighbours it kept, too.

    Returns that share, of up to 1,000 random items that are in the space before as well; None
    where it was not looked at, or they are too few.
    """
    share = None
    if kept:
        active = device.store.active().spec
        before = device.previous()
        if before is not None:
            sample = partial(staging.sample, device.store)
            share = neighbours_kept(sample, before.spec, active)
    device.store.state_set(
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


def send_report(device: GalleryFile, to: str | None) -> dict[str, Any]:
    """Send what the last sync left, once, to a gateway; None: send nothing. Returns it: no vector,
    no id of the device or of an item is in it.

    Raises NotFoundError before the first sync to another release, ConfigurationError for an address
    that is no gateway's, UnavailableError, NotPermittedError.
    """
    found: dict[str, Any] | None = device.state("last_sync")
    if found is None:
        raise NotFoundError("no sync has tried another release yet; there is nothing to report")
    if to is None:
        return found
    if not to.startswith(("grpc://", "grpcs://")):
        raise ConfigurationError(f"expected --to grpc(s)://HOST:PORT, got {to!r}")
    from nobackfill.v1 import release_pb2 as pb
    from nobackfill.wire.gateway import Gateway

    failure = found["failure"].upper()
    message = pb.ReportSyncRequest(
        release=found["release"],
        probes_passed=found["probes_passed"],
        seconds=found["seconds"],
        neighbours_kept=found["neighbours_kept"],
        failure="SYNC_FAILURE_UNSPECIFIED" if failure == "NONE" else f"SYNC_FAILURE_{failure}",
    )
    with Gateway(to) as gateway:
        gateway.report_sync(message)
    return found


def return_to(device: GalleryFile, state: dict[str, Any]) -> int:
    """Make the space that was active before the last upgrade active again; its release.

    What was upgraded stays staged, so that a later sync takes no time. `state` is set in the same
    transaction. Raises NotFoundError if the way back is gone, PreconditionError if items would not
    be found there.
    """
    previous = device.previous()
    if previous is None:
        raise NotFoundError(
            "nothing to return to: there was no upgrade yet, or a later sync or gc confirmed it"
        )
    staging.rollback(device.store, state={**state, "return_to": None})
    return previous.spec.release


def roll_back(device: GalleryFile) -> tuple[int, int]:
    """`rollback`: return to the release before, and hold the present one back on this device.

    Returns (release left, release now active). Raises like return_to; BusyError while a sync
    carries vectors. One that waits for its source goes on from where this leads.
    """
    with device.changing():
        left = device.store.active().spec.release
        digest = device.state("installed", {}).get(str(left))
        held = hold_back(device, left, f"release {left} was rolled back here", digest)
        return left, return_to(device, held)


def hold_back(device: GalleryFile, release: int, reason: str, digest: str | None) -> dict[str, Any]:
    """The state in which a release is not followed: by its number, and the digest of its manifest
    where that is known, so that one published anew is tried."""
    digests = {**device.state("held_digests", {}), str(release): digest}
    return {
        "held_back": {**device.state("held_back", {}), str(release): reason},
        "held_digests": digests,
    }


def confirm(device: GalleryFile, but: str | None = None) -> list[int]:
    """Drop the spaces that only a rollback needs, all `but` one; the releases they belonged to.

    Spaces that hold vectors embedded from images stay where the gallery keeps originals.
    """
    if but is None:
        device.store.state_set({"return_to": None})
    dropped = []
    for space in device.store.spaces():
        superfluous = space.state == "previous" and space.spec.space != but
        if superfluous and not (device.state("keep_original") and _has_originals(device, space)):
            staging.drop(device.store, space.spec.space)
            dropped.append(space.spec.release)
    return dropped


def _has_originals(device: GalleryFile, space: SpaceInfo) -> bool:
    with device.store.reading() as connection:
        table = vector_table(space.number)
        query = f"SELECT 1 FROM {table} WHERE origin = 'native' LIMIT 1"  # noqa: S608
        return connection.execute(query).fetchone() is not None


@dataclass(frozen=True)
class Wishes:
    """Options of one sync.

    `int8`: take quantised upgrades where they are published, as their measured loss is within the
    release's tolerance. `keep_original`, `source` None: as they were. `now`: also follow a release
    that is for a share of the devices, this one not among them.
    """

    dry_run: bool = False
    backfill: int = 0
    keep_original: bool | None = None
    int8: bool = True
    retry: bool = False
    source: str | None = None
    now: bool = False


@dataclass
class SyncReport:
    """What a sync did, or with dry_run would do.

    `state`: upgraded, up-to-date, planned, rolled-back, or behind (no newer release can be
    followed; `notes` says why). `expected_kept`: the share of re-embedding's mAP that the publisher
    measured on other images; `neighbours_kept`: the share of each item's nearest neighbours that
    this gallery has kept.
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
        """All of it, for --json."""
        return asdict(self)


def sync(device: GalleryFile, wishes: Wishes, output: Output) -> SyncReport:
    """Bring the gallery to the newest release that can be followed.

    While the source is waited for, rollback and gc go on; the sync then begins anew from where they
    led. Raises BusyError (another sync), VerificationError (nothing changed), UnavailableError
    (what came is kept for the next try), CannotWriteError.
    """
    source = normalised_source(wishes.source) if wishes.source else device.state("source")
    with device.following(), open_source(source) as (fetcher, base_url):
        durable.sweep(device.models)
        trust = device.trust(fetcher, base_url)
        trust.refresh()
        for space in device.store.spaces():
            # Brings a manifest again that is no longer as it came.
            trust.manifest(space.spec.release)
        if wishes.dry_run:
            return _Sync(device, trust, wishes, output).preview()
        for _ in range(_TRIES):
            try:
                return _Sync(device, trust, wishes, output).follow()
            except _OvertakenError:
                # A rollback of this moment is newer than the wish to retry.
                wishes = replace(wishes, retry=False)
        raise BusyError("other commands changed the gallery again and again; run it again")


class _OvertakenError(Exception):
    """Another command changed the spaces, or removed files, while the source was waited for."""


class _Sync:
    def __init__(self, device: GalleryFile, trust: Trust, wishes: Wishes, output: Output) -> None:
        self._device = device
        self._trust = trust
        self._wishes = wishes
        self._output = output
        # Galleries made by earlier versions have none.
        self._cohort: str = device.state("cohort") or secrets.token_hex(16)
        # What the plans are made for.
        self._spaces = device.store.spaces()
        active = device.store.active().spec.release
        self._report = SyncReport("up-to-date", active, active, items=device.store.count())

    def preview(self) -> SyncReport:
        """What `follow` would do; changes nothing but the metadata that was fetched."""
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
        """Try the candidates, best first, and settle where none leads on."""
        self._remember()
        for release in self._candidates():
            if release < self._report.from_release:
                with self._changing():
                    return_to(self._device, {})
                self._report.release, self._report.state = release, "rolled-back"
                return self._report
            plan = self._plan(release)
            if plan is None:
                remember(self._device, release, "no_route")
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
        """Alone in changing the gallery, if it is still as the plans have it."""
        with self._device.changing(_CHANGE_SECONDS):
            if self._device.store.spaces() != self._spaces:
                raise _OvertakenError
            try:
                yield
            finally:
                self._spaces = self._device.store.spaces()

    def _remember(self) -> None:
        """Keep the versions seen, and the wishes that last."""
        state: dict[str, Any] = {
            "floor": self._trust.floor().model_dump(),
            "cohort": self._cohort,
        }
        if self._wishes.source is not None:
            state["source"] = normalised_source(self._wishes.source)
        if self._wishes.keep_original is not None:
            state["keep_original"] = self._wishes.keep_original
        if self._wishes.retry:
            state["held_back"] = None
        self._device.store.state_set(state)

    def _candidates(self) -> Iterator[int]:
        """Releases to try, best first; an older one only if the active one was withdrawn."""
        active, releases = self._report.from_release, self._trust.releases()
        held = {} if self._wishes.retry else self._held_back()
        for release in sorted(releases, reverse=True):
            if release <= active or releases[release] is not None:
                continue
            if not self._wishes.now and not self._trust.belongs(release, self._cohort):
                share = self._trust.share(release)
                self._report.notes.append(
                    f"release {release} is for {100 * share:g} % of the devices so far, this one "
                    "not among them; `sync --now` joins early"
                )
                continue
            if str(release) in held:
                self._fall_behind(f"held back here: {held[str(release)]}")
                continue
            try:
                manifest = self._trust.manifest(release)
                twin = twin_of(manifest, self._trust.manifests().values())
                if twin is not None:
                    raise UnfitError(twin)
            except UnfitError as error:
                # Not held back: a newer version of this program may be able to.
                self._fall_behind(str(error))
                continue
            yield release
        if releases.get(active) is not None:
            self._report.notes.append(f"release {active} was withdrawn: {releases[active]}")
            previous = self._device.previous()
            if previous is not None and releases.get(previous.spec.release, "") is None:
                yield previous.spec.release
            else:
                self._fall_behind("no other release can be followed from here, so it answers on")

    def _held_back(self) -> dict[str, str]:
        """Releases that failed here, with the reason; without those published anew since."""
        digests = self._device.state("held_digests", {})
        return {
            release: reason
            for release, reason in self._device.state("held_back", {}).items()
            if int(release) not in self._trust.releases()
            or digests.get(release) in (None, manifest_digest(self._trust, int(release)))
        }

    def _plan(self, release: int) -> SyncPlan | None:
        plan = make_plan(self._device, self._trust, release, int8=self._wishes.int8)
        if plan is None:
            at = self._report.from_release
            self._fall_behind(f"release {release}: no route leads there from release {at}")
        return plan

    def _fall_behind(self, why: str) -> None:
        self._report.notes.append(why)
        self._report.state = "behind"

    def _hold_back(self, release: int, reason: str) -> None:
        with self._device.changing(_CHANGE_SECONDS):
            digest = manifest_digest(self._trust, release)
            self._device.store.state_set(hold_back(self._device, release, reason, digest))
            remember(self._device, release, "refused")
        self._fall_behind(reason)

    def _describe(self, plan: SyncPlan, state: str) -> None:
        report = self._report
        report.state = state
        report.release = plan.target.release
        report.routes = self._routes(plan)
        report.expected_kept = plan.kept()
        report.int8 = plan.int8

    def _routes(self, plan: SyncPlan) -> list[list[int]]:
        directly = [self._report.from_release, plan.target.release]
        return [list(leg.route.releases) or directly for leg in plan.legs]

    def _upgrade(self, plan: SyncPlan) -> bool:
        """Carry the gallery along a plan; False if items would be left behind."""
        device, release = self._device, plan.target.release
        installed = device.state("installed", {})
        state = {
            "floor": self._trust.floor().model_dump(),
            "installed": {**installed, str(release): manifest_digest(self._trust, release)},
            "return_to": device.store.active().spec.space,
            "carried": {**device.state("carried", {}), str(release): self._carried(plan)},
        }
        started = time.monotonic()
        carried = carry(device, plan, self._wishes.backfill, state, self._output)
        self._report.re_embedded += carried.re_embedded
        if carried.left_behind:
            remember(device, release, "left_behind")
            self._fall_behind(
                f"release {release}: {carried.left_behind} items have no side-information for its "
                f"upgrade; `sync --backfill {carried.left_behind}` embeds them from their images"
            )
            return False
        self._describe(plan, "upgraded")
        self._report.upgrade_seconds = round(time.monotonic() - started, 3)
        self._report.items = device.store.count()
        self._report.neighbours_kept = remember(
            device, release, "none", self._report.upgrade_seconds, kept=True
        )
        confirm(device, but=device.state("return_to"))
        tidy_models(device)
        return True

    def _carried(self, plan: SyncPlan) -> dict[str, Any]:
        """For people who ask later how their items came into this space."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        return {"at": now, "routes": self._routes(plan)}

    def _settle(self) -> SyncReport:
        """Nothing newer can be followed: what answers, and the way back, are completed; what is
        newest and has served for long is confirmed."""
        device, report = self._device, self._report
        manifest = device.active()
        files = list(embedding_files(manifest))
        previous = device.previous()
        if previous is not None and self._trust.releases().get(previous.spec.release, "") is None:
            files += embedding_files(device.manifest(previous.spec.release))
        report.download_bytes += download_files(device.models, self._trust, files, self._output)
        report.re_embedded += re_embed(device, manifest, self._wishes.backfill, self._output)
        if report.state == "up-to-date":
            with self._changing():
                way_back = None if self._has_served() else device.state("return_to")
                report.confirmed = confirm(device, but=way_back)
                tidy_models(device)
        return report

    def _has_served(self) -> bool:
        """Whether the active release was upgraded to long enough ago to be confirmed. Galleries of
        earlier versions do not tell when."""
        carried = self._device.state("carried", {}).get(str(self._report.release))
        if carried is None:
            return True
        return datetime.now(UTC) - datetime.fromisoformat(carried["at"]) >= _CONFIRMED_AFTER


def sentence(report: SyncReport) -> str:
    """What a sync did, or would do."""
    line = {
        "upgraded": f"{report.items} items now in release {report.release}'s space "
        f"(from {report.from_release}, {report.upgrade_seconds:.1f} s)",
        "planned": f"would go from release {report.from_release} to {report.release}: "
        f"{size(report.download_bytes)} to download, about {report.upgrade_seconds:.1f} s for "
        f"{report.items} items",
        "up-to-date": f"release {report.release} is the newest that can be followed",
        "rolled-back": f"returned to release {report.release}",
        "behind": f"stays at release {report.from_release}",
    }[report.state]
    if report.routes:
        line += f"; by way of {' and '.join('>'.join(map(str, r)) for r in report.routes)}"
    if report.neighbours_kept is not None:
        line += f"; kept {report.neighbours_kept:.1%} of the items' nearest neighbours"
    if report.expected_kept is not None:
        line += f"; on the publisher's images {report.expected_kept:.1%} of re-embedding's mAP"
    if report.re_embedded:
        line += f"; {report.re_embedded} embedded anew from their images"
    return line
