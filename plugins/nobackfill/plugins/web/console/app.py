"""The console as a whole: its pages behind the guard, at their own address."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from cryptography import x509
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from nobackfill.images import LARGEST_IMAGE_BYTES
from nobackfill.plugins.web.console.operations import Operations, Rollouts
from nobackfill.plugins.web.console.playground import Embed, Playground
from nobackfill.plugins.web.console.sessions import ConsoleSessions, SessionPaths
from nobackfill.plugins.web.guard import Guard, new_token
from nobackfill.plugins.web.listener import Listener
from nobackfill.plugins.web.site import Site, parse_form
from nobackfill.server.grpc.metrics import Metrics
from nobackfill.server.settings import Settings, split_address

_LINKS = (("/", "Overview"), ("/playground", "Playground"), ("/rollback", "Rollback"))


class Console:
    """The operators' console of a gateway: a server of pages that runs until `close`.

    Without tokens the address contains a new secret at each start. With tokens, people log in with
    their own.

    Attributes:
        address: the address of the pages.
    """

    def __init__(
        self, settings: Settings, socket_address: str, metrics: Metrics, embed: Embed
    ) -> None:
        """Start to serve the console on a thread.

        The caller closes it. The certificate is read once.

        Args:
            settings: the gateway's settings: the console's address, tokens and TLS.
            socket_address: the gateway's own socket, as gRPC names it.
            metrics: the gateway's metrics.
            embed: embeds queries for the playground: (release, image or text) -> float32 [1, dim].

        Raises:
            ConfigurationError: the address has another form, cannot be used, or is in use.
            OSError, ValueError: the certificate cannot be read.
        """
        host, port = split_address(settings.console_address, "console_address")
        host = "127.0.0.1" if host == "localhost" else host
        tls = None
        if settings.tls_cert is not None and settings.tls_key is not None:
            tls = settings.tls_cert, settings.tls_key, settings.tls_client_ca
        with ExitStack() as closing:
            listener = closing.enter_context(Listener(host, port, tls))
            guarded = settings.tokens_file is not None
            token = None if guarded else new_token()
            sessions = ConsoleSessions(socket_address, guarded=guarded, secure=tls is not None)
            site = _make_site(sessions, metrics, embed)
            names = (
                ()
                if settings.tls_cert is None
                else _certificate_names(settings.tls_cert, listener.port)
            )
            # Browsers fetch the pictures of hits from the operator's own hosts.
            pages = SessionPaths(site.app()) if guarded else site.app()
            app = Guard(pages, (*listener.hosts, *names), token, secure=tls is not None,
                        image_sources="http: https:")  # fmt: skip
            listener.serve(app, sessions.has_session if guarded else app.has_secret)
            self.address = f"{listener.address}/{token}/" if token else f"{listener.address}/"
            self._closing = closing.pop_all()

    def close(self) -> None:
        """Stop serving; open streams get 3 s to end. A second call does nothing.

        It blocks until the thread has ended.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _make_site(sessions: ConsoleSessions, metrics: Metrics, embed: Embed) -> Site:
    site = Site(
        Path(__file__).parent / "templates",
        "Gateway",
        _LINKS,
        login="/login" if sessions.guarded else "",
    )
    operations = Operations(sessions, Rollouts(), metrics, site)
    playground = Playground(sessions, embed, site)

    def login(request: Request) -> Response:
        return site.respond_with_page(request, "login.html.j2")

    def enter(request: Request, body: bytes) -> Response:
        token = parse_form(body).get("token", "").strip()
        return sessions.begin(token, lambda path: RedirectResponse(f"{path}/", 303))

    def leave(request: Request, body: bytes) -> Response:
        response = RedirectResponse("/login", 303)
        sessions.end(request, response)
        return response

    site.get("/", operations.overview)
    site.get("/release/{number}", operations.release)
    site.get("/release/{number}/estimate", operations.estimate)
    site.post("/release/{number}/activate", operations.activate)
    site.get("/gallery/{name}", operations.gallery)
    site.get("/rollback", operations.rollback_target)
    site.post("/rollback", operations.rollback)
    site.stream("/live", operations.live)
    site.get("/playground", playground.show)
    site.post("/playground/search", playground.search, LARGEST_IMAGE_BYTES, check=sessions.check)
    if sessions.guarded:
        site.get("/login", login)
        site.post("/login", enter)
        site.post("/logout", leave)
    return site


def _certificate_names(certificate: Path, port: int) -> Iterable[str]:
    """Return the names by which browsers may address a gateway with this certificate."""
    (first, *_) = x509.load_pem_x509_certificates(certificate.read_bytes())
    try:
        names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    addresses = names.get_values_for_type(x509.IPAddress)
    values = [
        *names.get_values_for_type(x509.DNSName),
        *(f"[{one}]" if one.version == 6 else str(one) for one in addresses),
    ]
    return [name for one in values for name in (f"{one}:{port}", *([one] if port == 443 else []))]
