"""Pages of the console about releases, galleries and canaries, and the operator's actions."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from nobackfill.errors import (
    BusyError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
)
from nobackfill.plugins.web.console.sessions import (
    ConsoleCaller,
    ConsoleSessions,
    GatewayLoad,
    LoadMeter,
)
from nobackfill.plugins.web.listener import is_ending
from nobackfill.plugins.web.site import Site, parse_form
from nobackfill.release.manifest import Manifest, parse_manifest
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.v1 import gallery_pb2, release_pb2
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire import Gateway
from nobackfill.wire.gateway import ROLLOUTS
from nobackfill.wire.values import read_metadata_value

QUERIES, GALLERIES = ("old", "new"), ("old", "served", "new")
TITLES = {"old": "stored by the old model", "served": "after the upgrade", "new": "re-embedded"}
BOUNDS = {("old", "old"): "lower bound", ("new", "new"): "upper bound"}
MARKS = BOUNDS | {("new", "old"): "naive swap", ("new", "served"): "what you get"}


@dataclass(frozen=True)
class MatrixCellView:
    """A cell of a compatibility matrix for a page.

    Attributes:
        map: mean average precision in percent.
        cmc1: share of queries whose first hit is right, in percent.
        cmc5: share of queries with a right hit among the first five, in percent.
        shade: `map` relative to the best cell, 0 to 1.
    """

    map: float
    cmc1: float
    cmc5: float
    shade: float


def evidence_matrix(
    manifest: Manifest, old_release: int
) -> Mapping[tuple[str, str], MatrixCellView]:
    """Return the published compatibility matrix of a release against an older one.

    `shade` is 0 to 1, and 0 for all if no cell has a positive mAP. An unknown `old_release` gives
    at most the cell (new, new).

    Args:
        manifest: the release.
        old_release: the number of the older release.

    Returns:
        Cells by (query model, gallery vectors): "old" or "new", and "old", "served" (migrated) or
        "new". Cells that were not measured are missing. The cell of migrated vectors belongs to the
        shortest route that was measured.
    """
    new = manifest.release
    routes = sorted(
        (route.releases for route in manifest.routes if route.releases[0] == old_release), key=len
    )
    names = {f"{old_release}/{old_release}": ("old", "old"), f"{new}/{old_release}": ("new", "old"),
             f"{new}/{new}": ("new", "new")}  # fmt: skip
    if routes:
        names[f"{new}/{'>'.join(map(str, routes[0]))}"] = ("new", "served")
    cells = {names[cell.name]: cell for cell in manifest.evidence if cell.name in names}
    best = max((cell.map for cell in cells.values()), default=0.0) or 1.0
    return {
        place: MatrixCellView(100 * cell.map, 100 * cell.cmc1, 100 * cell.cmc5, cell.map / best)
        for place, cell in cells.items()
    }


@dataclass(frozen=True)
class CanaryView:
    """A canary for a page.

    Attributes:
        release: the new release.
        state: the state in lower case, such as "running".
        settings: its settings.
        message: why it stopped; empty otherwise.
        pair_figures: for each figure its name, and its texts for the old and the new pair.
        joint_figures: figures of both pairs together: names and texts.
        evidence_by_bound: bounds with the evidence that each is exceeded, by name.
        stops_at: the evidence at which the canary stops.
    """

    release: int
    state: str
    settings: pb.Canary
    message: str
    pair_figures: Sequence[tuple[str, str, str]]
    joint_figures: Sequence[tuple[str, str]]
    evidence_by_bound: Sequence[tuple[str, float]]
    stops_at: float


def canary_view(gateway: Gateway) -> CanaryView | None:
    """Read the last canary since the gateway started, for a page.

    Args:
        gateway: the client; one report is read, and the stream is then closed.

    Returns:
        None if there was no canary, or if the gateway accepts no further watcher now.

    Raises:
        NotPermittedError: the role may not watch canaries.
        UnavailableError: the gateway does not answer.
        StopIteration: the gateway ends the stream without a report.
        UnauthenticatedError: the gateway does not know the token.
        ValueError: the canary's state is one that this version does not know.
    """
    try:
        report = next(gateway.watch_canary())
    except BusyError:
        return None
    return canary_to_view(report) if report.release else None


def canary_to_view(report: pb.WatchCanaryResponse) -> CanaryView:
    """Convert a report of a canary to the texts of a page.

    Figures that the report lacks are "not known".

    Args:
        report: the report; one without a canary gives empty texts and zeros.

    Raises:
        ValueError: its state is one that this version does not know.
    """
    old, new = report.old_pair, report.new_pair
    return CanaryView(
        release=report.release,
        state=pb.CanaryState.Name(report.state).removeprefix("CANARY_STATE_").lower(),
        settings=report.canary,
        message=report.message,
        pair_figures=[(name, figure(old), figure(new)) for name, figure in _FIGURES],
        joint_figures=[
            ("Answered by both", f"{report.compared}"),
            ("Not compared", f"{report.skipped}"),
            ("Overlap of both answers", _format_optional(report, "overlap", 100, " %")),
            ("Rank correlation", _format_optional(report, "rank_correlation", 1, "", 3)),
        ],
        evidence_by_bound=sorted(report.evidence.items()),
        stops_at=report.stops_at,
    )


def _format_optional(
    message: pb.WatchCanaryResponse | pb.CanaryPair, field: str, scale: float, unit: str,
    digits: int = 1,
) -> str:  # fmt: skip
    if not message.HasField(field):
        return "not known"
    return f"{scale * getattr(message, field):.{digits}f}{unit}"


_FIGURES: Sequence[tuple[str, Callable[[pb.CanaryPair], str]]] = (
    ("queries", lambda pair: f"{pair.queries}"),
    ("failed", lambda pair: f"{pair.errors}"),
    ("empty answers", lambda pair: f"{pair.empty}"),
    ("half answered within", lambda pair: _format_optional(pair, "p50", 1000, " ms")),
    ("99 % within", lambda pair: _format_optional(pair, "p99", 1000, " ms")),
    ("score of the first hit", lambda pair: _format_optional(pair, "score", 100, " %")),
    ("callers", lambda pair: f"{pair.sessions}"),
    ("of them approved a hit", lambda pair: f"{pair.approved}"),
    ("of them rejected a hit", lambda pair: f"{pair.rejected}"),
)


@dataclass
class RolloutView:
    """The state of an activation for a page, from its last report.

    Attributes:
        release: the release.
        rollout: cutover, dual, direct, or unspecified (as the release declares).
        phase: the phase in lower case.
        migrated_items: items migrated so far.
        total_items: items to migrate; 0 if it is not known.
        message: the gateway's last message.
        has_ended: whether no more reports will come.
        has_failed: whether it failed.
        migration_start: when the first item was migrated, in seconds of the monotonic clock; None
            before.
    """

    release: int
    rollout: str
    phase: str = "begins"
    migrated_items: int = 0
    total_items: int = 0
    message: str = ""
    has_ended: bool = False
    has_failed: bool = False
    migration_start: float | None = None

    @property
    def remaining_s(self) -> float | None:
        """Return the seconds that migrating may still take at its rate so far.

        None before the first item, after the last one, and while the total is not known.
        """
        if self.migration_start is None or not 0 < self.migrated_items < self.total_items:
            return None
        return (
            (time.monotonic() - self.migration_start)
            / self.migrated_items
            * (self.total_items - self.migrated_items)
        )


class Rollouts:
    """The activations that were started at the console.

    They continue in the gateway if the page is closed. Only the last one is remembered.
    """

    def __init__(self) -> None:
        self._run: RolloutView | None = None

    def current(self, load: GatewayLoad) -> RolloutView | None:
        """Return the last activation, unless a later change outside the console replaced it.

        Args:
            load: the present load, which names the active release.

        Returns:
            The activation; its fields change while it runs. None without one, or if another release
            is active or another upgrade runs since. A failed one stays, whatever release is active.
        """
        run = self._run
        if run is None or not run.has_ended:
            return run
        other_upgrade = 0 < load.upgrade_share < 1
        undone = not run.has_failed and run.release != load.release
        return None if other_upgrade or undone else run

    def begin(self, caller: Callable[[], ConsoleCaller], release: int, rollout: str) -> None:
        """Start the activation of a release, and follow it on a thread.

        Returns after the gateway's first report, which is waited for without a limit. It replaces
        the last activation in `current`. The thread ends with the activation, and errors become its
        `message`. After an error of this call, the last one stays.

        Args:
            caller: opens a client of the gateway with the operator's rights.
            release: the release's number.
            rollout: cutover, dual, direct, or unspecified (as the release declares).

        Raises:
            BusyError: another activation runs, or the gateway sent no report.
            NotPermittedError: the role may not activate.
            NotFoundError: there is no such release.
            InvalidInputError: `rollout` is none of these.
            UnauthenticatedError: the gateway does not know the token.
            CannotWriteError: the state of the gateway cannot be written.
            UnavailableError: the gateway does not answer.
            PreconditionError: the gateway refuses the activation in its present state.
            ValueError: the first report has a phase that this version does not know.
        """
        with ExitStack() as closing:
            gateway = closing.enter_context(caller())
            reports = gateway.activate(release, rollout=rollout)
            run = RolloutView(release, rollout)
            try:
                _take_report(run, next(reports))
            except StopIteration as error:
                raise BusyError(
                    f"the gateway sent no report on the activation of release {release}; look at "
                    "the overview whether the activation runs, then try again"
                ) from error
            # Only now the activation has begun.
            self._run = run
            closing.pop_all()

        def follow() -> None:
            with gateway:
                try:
                    for report in reports:
                        _take_report(run, report)
                except NobackfillError as error:
                    run.has_failed = True
                    run.message = str(error)
                finally:
                    run.has_ended = True

        threading.Thread(target=follow, name="console-rollout", daemon=True).start()


def _take_report(run: RolloutView, report: pb.ActivateReleaseResponse) -> None:
    run.phase = pb.Phase.Name(report.phase).removeprefix("PHASE_").lower()
    if report.total:
        # Only reports of the upgrading phase contain counts.
        run.migrated_items, run.total_items = report.done, report.total
    run.message = report.message
    run.has_failed = report.phase == pb.PHASE_FAILED
    if report.phase == pb.PHASE_UPGRADING and run.migration_start is None:
        run.migration_start = time.monotonic()


_REPORT_SECONDS = 1.0
# An expiry this near is shown in red.
_SOON = timedelta(days=14)


class Operations:
    """All pages of the console except the playground.

    Every page raises UnauthenticatedError without a session, NotPermittedError if the role may not
    make its calls, and UnavailableError if the gateway does not answer.
    """

    def __init__(
        self, sessions: ConsoleSessions, rollouts: Rollouts, metrics: Metrics, site: Site
    ) -> None:
        self._sessions = sessions
        self._rollouts = rollouts
        self._metrics = metrics
        self._load = LoadMeter(metrics.registry)
        self._site = site

    def overview(self, request: Request) -> Response:
        """Show releases, galleries, the load, and certificates, tokens and metadata that expire.

        If the galleries cannot be listed, as when the role may not, the page shows the error in
        their place.

        Raises:
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
            ValueError: the canary's state is one that this version does not know.
            Exception: any error of a collector of the metrics.
        """
        with self._sessions.open_caller(request) as gateway:
            releases = gateway.list_releases()
            galleries, why = None, ""
            try:
                galleries = list(gateway.list_galleries())
            except NotPermittedError:
                why = "Your role has no access to galleries."
            except NobackfillError as error:
                why = str(error)
            live = self._live_figures(gateway)
        return self._site.respond_with_page(
            request, "overview.html.j2", releases=releases, galleries=galleries, why=why,
            state=_release_state, space_state=_space_state, moment=_format_end,
            expiries=self._expiries(), guarded=self._sessions.guarded,
            index=_describe_index, **live,
        )  # fmt: skip

    def release(self, request: Request) -> Response:
        """Show one release, its compatibility matrix, and a link to the estimate of its activation.

        Raises:
            NotFoundError: there is no such release, or the address contains no release number.
            VerificationError: the publication or the release's manifest is not valid, or this
                version cannot read the manifest (UnfitError).
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
        """
        number = _release_number(request)
        with self._sessions.open_caller(request) as gateway:
            release = gateway.get_release(number)
        manifest = parse_manifest(release.manifest.encode(), number)
        old = max((upgrade.from_release for upgrade in manifest.upgrades), default=None)
        return self._site.respond_with_page(
            request, "release.html.j2", release=release, manifest=manifest, state=_release_state,
            old=old, matrix={} if old is None else evidence_matrix(manifest, old),
            axes=(QUERIES, GALLERIES, TITLES, MARKS, BOUNDS),
        )  # fmt: skip

    def estimate(self, request: Request) -> Response:
        """Show the estimated cost of activating a release, for each gallery, and the form.

        The gateway measures the release's models for it. A gallery's error is shown in its row. It
        blocks for as long as the gateway measures, at most a minute for each gallery.

        Raises:
            NotFoundError: the address contains no release number.
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
        """
        number = _release_number(request)
        rows: list[tuple[str, Any, str]] = []
        with self._sessions.open_caller(request) as gateway:
            for gallery in gateway.list_galleries():
                try:
                    rows.append((gallery.name, gateway.estimate_upgrade(gallery.name, number), ""))
                except NobackfillError as error:
                    rows.append((gallery.name, None, str(error)))
        return self._site.respond_with_page(
            request, "estimate.html.j2", rows=rows, number=number, rollouts=list(ROLLOUTS)
        )

    def activate(self, request: Request, body: bytes) -> Response:
        """Start an activation, and redirect to the overview.

        The gateway's first report is waited for without a limit.

        Raises:
            InvalidInputError: the form's `rollout` is not known, or the body is no form.
            NotFoundError: there is no such release, or the address contains no release number.
            BusyError: another activation runs.
            PreconditionError: the gateway refuses the activation in its present state.
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            CannotWriteError: the state of the gateway cannot be written.
            UnavailableError: the gateway does not answer within a minute.
        """
        rollout = parse_form(body).get("rollout", "")
        if rollout not in ROLLOUTS:
            raise InvalidInputError(
                f"rollout: expected one of {', '.join(ROLLOUTS)}, got {rollout[:20]!r}; choose "
                "one of these"
            )
        self._rollouts.begin(
            self._sessions.caller_factory(request), _release_number(request), rollout
        )
        return self._site.redirect(request, "/")

    def rollback_target(self, request: Request) -> Response:
        """Show the release that a rollback returns to, and the items without a vector there.

        Nothing is changed.

        Raises:
            PreconditionError: there is no release to return to: no other was active before, or it
                was retired.
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
            VerificationError: a gallery is damaged.
        """
        with self._sessions.open_caller(request) as gateway:
            target = gateway.rollback()
        return self._site.respond_with_page(request, "rollback.html.j2", target=target)

    def rollback(self, request: Request, body: bytes) -> Response:
        """Roll the gateway back to the release that the page showed, and go to the overview.

        It may block for ten minutes.

        Raises:
            InvalidInputError: the form's `to` is no release number, or the body is no form.
            PreconditionError: a rollback would return to another release now, or there is none to
                return to.
            BusyError: another rollback, activation or retirement takes too long. An activation that
                runs is cancelled.
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            CannotWriteError: the state of the gateway cannot be written.
            UnavailableError: the gateway does not answer within ten minutes, or cannot load the
                models; in the second case, nothing has changed.
            NotFoundError: the release to return to is not published any more.
            VerificationError: a file of that release differs from its digest, or a gallery is
                damaged.
        """
        to = parse_form(body).get("to", "")
        if not _is_number(to):
            raise InvalidInputError(
                "the rollback got no release number to return to, so nothing was changed; load the "
                "page of the rollback again"
            )
        with self._sessions.open_caller(request) as gateway:
            gateway.rollback(confirm=True, to=int(to))
        return self._site.redirect(request, "/")

    def gallery(self, request: Request) -> Response:
        """Show one gallery, its upgrade, and its quality by the values of a metadata key.

        The key is `by` in the address; if it is missing, no quality is measured. A failure to read
        the upgrade's progress, such as an unknown key, is shown on the page. The first report of
        the upgrade is waited for without a limit; with `by`, measuring takes seconds.

        Raises:
            NotFoundError: there is no such gallery.
            VerificationError: the gallery is damaged and set aside.
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
        """
        name, by = request.path_params["name"], request.query_params.get("by", "")
        progress, why = None, ""
        with self._sessions.open_caller(request) as gateway:
            gallery = gateway.get_gallery(name)
            reports = gateway.watch_upgrade(name, by_key=by)
            try:
                progress = next(reports, None)
            except NobackfillError as error:
                why = str(error)
            finally:
                reports.close()  # type: ignore[attr-defined]
        return self._site.respond_with_page(
            request, "gallery.html.j2", gallery=gallery, by=by, progress=progress, why=why,
            space_state=_space_state, moment=_format_end,
            text_of=lambda value: read_metadata_value(value, by),
            index=_describe_index,
        )  # fmt: skip

    async def live(self, request: Request) -> Response:
        """Send the load, the activation and the canary as server-sent events, once a second.

        Ends when the page is closed, the server stops, or a call fails. A token's eleventh live
        page gets no event.

        Raises:
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not make these calls.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
        """
        first = await run_in_threadpool(self._live_text, request)
        return EventSourceResponse(self._live_events(request, first))

    async def _live_events(self, request: Request, text: str) -> AsyncIterator[ServerSentEvent]:
        with self._sessions.count_live_page(request) as place:
            while place and not is_ending(request):
                yield ServerSentEvent(text, event="live")
                await asyncio.sleep(_REPORT_SECONDS)
                try:
                    text = await run_in_threadpool(self._live_text, request)
                except NobackfillError:
                    # The browser connects again, and then a page explains, for example that the
                    # token was revoked.
                    return

    def _live_text(self, request: Request) -> str:
        with self._sessions.open_caller(request) as gateway:
            live = self._live_figures(gateway)
        return self._site.render(request, "live.html.j2", **live)

    def _live_figures(self, gateway: ConsoleCaller) -> dict[str, Any]:
        """Return the figures that change every second: load, activation and canary.

        The last two are None if the role may not watch canaries: their messages name galleries.
        """
        load = self._load.measure()
        try:
            canary = canary_view(gateway)
        except NotPermittedError:
            return {"load": load, "run": None, "canary": None}
        return {"load": load, "run": self._rollouts.current(load), "canary": canary}

    def _expiries(self) -> list[tuple[str, str, bool]]:
        """Return names with their ends, ordered by time, and whether each is within 14 days."""
        expiries = self._metrics.expiries
        ends = {f"metadata {role}": end for role, end in expiries.metadata_expiries().items()}
        ends |= {
            f"certificate {name}": end for name, end in expiries.certificate_expiries().items()
        }
        token = expiries.first_token_expiry()
        if token is not None:
            ends["the first of the tokens"] = token
        soon = datetime.now(UTC) + _SOON
        order = sorted(ends.items(), key=lambda pair: pair[1])
        return [(name, f"{end:%d %B %Y}", end < soon) for name, end in order]


def _release_number(request: Request) -> int:
    """Return the release number in an address; raise NotFoundError for another text."""
    text: str = request.path_params["number"]
    if not _is_number(text):
        raise NotFoundError(
            f"there is no release {text[:20]!r}; a release has a whole number: choose one on the "
            "overview"
        )
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _release_state(release: release_pb2.Release) -> str:
    return release_pb2.ReleaseState.Name(release.state).removeprefix("RELEASE_STATE_").lower()


def _space_state(space: gallery_pb2.SpaceInfo) -> str:
    return gallery_pb2.SpaceState.Name(space.state).removeprefix("SPACE_STATE_").lower()


def _describe_index(space: gallery_pb2.SpaceInfo) -> str:
    """Describe how the vectors of a space are searched."""
    index = space.index
    if not space.HasField("index"):
        return "not in memory"
    parts = ((index.in_graph, "in a graph"), (index.compared, "compared one by one"),
            (index.delta, "in the delta"))  # fmt: skip
    text = ", ".join(f"{count} {part}" for count, part in parts if count) or "empty"
    return f"{text}; a graph is being made" if index.due else text


def _format_end(message: Any) -> str:
    """Format `ends_at` of a message; empty if it is not set."""
    return (
        f"{message.ends_at.ToDatetime(UTC):%d %B %Y, %H:%M} UTC"
        if message.HasField("ends_at")
        else ""
    )
