"""The method of this project: a closed-form affine map plus a trained residual network.

The loss is a distance and a listwise term: an upgraded embedding must rank a queue of new
embeddings as the true new embedding does. Neither term reads labels, so views may mix two images
(`mixed_views`), which show classes that do not exist. Terms with labels are off by default, because
FastFill's classification and `same_class` pull vectors to the centres of known classes.
"""

import copy

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from nobackfill.errors import ConfigurationError
from nobackfill.training.config import UpgradeConfig
from nobackfill.training.loop.objective import Batch, Terms
from nobackfill.training.losses.listwise import (
    listwise_loss,
    mean_squared_distance,
    same_class_loss,
)
from nobackfill.training.method import UpgradeInputs, UpgradeMethod, UpgradeShape
from nobackfill.training.methods.cheap_maps import (
    InputShape,
    flatten_views,
    input_shape,
    set_linear,
)
from nobackfill.training.methods.compatible import read_options
from nobackfill.training.methods.fastfill import (
    CLASSIFICATION,
    FastFillObjective,
    FastFillOptions,
    VarianceHead,
    uses_labels,
)
from nobackfill.training.networks.maps import fit_affine, fit_whitening_map
from nobackfill.training.networks.transform import UpgradeNetwork, UpgradeOutput

# A strong ridge on purpose: int8 has 256 steps for the largest input, so scaled-up directions of
# small variance would consist of rounding errors.
_WHITENING, _RIDGE = 0.1, 1e-2
# The learning rate of Adam at the start of a distillation.
_DISTILLATION_RATE = 5e-4


class ResidualOptions(FastFillOptions):
    """FastFill's weights, the weights of the listwise terms, and their queue."""

    classification: float = Field(0.0, ge=0)
    listwise: float = Field(1.0, ge=0)
    # A listwise term whose target is the image's class; it reads labels of views that have one.
    same_class: float = Field(0.0, ge=0)
    # Each row of a batch has two views, a mixed one and one that shows its image alone.
    both_views: bool = False
    queue: int = Field(1024, ge=2)
    # Relative to the mean squared distance between two new embeddings.
    temperature: float = Field(0.1, gt=0)
    # The network's share of the output: straight + share * residual.
    share: float = Field(1.0, ge=0, le=1)
    # Networks of h, each trained separately; the output uses their mean.
    members: int = Field(1, ge=1, le=16)
    # At the end of the training, one network learns that mean and replaces them.
    distilled: bool = False


