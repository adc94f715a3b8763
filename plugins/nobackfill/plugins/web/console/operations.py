"""Pages of the console for releases and galleries, and what it does for operators."""

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
    Load,
    LoadMeter,
)
from nobackfill.plugins.web.listener import ending
from nobackfill.plugins.web.site import Site, fields
from nobackfill.release.manifest import Manifest, parse_manifest
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.v1 import gallery_pb2, release_pb2
from nobackfill.v1 import release_pb2 as pb
from nobackfill.wire import Gateway
from nobackfill.wire.gateway import ROLLOUTS
from nobackfill.wire.values import from_value

QUERIES, GALLERIES = ("old", "new"), ("old", "served", "new")
TITLES = {"old": "stored by the old model", "served": "after the upgrade", "new": "embedded again"}
BOUNDS = {("old", "old"): "lower bound", ("new", "new"): "upper bound"}
MARKS = BOUNDS | {("new", "old"): "naive swap", ("new", "served"): "what you get"}


@dataclass(frozen=True)
class MatrixCellView:
    """A cell in percent, and how dark it is drawn, 0 to 1 of the best cell."""

    map: float
    cmc1: float
    cmc5: float
    shade: float


def matrix(manifest: Manifest, old: int) -> Mapping[tuple[str, str], MatrixCellView]:
    """The compatibility matrix of a release against an older one, as it was published with it;
    what was not measured is missing. What is served comes by the shortest route that was."""
    new = manifest.release
    routes = sorted(
        (route.releases for route in manifest.routes if route.releases[0] == old), key=len
    )
    names = {f"{old}/{old}": ("old", "old"), f"{new}/{old}": ("new", "old"),
             f"{new}/{new}": ("new", "new")}  # fmt: skip
    if routes:
        names[f"{new}/{'>'.join(map(str, routes[0]))}"] = ("new", "served")
    found = {names[cell.name]: cell for cell in manifest.evidence if cell.name in names}
    best = max((cell.map for cell in found.values()), default=0.0) or 1.0
    return {
        place: MatrixCellView(100 * cell.map, 100 * cell.cmc1, 100 * cell.cmc5, cell.map / best)
        for place, cell in found.items()
    }


# Pages that show releases and galleries, and what an operator does with them.

# The canary as the pages show it: both pairs side by side, and what speaks against the new one.


@dataclass(frozen=True)
class CanaryView:
    """`rows`: what is told, of the old pair, of the new one. `against`: bounds, evidence."""

    release: int
    state: str
    canary: pb.Canary
    message: str
    rows: Sequence[tuple[str, str, str]]
    alike: Sequence[tuple[str, str]]
    against: Sequence[tuple[str, float]]
    stops_at: float


def look(gateway: Gateway) -> CanaryView | None:
    """The last one since the gateway's start; None without one, and while the gateway has no place
    for who watches: the rest of a page is shown then. Raises NotPermittedError for a role that may
    not watch it."""
    try:
        found = next(gateway.watch_canary())
    except BusyError:
        return None
    return shown(found) if found.release else None


def shown(report: pb.WatchCanaryResponse) -> CanaryView:
    """A report in the words of a page."""
    old, new = report.old_pair, report.new_pair
    return CanaryView(
        release=report.release,
        state=pb.CanaryState.Name(report.state).removeprefix("CANARY_STATE_").lower(),
        canary=report.canary,
        message=report.message,
        rows=[(name, figure(old), figure(new)) for name, figure in _FIGURES],
        alike=[
            ("Answered by both", f"{report.compared}"),
            ("Not compared", f"{report.skipped}"),
            ("Overlap of both answers", _optional(report, "overlap", 100, " %")),
            ("Rank correlation", _optional(report, "rank_correlation", 1, "", 3)),
        ],
        against=sorted(report.evidence.items()),
        stops_at=report.stops_at,
    )


def _optional(
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
    ("half answered within", lambda pair: _optional(pair, "p50", 1000, " ms")),
    ("99 % within", lambda pair: _optional(pair, "p99", 1000, " ms")),
    ("score of the first hit", lambda pair: _optional(pair, "score", 100, " %")),
    ("callers", lambda pair: f"{pair.sessions}"),
    ("of them approved a hit", lambda pair: f"{pair.approved}"),
    ("of them rejected a hit", lambda pair: f"{pair.rejected}"),
)


# Activations that were begun at the console; they go on at the gateway when nobody watches.


@dataclass
class RolloutView:
    """An activation as its last report tells it."""

    release: int
    rollout: str
    phase: str = "begins"
    done: int = 0
    total: int = 0
    message: str = ""
    ended: bool = False
    failed: bool = False
    # When the first item was carried, on the monotonic clock.
    carrying_since: float | None = None

    @property
    def remaining_s(self) -> float | None:
        """Seconds that carrying may still take, by its pace so far."""
        if self.carrying_since is None or not 0 < self.done < self.total:
            return None
        return (time.monotonic() - self.carrying_since) / self.done * (self.total - self.done)


