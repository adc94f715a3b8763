"""FCT: h and g trained by squared L2 distance (fct.txt sections 3.3 and 4.4, D.5)."""

import copy

import torch
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods.compatible import Options, read_options
from nobackfill.training.networks.transform import (
    FctTransform,
    UpgradeNetwork,
    UpgradeOutput,
)


class BestEpoch(nn.Module):
    """The weights with the least figure so far, and that figure.

    During training this is a part of the checkpoint, so that a resumed run knows the best epoch of
    the time before the kill.
    """

    least: Tensor

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.kept = copy.deepcopy(network).requires_grad_(False)
        # Not infinity, because a checkpoint must hold finite numbers.
        self.register_buffer("least", torch.tensor(torch.finfo(torch.float32).max))

    def keep_if_better(self, network: nn.Module, figure: float) -> None:
        """Copy the weights of `network` if `figure` is below all earlier ones; NaN never is.

        At an equal figure the earlier weights stay. Buffers are copied, too.

        Raises:
            RuntimeError: the figure is the best, and the network has other parameters.
        """
        if figure < float(self.least):
            self.kept.load_state_dict(network.state_dict())
            self.least.fill_(figure)

    def restore(self, network: nn.Module) -> None:
        """Load the best weights into `network`, in place; those of the constructor without any.

        Buffers, such as BatchNorm statistics, are loaded, too. The best weights stay here.

        Raises:
            RuntimeError: the network has other parameters.
        """
        network.load_state_dict(self.kept.state_dict())


