"""A site of pages: routes, static files, and errors shown as pages."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

from nobackfill.errors import (
    BusyError,
    CannotWriteError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    NotPermittedError,
    PreconditionError,
    TooLargeError,
    UnauthenticatedError,
    UnavailableError,
)
from nobackfill.pages.templates import SHARED_TEMPLATES, template_environment

# The first matching class wins.
_STATUSES: tuple[tuple[type[NobackfillError], int], ...] = (
    (UnauthenticatedError, 401),
    (NotPermittedError, 403),
    (NotFoundError, 404),
    (TooLargeError, 413),
    (PreconditionError, 409),
    (InvalidInputError, 422),
    (BusyError, 503),
    (UnavailableError, 502),
    (CannotWriteError, 507),
)
_FOLDER = Path(__file__).parent
_STATIC = {
    "style.css": (SHARED_TEMPLATES, "text/css"),
    "site.css": (_FOLDER, "text/css"),
    "icon.svg": (_FOLDER / "static", "image/svg+xml"),
    "pages.js": (_FOLDER / "static", "text/javascript"),
    "htmx.min.js": (_FOLDER / "static", "text/javascript"),
    "htmx-sse.min.js": (_FOLDER / "static", "text/javascript"),
}
# Largest body of a form, and how long a body may take to arrive.
MOST_FORM_BYTES = 64 * 1024
_BODY_SECONDS = 60.0

Page = Callable[[Request], Response]
# A page that also gets the body of the request.
Action = Callable[[Request, bytes], Response]


class Site:
    """The routes of a site, and the templates of its pages.

    Pages are functions, which run on threads.
    An error of nobackfill that a page raises becomes a page of one sentence, with the status of its
    class.
    """

    def __init__(
        self, template_folder: Path, title: str, links: Sequence[tuple[str, str]], login: str = ""
    ) -> None:
        """Make an empty site.

        Args:
            template_folder: the folder of the site's templates; the shared ones of all sites are
                found too.
            title: the title of all pages.
            links: path and name of each link at the top of the pages.
            login: where unauthenticated readers are redirected; empty: nowhere.
        """
        self._login = login
        self._environment = template_environment(template_folder, _FOLDER)
        self._shared: dict[str, Any] = {"site": title, "links": links}
        self._routes = [Route("/static/{name}", _static)]

    def get(self, path: str, page: Page) -> None:
        """Add a page that a browser reads; of two pages with one path, the first one counts.

        HEAD is answered too. Pages share a pool of threads. Call it before `app`.

        Args:
            path: the path in the site, as starlette writes routes.
            page: makes the response, on a thread.
        """
        self._routes.append(Route(path, _in_thread_pool(page), methods=["GET"]))

    def post(
        self,
        path: str,
        page: Action,
        most_bytes: int = MOST_FORM_BYTES,
        check: Callable[[Request], None] = lambda request: None,
    ) -> None:
        """Add an action that a browser posts to.

        Call it before `app`. If two actions have one path, the first one counts.

        Args:
            path: the path in the site, as starlette writes routes.
            page: gets the request and its body, and makes the response, on a thread.
            most_bytes: the largest body in bytes; a larger one gets the status 413. It must arrive
                within 60 s, or it gets the status 422.
            check: runs first, in the event loop, so it must not block; if it raises, the body is
                not read.
        """

        async def endpoint(request: Request) -> Response:
            check(request)
            return await run_in_threadpool(page, request, await _read_body(request, most_bytes))

        self._routes.append(Route(path, endpoint, methods=["POST"]))

    def stream(self, path: str, page: Callable[[Request], Awaitable[Response]]) -> None:
        """Add a page that streams its answer.

        Call it before `app`. If two pages have one path, the first one counts.

        Args:
            path: the path in the site, as starlette writes routes.
            page: makes the response in the event loop, so it must not block.
        """
        self._routes.append(Route(path, page, methods=["GET"]))

    def render(self, request: Request, template: str, **values: Any) -> str:
        """Render a template.

        Args:
            request: the present request.
            template: the name of the template.
            values: names for the template. It also gets `base` (the site's address without the
                final slash), `here` (the path in the site), `site` (the title) and `links`. A name
                that the template uses and nobody gives is an error of jinja2.

        Returns:
            The text of the page; values are escaped for HTML.

        Raises:
            jinja2.TemplateNotFound: there is no such template.
            jinja2.UndefinedError: the template uses a name that nobody gives.
            TypeError: `values` has one of the names above.
        """
        base = request.scope.get("root_path", "")
        path = request.url.path.removeprefix(base)
        page = self._environment.get_template(template)
        return page.render(base=base, here=path, **self._shared, **values)

    def respond_with_page(
        self, request: Request, template: str, status: int = 200, **values: Any
    ) -> Response:
        """Respond with a rendered template.

        Args:
            request: the present request.
            template: the name of the template.
            status: the HTTP status.
            values: names for the template, as in `render`.

        Raises:
            jinja2.TemplateNotFound: there is no such template.
            jinja2.UndefinedError: the template uses a name that nobody gives.
            TypeError: `values` has a name that `render` gives itself.
        """
        return HTMLResponse(self.render(request, template, **values), status)

    def redirect(self, request: Request, path: str) -> Response:
        """Redirect the browser to another page of the site after an action.

        Args:
            request: the present request; one that htmx sent gets its own header.
            path: the path in the site, with a leading slash.

        Returns:
            The status 303, or for htmx 200 with the header HX-Redirect. Whether the page exists is
            not checked.
        """
        address = request.scope.get("root_path", "") + path
        if "hx-request" in request.headers:
            return Response(headers={"HX-Redirect": address})
        return RedirectResponse(address, 303)

    def app(self) -> Starlette:
        """Build the application of all routes that were added so far.

        Returns:
            The application. An error of nobackfill gets the status of its class, or 500; an
            unauthenticated GET is redirected to the login, if the site has one. Other errors pass
            to the server.
        """
        handlers: dict[Any, Any] = {
            NobackfillError: self._respond_with_refusal,
            HTTPException: self._respond_not_found,
            ClientDisconnect: _respond_to_disconnected,
        }
        return Starlette(routes=self._routes, exception_handlers=handlers)

    def _respond_with_refusal(self, request: Request, error: Exception) -> Response:
        if self._login and isinstance(error, UnauthenticatedError) and request.method == "GET":
            return self.redirect(request, self._login)
        status = next((code for kind, code in _STATUSES if isinstance(error, kind)), 500)
        return self._respond_with_error(request, str(error), status)

    def _respond_not_found(self, request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return self._respond_with_error(request, "This page does not exist.", error.status_code)

    def _respond_with_error(self, request: Request, sentence: str, status: int) -> Response:
        part = "hx-request" in request.headers
        template = "notice.html.j2" if part else "error.html.j2"
        return self.respond_with_page(request, template, status, sentence=sentence)


def parse_form(body: bytes) -> dict[str, str]:
    """Parse the body of a form; of several equal names, the last one counts.

    Empty fields are left out.

    Returns:
        The values by name; empty for an empty body.

    Raises:
        InvalidInputError: the body is not UTF-8, or has more than 100 fields.
    """
    try:
        return dict(parse_qsl(body.decode("utf-8"), max_num_fields=100, errors="strict"))
    except ValueError as error:
        raise InvalidInputError(
            "expected the form of this page in UTF-8 with at most 100 fields; load the page again"
        ) from error


async def _read_body(request: Request, most: int) -> bytes:
    """Read the body of a request.

    Raises:
        TooLargeError: it exceeds `most` bytes; no more is read.
        InvalidInputError: it does not end in time.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise TooLargeError(
                        f"the upload: expected at most {most} bytes, got more; send a smaller file"
                    )
    except TimeoutError as error:
        raise InvalidInputError(
            f"the upload is incomplete: {len(body)} bytes arrived within {_BODY_SECONDS:.0f} s; "
            "send it again, or send a smaller copy"
        ) from error
    return bytes(body)


def _respond_to_disconnected(request: Request, error: Exception) -> Response:
    """Respond to a client that has disconnected, which reads nothing."""
    return Response(status_code=400)


def _in_thread_pool(page: Page) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await run_in_threadpool(page, request)

    return endpoint


def _static(request: Request) -> Response:
    try:
        folder, kind = _STATIC[request.path_params["name"]]
    except KeyError as error:
        raise HTTPException(404) from error
    content = (folder / request.path_params["name"]).read_bytes()
    return Response(content, media_type=kind, headers={"Cache-Control": "private, max-age=3600"})
