"""Which models were tried in a child with limits, so that this process may load them."""

import threading
from collections.abc import Callable, Collection, Iterable

from nobackfill.release.manifest import Manifest, Upgrade
from nobackfill.release.trial import try_release
from nobackfill.server.catalog import Catalog


class Trials:
    """Tries what was not tried since the start, one release at a time."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._lock = threading.Lock()
        # Replaced, never changed: what was tried is known without waiting for a trial that runs.
        self._tried: frozenset[tuple[str, int | None]] = frozenset()

    def release(
        self,
        manifest: Manifest,
        sources: Collection[int] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Try a release's encoders, and its upgrades from `sources`; see try_release."""
        wanted = {(manifest.space, source) for source in (None, *sources)}
        if wanted <= self._tried:
            return
        with self._lock:
            if wanted <= self._tried:
                return
            folder = self._catalog.verified(manifest.release)
            try_release(folder, manifest, upgrades=sources, meanwhile=meanwhile)
            self._tried |= wanted

    def steps(self, steps: Iterable[tuple[Manifest, Upgrade]]) -> None:
        """Try what a route leads through. Raises VerificationError."""
        for manifest, upgrade in steps:
            self.release(manifest, (upgrade.from_release,))
