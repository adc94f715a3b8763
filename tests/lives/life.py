"""One life: the real system beside the model of it."""

from dataclasses import dataclass
from typing import TypeVar

from numpy.random import Generator

from tests.lives.model import Device, Publication, Server
from tests.lives.world import World

T = TypeVar("T")


@dataclass
class Life:
    """`rng` is one operation's own, so that what is drawn does not hang on what went before.

    `floor`: the newest metadata versions the device has seen. `stamps`: what was in timestamp.json,
    oldest first.
    """

    world: World
    publication: Publication
    server: Server
    device: Device
    rng: Generator
    floor: tuple[int, int, int, int] = (0, 0, 0, 0)
    stamps: tuple[bytes, ...] = ()

    def chance(self, share: float) -> bool:
        """True so often."""
        return bool(self.rng.random() < share)

    def below(self, limit: int) -> int:
        """0 to just below `limit`."""
        return int(self.rng.integers(limit))

    def some_gallery(self) -> str:
        """The name of a gallery that there is."""
        return self.one_of(sorted(self.server.galleries))

    def one_of(self, choices: list[T]) -> T:
        """One of these."""
        return choices[self.below(len(choices))]
