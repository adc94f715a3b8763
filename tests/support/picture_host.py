"""A host of pictures on this machine, which counts who asks for what and may keep them waiting."""

import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.support import hosts


class PictureHost:
    """Serves `pictures` by id, as /ID, to the end of the block; `gate` holds answers back while it
    is not set."""

    def __init__(self, pictures: Mapping[str, bytes]) -> None:
        self.pictures = dict(pictures)
        self.asked: Counter[str] = Counter()
        # Of each request.
        self.headers: list[Mapping[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def address(self) -> str:
        """The source of it."""
        return f"http://127.0.0.1:{self._server.server_port}/{{id}}"

    def __enter__(self) -> "PictureHost":
        host = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.strip("/")
                host.asked[name] += 1
                host.headers.append(dict(self.headers))
                host.gate.wait(60)
                picture = host.pictures.get(name)
                self.send_response(404 if picture is None else 200)
                self.send_header("Content-Length", str(len(picture or b"")))
                self.end_headers()
                self.wfile.write(picture or b"")

            def log_message(self, *_: Any) -> None:
                """Not on the terminal."""

        self._server = hosts.Host(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
