"""What an item of a row costs: bytes stored for it, and the time that its route takes."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nobackfill.training.comparison.exported import exported
from nobackfill.training.comparison.rows import Row
from nobackfill.training.comparison.serve import step_of
from nobackfill.training.loop.run import read_finished
from nobackfill.training.networks.transform import UpgradeNetwork

_BATCH, _REPEATS = 1024, 10
# Of the numbers that Binarise writes: a bit each, where they are packed.
_BITS = "binary_simclr"


@dataclass(frozen=True)
class Cost:
    """`stored`: bytes of the old embedding (float32) and the side-information (float32, or a bit a
    number). `microseconds` an item, in batches of 1,024 on one thread; 0 without a transform.
    """

    stored: float
    microseconds: float


@dataclass(frozen=True)
class _Step:
    """One transform of a route, and what it reads."""

    network: UpgradeNetwork
    old_dim: int
    side_dim: int
    int8: bool

    @property
    def form(self) -> object:
        """Equal for networks of equal cost."""
        shapes = tuple((k, tuple(v.shape)) for k, v in self.network.state_dict().items())
        return type(self.network.h), shapes, self.int8


def costs(rows: Sequence[Row]) -> dict[str, Cost]:
    """By row. Transforms of one form are exported and timed once."""
    known: dict[object, float] = {}
    found = {}
    for row in rows:
        total = 0.0
        for step in _steps(row):
            if step.form not in known:
                known[step.form] = _microseconds(step)
            total += known[step.form]
        found[row.name] = Cost(stored(row), total)
    return found


def stored(row: Row) -> float:
    """Bytes an item of the gallery keeps for a row."""
    dim = row.old.values["embedding_dim"]
    assert isinstance(dim, int)
    if row.side is None:
        return 4.0 * dim
    side = row.side.values["side_info_dim"]
    assert isinstance(side, int)
    return 4.0 * dim + side * (1 / 8 if row.side.values["side_info"] == _BITS else 4)


def _steps(row: Row) -> list[_Step]:
    steps = []
    for run in row.route:
        # What a run reads first is its old model.
        old_dim = run.needs[0].values["embedding_dim"]
        assert isinstance(old_dim, int)
        side_dim = read_finished(run.folder).facts.get("side_dim", 0)
        steps.append(_Step(step_of(run), old_dim, int(side_dim), row.int8))
    return steps


def _microseconds(step: _Step) -> float:
    """The least of some repeats: what the processor takes where nobody else uses it."""
    session = exported(step.network, step.old_dim, step.side_dim, int8=step.int8)
    rng = np.random.default_rng(0)
    inputs = {"embedding": rng.normal(size=(_BATCH, step.old_dim)).astype(np.float32)}
    if step.network.reads_side:
        inputs["side"] = rng.normal(size=(_BATCH, step.side_dim)).astype(np.float32)
    taken = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        session.run(None, inputs)
        taken.append(time.perf_counter() - started)
    return 1e6 * min(taken) / _BATCH
