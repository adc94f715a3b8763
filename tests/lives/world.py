"""The real system: a publication folder, a gateway process on it, a device that follows it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypedDict, TypeVar

import numpy as np

from nobackfill.client.device import Device
from nobackfill.errors import (
    CancelledError,
    InvalidInputError,
    NobackfillError,
    NotFoundError,
    PreconditionError,
    UnavailableError,
    VerificationError,
)
from nobackfill.release.manifest import Manifest
from nobackfill.release.publishing.metadata import require_signed_metadata
from nobackfill.v1 import gallery_pb2, types_pb2
from nobackfill.wire.connection import translate_errors
from tests.lives.pictures import IMAGES, PICTURES, Pictures
from tests.server import process
from tests.server.support import Client, metadata, vectors_of
from tests.support import blocks, graphs

T = TypeVar("T")


class Query(TypedDict, total=False):
    """What a search asks by."""

    image: bytes
    embeddings: dict[str, list[float]]


# Errors of a call for a release that there is not, and of one whose gateway may be gone.
_NOWHERE = (NotFoundError, PreconditionError, VerificationError)
_AWAY = (UnavailableError, CancelledError)


class KilledError(Exception):
    """The gateway died while it was asked; it runs again."""


class World:
    """Everything that runs, in one folder. Close it."""

    def __init__(self, top: Path, pictures: Pictures, *options: str) -> None:
        """`options` of `gateway serve`."""
        self.top = top
        self.repo = top / "repo"
        self.device = top / "device.sqlite"
        self.pictures = pictures
        self.manifests: dict[int, Manifest] = {}
        self.restarts = 0
        self._options = options
        self._files = blocks.write_pngs(top / "images", IMAGES)

    def begin(self) -> None:
        """With release 1: a gateway that serves it."""
        self.publish(1, ())
        self.start()

    def publish(self, number: int, sources: Sequence[int], *, direct: bool = False) -> None:
        """Publish a release for real."""
        directly = sources[:1] if direct else ()
        made = blocks.publish_block_release(self.repo, number, sources, directly=directly)
        self.manifests[number] = made

    def start(self, fault: str = "") -> None:
        """Start the gateway; `fault` as in nobackfill.durable kills it at a step of its own."""
        self._armed = bool(fault)
        data, environment = self.top / "data", {"NOBACKFILL_FAULT": fault} if fault else {}
        while True:
            try:
                self.served = process.start(self.repo, data, *self._options, **environment)
                break
            except AssertionError:
                if not environment:
                    raise
                # Killed before it served: it is started again without a fault.
                environment = {}
        self.client = Client(self.served.address)
        self.restarts += 1

    def stop(self, *, kill: bool) -> None:
        """End the gateway: SIGKILL, or SIGTERM and its own time."""
        self.client.close()
        if kill:
            self.served.process.kill()
            self.served.process.wait()
        else:
            # It may meet the fault that it was started with.
            ended = (0, -9) if self._armed else (0,)
            assert self.served.stop() in ended, "a gateway that is told to end, ends well"

    def close(self) -> None:
        """End what runs."""
        if hasattr(self, "served") and self.served.process.poll() is None:
            self.stop(kill=True)

    def ask(self, call: Callable[[Client], T]) -> T:
        """The answer of the gateway. Raises KilledError if it died meanwhile."""
        try:
            with translate_errors("the gateway"):
                return call(self.client)
        except NobackfillError as error:
            # A status that is in no table, UNKNOWN say, is of no class of its own.
            away = isinstance(error, _AWAY) or type(error) is NobackfillError
            try:
                self.served.process.wait(5 if away else 0)
            except subprocess.TimeoutExpired:
                raise error from None
        self.client.close()
        self.start()
        raise KilledError

    def read(self, call: Callable[[Client], T]) -> T:
        """The answer to a question that may be asked again."""
        try:
            return self.ask(call)
        except KilledError:
            return self.ask(call)

    # What is asked.

    def item(self, gallery: str, name: str) -> tuple[str, frozenset[int]] | None:
        """An item's content, and the releases in whose spaces it has a vector."""
        request = gallery_pb2.GetItemRequest(gallery=gallery, id=name)
        try:
            # Gateway does not answer an item's spaces.
            found = self.read(lambda client: client.raw.galleries.GetItem(request))
        except NotFoundError:
            return None
        return found.metadata["content"].text, self.releases_of(found.spaces)

    def releases_of(self, spaces: Iterable[str]) -> frozenset[int]:
        """Spaces as release numbers."""
        known = {manifest.space: number for number, manifest in self.manifests.items()}
        return frozenset(known[space] for space in spaces)

    def gallery(self, name: str) -> gallery_pb2.Gallery:
        """As the gateway tells it."""
        return self.read(lambda client: client.get_gallery(name))

    def galleries(self) -> dict[str, gallery_pb2.Gallery]:
        """All of them, by name."""
        found = self.read(lambda client: list(client.list_galleries()))
        return {gallery.name: gallery for gallery in found}

    def states(self) -> dict[int, str]:
        """Releases as the gateway tells them."""
        return self.read(lambda client: client.states())

    def idle(self) -> bool:
        """Whether no activation is under way: only then a wrong name is what is wrong."""
        try:
            self.read(lambda client: client.create_gallery("NO NAME"))
        except NobackfillError as error:
            return isinstance(error, InvalidInputError)
        raise AssertionError("a gallery was made under a wrong name")

    def refresh(self) -> None:
        """Let the gateway read the publication now: asked for a release it does not know."""
        with suppress(*_NOWHERE):
            self.read(lambda client: client.get_release(999))

    # What is sent.

    def image(self, name: str, picture: int, content: str) -> gallery_pb2.PutItem:
        """An item as an image."""
        told = metadata(content=content)
        return gallery_pb2.PutItem(id=name, image=self.pictures.pngs[picture], metadata=told)

    def vectors(self, name: str, picture: int, release: int, content: str) -> gallery_pb2.PutItem:
        """An item as vectors that a client with that release on board has made."""
        side = np.full(graphs.SIDE_DIM, picture / PICTURES, "<f4")
        vectors = gallery_pb2.Vectors(
            embedding=self.embedding(release, picture),
            side_info=types_pb2.SideInfo(
                space=self.manifests[release].side_space or "", values=side.tobytes()
            ),
        )
        return gallery_pb2.PutItem(id=name, vectors=vectors, metadata=metadata(content=content))

    def embedding(self, release: int, picture: int) -> types_pb2.Embedding:
        """A picture as a client with that release on board sends it."""
        manifest = self.manifests[release]
        values = self.pictures.vector(manifest, picture).astype("<f4").tobytes()
        return types_pb2.Embedding(space=manifest.space, values=values)

    def by_image(self, picture: int) -> Query:
        return {"image": self.pictures.pngs[picture]}

    def by_embedding(self, picture: int, of: Iterable[int]) -> Query:
        """By its vectors in the spaces of releases."""
        return {"embeddings": vectors_of(*(self.embedding(release, picture) for release in of))}

    # The publication and the device.

    def versions(self) -> tuple[int, int, int, int]:
        """Of the metadata that is published: root, timestamp, snapshot, targets."""
        ledger = require_signed_metadata(self.repo)
        signed = (ledger.root, ledger.timestamp, ledger.snapshot, ledger.targets)
        root, timestamp, snapshot, targets = (part.version for part in signed)
        return root, timestamp, snapshot, targets

    def file(self, picture: int) -> Path:
        """A picture on the device."""
        return self._files[picture]

    def command(self, *arguments: str, fault: str) -> int:
        """Run `edge-client`; its exit status."""
        program = str(Path(sys.executable).with_name("edge-client"))
        return subprocess.run(
            [program, "--gallery", str(self.device), *arguments],
            check=False,
            capture_output=True,
            env={**os.environ, "NOBACKFILL_FAULT": fault},
        ).returncode

    def opened(self) -> Device:
        """The device's gallery."""
        return Device(self.device)

    def timestamp(self) -> Path:
        """The file whose replacement commits what is published."""
        return self.repo / "timestamp.json"


def spaces_of(told: gallery_pb2.Gallery) -> dict[int, tuple[str, int]]:
    """A gallery's spaces by release: state, number of vectors."""
    name = gallery_pb2.SpaceState.Name
    return {
        s.release: (name(s.state).removeprefix("SPACE_STATE_").lower(), s.items)
        for s in told.spaces
    }
