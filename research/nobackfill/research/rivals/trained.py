"""The upgrade methods of this project, trained on frozen vectors."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from nobackfill.errors import ConfigurationError
from nobackfill.research.rivals.rival import Floats, TrainingVectors
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.loop.loop import ProgressBars
from nobackfill.training.loop.upgrade import fit_upgrade, load_upgrade, upgrade_shape
from nobackfill.training.method import UpgradeInputs
from nobackfill.training.methods import upgrade_method
from nobackfill.training.networks.transform import UpgradeOutput

_BATCH = 512


class TrainedMap:
    """Migrate stored vectors by h of an upgrade method of nobackfill.training."""

    mapped_vectors: Literal["items", "queries"] = "items"

    def __init__(
        self, method: str, *, reads_side: bool, options: Mapping[str, float | bool],
        epochs: int, inner_dim: int,
    ) -> None:  # fmt: skip
        """Choose a method; names and options are checked by `fit`.

        Args:
            method: a name of the upgrade methods of nobackfill.training.
            reads_side: it reads side-information in addition to the old vectors.
            options: options of the method.
            epochs: passes over the training vectors.
            inner_dim: width of the inner layers.
        """
        self._method, self._reads_side = method, reads_side
        self._options, self._epochs, self._inner_dim = dict(options), epochs, inner_dim

    def fit(self, train: TrainingVectors, seed: int) -> None:
        """Train h in a temporary folder, or solve it if the method is in closed form.

        The folder is removed at the end. Without labels, all items count as one class. After an
        error an earlier map stays. torch's default generator is seeded. A second call replaces the
        map.

        Args:
            train: at least two pairs, old float32 [n, a] and new [n, b]; with side-information
                [n, s] for a method that reads it.
            seed: of the random numbers, at least 0.

        Raises:
            ConfigurationError: the method is unknown, there are fewer than two pairs,
                side-information or labels that it reads are missing, or an option is wrong.
            DivergedError: a loss is not finite.
            ValueError: epochs, width or seed are out of range (pydantic.ValidationError). Or the
                method affine gets a value that is not finite.
            CannotWriteError, OSError: the temporary folder cannot be written.
            RuntimeError: the method procrustes or residual gets a value that is not finite.
        """
        method = upgrade_method(self._method)
        if len(train.old) < 2:
            raise ConfigurationError(
                f"method {self._method}: expected at least 2 training pairs, got {len(train.old)}; "
                "add pairs"
            )
        if self._reads_side and train.side is None:
            raise ConfigurationError(
                f"method {self._method} reads side-information, but the file of --vectors has no "
                "array side; add the array, or leave the method out of --methods"
            )
        with tempfile.TemporaryDirectory() as folder:
            # The optimizer of configs/cifar100.
            config = UpgradeConfig(
                kind="upgrade", run_dir=Path(folder) / "run", images=Path(folder),
                old=Path(folder), new=Path(folder), method=self._method, options=self._options,
                reads_side=self._reads_side, epochs=self._epochs,
                warmup_epochs=min(2.0, self._epochs / 4), batch_size=min(_BATCH, len(train.old)),
                optimizer="adam", lr=5e-4, weight_decay=3e-5, seed=seed,
                checkpoint_every=self._epochs, inner_dim=self._inner_dim,
            )  # fmt: skip
            if train.labels is None and method.reads_labels(config):
                raise ConfigurationError(
                    f"method {self._method} reads labels, but the file of --vectors has no array "
                    "labels; add the array, or leave the method out of --methods"
                )
            rows = {"old": _one_view(train.old), "new": _one_view(train.new)}
            if self._reads_side and train.side is not None:
                rows["side"] = _one_view(train.side)
            names, labels = np.unique(
                np.zeros(len(train.old), np.int64) if train.labels is None else train.labels,
                return_inverse=True,
            )
            rows["labels"] = torch.from_numpy(labels.astype(np.int64))
            class_names = tuple(map(str, names))
            inputs = UpgradeInputs(
                config,
                upgrade_shape(rows, train.unit_norm),
                class_names,
                rows,
                {},
                None,
                class_names,
            )
            self._upgrade = load_upgrade(fit_upgrade(inputs, ProgressBars(visible=False), {}))

    def transform(self, vectors: Floats, side: Floats | None) -> Floats:
        """Migrate old vectors float32 [m, a], with their side-information [m, s], to [m, b].

        Call `fit` before. `side` is ignored by a method that does not read it, and must not be None
        for one that does.

        Raises:
            AttributeError: `fit` was not called.
            AssertionError: `side` is None, and the method reads it.
        """
        return np.asarray(self._run(vectors, side).embedding.numpy(), np.float32)

    def variances(self, vectors: Floats, side: Floats | None) -> Floats | None:
        """Predict the variance of a dimension of each migrated vector, float32 [m], above 0.

        Call `fit` before. The arguments are those of `transform`. None: the method predicts none.

        Raises:
            AttributeError: `fit` was not called.
            AssertionError: `side` is None, and the method reads it.
        """
        logarithm = self._run(vectors, side).log_variance
        return None if logarithm is None else np.asarray(logarithm.exp().numpy(), np.float32)

    def _run(self, vectors: Floats, side: Floats | None) -> UpgradeOutput:
        read = torch.from_numpy(side) if self._reads_side and side is not None else None
        with torch.no_grad():
            output: UpgradeOutput = self._upgrade(torch.from_numpy(vectors), read)
        return output

    @property
    def parameters(self) -> int:
        """The number of values of h after `fit`, without the variance head.

        Raises:
            AttributeError: `fit` was not called.
        """
        return sum(part.numel() for part in self._upgrade.h.parameters())


def _one_view(vectors: Floats) -> Tensor:
    return torch.from_numpy(vectors)[:, None]
