"""Web pages: the operator's console of a gateway, and `edge-client browse`."""

from nobackfill.extras import require_extra

# Import the whole extra, so that a missing package is reported before any page is served.
with require_extra("web"):
    import jinja2  # noqa: F401
    import sse_starlette  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
