"""Pages that show releases and galleries, and what an operator does with them."""

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from nobackfill.errors import (
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
)
from nobackfill.pages import Site
from nobackfill.pages.listener import ending
from nobackfill.pages.site import fields
from nobackfill.release.parsing import parse_manifest
from nobackfill.server.console import canary, evidence
from nobackfill.server.console.caller import Caller
from nobackfill.server.console.load import LoadMeter
from nobackfill.server.console.rollouts import Rollouts
from nobackfill.server.console.sessions import Sessions
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.v1 import gallery_pb2, release_pb2
from nobackfill.wire.releases import ROLLOUTS
from nobackfill.wire.values import from_value

_REPORT_SECONDS = 1.0
# Of what expires, that which is told in red.
_SOON = timedelta(days=14)


class Operations:
    """Everything but the playground."""

    def __init__(
        self, sessions: Sessions, rollouts: Rollouts, metrics: Metrics, site: Site
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
            matrix={} if old is None else evidence.matrix(manifest, old), evidence=evidence,
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

    def _live(self, gateway: Caller) -> dict[str, Any]:
        """What changes by the second: the load, and for a role that may watch a canary also that
        and the activation, whose message names galleries."""
        load = self._load.now()
        try:
            tried = canary.look(gateway)
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
