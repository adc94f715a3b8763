"""The vectors and models that pages search with, kept in memory while the file stays as it is."""

import threading
import time
from dataclasses import dataclass

from nobackfill.client.device import Device
from nobackfill.client.photos.encoding import Encoder
from nobackfill.client.photos.search import Answer, Search
from nobackfill.errors import IncompatibleSpaceError, InvalidInputError, UnusableOutputError
from nobackfill.gallery.filters import All
from nobackfill.gallery.spec import SpaceSpec
from nobackfill.release.models import no_vector

# While a sync writes, every chunk of it is a commit: what is searched may be so much older then.
_OLDEST_SECONDS = 2.0


@dataclass(frozen=True)
class _Held:
    search: Search
    commits: int
    read_at: float


class View:
    """Searches in the active space and in the one that a rollback returns to; from any thread."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._held: dict[str, _Held] = {}
        self._encoders: dict[str, Encoder] = {}
        self._lock = threading.Lock()

    def active(self) -> Search:
        """All items in the space that answers."""
        while True:
            try:
                return self._search(self._device.store.active().spec)
            except IncompatibleSpaceError:
                # A sync flipped and dropped it in between.
                continue

    def previous(self) -> Search | None:
        """All items in the space before the last upgrade, as long as a rollback is possible."""
        previous = self._device.previous()
        try:
            return None if previous is None else self._search(previous.spec)
        except IncompatibleSpaceError:
            return None

    def by_image(self, search: Search, image: bytes, k: int, where: All | None = None) -> Answer:
        """What is nearest to an image. Raises InvalidInputError."""
        encoder = self._encoder(search.spec)
        try:
            vector = encoder.embed([encoder.pixels(image)])[0]
        except UnusableOutputError as error:
            raise InvalidInputError(f"the picture: {no_vector(encoder.manifest)}") from error
        among = search if where is None else search.among(where)
        return among.by_embedding({search.spec.space: vector.tolist()}, k)

    def _search(self, spec: SpaceSpec) -> Search:
        with self._lock:
            commits, staging = self._changes()
            held = self._held.get(spec.space)
            if held is not None:
                young = time.monotonic() - held.read_at < _OLDEST_SECONDS
                if held.commits == commits or (staging and young):
                    return held.search
            search = Search(self._device, {}, spec)
            known = {space.spec.space for space in self._device.store.spaces()}
            self._held = {name: one for name, one in self._held.items() if name in known}
            self._held[spec.space] = _Held(search, commits, time.monotonic())
            return search

    def _changes(self) -> tuple[int, bool]:
        """Commits of all processes so far, and whether one carries vectors just now."""
        with self._device.store.reading() as connection:
            commits = connection.execute("SELECT count FROM commits").fetchone()[0]
            staging = connection.execute("SELECT 1 FROM spaces WHERE state = 'staging'").fetchone()
        return int(commits), staging is not None

    def _encoder(self, spec: SpaceSpec) -> Encoder:
        with self._lock:
            if spec.space not in self._encoders:
                manifest = self._device.manifest(spec.release)
                self._encoders = {
                    name: one for name, one in self._encoders.items() if name in self._held
                }
                self._encoders[spec.space] = Encoder(self._device.models, manifest, side=False)
            return self._encoders[spec.space]
