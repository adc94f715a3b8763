"""Bring a public one: a model of timm's or open_clip's becomes a release's, without training."""

from nobackfill.errors import ConfigurationError
from nobackfill.training.export.drafting import Release
from nobackfill.training.networks.embedder import ImageEncoder
from nobackfill.training.networks.public_models import open_public
from nobackfill.training.networks.weights import shown


def add_public_embedder(release: Release, name: str) -> None:
    """Put the model of images that `name` names into the release, with its makers' weights and
    pixels; its vectors have norm 1. Raises what open_public does, and ConfigurationError for one
    that is none that can be published."""
    model = open_public(name)
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
    release.recipe["weights"] = shown(name)
