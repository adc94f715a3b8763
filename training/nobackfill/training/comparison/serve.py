"""A gallery of old vectors as a row serves it: as it is, or carried along upgrades."""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from nobackfill.class_folders import Listing
from nobackfill.metrics.distances import Metric
from nobackfill.quality.embedded import Embedded
from nobackfill.release.models import Upgraded
from nobackfill.training.comparison.exported import exported
from nobackfill.training.comparison.recipe import Run
from nobackfill.training.comparison.rows import Row
from nobackfill.training.config import EmbedderConfig
from nobackfill.training.loop.run import load_part
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.method import UpgradeShape
from nobackfill.training.methods import embedder_method
from nobackfill.training.networks import transform
from nobackfill.training.networks.frozen import load_encoder
from nobackfill.training.networks.transform import UpgradeNetwork
from nobackfill.vectors import Vectors

# A row's models, as releases are numbered.
OLD, NEW = 1, 2


class Trained(Embedded):
    """Test images in the spaces of a row's models, and those of OLD carried along its route."""

    def __init__(
        self,
        row: Row,
        listing: Listing,
        metric: Metric,
        vectors: Mapping[int, Vectors],
        side: Vectors | None,
    ) -> None:
        """`vectors` by model [n,dim]; `side` [n,side_dim] is stored beside those of OLD."""
        super().__init__(listing)
        self._row, self._metric, self._vectors, self._side = row, metric, vectors, side
        self._served: dict[bool, Upgraded] = {}

    def native(self, release: int) -> Vectors:
        """Of OLD or NEW."""
        return self._vectors[release]

    def along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """OLD's along the row's route; `int8`: through the exported, quantised files."""
        if len(releases) == 1:
            return Upgraded(self.native(releases[0]), None, None)
        if int8 not in self._served:
            self._served[int8] = serve(self._row, self.native(OLD), self._side, int8=int8)
        return self._served[int8]

    def metric(self, release: int) -> Metric:
        """One for all."""
        return self._metric


def serve(row: Row, old: Vectors, side: Vectors | None, *, int8: bool) -> Upgraded:
    """Carry `old` [n,dim] with `side` along the row's route."""
    embedding, stored = torch.from_numpy(old), None if side is None else torch.from_numpy(side)
    log_variance = None
    for step in map(step_of, row.route):
        if int8:
            out = _quantised(step, embedding, stored)
        else:
            with torch.no_grad():
                out = step(embedding, stored if step.reads_side else None)
        embedding = out.embedding
        stored = out.side if out.side is not None else stored
        log_variance = out.log_variance
    uncertainty = None if log_variance is None else np.exp(log_variance.numpy())
    return Upgraded(embedding.numpy(), None, uncertainty)


def step_of(run: Run) -> UpgradeNetwork:
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


def _quantised(
    step: UpgradeNetwork, embedding: Tensor, side: Tensor | None
) -> transform.UpgradeOutput:
    """The step through its exported int8 file."""
    inputs = {"embedding": embedding.numpy()}
    if step.reads_side:
        assert side is not None
        inputs["side"] = side.numpy()
    side_dim = 0 if side is None else side.shape[1]
    session = exported(step, embedding.shape[1], side_dim, int8=True)
    (upgraded,) = session.run(["upgraded"], inputs)
    return transform.UpgradeOutput(torch.from_numpy(upgraded), None, None)