class Rollouts:
    """The last activation that began here, and beginning the next."""

    def __init__(self) -> None:
        self._run: RolloutView | None = None

    def told(self, load: Load) -> RolloutView | None:
        """The last activation, unless what is going on now has left it behind."""
        run = self._run
        if run is None or not run.ended:
            return run
        elsewhere = 0 < load.ratio < 1
        undone = not run.failed and run.release != load.release
        return None if elsewhere or undone else run

    def begin(self, caller: Callable[[], ConsoleCaller], release: int, rollout: str) -> None:
        """Activate a release. Raises what the call raises at once, as NotPermittedError, and
        BusyError while another activation goes on."""
        with ExitStack() as closing:
            gateway = closing.enter_context(caller())
            reports = gateway.activate(release, rollout=rollout)
            run = RolloutView(release, rollout)
            try:
                _take(run, next(reports))
            except StopIteration as error:
                raise BusyError("the gateway reported nothing; try again") from error
            # Only now it has begun.
            self._run = run
            closing.pop_all()

        def follow() -> None:
            with gateway:
                try:
                    for report in reports:
                        _take(run, report)
                except NobackfillError as error:
                    run.failed = True
                    run.message = str(error)
                finally:
                    run.ended = True

        threading.Thread(target=follow, name="console-rollout", daemon=True).start()


def _take(run: RolloutView, report: pb.ActivateReleaseResponse) -> None:
    run.phase = pb.Phase.Name(report.phase).removeprefix("PHASE_").lower()
    if report.total:
        # Only reports of carrying count.
        run.done, run.total = report.done, report.total
    run.message = report.message
    run.failed = report.phase == pb.PHASE_FAILED
    if report.phase == pb.PHASE_UPGRADING and run.carrying_since is None:
        run.carrying_since = time.monotonic()


_REPORT_SECONDS = 1.0
# Of what expires, that which is told in red.
_SOON = timedelta(days=14)


