"""Objectives of side-information encoders psi (FCT section 5.1).

They are SimCLR, an autoencoder, a second old model, VICReg and self-distillation.

psi's output passes a last BatchNorm and is stored. The loss uses a further network (a projection or
an expander), which is discarded after the training.

>>> import torch
>>> from nobackfill.training.side_info import nt_xent
>>> views = torch.eye(4)
>>> bool(nt_xent(views, views, temperature=0.1) < nt_xent(views, views.roll(1, 0), 0.1))
True
"""

import copy
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nobackfill.training.config import SideEncoderConfig
from nobackfill.training.data.augment import Augment, draw_small_crops
from nobackfill.training.loop.objective import Batch, Objective, Terms
from nobackfill.training.networks.embedder import (
    ImageEncoder,
    build_encoder,
    to_pixels,
)
from nobackfill.training.networks.heads import Head, build_head


def mix_images(pixels: Tensor, alpha: float) -> Tensor:
    """Mix each image of a batch with another one, at most in equal parts.

    Labels stay one-hot (FCT section 5.1: mixup of images only), so the larger share of Beta(alpha,
    alpha) belongs to the image whose label stays. The shares and partners come from torch's default
    generator. `pixels` is not changed.

    Args:
        pixels: float32 [n,3,H,W].
        alpha: above 0, else ValueError.

    Returns:
        float32 [n,3,H,W]. An image may be drawn to be mixed with itself.
    """
    share = torch.distributions.Beta(alpha, alpha).sample((len(pixels), 1, 1, 1))
    share = torch.maximum(share, 1 - share).to(pixels)
    return (
        share * pixels
        + (1 - share) * pixels[torch.randperm(len(pixels)).to(pixels.device, non_blocking=True)]
    )


class AlternateObjective(Objective):
    """A second old model (fct.txt section 5.1): the old model's training with another seed.

    With `mixup`, images are also mixed. The side-information is the backbone's output, not
    normalised. Batches contain `images` uint8 [b,H,W,3] and `labels` int64 [b]. The constructor
    raises the errors of `side_objective`.
    """

    def __init__(self, config: SideEncoderConfig, class_count: int) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.head: Head = build_head(
            config.head, class_count, config.side_info_dim, margin=config.margin, scale=config.scale
        )
        self.augment = Augment(config.augmentation)
        self.alpha = config.mixup_alpha if config.side_info == "mixup" else None

    def forward(self, batch: Batch) -> Terms:
        """Return `classification`, the head's mean loss on one augmented view.

        Labels are rows of the head. The view and the mixing are drawn from torch's default
        generator.
        """
        pixels = self.augment(to_pixels(batch["images"]))
        if self.alpha is not None:
            pixels = mix_images(pixels, self.alpha)
        return {"classification": self.head(self.encoder.encode(pixels), batch["labels"])}

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder and head; only the encoder is published."""
        return nn.ModuleDict({"encoder": self.encoder, "head": self.head})


class Decoder(nn.Module):
    """Maps codes [n,dim] to pixels [n,3,S,S] in 0..1: a 4 x 4 map, upsampled and convolved.

    `image_size` is S in pixels, `width` the number of channels of every layer.
    """

    def __init__(self, dim: int, image_size: int, width: int) -> None:
        super().__init__()
        self.image_size, self.width = image_size, width
        doublings = max(1, (image_size - 1).bit_length() - 2)
        self.start = nn.Linear(dim, width * 16)
        layers: list[nn.Module] = []
        for _ in range(doublings):
            layers += [
                nn.Upsample(scale_factor=2),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(inplace=True),
            ]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1), nn.Sigmoid())

    def forward(self, code: Tensor) -> Tensor:
        """Map codes [n,dim] to pixels float32 [n,3,S,S] in 0..1.

        A side that is no power of two, or below 8, is reached by bilinear scaling of a larger one.
        """
        maps = self.start(code).unflatten(1, (self.width, 4, 4))
        pixels: Tensor = self.layers(maps)
        size = (self.image_size, self.image_size)
        return pixels if pixels.shape[2:] == size else F.interpolate(pixels, size, mode="bilinear")


class AutoencoderObjective(Objective):
    """Mean squared error per pixel value between an augmented image and its reconstruction (fct.txt
    5.1, D.4.2).

    Batches contain `images` uint8 [b,S,S,3], with S the key image_size; labels are not used.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        self.decoder = Decoder(config.side_info_dim, config.image_size, 2 * config.width)
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        """Return `reconstruction`, the mean squared error per pixel value of one augmented view.

        The images must have the side of the configuration. The view is drawn from torch's default
        generator.
        """
        pixels = self.augment(to_pixels(batch["images"]))
        return {"reconstruction": F.mse_loss(self.decoder(self.encoder.encode(pixels)), pixels)}

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder and decoder; only the encoder is published."""
        return nn.ModuleDict({"encoder": self.encoder, "decoder": self.decoder})


def nt_xent(first: Tensor, second: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss: each row must find the other view of its image among the 2n - 1 other rows.

    The loss is the mean over all 2n rows; both views get a gradient. With n = 1 it is 0, and
    without rows NaN.

    Args:
        first: one view of n images [n,d]; normalised here.
        second: another view of the same images [n,d], in the same order; normalised here.
        temperature: divisor of the cosines, above 0.

    Returns:
        A scalar.

    Raises:
        RuntimeError: the two views have other numbers of rows or dimensions.
    """
    n = len(first)
    views = F.normalize(torch.cat((first, second)).float())
    # Autocast uses bf16 here: cosines have errors of .4 %, which do not matter among negatives.
    similarity = views @ views.t() / temperature
    itself = torch.eye(2 * n, dtype=torch.bool, device=views.device)
    partner = torch.arange(2 * n, device=views.device).roll(n)
    return F.cross_entropy(similarity.masked_fill(itself, -torch.inf), partner)


