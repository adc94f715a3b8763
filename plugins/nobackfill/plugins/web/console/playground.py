"""One picture, or one text, asked of each pair of models and vectors, side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from nobackfill.errors import InvalidInputError, NobackfillError
from nobackfill.plugins.web.console.sessions import ConsoleSessions
from nobackfill.plugins.web.site import Site
from nobackfill.v1 import gallery_pb2, release_pb2
from nobackfill.vectors import Vectors
from nobackfill.wire import Gateway
from nobackfill.wire.answers import Answer, Hit

_HITS = 10
_MOST_TEMPLATE = 500
_ACTIVE = release_pb2.RELEASE_STATE_ACTIVE

# (release, image or text) -> float32 [1,dim].
Embed = Callable[[int, bytes | str], Vectors]


@dataclass(frozen=True)
class ResultColumn:
    """What one pair answers, or why it is not asked."""

    title: str
    hits: Sequence[Hit] = ()
    why: str = ""


class Playground:
    """Searches as an app would make them; the gateway neither fetches nor keeps a picture, and
    keeps no text."""

    def __init__(self, sessions: ConsoleSessions, embed: Embed, site: Site) -> None:
        self._sessions = sessions
        self._embed = embed
        self._site = site

    def show(self, request: Request) -> Response:
        """The galleries to choose from, and where a picture goes; a text, where the release that
        answers reads such."""
        with self._sessions.calling(request) as gateway:
            galleries = [gallery.name for gallery in gateway.list_galleries()]
            active = [one for one in gateway.list_releases() if one.state == _ACTIVE]
        return self._site.show(
            request, "playground.html.j2", galleries=galleries,
            pictures=not active or any(release.embeds_images for release in active),
            texts=any(release.embeds_texts for release in active),
        )  # fmt: skip

    def search(self, request: Request, body: bytes) -> Response:
        """The columns for one picture, or for a text where the request says that it is one."""
        query = _query(request, body)
        asked = request.query_params
        name, template = asked.get("gallery", ""), asked.get("template", "")[:_MOST_TEMPLATE]
        if not name:
            raise InvalidInputError("expected a gallery; make one with CreateGallery first")
        with self._sessions.calling(request) as gateway:
            # Before anything is embedded for them: whether they may search here at all.
            if isinstance(query, str):
                now = gateway.search(name, text=query, k=_HITS)
            else:
                now = gateway.search(name, image=query, k=_HITS)
            gallery = gateway.get_gallery(name)
            columns = [
                *self._older(gateway, gallery, now, query),
                ResultColumn(f"release {now.release}, as it is served", now.hits),
            ]
        return self._site.show(
            request, "columns.html.j2", columns=columns, url=lambda hit: _url(hit, template)
        )

    def _older(
        self, gateway: Gateway, gallery: gallery_pb2.Gallery, now: Answer[Hit], query: bytes | str
    ) -> list[ResultColumn]:
        """Old/old, and new/old, where the gallery still has vectors of a release before."""
        filling = gallery_pb2.SPACE_STATE_STAGING
        kept = [s for s in gallery.spaces if s.state != filling and s.release < now.release]
        if not kept:
            return []
        old = max(kept, key=lambda space: space.release)
        alone = f"release {old.release} asks its own vectors"
        mixed = f"release {now.release} asks release {old.release}'s vectors"
        release = gateway.get_release(now.release)
        pairs = [(alone, old.release)]
        if old.release in release.searches_directly:
            pairs.append((mixed, now.release))
        columns = []
        for title, asking in pairs:
            try:
                vector = self._embed(asking, query)[0]
                by = {old.space: vector.tolist()}
                found = gateway.search(gallery.name, embeddings=by, k=_HITS)
                columns.append(ResultColumn(title, found.hits))
            except NobackfillError as error:
                columns.append(ResultColumn(title, why=str(error)))
        if len(pairs) == 1:
            columns.append(ResultColumn(mixed, why=_never_meet(release, old.release)))
        return columns


def _query(request: Request, body: bytes) -> bytes | str:
    """Raises InvalidInputError."""
    if not request.headers.get("content-type", "").startswith("text/plain"):
        return body
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError("expected a text in UTF-8") from error


def _never_meet(release: release_pb2.Release, old: int) -> str:
    return (
        f"Not asked: release {release.number} does not declare that its queries may meet vectors "
        f"of release {old} as they are, so they never do. What that naive swap would cost stands "
        "in the release's matrix."
    )


def _url(hit: Hit, template: str) -> str:
    """Where the browser finds a hit's picture: its metadata `image_url`, else the template with
    {id} or a metadata key in braces; empty for what is no http(s) address."""
    url = str(hit.metadata.get("image_url", ""))
    if not url and template:
        url = template.replace("{id}", quote(hit.id, safe=""))
        for key, value in hit.metadata.items():
            url = url.replace(f"{{{key}}}", quote(str(value), safe=""))
    return url if url.startswith(("http://", "https://")) else ""
