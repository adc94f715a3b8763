"""Where a report leads: to pages that are served while it is read."""

from collections.abc import Sequence
from dataclasses import dataclass

from nobackfill.errors import InvalidInputError


@dataclass(frozen=True)
class Served:
    """Addresses of pages as their commands print them; empty where none are served."""

    # `gateway serve --console`.
    console: str = ""
    # `edge-client browse`.
    browse: str = ""

    def links(self, release: int) -> Sequence[tuple[str, str]]:
        """What there is to see of a release, and its address. Raises InvalidInputError."""
        pages = (
            (self.console, f"release/{release}", f"release {release} at the gateway's console"),
            (self.console, "playground", "old and new side by side"),
            (self.browse, "release", "what a sync does to the device's gallery"),
            (self.browse, "uncertain", "its least certain pictures"),
        )
        return [(said, _base(served) + path) for served, path, said in pages if served]


def _base(address: str) -> str:
    if not address.startswith(("http://", "https://")):
        raise InvalidInputError(
            f"expected an address as gateway serve --console or edge-client browse prints it, "
            f"http://…, got {address!r}"
        )
    return address.rstrip("/") + "/"