def one_sided_nt_xent(anchor: Tensor, views: Tensor, temperature: float) -> Tensor:
    """Compute the cross-entropy of finding each anchor's own image among `views` (multi-crop).

    The loss is the mean over anchors; both arguments are normalised here and get a gradient. With n
    = 1 it is 0, and without rows NaN.

    Args:
        anchor: views of n images [n,d], such as small crops.
        views: other views of the same images [n,d], in the same order.
        temperature: divisor of the cosines, above 0.

    Returns:
        A scalar.

    Raises:
        IndexError: there are more anchors than views; more views than anchors are allowed.
        RuntimeError: the two have other dimensions.
    """
    similarity = F.normalize(anchor.float()) @ F.normalize(views.float()).t() / temperature
    return F.cross_entropy(similarity, torch.arange(len(anchor), device=anchor.device))


class SimclrObjective(Objective):
    """SimCLR, FCT's best psi (fct.txt section 3.4, D.4.1), with a projection of two layers.

    With multi-crop, small crops are attracted to both full views. Batches contain `images` uint8
    [b,H,W,3]; labels are not used.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = build_encoder(config)
        dim = config.side_info_dim
        self.projection = nn.Sequential(
            nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Linear(4 * dim, config.projection_dim)
        )
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        """Return `contrastive` and, for each small crop, `small_crop_0` and so on.

        A small crop's term is its mean attraction to both full views, divided by the number of
        small crops. Views and crops are drawn from torch's default generator. In training mode a
        small crop of a single image raises ValueError, because BatchNorm needs two.
        """
        pixels, temperature = to_pixels(batch["images"]), self.config.temperature
        # Both views in one pass, so that BatchNorm sees one distribution.
        both = self.projection(
            self.encoder.encode(torch.cat((self.augment(pixels), self.augment(pixels))))
        )
        first, second = both.chunk(2)
        terms = {"contrastive": nt_xent(first, second, temperature)}
        for number in range(self.config.small_crops):
            crops = draw_small_crops(pixels, self.config.augmentation, self.config.small_crop_area)
            anchor = self.projection(self.encoder.encode(crops))
            attraction = one_sided_nt_xent(anchor, first, temperature)
            attraction = attraction + one_sided_nt_xent(anchor, second, temperature)
            terms[f"small_crop_{number}"] = attraction / (2 * self.config.small_crops)
        return terms

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder and projection; only the encoder is published."""
        return nn.ModuleDict({"encoder": self.encoder, "projection": self.projection})


# VICReg's lambda, mu and nu (section 4.2).
INVARIANCE, VARIANCE, COVARIANCE = 25.0, 25.0, 1.0
# Added to variances, so that the root has a finite gradient.
_EPSILON = 1e-4


def variance_hinge(z: Tensor) -> Tensor:
    """Mean over elements of how far z [n,d] is below a standard deviation of 1: scalar (Eq. 1).

    With n = 1 it is NaN. A variance of 0 gives about 0.99, because 1e-4 is added to variances.
    """
    return F.relu(1 - (z.var(0) + _EPSILON).sqrt()).mean()


def covariance_penalty(z: Tensor) -> Tensor:
    """Sum of squared covariances between different elements of z [n,d], divided by d (Eq. 3, 4).

    The result is a scalar. d is at least 2, else IndexError; with n = 1 it is NaN.
    """
    covariance = torch.cov(z.T)
    return (covariance.square().sum() - covariance.diagonal().square().sum()) / z.shape[1]


class VicregObjective(Objective):
    """VICReg (Bardes et al. 2022) with an expander of two layers.

    Its terms make two views equal, use every element, and decorrelate elements. It needs no
    negatives, so batches may be small. Batches contain `images` uint8 [b,H,W,3]; labels are not
    used.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        self.encoder = build_encoder(config)
        width = 4 * config.projection_dim
        self.expander = nn.Sequential(
            nn.Linear(config.side_info_dim, width),
            nn.BatchNorm1d(width),
            nn.ReLU(),
            nn.Linear(width, width),
        )
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        """Return `invariance`, `variance` and `covariance` of two augmented views, weighted by 25,
        25 and 1.

        The views are drawn from torch's default generator. With one image, `variance` and
        `covariance` are NaN.
        """
        pixels = to_pixels(batch["images"])
        views = torch.cat((self.augment(pixels), self.augment(pixels)))
        first, second = self.expander(self.encoder.encode(views)).float().chunk(2)
        # Half of the sum over both views, as in the authors' code.
        hinges = (variance_hinge(first) + variance_hinge(second)) / 2
        return {
            "invariance": INVARIANCE * F.mse_loss(first, second),
            "variance": VARIANCE * hinges,
            "covariance": COVARIANCE * (covariance_penalty(first) + covariance_penalty(second)),
        }

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder and expander; only the encoder is published."""
        return nn.ModuleDict({"encoder": self.encoder, "expander": self.expander})


