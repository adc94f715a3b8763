"""Pages in a browser: the operator's console of a gateway, and `edge-client browse`."""

from nobackfill.extras import extra

# All of the extra, so that a missing package is told before anything is served.
with extra("web"):
    import jinja2  # noqa: F401
    import sse_starlette  # noqa: F401
    import starlette  # noqa: F401
    import uvicorn  # noqa: F401
