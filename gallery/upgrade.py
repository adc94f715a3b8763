"""Carry a gallery's vectors into another space, chunk by chunk, resumable, bit-equal to an unbroken run."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from gallery.spec import SpaceSpec
from gallery.store import Store
from release.vectors import Vectors

Order = Literal["label", "uncertainty"]


class Upgraded(Protocol):
    """What a runner gives back for n items; release.models.Upgraded is one."""

    @property
    def embedding(self) -> Vectors: ...
    @property
    def side(self) -> Vectors | None: ...
    @property
    def uncertainty(self) -> Vectors | None: ...


class Runner(Protocol):
    """An upgrade or a route; release.models and release.routes open them."""

    def run(self, embedding: Vectors, side: Vectors | None) -> Upgraded:
        """embedding [n, from_dim], side [n, from_side_dim] or None -> the target's vectors."""
        ...


@dataclass(frozen=True)
class Progress:
    """Items written so far by this run and before it, out of `total`; `seconds` of this run."""

    done: int
    total: int
    written: int
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """`written` by this run. `left_behind`: items that have no vector in the target. `stopped`: asked to."""

    written: int
    left_behind: int
    stopped: bool


@dataclass(frozen=True)
class Estimate:
    """From a short measured probe that changes nothing. `bytes` the new space adds on disk."""

    items: int
    seconds: float
    bytes: int
    left_behind: int


def run_upgrade(
    store: Store,
    runner: Runner,
    target: SpaceSpec,
    *,
    source: str | None = None,
    reads_side: bool = False,
    chunk: int = 1024,
    order: Order = "label",
    on_progress: Callable[[Progress], None] | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> Outcome:
    """Fill `target` (staged if new) from space `source` (default: the active one).

    Items without side-information stay behind where the runner `reads_side`. Items put meanwhile are
    carried along; deleted ones are skipped. A run that was stopped or killed goes on where it ended.
    `on_progress` is called after each durable chunk and may sleep, to leave room for searches.
    Raises InvalidInputError for a bad output of the runner (nothing of that chunk is written).
    """
    raise NotImplementedError


def estimate(
    store: Store,
    runner: Runner,
    target: SpaceSpec,
    *,
    source: str | None = None,
    reads_side: bool = False,
) -> Estimate:
    """Cost of `run_upgrade`, before anything starts."""
    raise NotImplementedError