class Operations:
    """Everything but the playground."""

    def __init__(
        self, sessions: ConsoleSessions, rollouts: Rollouts, metrics: Metrics, site: Site
    ) -> None:
        self._sessions = sessions
        self._rollouts = rollouts
        self._metrics = metrics
        self._load = LoadMeter(metrics.registry)
        self._site = site

    def overview(self, request: Request) -> Response:
        """Releases, galleries, the load, and what is about to expire."""
        with self._sessions.calling(request) as gateway:
            releases = gateway.list_releases()
            galleries, why = None, ""
            try:
                galleries = list(gateway.list_galleries())
            except NotPermittedError:
                why = "Your role is not for galleries."
            except NobackfillError as error:
                why = str(error)
            live = self._live(gateway)
        return self._site.show(
            request, "overview.html.j2", releases=releases, galleries=galleries, why=why,
            state=_state, space_state=_space_state, moment=_moment, expiries=self._expiries(),
            guarded=self._sessions.guarded, index=_index, **live,
        )  # fmt: skip

    def release(self, request: Request) -> Response:
        """One release: its evidence, and activating it once the estimate was seen."""
        number = _number(request)
        with self._sessions.calling(request) as gateway:
            release = gateway.get_release(number)
        manifest = parse_manifest(release.manifest.encode(), number)
        old = max((upgrade.from_release for upgrade in manifest.upgrades), default=None)
        return self._site.show(
            request, "release.html.j2", release=release, manifest=manifest, state=_state, old=old,
            matrix={} if old is None else matrix(manifest, old),
            axes=(QUERIES, GALLERIES, TITLES, MARKS, BOUNDS),
        )  # fmt: skip

    def estimate(self, request: Request) -> Response:
        """What activating a release would take, a line a gallery, measured now; then the form."""
        number = _number(request)
        rows: list[tuple[str, Any, str]] = []
        with self._sessions.calling(request) as gateway:
            for gallery in gateway.list_galleries():
                try:
                    rows.append((gallery.name, gateway.estimate_upgrade(gallery.name, number), ""))
                except NobackfillError as error:
                    rows.append((gallery.name, None, str(error)))
        return self._site.show(
            request, "estimate.html.j2", rows=rows, number=number, rollouts=list(ROLLOUTS)
        )

    def activate(self, request: Request, body: bytes) -> Response:
        """Begin an activation."""
        rollout = fields(body).get("rollout", "")
        if rollout not in ROLLOUTS:
            raise InvalidInputError(f"rollout: expected one of {', '.join(ROLLOUTS)}")
        self._rollouts.begin(self._sessions.caller(request), _number(request), rollout)
        return self._site.go(request, "/")

    def before_rollback(self, request: Request) -> Response:
        """Where a rollback would lead, and what would not be found there."""
        with self._sessions.calling(request) as gateway:
            found = gateway.rollback()
        return self._site.show(request, "rollback.html.j2", found=found)

    def rollback(self, request: Request, body: bytes) -> Response:
        """Return to the release that was shown, and to no other."""
        to = fields(body).get("to", "")
        if not _is_number(to):
            raise InvalidInputError("expected the release that the page named; load it again")
        with self._sessions.calling(request) as gateway:
            gateway.rollback(confirm=True, to=int(to))
        return self._site.go(request, "/")

    def gallery(self, request: Request) -> Response:
        """One gallery, its upgrade, and its quality by the values of a metadata key."""
        name, by = request.path_params["name"], request.query_params.get("by", "")
        progress, why = None, ""
        with self._sessions.calling(request) as gateway:
            gallery = gateway.get_gallery(name)
            reports = gateway.watch_upgrade(name, by=by)
            try:
                progress = next(reports, None)
            except NobackfillError as error:
                why = str(error)
            finally:
                reports.close()  # type: ignore[attr-defined]
        return self._site.show(
            request, "gallery.html.j2", gallery=gallery, by=by, progress=progress, why=why,
            space_state=_space_state, moment=_moment, said=lambda value: from_value(value, by),
            index=_index,
        )  # fmt: skip

    async def live(self, request: Request) -> Response:
        """The load, the activation and the canary as server-sent events, for as long as somebody
        looks."""
        first = await run_in_threadpool(self._now, request)
        return EventSourceResponse(self._reports(request, first))

    async def _reports(self, request: Request, text: str) -> AsyncIterator[ServerSentEvent]:
        with self._sessions.watching(request) as place:
            while place and not ending(request):
                yield ServerSentEvent(text, event="live")
                await asyncio.sleep(_REPORT_SECONDS)
                try:
                    text = await run_in_threadpool(self._now, request)
                except NobackfillError:
                    # The browser asks again: by then a page says why, as of a token that was
                    # revoked.
                    return

    def _now(self, request: Request) -> str:
        with self._sessions.calling(request) as gateway:
            live = self._live(gateway)
        return self._site.text(request, "live.html.j2", **live)

    def _live(self, gateway: ConsoleCaller) -> dict[str, Any]:
        """What changes by the second: the load, and for a role that may watch a canary also that
        and the activation, whose message names galleries."""
        load = self._load.now()
        try:
            tried = look(gateway)
        except NotPermittedError:
            return {"load": load, "run": None, "canary": None}
        return {"load": load, "run": self._rollouts.told(load), "canary": tried}

    def _expiries(self) -> list[tuple[str, str, bool]]:
        """What, when, and whether that is soon; the first to expire first."""
        known = self._metrics.expiries
        ends = {f"metadata {role}": end for role, end in known.metadata().items()}
        ends |= {f"certificate {name}": end for name, end in known.certificates().items()}
        token = known.tokens()
        if token is not None:
            ends["the first of the tokens"] = token
        now = datetime.now(UTC)
        order = sorted(ends.items(), key=lambda pair: pair[1])
        return [(name, f"{end:%d %B %Y}", end - now < _SOON) for name, end in order]


def _number(request: Request) -> int:
    """Of the release that an address names. Raises NotFoundError."""
    text: str = request.path_params["number"]
    if not _is_number(text):
        raise NotFoundError(f"no release is called {text[:20]!r}")
    return int(text)


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10


def _state(release: release_pb2.Release) -> str:
    return release_pb2.ReleaseState.Name(release.state).removeprefix("RELEASE_STATE_").lower()


def _space_state(space: gallery_pb2.SpaceInfo) -> str:
    return gallery_pb2.SpaceState.Name(space.state).removeprefix("SPACE_STATE_").lower()


def _index(space: gallery_pb2.SpaceInfo) -> str:
    """How searches meet the vectors of a space."""
    found = space.index
    if not space.HasField("index"):
        return "not in memory"
    ways = ((found.in_graph, "in a graph"), (found.compared, "compared one by one"),
            (found.delta, "in the delta"))  # fmt: skip
    said = ", ".join(f"{count} {way}" for count, way in ways if count) or "empty"
    return f"{said}; a graph is being made" if found.due else said


def _moment(message: Any) -> str:
    """A message's `ends_at`, if it has one."""
    return (
        f"{message.ends_at.ToDatetime(UTC):%d %B %Y, %H:%M} UTC"
        if message.HasField("ends_at")
        else ""
    )
