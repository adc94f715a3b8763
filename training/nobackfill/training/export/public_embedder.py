"""Bring a public one: a model of timm's, open_clip's or torchvision's becomes a release's, without
training."""

from nobackfill.errors import ConfigurationError
from nobackfill.training.export.drafting import Release
from nobackfill.training.networks.embedder import ImageEncoder
from nobackfill.training.networks.public_models import is_public, open_public
from nobackfill.training.networks.torchvision_model import TORCHVISION, open_torchvision
from nobackfill.training.networks.weights import shown


def can_be_public(name: str) -> bool:
    """Whether `add_public_embedder` takes such a name."""
    return is_public(name) or name.startswith(TORCHVISION)


def add_public_embedder(release: Release, name: str) -> None:
    """Put the model of images that `name` names into the release, with its makers' weights and
    pixels; its vectors have norm 1. Raises what open_public and open_torchvision do, and
    ConfigurationError for one that is none that can be published."""
    model = open_public(name) if is_public(name) else open_torchvision(name)
    (height, width), pixels = model.pixels.size, model.pixels
    if height != width:
        raise ConfigurationError(
            f"--weights {name}: expected square pixels, got {width} x {height}"
        )
    encoder = ImageEncoder(model.network, model.dim, height, True, pixels.mean, pixels.std)
    release.add_embedder(encoder.eval())
    assert release.embedder is not None
    framed = {"fit": pixels.fit, "shortest": pixels.shortest, "interpolation": pixels.interpolation}
    release.embedder = release.embedder.model_copy(update=framed)
    release.method = "brought"
    release.recipe["weights"] = shown(name) if is_public(name) else name
