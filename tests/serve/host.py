"""A host of images on this machine."""

import threading
from http.server import BaseHTTPRequestHandler

from tests.support import hosts


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = 404 if "gone" in self.path else 302 if "moved" in self.path else 200
        body = bytes(1_000_000) if "large" in self.path else self.path.encode()
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/elsewhere")
        if "endless" not in self.path:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        try:
            self.wfile.write(body)
            while "endless" in self.path:
                self.wfile.write(bytes(1 << 16))
        except OSError:
            self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""


class Host:
    """Serves to the end of the block; `url` without a path."""

    def __enter__(self) -> "Host":
        self._server = hosts.Host(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
