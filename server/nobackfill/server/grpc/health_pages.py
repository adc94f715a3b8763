"""HTTP of the metrics port: /metrics, and what a kubelet asks, /healthz and /readyz.

In the clear, so that probes work where gRPC is behind TLS and tokens; nothing private is told.
"""

import socket
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

_TEXT = [("Content-Type", "text/plain; charset=utf-8")]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Silent(WSGIRequestHandler):
    # Seconds that a request may take to come.
    timeout = 10

    def log_message(self, format: str, *args: object) -> None:
        """Every probe would be a line."""


def serve(
    host: str, port: int, registry: CollectorRegistry, ready: Callable[[], bool]
) -> WSGIServer:
    """A server that is to be run with serve_forever. /healthz: the process answers; /readyz: 503
    until `ready` holds, and once it holds no more. Raises OSError."""
    metrics: Any = make_wsgi_app(registry)

    def answer(environ: Any, start_response: Any) -> Iterable[bytes]:
        path = environ.get("PATH_INFO")
        if path == "/healthz" or (path == "/readyz" and ready()):
            start_response("200 OK", _TEXT)
            return [b"ok\n"]
        if path == "/readyz":
            start_response("503 Service Unavailable", _TEXT)
            return [b"starting, or draining\n"]
        if path in ("/metrics", "/"):
            return metrics(environ, start_response)  # type: ignore[no-any-return]
        start_response("404 Not Found", _TEXT)
        return [b"expected /metrics, /healthz or /readyz\n"]

    kind = _Server6 if ":" in host else _Server
    return make_server(host, port, answer, kind, _Silent)
