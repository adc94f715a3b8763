"""A gallery of old vectors as a row serves it: as it is, or carried along upgrades."""

import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.comparison.rows import Row
from training.config import EmbedderConfig
from training.frozen import load_encoder
from training.method import UpgradeShape
from training.methods import embedder_method
from training.onnx_export import export_onnx, quantise
from training.run import load_part
from training.transform import Upgrade, Upgraded
from training.upgrade import read_upgrade

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
    steps = [read_upgrade(run.folder)[0] for run in row.route]
    if row.forward_head:
        steps = [forward_head(row.new.folder, old.shape[1])]
    if not steps:
        return None
    embedding, stored = torch.from_numpy(old), None if side is None else torch.from_numpy(side)
    log_variance = None
    for step in steps:
        if row.int8:
            out = _quantised(step, embedding, stored)
        else:
            with torch.no_grad():
                out = step(embedding, stored if step.reads_side else None)
        embedding = out.embedding
        stored = out.side if out.side is not None else stored
        log_variance = None if out.log_variance is None else out.log_variance.numpy()
    return Served(embedding.numpy(), log_variance)


def forward_head(run_dir: Path, old_dim: int) -> Upgrade:
    """The upgrade that an embedder's own training made (DMU's psi)."""
    encoder, checkpoint = load_encoder(run_dir)
    config = checkpoint.config
    assert isinstance(config, EmbedderConfig)
    build = embedder_method(config.method).upgrade
    assert build is not None
    head = build(config, UpgradeShape(old_dim, 0, encoder.dim, 0, encoder.unit))
    load_part(head, checkpoint, "upgrade")
    return head.eval().requires_grad_(False)


def _quantised(step: Upgrade, embedding: Tensor, side: Tensor | None) -> Upgraded:
    """The step through its exported int8 file, run by onnxruntime as on a device."""
    inputs = {"embedding": embedding}
    if step.reads_side:
        assert side is not None
        inputs["side"] = side
    module = _EmbeddingAlone(step)
    with tempfile.TemporaryDirectory() as folder:
        whole, small = Path(folder) / "model.onnx", Path(folder) / "model.int8.onnx"
        export_onnx(module, {k: v[:8] for k, v in inputs.items()}, ("upgraded",), whole)
        quantise(whole, small)
        session = onnxruntime.InferenceSession(
            small.read_bytes(), providers=["CPUExecutionProvider"]
        )
    (upgraded,) = session.run(None, {k: v.numpy() for k, v in inputs.items()})
    return Upgraded(torch.from_numpy(upgraded), None, None)


class _EmbeddingAlone(torch.nn.Module):
    """An upgrade's first output."""

    def __init__(self, upgrade: Upgrade) -> None:
        super().__init__()
        self.upgrade = upgrade

    def forward(self, embedding: Tensor, side: Tensor | None = None) -> Tensor:
        output: Tensor = self.upgrade(embedding, side).embedding
        return output
