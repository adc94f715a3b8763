"""Serve a gallery of old vectors as a row does, directly or migrated by upgrades; and its cost.

The cost of an item is the bytes that are stored for it, and the time of its route.
"""

import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nobackfill.class_folders import ImageListing
from nobackfill.metrics.distances import Metric
from nobackfill.onnx_runtime import onnxruntime
from nobackfill.quality.embedded import EmbeddedListing
from nobackfill.release.models import Upgraded
from nobackfill.research.results import CostResult
from nobackfill.research.rows import MethodRow, TrainingRun
from nobackfill.training.config import EmbedderConfig
from nobackfill.training.export.drafting import UpgradeGraph
from nobackfill.training.export.onnx_export import export_onnx, quantise
from nobackfill.training.loop.run import load_part, read_finished
from nobackfill.training.loop.upgrade import read_upgrade
from nobackfill.training.method import UpgradeShape
from nobackfill.training.methods import embedder_method
from nobackfill.training.networks import transform
from nobackfill.training.networks.frozen import load_encoder
from nobackfill.training.networks.transform import UpgradeNetwork
from nobackfill.vectors import Vectors

_EXAMPLES = 8


def exported_session(
    step: UpgradeNetwork, old_dim: int, side_dim: int, *, int8: bool
) -> onnxruntime.InferenceSession:
    """Export an upgrade to a temporary ONNX file, and open it in onnxruntime on one thread.

    Example inputs come from torch's default generator.

    Args:
        step: the network; it is moved to the CPU and to eval mode.
        old_dim: the dimension of its input `embedding` [n,old_dim].
        side_dim: the dimension of its input `side` [n,side_dim], if it reads one.
        int8: quantise the file.

    Returns:
        The session; the temporary files are gone.

    Raises:
        VerificationError: onnxruntime cannot run the exported file, or it computes other vectors
            than torch. The quantised file is not compared.
        RuntimeError: torch cannot export the network.
        OSError: the temporary files cannot be written.
    """
    graph = UpgradeGraph(step)
    inputs = {"embedding": torch.randn(_EXAMPLES, old_dim)}
    if step.reads_side:
        inputs["side"] = torch.randn(_EXAMPLES, side_dim)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.TemporaryDirectory() as folder:
        file, small = Path(folder) / "model.onnx", Path(folder) / "model.int8.onnx"
        export_onnx(graph, inputs, graph.outputs, file)
        if int8:
            quantise(file, small)
        return onnxruntime.InferenceSession(
            (small if int8 else file).read_bytes(), options, providers=["CPUExecutionProvider"]
        )


# Numbers of a row's models, in the place of release numbers.
OLD, NEW = 1, 2


class TrainedImages(EmbeddedListing):
    """Test images in the spaces of a row's models, and those of OLD migrated along its route."""

    def __init__(
        self,
        row: MethodRow,
        listing: ImageListing,
        metric: Metric,
        vectors: Mapping[int, Vectors],
        side: Vectors | None,
    ) -> None:
        """Use vectors that the models computed.

        Args:
            row: the row.
            listing: n images.
            metric: how vectors are compared.
            vectors: float32 [n,dim] by model, OLD and NEW.
            side: float32 [n,side_dim] stored with those of OLD; None: none.
        """
        super().__init__(listing)
        self._row, self._metric, self._vectors, self._side = row, metric, vectors, side
        self._served: dict[bool, Upgraded] = {}

    def native_vectors(self, release: int) -> Vectors:
        """Return the vectors float32 [n,dim] of OLD or NEW.

        Args:
            release: OLD or NEW.

        Raises:
            KeyError: `release` is neither OLD nor NEW, or was not given.
        """
        return self._vectors[release]

    def vectors_along(self, releases: tuple[int, ...], *, int8: bool = False) -> Upgraded:
        """Return vectors migrated along a route; the result is cached.

        Args:
            releases: one model, whose vectors are returned as they are; or OLD and NEW, for the
                row's whole route.
            int8: migrate by quantised files.

        Returns:
            The vectors. Longer routes than one model are not distinguished.

        Raises:
            ConfigurationError: a run of the route is missing or unfinished.
            VerificationError: a checkpoint is damaged, or an exported file computes other vectors.
            KeyError: one model is given that is neither OLD nor NEW.
            NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
                description cannot be downloaded.
            OSError: a checkpoint exists, but cannot be opened, or a temporary file of an export
                cannot be written.
            AssertionError: an upgrade reads side-information and there is none.
        """
        if len(releases) == 1:
            return Upgraded(self.native_vectors(releases[0]), None, None)
        if int8 not in self._served:
            self._served[int8] = migrate_along_row(
                self._row, self.native_vectors(OLD), self._side, int8=int8
            )
        return self._served[int8]

    def metric(self, release: int) -> Metric:
        """Return the metric, which is the same for all models."""
        return self._metric


def migrate_along_row(
    row: MethodRow, old: Vectors, side: Vectors | None, *, int8: bool
) -> Upgraded:
    """Migrate old vectors along the upgrades of a row, one after another.

    Building a network draws from torch's default generator.

    Args:
        row: the row; its runs are trained.
        old: float32 [n,dim] by the old model.
        side: side-information float32 [n,side_dim]; None if no upgrade reads it.
        int8: use quantised files; they return no new side-information and no uncertainty.

    Returns:
        Vectors [n,new_dim], and the variance [n] that the last upgrade predicts, if it does.
        Side-information is never returned. Without a route these are the old vectors.

    Raises:
        ConfigurationError: a run is missing or unfinished.
        VerificationError: a checkpoint is damaged, or an exported file computes other vectors.
        AssertionError: an upgrade reads side-information and there is none.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        OSError: a checkpoint exists, but cannot be opened, or a temporary file of an export cannot
            be written.
    """
    embedding = torch.from_numpy(old)
    current_side = None if side is None else torch.from_numpy(side)
    log_variance = None
    for step in map(load_upgrade_step, row.upgrade_runs):
        if int8:
            out = _quantised(step, embedding, current_side)
        else:
            with torch.no_grad():
                out = step(embedding, current_side if step.reads_side else None)
        embedding = out.embedding
        current_side = out.side if out.side is not None else current_side
        log_variance = out.log_variance
    uncertainty = None if log_variance is None else np.exp(log_variance.numpy())
    return Upgraded(embedding.numpy(), None, uncertainty)