class WhiteningLayer(nn.Module):
    """Standardises one input per element and then whitens it: [n,d] -> [n,d]; solved, not trained.

    The first step is no matrix product, so it stays float32 in the int8 file. Inputs of another
    scale or with long tails therefore do not use up the 256 steps.
    """

    shift: Tensor
    scale: Tensor

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(dim))
        self.register_buffer("scale", torch.ones(dim))
        self.rotate = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Map [n,d] to [n,d]; before `solve` the map is random."""
        output: Tensor = self.rotate((x - self.shift) * self.scale)
        return output

    def solve(self, x: Tensor) -> None:
        """Fit to rows x [n,d], n >= 2, in place. A constant element becomes 0.

        An element counts as constant if its standard deviation is at most 1e-6. If all are, the map
        is infinite or NaN.

        Raises:
            RuntimeError: a value is NaN or infinite, there is one row, or d is another dimension
                than the map's. `shift` and `scale` may have changed.
        """
        deviation = x.std(0)
        self.shift.copy_(x.mean(0))
        # A constant element carries no information: its scale is 0, not infinite.
        self.scale.copy_(torch.where(deviation > 1e-6, 1 / deviation.clamp(min=1e-6), 0.0))
        set_linear(self.rotate, fit_whitening_map((x - self.shift) * self.scale, _WHITENING))


class ResidualMap(nn.Module):
    """affine(w) + mlp(w) of whitened inputs w, or the mean of several mlp.

    With `unit_norm`, outputs are normalised. The last layer of a network starts at zero, so that
    training starts at the affine solution.
    """

    def __init__(
        self, reads: InputShape, dim: int, inner_dim: int, unit_norm: bool, member_count: int = 1
    ) -> None:
        super().__init__()
        total = reads.embedding_dim + reads.side_dim
        self.input_shape, self.unit_norm = reads, unit_norm
        self.embedding = WhiteningLayer(reads.embedding_dim) if reads.embedding_dim else None
        self.side = WhiteningLayer(reads.side_dim) if reads.side_dim else None
        self.straight = nn.Linear(total, dim)
        self.residual = _network(total, inner_dim, dim)
        self.others = nn.ModuleList(
            _network(total, inner_dim, dim) for _ in range(member_count - 1)
        )
        # The index of the network that is being trained; None: use all.
        self.active_member: int | None = None

    @property
    def members(self) -> list[nn.Sequential]:
        """The residual networks, at least one; `residual` is the first.

        They are the modules themselves, in a new list.
        """
        return [self.residual, *(one for one in self.others if isinstance(one, nn.Sequential))]

    def add_members(self, count: int) -> None:
        """Append `count` networks of the same sizes, with random inner layers, in place.

        They are on the CPU, output zero, and draw from torch's default generator.
        """
        first = self.residual[0]
        assert isinstance(first, nn.Linear)
        sizes = (first.in_features, first.out_features, self.straight.out_features)
        self.others.extend(_network(*sizes) for _ in range(count))

    def forward(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Map the inputs that are read, [n,old_dim] and [n,side_dim], to [n,dim].

        `side` may be None only if it is not read, else AssertionError. If `active_member` is set,
        only that network is used. In training mode BatchNorm needs at least two rows, or raises
        ValueError.
        """
        white = self.whiten_inputs(embedding, side)
        networks = (
            self.members if self.active_member is None else [self.members[self.active_member]]
        )
        output: Tensor = networks[0](white)
        if len(networks) > 1:
            output = torch.stack([output, *(network(white) for network in networks[1:])]).mean(0)
        output = self.straight(white) + output
        return F.normalize(output) if self.unit_norm else output

    def whiten_inputs(self, embedding: Tensor, side: Tensor | None) -> Tensor:
        """Whiten each input that is read, and concatenate them: [n, embedding + side].

        `side` may be None only if it is not read, else AssertionError. The embedding's values come
        first. Before `solve` the result is random.
        """
        parts = []
        if self.embedding is not None:
            parts.append(self.embedding(embedding))
        if self.side is not None:
            assert side is not None
            parts.append(self.side(side))
        return torch.cat(parts, 1)

    def solve(self, embedding: Tensor, side: Tensor | None, target: Tensor) -> None:
        """Fit whitening and affine map to rows [n, …] and targets [n, dim], n >= 2, in place.

        The residual networks stay as they are. All rows are needed in memory, in float64. After an
        error the whitening may have changed.

        Args:
            embedding: [n, old_dim]; ignored if embeddings are not read.
            side: [n, side_dim]; None only if it is not read, else AssertionError.
            target: [n, dim]; a value of NaN makes the affine map NaN.

        Raises:
            RuntimeError: an input has a value of NaN or infinity, or one row; or a dimension is
                another one than the map's.
            ValueError: inputs and targets have different numbers of rows.
        """
        with torch.no_grad():
            if self.embedding is not None:
                self.embedding.solve(embedding)
            if self.side is not None:
                assert side is not None
                self.side.solve(side)
            white = self.whiten_inputs(embedding, side)
        set_linear(self.straight, fit_affine(white, target, _RIDGE))


def _network(total: int, inner_dim: int, dim: int) -> nn.Sequential:
    last = nn.Linear(inner_dim, dim)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)
    return nn.Sequential(
        nn.Linear(total, inner_dim),
        nn.BatchNorm1d(inner_dim),
        nn.ReLU(inplace=True),
        nn.Linear(inner_dim, inner_dim),
        nn.BatchNorm1d(inner_dim),
        nn.ReLU(inplace=True),
        last,
    )


