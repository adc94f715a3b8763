"""Following a publication: verified news, staged vectors, one flip; searchable throughout.

A kill at any moment leaves the gallery wholly in the old space or wholly in the new one, and the
next sync goes on from there. The space that was left is kept, so that `rollback` can return to it,
until a sync at least a week later finds nothing newer to follow (or `gc` is asked to): that
confirms the release. How the last sync went is kept, in five numbers, for `report`."""

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal

from nobackfill import durable
from nobackfill.client.gallery_file import GalleryFile
from nobackfill.client.output import Output, size
from nobackfill.client.plan import (
    SyncPlan,
    download_files,
    embedding_files,
    estimate_seconds,
    make_plan,
    manifest_digest,
    missing_files,
    tidy_models,
    try_plan,
)
from nobackfill.client.sources import normalised_source, open_source
from nobackfill.client.upgrade import carry, re_embed
from nobackfill.errors import (
    BusyError,
    ConfigurationError,
    NotFoundError,
    UnfitError,
    UnusableOutputError,
)
from nobackfill.gallery import staging
from nobackfill.gallery.spec import SpaceInfo
from nobackfill.gallery.staging import neighbours_kept
from nobackfill.gallery.tables import vector_table
from nobackfill.release.routes import twin_of
from nobackfill.release.trust.trust import Trust

Failure = Literal["none", "no_route", "refused", "left_behind"]


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


# Times that a sync begins anew because other commands changed the gallery meanwhile.
_TRIES = 3
# How long a release serves before a sync that finds nothing newer removes the way back.
_CONFIRMED_AFTER = timedelta(days=7)
# How long it waits for such a command to end.
_CHANGE_SECONDS = 60.0


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