def load_upgrade_step(run: TrainingRun) -> UpgradeNetwork:
    """Load a step of a route: an upgrade, or the one that an embedder's own training made (DMU).

    Building a network draws from torch's default generator.

    Args:
        run: the run of a step.

    Returns:
        The network on the CPU, in eval mode and without gradients.

    Raises:
        ConfigurationError: the run is missing or unfinished.
        VerificationError: its checkpoint is damaged.
        AssertionError: an embedder whose method makes no upgrade.
        IndexError: a run that is no upgrade and has no prerequisites.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        OSError: the checkpoint exists, but cannot be opened.
    """
    if run.config_values["kind"] == "upgrade":
        return read_upgrade(run.folder)[0]
    encoder, checkpoint = load_encoder(run.folder)
    config = checkpoint.config
    old_dim = run.prerequisites[0].config_values["embedding_dim"]
    assert isinstance(config, EmbedderConfig)
    build = embedder_method(config.method).build_upgrade
    assert build is not None
    head = build(config, UpgradeShape(old_dim, 0, encoder.dim, 0, encoder.unit_norm))
    load_part(head, checkpoint, "upgrade")
    return head.eval().requires_grad_(False)


def _quantised(
    step: UpgradeNetwork, embedding: Tensor, side: Tensor | None
) -> transform.UpgradeOutput:
    """Run the step by its exported int8 file."""
    inputs = {"embedding": embedding.numpy()}
    if step.reads_side:
        assert side is not None
        inputs["side"] = side.numpy()
    side_dim = 0 if side is None else side.shape[1]
    session = exported_session(step, embedding.shape[1], side_dim, int8=True)
    (upgraded,) = session.run(["upgraded"], inputs)
    return transform.UpgradeOutput(torch.from_numpy(upgraded), None, None)


_BATCH, _REPEATS = 1024, 10
# This kind of side-information can be packed into one bit per element.
_BITS = "binary_simclr"


@dataclass(frozen=True)
class _RouteStep:
    """One transform of a route, and the dimensions that it reads."""

    network: UpgradeNetwork
    old_dim: int
    side_dim: int
    int8: bool

    @property
    def form(self) -> object:
        """A key that is equal for networks of equal cost."""
        shapes = tuple((k, tuple(v.shape)) for k, v in self.network.state_dict().items())
        return type(self.network.h), shapes, self.int8


def measure_costs(rows: Sequence[MethodRow]) -> dict[str, CostResult]:
    """Measure the cost of each row on this machine; transforms of one form are timed once.

    If rows have one name, the last one counts. Transforms are exported, loaded and run some times.
    Building a network draws from torch's default generator.

    Args:
        rows: rows whose runs are trained.

    Returns:
        The cost by the row's name.

    Raises:
        ConfigurationError: a run is missing or unfinished.
        VerificationError: a checkpoint is damaged, or an exported file computes other vectors.
        RuntimeError: torch cannot export a network.
        KeyError: a run's configuration does not say its dimension.
        NotFoundError, UnavailableError: a backbone of local-dir or hf-hub is missing, or its
            description cannot be downloaded.
        OSError: a checkpoint exists, but cannot be opened, or a temporary file of an export cannot
            be written.
    """
    time_of: dict[object, float] = {}
    cost_of = {}
    for row in rows:
        total = 0.0
        for step in _steps(row):
            if step.form not in time_of:
                time_of[step.form] = _microseconds(step)
            total += time_of[step.form]
        cost_of[row.name] = CostResult(stored=stored_bytes(row), microseconds=total)
    return cost_of


def stored_bytes(row: MethodRow) -> float:
    """Return the bytes that a gallery stores per item for a row.

    They are 4 for each element of the old embedding, and 4 for each element of side-information, or
    1/8 if that is binary.

    Nothing is read from disk.

    Raises:
        KeyError: the run's configuration does not say its dimension.
    """
    size = 4.0 * row.old_run.config_values["embedding_dim"]
    if row.side_run is not None:
        side = row.side_run.config_values
        size += side["side_info_dim"] * (1 / 8 if side["side_info"] == _BITS else 4)
    return float(size)


def _steps(row: MethodRow) -> list[_RouteStep]:
    steps = []
    for run in row.upgrade_runs:
        # The first training that a run reads is its old model.
        old_dim = run.prerequisites[0].config_values["embedding_dim"]
        side_dim = read_finished(run.folder).facts.get("side_dim", 0)
        steps.append(_RouteStep(load_upgrade_step(run), old_dim, int(side_dim), row.uses_int8))
    return steps


def _microseconds(step: _RouteStep) -> float:
    """Return the least time of some repeats: the time without other load."""
    session = exported_session(step.network, step.old_dim, step.side_dim, int8=step.int8)
    rng = np.random.default_rng(0)
    inputs = {"embedding": rng.normal(size=(_BATCH, step.old_dim)).astype(np.float32)}
    if step.network.reads_side:
        inputs["side"] = rng.normal(size=(_BATCH, step.side_dim)).astype(np.float32)
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        session.run(None, inputs)
        seconds.append(time.perf_counter() - started)
    return 1e6 * min(seconds) / _BATCH