def build_residual(config: UpgradeConfig, shape: UpgradeShape) -> UpgradeNetwork:
    """Build h, and g if new side-information is written, with FastFill's variance.

    With the option `distilled` h has one network; the objective adds the others. Its affine parts
    are random until the objective is made. A residual network starts at zero output, with random
    inner layers. All come from torch's default generator.

    Raises:
        ConfigurationError: an option is unknown or of a wrong value.
    """
    options = read_options(config.options, ResidualOptions, config.method)
    reads = input_shape(config, shape)
    side = shape.new_side_dim
    members = 1 if options.distilled else options.members
    return UpgradeNetwork(
        ResidualMap(reads, shape.new_dim, config.inner_dim, shape.unit_norm, members),
        reads_side=shape.side_dim > 0,
        g=ResidualMap(reads, side, config.inner_dim, False) if side else None,
        log_variance=VarianceHead(reads, config.projection_dim),
    )


class ResidualObjective(FastFillObjective):
    """FastFill's terms and the listwise term, starting at the affine solution.

    The constructor solves the affine parts of h and g. The loss is this project's own, not a
    paper's. The constructor raises ConfigurationError for a wrong option, for `both_views` without
    mixed views, for `distilled` with one network, or if keep_best has no held-out images.
    """

    options_model = ResidualOptions
    options: ResidualOptions

    def __init__(self, upgrade: UpgradeNetwork, inputs: UpgradeInputs) -> None:
        options = read_options(inputs.options, ResidualOptions, inputs.config.method)
        if options.distilled:
            if options.members < 2:
                raise ConfigurationError(
                    "option distilled trains one network on the mean of several, but members is 1; "
                    "set members: 3"
                )
            assert isinstance(upgrade.h, ResidualMap)
            upgrade.h.add_members(options.members - 1)
        super().__init__(upgrade, inputs)
        self.inputs = inputs
        side = flatten_views(inputs.training_features, "side") if inputs.shape.side_dim else None
        for network, target in ((upgrade.h, "new"), (upgrade.g, "new_side")):
            if isinstance(network, ResidualMap):
                network.solve(
                    flatten_views(inputs.training_features, "old"),
                    side,
                    flatten_views(inputs.training_features, target),
                )
        self.both_views = options.both_views
        if self.both_views and not inputs.config.mixed_views:
            raise ConfigurationError(
                "the option both_views of method residual needs a mixed view, but mixed_views is "
                "0; set mixed_views: 1"
            )
        self.register_buffer("queue", flatten_views(inputs.training_features, "new"))
        labelled, labels = inputs.labelled()
        self.register_buffer("labelled_queue", labelled)
        self.register_buffer("queue_labels", labels)
        self.unit_of_distance = float(
            mean_squared_distance(flatten_views(inputs.training_features, "new"))
        )

    def forward(self, batch: Batch) -> Terms:
        """Return terms averaged over the networks, each of which draws its own view.

        Afterwards all networks are used again; after an error only the one that failed. In training
        mode a batch of one row raises ValueError.
        """
        h = self.upgrade.h
        assert isinstance(h, ResidualMap)
        total: Terms = {}
        for number in range(len(h.members)):
            h.active_member = number
            for name, term in super().forward(batch).items():
                total[name] = total.get(name, 0) + term / len(h.members)
        h.active_member = None
        return total

    def distance_terms(self, upgraded: UpgradeOutput, view: Batch) -> Terms:
        """Add a listwise term: distances to random vectors of the queue rank as the new model's.

        The term `listwise` is the mean over rows times its option; its queue is drawn anew, with
        repetition, by torch's default generator. With the option `same_class` above 0, a term of
        that name follows; it is 0 without labelled rows.

        Raises:
            KeyError: the view lacks `new`, or `labels` that a term needs.
            ConfigurationError: outputs have fewer dimensions than the new model's classifier.
            IndexError: a label is no class of the training, and the classification has a weight.
        """
        terms = super().distance_terms(upgraded, view)
        options = self.options
        assert isinstance(self.queue, Tensor)
        drawn = torch.randint(len(self.queue), (options.queue,)).to(
            self.queue.device, non_blocking=True
        )
        losses = listwise_loss(
            upgraded.embedding,
            view["new"],
            self.queue[drawn],
            options.temperature * self.unit_of_distance,
        )
        terms["listwise"] = options.listwise * losses.mean()
        if options.same_class:
            terms["same_class"] = options.same_class * self._same_class(upgraded, view)
        return terms

    def _same_class(self, upgraded: UpgradeOutput, view: Batch) -> Tensor:
        """Return the mean over rows with a label; 0 without any."""
        options = self.options
        assert isinstance(self.labelled_queue, Tensor) and isinstance(self.queue_labels, Tensor)
        drawn = torch.randint(len(self.queue_labels), (options.queue,))
        drawn = drawn.to(self.queue_labels.device, non_blocking=True)
        losses = same_class_loss(
            upgraded.embedding,
            view["labels"],
            self.labelled_queue[drawn],
            self.queue_labels[drawn],
            options.temperature * self.unit_of_distance,
        )
        return losses.sum() / (view["labels"] >= 0).sum().clamp(min=1)

    def adjust_upgrade(self) -> None:
        """Distil the networks and scale the result, by the options `distilled` and `share`.

        `finish` calls it once. Distilling trains for as many epochs again, and draws from torch's
        default generator.
        """
        if self.options.distilled:
            self._distil()
        shrink(self.upgrade, self.options.share)

    def _distil(self) -> None:
        """Train one network on the output of all of them, and replace them by it.

        It starts as the first one. Half of a batch are rows of the training, the others are
        mixtures of two: the networks answer any input, so it needs no target. BatchNorm keeps the
        first network's statistics, which mixtures would change.
        """
        h, rows, config = self.upgrade.h, self.inputs.training_features, self.inputs.config
        assert isinstance(h, ResidualMap)
        teacher, device = h.eval(), h.straight.weight.device
        student = copy.deepcopy(teacher)
        student.others = nn.ModuleList()
        old, side = (
            flatten_views(rows, "old"),
            flatten_views(rows, "side") if self.inputs.shape.side_dim else None,
        )
        size = min(config.batch_size, len(rows["old"]))
        steps = config.epochs * (len(rows["old"]) // size)
        optimizer = torch.optim.Adam(student.residual.parameters(), lr=_DISTILLATION_RATE)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        for _ in range(steps):
            one, other = torch.randint(len(old), (2, size))
            share = torch.rand(size, 1)
            share[: size // 2] = 1
            read = [
                None if x is None else torch.lerp(x[other], x[one], share).to(device)
                for x in (old, side)
            ]
            assert read[0] is not None
            with torch.no_grad():
                target = teacher(read[0], read[1])
            loss = (student(read[0], read[1]) - target).square().sum(1).mean()
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
        h.residual, h.others = student.residual, student.others


def shrink(upgrade: UpgradeNetwork, share: float) -> None:
    """Scale the output of h's residual networks by `share` (0 to 1), in place; repeats multiply.

    With 0 the upgrade is its affine part. The variance and g stay. An upgrade of another method
    raises AssertionError.
    """
    assert isinstance(upgrade.h, ResidualMap)
    for network in upgrade.h.members:
        last = network[-1]
        assert isinstance(last, nn.Linear)
        with torch.no_grad():
            last.weight.mul_(share)
            last.bias.mul_(share)


def shrunk_copy(upgrade: UpgradeNetwork, share: float) -> UpgradeNetwork:
    """Return a copy of an upgrade whose residual networks are scaled by `share` (0 to 1).

    The argument is not changed. The variance and g stay. An upgrade of another method raises
    AssertionError.
    """
    copied = copy.deepcopy(upgrade)
    shrink(copied, share)
    return copied


def _reads_labels(config: UpgradeConfig) -> bool:
    options = read_options(config.options, ResidualOptions, config.method)
    return options.same_class > 0 or uses_labels(config, ResidualOptions)


RESIDUAL = UpgradeMethod(
    build_network=build_residual,
    make_objective=ResidualObjective,
    reads_labels=_reads_labels,
    option_values={"share": (1.0, 0.75, 0.5, 0.25, 0.0), CLASSIFICATION: (0.0, 1.0)},
    variant_makers={"share": shrunk_copy},
)