def squared_l2(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean over rows of |predicted - target|^2: [n,d], [n,d] -> scalar (section 3.3).

    It is computed in float32. Both arguments get a gradient; without rows it is NaN.
    """
    return (predicted - target).float().square().sum(1).mean()


class FctOptions(Options):
    """FCT's option."""

    # In a space of unit vectors: train h by squared L2 of its raw output, as the authors' code
    # does, and normalise only what is served. false: normalise in training too (D.7).
    raw: bool = False


def _build(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    options = read_options(config.options, FctOptions, config.method)
    return build_fct(config, shape, raw=options.raw)


def build_fct(config: UpgradeConfig, shape: UpgradeShape, *, raw: bool = False) -> UpgradeNetwork:
    """Build h, and g of the same architecture if new side-information is written (section 4.4).

    Keys reads_embedding, projection_dim and inner_dim of the configuration apply. `options` is not
    read. The weights are random, from torch's default generator. With unit vectors in the new
    space, h's output is normalised, with `raw` in eval mode only; g's never is.
    """

    def transform(dim: int, unit: bool) -> FctTransform:
        return FctTransform(
            shape.old_dim if config.reads_embedding else 0,
            shape.side_dim,
            dim,
            projection_dim=config.projection_dim,
            inner_dim=config.inner_dim,
            unit_norm=unit,
            raw=raw,
        )

    return UpgradeNetwork(
        transform(shape.new_dim, shape.unit_norm),
        reads_side=shape.side_dim > 0,
        g=transform(shape.new_side_dim, False) if shape.new_side_dim else None,
    )


class FctObjective(Objective):
    """Squared L2 distance of h's output to the new embedding, and of g's to new side-information.

    Each row of a batch draws one of its cached views, the same for all models; with `both_views` it
    draws a labelled one and a mixed one. Subclasses extend `distance_terms`. The constructor raises
    ConfigurationError if the key keep_best has no held-out images to select an epoch by. The loss
    is l(x) of FCT section 3.3; g's is that of section 4.4.
    """

    both_views = False

    def __init__(self, upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
        super().__init__()
        self.upgrade = upgrade
        self.freeze_batchnorm_at = inputs.config.freeze_batchnorm_at
        self.labelled_views = inputs.labelled_views
        self._held_out = inputs.held_out_features
        if inputs.config.keep_best and not self._held_out:
            raise ConfigurationError(
                "the key keep_best: there is no held-out image to select the best epoch by; set "
                "held_out to a larger share, or leave keep_best out"
            )
        self.best = BestEpoch(upgrade) if inputs.config.keep_best else None

    def begin_epoch(self, epoch: int, epochs: int) -> None:
        """Measure held-out images; from `freeze_batchnorm_at` of the epochs on, freeze BatchNorm.

        The figure is h's squared distance in eval mode, in the statistics as `held_out_distance`.
        It also selects the best epoch for keep_best. The first view of each image counts. Without
        held-out images nothing is measured.
        """
        self._measure_held_out()
        if epoch >= self.freeze_batchnorm_at * epochs:
            for module in self.upgrade.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.eval()

    def _measure_held_out(self) -> None:
        """Measure h's distance on held-out images before each epoch and after the last.

        The figure is logged, and it selects the best epoch."""
        if not self._held_out or not len(self._held_out["labels"]):
            return
        training = self.upgrade.training
        device = next(self.upgrade.parameters()).device
        view = {k: v[:, 0].to(device) for k, v in self._held_out.items() if v.ndim == 3}
        with torch.no_grad():
            upgraded = self.upgrade.eval()(view["old"], view.get("side"))
        self.upgrade.train(training)
        distance = squared_l2(upgraded.embedding, view["new"])
        self.statistics["held_out_distance"] = float(distance)
        if self.best is not None:
            self.best.keep_if_better(self.upgrade, float(distance))

    def finish(self) -> None:
        """With the key keep_best, load the weights of the best epoch; else do nothing.

        The last epoch is measured before, so that it can be the best one. The part `best` is
        dropped. A second call does nothing.
        """
        if self.best is not None:
            self._measure_held_out()
            self.best.restore(self.upgrade)
            self.best = None

    def forward(self, batch: Batch) -> Terms:
        """Return the terms of one view per row, drawn at random; with `both_views` of two.

        Torch's default generator draws. The batch has the features `old`, `new` and, where they are
        used, `side` and `new_side`, [b,v,d], and `labels` int64 [b]. In training mode BatchNorm
        needs at least two rows, or raises ValueError.

        Raises:
            KeyError: the batch lacks `old`, `labels` or a feature of `distance_terms`.
        """
        view = draw_view(batch, self.labelled_views, draws_two=self.both_views)
        return self.distance_terms(self.upgrade(view["old"], view.get("side")), view)

    def distance_terms(self, upgraded: UpgradeOutput, view: Batch) -> Terms:
        """Return the terms for outputs and targets of one view per row, [b,dim] each.

        They are `distance` and, if g exists, `side_distance`, each a mean over rows. Labels are not
        read.

        Args:
            upgraded: the outputs of h and g.
            view: features and labels by name, as of `draw_view`.

        Raises:
            KeyError: the view lacks `new`, or `new_side` if g exists.
        """
        terms = {"distance": squared_l2(upgraded.embedding, view["new"])}
        if upgraded.side is not None:
            terms["side_distance"] = squared_l2(upgraded.side, view["new_side"])
        return terms

    def trained_parts(self) -> nn.ModuleDict:
        """Return the part upgrade and, until `finish`, best (with the key keep_best).

        Both are the modules themselves; after `finish` only the upgrade is stored.
        """
        parts = {"upgrade": self.upgrade}
        return nn.ModuleDict(parts if self.best is None else {**parts, "best": self.best})


def draw_view(batch: Batch, labelled_view_count: int, *, draws_two: bool = False) -> Batch:
    """Draw views: features [b,v,d] -> [b,d], the same view of a row in every tensor.

    Torch's default generator draws. The batch is not changed.

    Args:
        batch: the batch; its tensors other than features have one value per row.
        labelled_view_count: the number of first views that have the row's label; the others get
            label -1.
        draws_two: draw one labelled and one other view per row. The result has 2b rows: all
            labelled views, then the others. Without other views it raises RuntimeError.

    Returns:
        The tensors by name, with `labels` int64; features are [b,d], or [2b,d] with `draws_two`.

    Raises:
        KeyError: the batch lacks `old` or `labels`.
    """
    n, views = batch["old"].shape[:2]
    row, picked = torch.arange(n), torch.randint(labelled_view_count if draws_two else views, (n,))
    if draws_two:
        row, picked = (
            row.repeat(2),
            torch.cat((picked, torch.randint(labelled_view_count, views, (n,)))),
        )
    row, picked = (index.to(batch["old"].device, non_blocking=True) for index in (row, picked))
    drawn = {
        name: tensor[row, picked] if name in ("old", "side", "new", "new_side") else tensor[row]
        for name, tensor in batch.items()
    }
    return {**drawn, "labels": torch.where(picked < labelled_view_count, drawn["labels"], -1)}


FCT = UpgradeMethod(build_network=_build, make_objective=FctObjective)
