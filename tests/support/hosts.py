"""An HTTP server of tests whose clients may leave in the middle of an answer."""

import sys
from http.server import ThreadingHTTPServer
from typing import Any


class Host(ThreadingHTTPServer):
    """Says nothing of a client that has left: its thread's traceback would stand in the output of
    whichever test runs by then."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)