# The share of the teacher that a step keeps. BYOL's .996 is for a million steps.
MOMENTUM = 0.99


class ProjectedEncoder(nn.Module):
    """psi with its projection, which the student imitates."""

    def __init__(self, encoder: ImageEncoder, projection: nn.Module) -> None:
        super().__init__()
        self.encoder, self.projection = encoder, projection

    def forward(self, pixels: Tensor) -> Tensor:
        """Map pixels float32 [n,3,H,W] in 0..1 to raw projections [n,projection_dim].

        In training mode BatchNorm needs at least two images, or raises ValueError.
        """
        output: Tensor = self.projection(self.encoder.encode(pixels))
        return output


class DistilledObjective(Objective):
    """Self-distillation (BYOL, Grill et al. 2020): psi predicts its moving average on another view.

    psi has a projection and a predictor. The teacher is the moving average of psi and projection.
    Batches contain `images` uint8 [b,H,W,3]; labels are not used.
    """

    def __init__(self, config: SideEncoderConfig) -> None:
        super().__init__()
        dim, out = config.side_info_dim, config.projection_dim
        self.student = ProjectedEncoder(build_encoder(config), _two_layers(dim, 4 * dim, out))
        self.predictor = _two_layers(out, 4 * dim, out)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.augment = Augment(config.augmentation)

    def forward(self, batch: Batch) -> Terms:
        """Return `distillation` of two augmented views; in training, move the teacher first.

        A move takes 1 % of the student's present parameters; in eval mode the teacher stays. The
        teacher gets no gradient. The views are drawn from torch's default generator. The teacher's
        BatchNorm statistics are its own, from the same views.
        """
        pixels = to_pixels(batch["images"])
        views = torch.cat((self.augment(pixels), self.augment(pixels)))
        predicted = self.predictor(self.student(views))
        with torch.no_grad():
            if self.training:
                self._follow()
            target = self.teacher(views)
        # Each view predicts the other one.
        return {"distillation": byol_loss(predicted, target.roll(len(pixels), 0))}

    def _follow(self) -> None:
        """Move the teacher towards the student of the last step."""
        followed = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
        for teacher, student in followed:
            teacher.lerp_(student.detach(), 1 - MOMENTUM)

    def trained_parts(self) -> nn.ModuleDict:
        """Return the parts encoder, projection, predictor and teacher.

        The encoder is the student's, and only it is published. The teacher holds an encoder of its
        own, so that a resumed run has the same average.
        """
        return nn.ModuleDict(
            {
                "encoder": self.student.encoder,
                "projection": self.student.projection,
                "predictor": self.predictor,
                "teacher": self.teacher,
            }
        )


def byol_loss(predicted: Tensor, target: Tensor) -> Tensor:
    """Mean of 2 - 2 cos over rows: [n,d], [n,d] -> scalar (BYOL Eq. 2).

    `target` gets no gradient. Neither argument needs to be normalised; a zero vector has the cosine
    0. Without rows the result is NaN. Other dimensions raise RuntimeError.
    """
    return 2 - 2 * F.cosine_similarity(predicted.float(), target.detach().float(), dim=1).mean()


def _two_layers(dim: int, inner: int, out: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(dim, inner), nn.BatchNorm1d(inner), nn.ReLU(), nn.Linear(inner, out)
    )


_UNLABELLED: Mapping[str, Callable[[SideEncoderConfig], Objective]] = {
    "autoencoder": AutoencoderObjective,
    "vicreg": VicregObjective,
    "distilled": DistilledObjective,
    "simclr": SimclrObjective,
    # build_encoder makes the difference between the two.
    "binary_simclr": SimclrObjective,
}


def side_objective(config: SideEncoderConfig, class_count: int) -> Objective:
    """Make the training objective of a side-information encoder.

    The network has random weights from torch's default generator; the key `weights` is not loaded.

    Args:
        config: the configuration; its key side_info selects the objective. `inner` has none,
            because it is not trained, and raises KeyError.
        class_count: the number of classes; only `alternate` and `mixup` use it, and need at least
            2.

    Raises:
        ConfigurationError: the backbone is unknown or does not fit the other keys, or its package
            is not installed; or the head does not fit the other keys or the number of classes.
        NotFoundError, UnavailableError: the folder of a public backbone (local-dir, hf-hub) does
            not exist, or its description cannot be downloaded.
    """
    if config.side_info in ("alternate", "mixup"):
        return AlternateObjective(config, class_count)
    return _UNLABELLED[config.side_info](config)
