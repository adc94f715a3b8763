"""The playground: search with each pair of query model and gallery vectors, side by side."""

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

# (release, encoded image or text) -> float32 [1, dim].
Embed = Callable[[int, bytes | str], Vectors]


@dataclass(frozen=True)
class ResultColumn:
    """The answer of one pair of query model and gallery vectors.

    Attributes:
        title: the heading of the column.
        hits: nearest first.
        no_answer_reason: the reason why there is no answer; empty if there is one.
    """

    title: str
    hits: Sequence[Hit] = ()
    no_answer_reason: str = ""


class Playground:
    """The pages of the playground, which search as an app would.

    The gateway stores neither pictures nor texts, and never fetches a hit's picture.
    """

    def __init__(self, sessions: ConsoleSessions, embed: Embed, site: Site) -> None:
        self._sessions = sessions
        self._embed = embed
        self._site = site

    def show(self, request: Request) -> Response:
        """Show the form: a gallery, and a picture or a text, as the active release embeds them.

        Without an active release, the page offers pictures only. Galleries that are set aside are
        offered, too.

        Raises:
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not list galleries or releases.
            UnavailableError: the gateway does not answer.
            BusyError: the gateway has too much work.
        """
        with self._sessions.open_caller(request) as gateway:
            galleries = [gallery.name for gallery in gateway.list_galleries()]
            active = [one for one in gateway.list_releases() if one.state == _ACTIVE]
        return self._site.respond_with_page(
            request, "playground.html.j2", galleries=galleries,
            pictures=not active or any(release.embeds_images for release in active),
            texts=any(release.embeds_texts for release in active),
        )  # fmt: skip

    def search(self, request: Request, body: bytes) -> Response:
        """Show the hits of a query by each pair of query model and gallery vectors.

        At most ten hits of each pair are shown. The first search is made with the caller's rights
        before anything is embedded. An error of a further pair is shown in its column.

        Args:
            request: its address has `gallery`, and may have `template`, the address of a hit's
                picture.
            body: a text if the content type is text/plain, else an encoded image.

        Raises:
            InvalidInputError: there is no `gallery`, or the body is empty, or no image or text in
                UTF-8.
            NotFoundError: there is no such gallery.
            VerificationError: the gallery is damaged and set aside.
            PreconditionError: the gallery cannot answer such a query now, such as NoEncoderError.
            UnauthenticatedError: the request belongs to no session.
            NotPermittedError: the role may not search.
            TooLargeError: the query is larger than the gateway accepts.
            BusyError: the gateway has too much work.
            UnavailableError: the gateway does not answer within a minute.
        """
        query = _parse_query(request, body)
        parameters = request.query_params
        name, template = (
            parameters.get("gallery", ""),
            parameters.get("template", "")[:_MOST_TEMPLATE],
        )
        if not name:
            raise InvalidInputError(
                "the search names no gallery; choose one, or create one with the gateway's call "
                "CreateGallery"
            )
        with self._sessions.open_caller(request) as gateway:
            # First a search with the caller's own rights: without them, nothing is embedded.
            if isinstance(query, str):
                answer = gateway.search(name, text=query, k=_HITS)
            else:
                answer = gateway.search(name, image=query, k=_HITS)
            gallery = gateway.get_gallery(name)
            columns = [
                *self._older_columns(gateway, gallery, answer, query),
                ResultColumn(f"release {answer.release}, as it is served", answer.hits),
            ]
        return self._site.respond_with_page(
            request, "columns.html.j2", columns=columns, url=lambda hit: _picture_url(hit, template)
        )

    def _older_columns(
        self,
        gateway: Gateway,
        gallery: gallery_pb2.Gallery,
        answer: Answer[Hit],
        query: bytes | str,
    ) -> list[ResultColumn]:
        """Return the columns old/old and new/old, if the gallery keeps vectors of an older
        release."""
        filling = gallery_pb2.SPACE_STATE_STAGING
        older = [s for s in gallery.spaces if s.state != filling and s.release < answer.release]
        if not older:
            return []
        old = max(older, key=lambda space: space.release)
        old_title = f"release {old.release} searches its own vectors"
        mixed_title = f"release {answer.release} searches the vectors of release {old.release}"
        release = gateway.get_release(answer.release)
        pairs = [(old_title, old.release)]
        if old.release in release.searches_directly:
            pairs.append((mixed_title, answer.release))
        columns = []
        for title, model in pairs:
            try:
                vector = self._embed(model, query)[0]
                by = {old.space: vector.tolist()}
                other = gateway.search(gallery.name, embeddings=by, k=_HITS)
                columns.append(ResultColumn(title, other.hits))
            except NobackfillError as error:
                columns.append(ResultColumn(title, no_answer_reason=str(error)))
        if len(pairs) == 1:
            columns.append(
                ResultColumn(
                    mixed_title, no_answer_reason=_not_searched_reason(release, old.release)
                )
            )
        return columns


def _parse_query(request: Request, body: bytes) -> bytes | str:
    """Return the body as an image, or as a text.

    Raises:
        InvalidInputError: a text is not UTF-8.
    """
    if not request.headers.get("content-type", "").startswith("text/plain"):
        return body
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidInputError(
            "the query: expected a text in UTF-8, got other bytes; type the text again"
        ) from error


def _not_searched_reason(release: release_pb2.Release, old: int) -> str:
    return (
        f"Not searched: release {release.number} does not declare release {old} directly "
        f"searchable, so its queries never meet these vectors as they are. The release's matrix "
        "shows what such a naive swap would cost."
    )


def _picture_url(hit: Hit, template: str) -> str:
    """Return the address of a hit's picture; empty if it is not an http(s) address.

    The address is the metadata `image_url`, else the template with {id} or {KEY} replaced.
    """
    url = str(hit.metadata.get("image_url", ""))
    if not url and template:
        url = template.replace("{id}", quote(hit.id, safe=""))
        for key, value in hit.metadata.items():
            url = url.replace(f"{{{key}}}", quote(str(value), safe=""))
    return url if url.startswith(("http://", "https://")) else ""
