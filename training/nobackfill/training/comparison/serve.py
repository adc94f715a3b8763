"""A gallery of old vectors as a row serves it: as it is, or carried along upgrades."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nobackfill.training.comparison.exported import exported
from nobackfill.training.comparison.recipe import Run
from nobackfill.training.comparison.rows import Row
from nobackfill.training.config import EmbedderConfig
from nobackfill.training.loop.run import load_part
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.method import UpgradeShape
from nobackfill.training.methods import embedder_method
from nobackfill.training.networks.frozen import load_encoder
from nobackfill.training.networks.transform import Upgrade, Upgraded

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class Served:
    """The gallery in the new space, and the log-variance [n] an item where the route
    predicts one.
    """

    embedding: Floats
    log_variance: Floats | None


def serve(row: Row, old: Floats, side: Floats | None) -> Served | None:
    """Carry `old` [n,dim] with `side` along the row's route; None where it is searched as it is."""
    if not row.route:
        return None
    embedding, stored = torch.from_numpy(old), None if side is None else torch.from_numpy(side)
    log_variance = None
    for step in map(step_of, row.route):
        if row.int8:
            out = _quantised(step, embedding, stored)
        else:
            with torch.no_grad():
                out = step(embedding, stored if step.reads_side else None)
        embedding = out.embedding
        stored = out.side if out.side is not None else stored
        log_variance = None if out.log_variance is None else out.log_variance.numpy()
    return Served(embedding.numpy(), log_variance)


def step_of(run: Run) -> Upgrade:
    """A step of a route: an upgrade, or the one that an embedder's own training made."""
    if run.values["kind"] == "upgrade":
        return read_upgrade(run.folder)[0]
    encoder, checkpoint = load_encoder(run.folder)
    config = checkpoint.config
    old_dim = run.needs[0].values["embedding_dim"]
    assert isinstance(config, EmbedderConfig) and isinstance(old_dim, int)
    build = embedder_method(config.method).upgrade
    assert build is not None
    head = build(config, UpgradeShape(old_dim, 0, encoder.dim, 0, encoder.unit))
    load_part(head, checkpoint, "upgrade")
    return head.eval().requires_grad_(False)


def _quantised(step: Upgrade, embedding: Tensor, side: Tensor | None) -> Upgraded:
    """The step through its exported int8 file."""
    inputs = {"embedding": embedding.numpy()}
    if step.reads_side:
        assert side is not None
        inputs["side"] = side.numpy()
    side_dim = 0 if side is None else side.shape[1]
    session = exported(step, embedding.shape[1], side_dim, int8=True)
    (upgraded,) = session.run(["upgraded"], inputs)
    return Upgraded(torch.from_numpy(upgraded), None, None)
